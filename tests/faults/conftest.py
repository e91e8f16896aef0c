"""Lets the tests import what lies beside them, which `measure.py` imports as a script does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

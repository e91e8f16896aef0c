"""Variants as points of a vector space, for models that regress over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilewright.generator.variant import AxisValue, VariantSpec

Matrix = NDArray[np.float64]

ABSENT = 0.5
"""The coordinate of an axis that a family does not have: its middle."""


def features(specs: Sequence[VariantSpec]) -> Matrix:
    """One row a variant: family and choices of text as 0 or 1 each, other axes by their place among their values.

    Places lie in [0, 1]: 32, 64, 128 become 0, 1/2, 1. Axes of one name are one column, whatever the family. What is
    the same in all rows is left out.
    """
    values = [spec.values() for spec in specs]
    names = dict.fromkeys(name for one in values for name in one)
    columns: list[list[AxisValue | None]] = [[spec.family for spec in specs]]
    columns += [[one.get(name) for one in values] for name in names]
    parts = [part for column in columns for part in _encoded(column)]
    return np.array(parts, dtype=np.float64).T if parts else np.zeros((len(specs), 0))


def _encoded(column: Sequence[AxisValue | None]) -> list[list[float]]:
    values = sorted({value for value in column if value is not None}, key=lambda value: (str(type(value)), value))
    if len(values) < 2:
        return []
    if any(isinstance(value, str) for value in values):
        return [[1.0 if value == one else 0.0 for value in column] for one in values]
    place = {value: index / (len(values) - 1) for index, value in enumerate(values)}
    return [[ABSENT if value is None else place[value] for value in column]]

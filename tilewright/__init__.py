"""Sparse attention kernels, generated and tuned for the machine they run on.

import tilewright as tw
out = tw.attention(query, key, value, tw.masks.sliding_window(4096, 0) | tw.masks.global_stride(512))
"""

from tilewright.generator.errors import InvalidInput, NotSupported, TilewrightError
from tilewright.runtime import masks
from tilewright.runtime.attention import Explanation, attention, explain, reload_winners
from tilewright.runtime.environment import tilewright_version
from tilewright.runtime.topk import select_blocks, selected_attention, topk_attention
from tilewright.runtime.topk_explain import TopkExplanation, explain_topk

__version__ = tilewright_version()

__all__ = [
    "Explanation",
    "InvalidInput",
    "NotSupported",
    "TilewrightError",
    "TopkExplanation",
    "__version__",
    "attention",
    "explain",
    "explain_topk",
    "masks",
    "reload_winners",
    "select_blocks",
    "selected_attention",
    "topk_attention",
]

"""Adversarial cases of the two stages of attention that chooses its own blocks: shapes, numbers and lists."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tilewright.runtime.selection import Selection
from tilewright.tuner.layouts import Layout
from tilewright.tuner.topk_oracle import allowed_blocks, block_counts, listed, select_blocks_oracle

Numbers = Literal[
    "normal",
    "uniform_weights",
    "large",
    "very_negative",
    "integers",
    "equal_keys",
    "nan_block",
    "infinite_block",
    "infinite_blocks",
    "few_finite",
    "spaced",
]
Lists = Literal["chosen", "random", "shuffled", "outside", "same", "none", "all"]

EXACT = frozenset({"integers", "equal_keys", "nan_block", "infinite_block", "infinite_blocks", "few_finite", "spaced"})
"""Numbers whose means and scores are exact in float32, so that a choice must be the reference's bit for bit."""


@dataclass(frozen=True, slots=True)
class ChoiceShape:
    """One case before its tensors are made; whether it is causal is the kernel's. Sizes in tokens, heads and blocks.

    top: places in a list, and what a chooser takes; more where more blocks are always in, fewer where there are fewer.
    shared: a group of query heads shares its choice. uneven: choosers take different numbers of blocks.
    numbers: standard normal, `large` or `very_negative` logits, or `uniform_weights` (query 0, so that lse tells how
    many keys were seen); for choosing `integers` of few values with many equal scores, `equal_keys`, and integers with
    one NaN, or one infinity, in one block, or an infinity in every fifth, with `few_finite` scores, the others -inf, or
    with the best blocks `spaced` 64 apart, the later the better, so that one lane of a kernel meets them all. With
    `EXACT` ones block sizes, groups and last blocks are powers of two.
    lists: for attending, blocks `chosen` by the reference; `random` ones, of random counts, 0 among them; `shuffled`;
    with entries `outside` of what there is before the count; the `same` block for every query; `none`; `all` of them.
    Past a count anything may stand, and does.
    """

    name: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    block_size: int
    top: int
    query_group: int = 1
    shared: bool = False
    uneven: bool = False
    sink_blocks: int = 0
    window_blocks: int = 0
    layout: Layout = "packed"
    numbers: Numbers = "normal"
    lists: Lists = "random"

    def selection(self, causal: bool) -> Selection:
        """What is chosen from; its list is wide enough for what is always in."""
        rest = (self.num_kv_heads if self.shared else self.num_heads, self.query_group, causal)
        whole = Selection(self.block_size, 1, *rest, self.sink_blocks, self.window_blocks)
        groups = torch.arange(whole.num_groups(self.seqlen_q))
        _, always = allowed_blocks(whole, self.seqlen_q, self.seqlen_kv, groups)
        width = min(max(self.top, int(always.sum(1).max())), whole.num_blocks(self.seqlen_kv))
        return Selection(self.block_size, width, *rest, self.sink_blocks, self.window_blocks)

    def budgets(self, selection: Selection) -> Tensor:
        """[num_choosers] int32, blocks that each takes: at least what can be always in."""
        budgets = torch.full((selection.num_choosers,), selection.list_width, dtype=torch.int32)
        if self.uneven:
            groups = torch.arange(selection.num_groups(self.seqlen_q))
            _, always = allowed_blocks(selection, self.seqlen_q, self.seqlen_kv, groups)
            steps = torch.arange(selection.num_choosers, dtype=torch.int32) * 7 % selection.list_width
            budgets = (budgets - steps).clamp(min=max(1, int(always.sum(1).max())))
        return budgets


SELECT_SHAPES: tuple[ChoiceShape, ...] = (
    ChoiceShape("one token", 1, 1, 1, 1, 1, 16, 1),
    ChoiceShape("17 tokens, blocks of 3, budgets per head", 2, 3, 3, 17, 17, 3, 4, uneven=True),
    ChoiceShape("127 tokens, blocks of 1, GQA, transposed", 1, 4, 2, 127, 127, 1, 9, layout="transposed"),
    ChoiceShape("129 tokens, amid NaNs", 1, 2, 2, 129, 129, 16, 4, layout="padded"),
    ChoiceShape("1025 tokens, groups of 64, heads share", 1, 4, 2, 1025, 1025, 64, 5, query_group=64, shared=True),
    ChoiceShape("1 query, 257 keys", 2, 2, 1, 1, 257, 16, 16, layout="padded"),
    ChoiceShape("more keys than queries, groups of 3", 1, 2, 2, 65, 321, 48, 3, query_group=3),
    ChoiceShape("more queries than keys", 1, 2, 2, 321, 65, 16, 3, layout="padded"),
    ChoiceShape("blocks of 100, sinks and a window", 1, 4, 2, 300, 1025, 100, 6, sink_blocks=1, window_blocks=2),
    ChoiceShape("blocks of 256, heads share", 1, 4, 1, 200, 1025, 256, 2, shared=True, uneven=True),
    ChoiceShape("a budget for every block", 1, 1, 1, 70, 200, 48, 5),
    ChoiceShape("4097 blocks", 1, 1, 1, 9, 4097, 1, 100, window_blocks=3),
    ChoiceShape("rows at odd elements", 1, 2, 1, 131, 515, 64, 4, layout="unaligned"),
    ChoiceShape("integers, many ties", 2, 3, 1, 130, 1025, 16, 12, uneven=True, numbers="integers"),
    ChoiceShape(
        "integers, groups of 64, heads share", 1, 4, 2, 321, 513, 32, 5, query_group=64, shared=True, numbers="integers"
    ),
    ChoiceShape(
        "integers, sinks and a window", 1, 2, 2, 257, 257, 16, 7, sink_blocks=2, window_blocks=2, numbers="integers"
    ),
    ChoiceShape("all keys equal", 1, 2, 2, 130, 992, 64, 6, numbers="equal_keys"),
    ChoiceShape("NaN keys in one block", 1, 2, 2, 65, 161, 16, 10, layout="padded", numbers="nan_block"),
    ChoiceShape("infinite keys in one block", 1, 2, 1, 65, 257, 16, 3, numbers="infinite_block"),
    ChoiceShape("infinite keys, budgets per head", 1, 3, 1, 130, 513, 16, 4, uneven=True, numbers="infinite_blocks"),
    ChoiceShape(
        "infinite keys, sinks and a window",
        1,
        2,
        1,
        70,
        257,
        8,
        5,
        sink_blocks=1,
        window_blocks=2,
        numbers="infinite_blocks",
    ),
    ChoiceShape("few scores above -inf", 1, 2, 1, 130, 1025, 16, 12, numbers="few_finite"),
    ChoiceShape("the best blocks 64 apart", 1, 1, 1, 130, 4097, 1, 12, numbers="spaced"),
    ChoiceShape("2049 blocks, long lists per head", 1, 6, 2, 200, 2049, 1, 64, uneven=True),
    ChoiceShape("600 blocks, lists of 32", 1, 2, 1, 131, 1199, 2, 32, window_blocks=1),
    ChoiceShape("40 heads, budgets per head", 2, 40, 8, 70, 129, 16, 5, uneven=True),
    ChoiceShape("integers, long lists", 1, 2, 1, 130, 1025, 2, 64, sink_blocks=1, window_blocks=2, numbers="integers"),
    ChoiceShape("the best blocks 64 apart, long lists", 1, 1, 1, 70, 4097, 1, 48, numbers="spaced"),
    ChoiceShape("large scores", 1, 2, 2, 129, 385, 48, 4, numbers="large"),
    ChoiceShape("very negative scores, ragged", 1, 2, 2, 77, 331, 64, 2, numbers="very_negative", layout="padded"),
    ChoiceShape("token offsets past 2^31", 1, 1, 1, 130, 130, 16, 3, layout="far_tokens"),
    ChoiceShape("head offsets past 2^31", 1, 2, 2, 70, 90, 16, 3, layout="far_heads"),
)
"""Every case of choosing; far layouts last, because they are the only ones that can be refused memory."""

SELECT_HOST_SHAPES: tuple[ChoiceShape, ...] = (
    ChoiceShape("one token", 1, 1, 1, 1, 1, 16, 1),
    ChoiceShape("17 tokens, blocks of 3, budgets per head", 2, 2, 2, 17, 17, 3, 4, uneven=True),
    ChoiceShape("blocks of 1, GQA, transposed", 1, 4, 2, 19, 65, 1, 9, layout="transposed"),
    ChoiceShape("65 queries, 129 keys, amid NaNs", 1, 1, 1, 65, 129, 16, 4, layout="padded"),
    ChoiceShape("groups of 64, heads share", 1, 4, 2, 129, 193, 64, 2, query_group=64, shared=True),
    ChoiceShape("1 query, 257 keys", 2, 2, 1, 1, 257, 16, 16, layout="padded"),
    ChoiceShape("more keys than queries, groups of 3", 1, 2, 2, 17, 321, 48, 3, query_group=3),
    ChoiceShape("more queries than keys", 1, 1, 1, 161, 33, 16, 2, layout="padded"),
    ChoiceShape("blocks of 100, sinks and a window", 1, 2, 1, 20, 725, 100, 6, sink_blocks=1, window_blocks=2),
    ChoiceShape("blocks of 256, heads share", 1, 4, 1, 9, 1025, 256, 2, shared=True, uneven=True),
    ChoiceShape("1025 blocks", 1, 1, 1, 5, 1025, 1, 64, window_blocks=3),
    ChoiceShape("rows at odd elements", 1, 2, 1, 21, 131, 16, 4, layout="unaligned"),
    ChoiceShape("integers, many ties", 1, 3, 1, 35, 513, 16, 12, uneven=True, numbers="integers"),
    ChoiceShape(
        "integers, sinks and a window", 1, 1, 1, 65, 129, 16, 7, sink_blocks=2, window_blocks=2, numbers="integers"
    ),
    ChoiceShape("all keys equal", 1, 1, 1, 35, 480, 64, 3, numbers="equal_keys"),
    ChoiceShape("NaN keys in one block", 1, 1, 1, 33, 161, 16, 10, layout="padded", numbers="nan_block"),
    ChoiceShape("infinite keys in one block", 1, 1, 1, 33, 129, 16, 3, numbers="infinite_block"),
    ChoiceShape("infinite keys, budgets per head", 1, 2, 1, 19, 257, 16, 3, uneven=True, numbers="infinite_blocks"),
    ChoiceShape(
        "infinite keys, sinks and a window",
        1,
        1,
        1,
        33,
        129,
        8,
        5,
        sink_blocks=1,
        window_blocks=2,
        numbers="infinite_blocks",
    ),
    ChoiceShape("few scores above -inf", 1, 1, 1, 19, 513, 16, 6, numbers="few_finite"),
    ChoiceShape("the best blocks 64 apart", 1, 1, 1, 17, 1537, 1, 9, numbers="spaced"),
    ChoiceShape("700 blocks, long lists per head", 1, 3, 1, 19, 700, 1, 32, uneven=True),
    ChoiceShape("40 heads, budgets per head", 1, 40, 8, 3, 65, 16, 4, uneven=True),
    ChoiceShape("integers, long lists", 1, 1, 1, 9, 1025, 2, 64, sink_blocks=1, window_blocks=2, numbers="integers"),
    ChoiceShape("the best blocks 64 apart, long lists", 1, 1, 1, 3, 2305, 1, 48, numbers="spaced"),
    ChoiceShape("large scores", 1, 1, 1, 33, 241, 48, 4, numbers="large"),
    ChoiceShape("very negative scores, ragged", 1, 1, 1, 37, 131, 64, 2, numbers="very_negative", layout="padded"),
    ChoiceShape("token offsets past 2^31", 1, 1, 1, 130, 130, 16, 3, layout="far_tokens"),
    ChoiceShape("head offsets past 2^31", 1, 2, 2, 17, 45, 16, 2, layout="far_heads"),
)
"""The same ideas for a machine that executes a GPU's threads one after the other."""

SELECTED_SHAPES: tuple[ChoiceShape, ...] = (
    ChoiceShape("one token", 1, 1, 1, 1, 1, 16, 1, lists="chosen"),
    ChoiceShape("17 tokens, blocks of 3, lists per head", 2, 3, 3, 17, 17, 3, 4),
    ChoiceShape("127 tokens, blocks of 1, GQA, transposed", 1, 4, 2, 127, 127, 1, 9, layout="transposed"),
    ChoiceShape("129 tokens, amid NaNs", 1, 2, 2, 129, 129, 16, 4, layout="padded"),
    ChoiceShape(
        "1025 tokens, groups of 64, heads share",
        1,
        4,
        2,
        1025,
        1025,
        64,
        5,
        query_group=64,
        shared=True,
        lists="chosen",
    ),
    ChoiceShape("1025 tokens, blocks of 64", 1, 2, 1, 1025, 1025, 64, 4, lists="chosen"),
    ChoiceShape("300 queries, budgets per head", 2, 6, 3, 300, 515, 16, 20, uneven=True),
    ChoiceShape("budgets per choice, heads share", 1, 6, 3, 70, 333, 32, 9, query_group=3, shared=True, uneven=True),
    ChoiceShape("1 query, 257 keys", 2, 2, 1, 1, 257, 16, 9, layout="padded"),
    ChoiceShape(
        "more keys than queries, groups of 3, shuffled", 1, 2, 2, 65, 321, 48, 3, query_group=3, lists="shuffled"
    ),
    ChoiceShape("more queries than keys, heads share", 1, 4, 2, 321, 65, 16, 3, shared=True, layout="padded"),
    ChoiceShape("blocks of 100, entries outside", 1, 2, 1, 300, 1025, 100, 6, lists="outside"),
    ChoiceShape("blocks of 256", 1, 2, 2, 200, 1025, 256, 2),
    ChoiceShape("long lists, blocks of 3", 1, 1, 1, 33, 1025, 3, 100),
    ChoiceShape("more places in a head's lists than 16 bits count", 1, 1, 1, 1100, 1701, 1, 64),
    ChoiceShape("every block listed", 1, 2, 2, 131, 300, 64, 5, lists="all"),
    ChoiceShape("every block listed, groups of 16", 1, 3, 1, 70, 257, 16, 17, query_group=16, shared=True, lists="all"),
    ChoiceShape("nothing listed", 1, 2, 2, 67, 129, 16, 2, lists="none"),
    ChoiceShape("every query lists the same block", 1, 4, 2, 259, 515, 64, 3, lists="same"),
    ChoiceShape("counting keys", 1, 3, 1, 200, 333, 16, 7, numbers="uniform_weights"),
    ChoiceShape("large logits", 1, 2, 2, 129, 193, 48, 3, numbers="large"),
    ChoiceShape("very negative logits, ragged", 1, 2, 2, 77, 131, 64, 2, numbers="very_negative", layout="padded"),
    ChoiceShape("rows at odd elements", 1, 2, 1, 131, 515, 64, 4, layout="unaligned"),
    ChoiceShape("token offsets past 2^31", 1, 1, 1, 130, 130, 16, 3, layout="far_tokens"),
    ChoiceShape("head offsets past 2^31", 1, 2, 2, 70, 90, 16, 3, layout="far_heads"),
)
"""Every case of attending to listed blocks. In all of them blocks that nobody lists hold NaN."""

SELECTED_HOST_SHAPES: tuple[ChoiceShape, ...] = (
    ChoiceShape("one token", 1, 1, 1, 1, 1, 16, 1, lists="chosen"),
    ChoiceShape("more blocks than are counted at once", 1, 1, 1, 33, 8501, 2, 6),
    ChoiceShape("17 tokens, blocks of 3, lists per head", 1, 2, 2, 17, 17, 3, 4),
    ChoiceShape("blocks of 1, GQA, transposed", 1, 4, 2, 9, 65, 1, 9, layout="transposed"),
    ChoiceShape("35 queries, 129 keys, amid NaNs", 1, 1, 1, 35, 129, 16, 4, layout="padded"),
    ChoiceShape("groups of 64, heads share", 1, 2, 1, 129, 193, 64, 2, query_group=64, shared=True, lists="chosen"),
    ChoiceShape("1 query, 257 keys", 2, 2, 1, 1, 257, 16, 9, layout="padded"),
    ChoiceShape("budgets per head", 1, 3, 1, 13, 150, 16, 9, uneven=True),
    ChoiceShape("groups of 3, shuffled", 1, 1, 1, 17, 321, 48, 3, query_group=3, lists="shuffled"),
    ChoiceShape("more queries than keys, heads share", 1, 2, 1, 41, 17, 16, 1, shared=True, layout="padded"),
    ChoiceShape("blocks of 100, entries outside", 1, 2, 1, 9, 325, 100, 3, lists="outside"),
    ChoiceShape("blocks of 256", 1, 1, 1, 5, 1025, 256, 2),
    ChoiceShape("long lists, blocks of 3", 1, 1, 1, 5, 325, 3, 60),
    ChoiceShape("every block listed", 1, 1, 1, 19, 150, 64, 3, lists="all"),
    ChoiceShape("every block listed, groups of 16", 1, 3, 1, 20, 65, 16, 5, query_group=16, shared=True, lists="all"),
    ChoiceShape("nothing listed", 1, 1, 1, 9, 65, 16, 2, lists="none"),
    ChoiceShape("every query lists the same block", 1, 1, 1, 131, 67, 32, 2, query_group=2, lists="same"),
    ChoiceShape("counting keys", 1, 3, 1, 7, 203, 16, 7, numbers="uniform_weights"),
    ChoiceShape("large logits", 1, 1, 1, 33, 97, 48, 2, numbers="large"),
    ChoiceShape("very negative logits, ragged", 1, 1, 1, 19, 131, 64, 2, numbers="very_negative", layout="padded"),
    ChoiceShape("rows at odd elements", 1, 2, 1, 11, 131, 16, 4, layout="unaligned"),
    ChoiceShape("token offsets past 2^31", 1, 1, 1, 130, 130, 16, 3, query_group=10, layout="far_tokens"),
    ChoiceShape("head offsets past 2^31", 1, 2, 2, 9, 45, 16, 2, layout="far_heads"),
)
"""The same ideas for a machine that executes a GPU's threads one after the other: few lists, since some kernels give
each of them hundreds of threads."""


def generator_of(shape: ChoiceShape) -> torch.Generator:
    """The same numbers for a shape on every run."""
    return torch.Generator().manual_seed(zlib.crc32(shape.name.encode()))


def make_tensors(
    shape: ChoiceShape, dtype: str, head_dim: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, Hq, Nq, D], key and value [B, Hkv, Nkv, D], on the CPU."""
    q_size = (shape.batch, shape.num_heads, shape.seqlen_q, head_dim)
    kv_size = (shape.batch, shape.num_kv_heads, shape.seqlen_kv, head_dim)
    query, key = _numbers(shape, q_size, kv_size, generator)
    kind = getattr(torch, dtype)
    return query.to(kind), key.to(kind), torch.randn(kv_size, generator=generator).to(kind)


def _numbers(
    shape: ChoiceShape, q_size: tuple[int, ...], kv_size: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    if shape.numbers in EXACT:
        return _integers(shape, q_size, kv_size, generator)
    if shape.numbers in ("large", "very_negative"):
        # Positive queries against keys of one sign a token: logits of +-64 sqrt(head_dim) and more.
        query, key = 8 + 8 * torch.rand(q_size, generator=generator), 8 + 8 * torch.rand(kv_size, generator=generator)
        signs = torch.randint(0, 2, (*kv_size[:3], 1), generator=generator) * 2.0 - 1.0
        return query, key * (signs if shape.numbers == "large" else -1.0)
    query, key = torch.randn(q_size, generator=generator), torch.randn(kv_size, generator=generator)
    return (torch.zeros(q_size) if shape.numbers == "uniform_weights" else query), key


def _integers(
    shape: ChoiceShape, q_size: tuple[int, ...], kv_size: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    query = torch.randint(-1, 2, q_size, generator=generator).float()
    if shape.numbers == "equal_keys":
        return query, torch.full(kv_size, 0.5)
    # Blocks repeat a few patterns, so that their means, and with them whole scores, are equal.
    size = shape.block_size
    patterns = torch.randint(-2, 3, (*kv_size[:2], 5, size, kv_size[3]), generator=generator).float()
    block = torch.arange(kv_size[2]) // size
    pattern = torch.randint(0, 5, (-(-kv_size[2] // size),), generator=generator)[block]
    key = patterns[:, :, pattern, torch.arange(kv_size[2]) % size]
    odd = int(block[-1]) // 2 * size  # in a block that later ones could choose
    if shape.numbers == "nan_block":
        key[:, :, odd, 3] = torch.nan
    if shape.numbers == "infinite_block":
        key[:, :, odd, 3] = torch.inf
    if shape.numbers == "infinite_blocks":
        key[:, :, 2 * size :: 5 * size, 3] = torch.inf
    if shape.numbers == "few_finite":
        query[..., 0] = 1.0
        key[:, :, block % 9 != 4, 0] = -torch.inf
    if shape.numbers == "spaced":
        query[..., 0] = 1.0
        key[:, :, block % 64 == 5, 0] = 40.0 + (block[block % 64 == 5] // 64).float()
    return query, key


def make_lists(
    shape: ChoiceShape, selection: Selection, query: Tensor, key: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """indices [B, choosers, groups, list_width] and counts [B, choosers, groups], int32, on the CPU."""
    width, num_blocks = selection.list_width, selection.num_blocks(shape.seqlen_kv)
    size = (shape.batch, selection.num_choosers, selection.num_groups(shape.seqlen_q))
    places = torch.arange(width)
    if shape.lists == "chosen":
        chosen = select_blocks_oracle(query, key, shape.budgets(selection), selection)
        indices, counts = chosen.indices.long(), chosen.counts.long()
    elif shape.lists == "same":
        indices, counts = torch.full((*size, width), num_blocks // 2), torch.ones(size, dtype=torch.int64)
    else:
        indices = torch.rand((*size, num_blocks), generator=generator).argsort(-1)[..., :width]
        counts = torch.randint(0, width + 1, size, generator=generator)
        if shape.uneven:
            counts = torch.minimum(counts, shape.budgets(selection).view(1, -1, 1))
        if shape.lists in ("none", "all"):
            counts.fill_(0 if shape.lists == "none" else width)
        if shape.lists != "shuffled":
            indices = torch.where(places < counts.unsqueeze(-1), indices, num_blocks).sort(-1).values
        if shape.lists == "outside":
            strange = torch.tensor([-1, num_blocks, 2**31 - 1, -(2**31)])[places % 4]
            indices = torch.where(torch.rand(indices.shape, generator=generator) < 0.3, strange, indices)
    # What stands past a count would be a block, if it were read.
    garbage = torch.randint(-2, num_blocks + 2, indices.shape, generator=generator)
    return torch.where(places < counts.unsqueeze(-1), indices, garbage).to(torch.int32), counts.to(torch.int32)


def unlisted_tokens(indices: Tensor, counts: Tensor, selection: Selection, num_kv_heads: int, seqlen_kv: int) -> Tensor:
    """Tokens of blocks that no query of any head lists: bool [B, Hkv, seqlen_kv]."""
    seen = listed(indices, counts, selection.num_blocks(seqlen_kv)).any(2)
    seen = seen.view(seen.shape[0], num_kv_heads, -1, seen.shape[2]).any(2)
    return ~seen.repeat_interleave(block_counts(seqlen_kv, selection.block_size, indices.device), dim=-1)

"""Masks written as text in workload files: `sliding_window(32, 32) | random_blocks(128, 128, density=0.1)`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.generator.errors import InvalidInput
from tilewright.runtime import masks


@dataclass(frozen=True, slots=True)
class MaskShape:
    """The call a mask is made for: sizes, and the seed of what is drawn at random."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_kv: int
    seed: int = 0


def parse_mask(text: str, shape: MaskShape) -> masks.Mask | None:
    """The mask that `text` describes for calls of `shape`, its tensors on the CPU; None for `full()` alone.

    `&` binds tighter than `|`; parentheses group. The same text, shape and seed give the same mask on every machine.
    Raises `InvalidInput` that names the offending part and what may stand there.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise InvalidInput(f"mask must be calls of {_known()} joined by & and |; got {text!r}") from error
    generator = torch.Generator().manual_seed(shape.seed)
    mask = _evaluate(tree, shape, generator)
    return None if mask.spec == masks.full().spec else mask


def _evaluate(node: ast.expr, shape: MaskShape, generator: torch.Generator) -> masks.Mask:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd):
        left, right = _evaluate(node.left, shape, generator), _evaluate(node.right, shape, generator)
        return left | right if isinstance(node.op, ast.BitOr) else left & right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILDERS:
        name = node.func.id
        if any(keyword.arg is None for keyword in node.keywords):
            raise InvalidInput(f"mask: {name} takes plain arguments; got {ast.unparse(node)}")
        positional = [_literal(argument) for argument in node.args]
        named = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
        builder = BUILDERS[name]
        try:
            return builder.make(shape, generator, *positional, **named)
        except TypeError as error:
            raise InvalidInput(f"mask: expected {builder.usage}; got {ast.unparse(node)}") from error
    raise InvalidInput(f"mask must be calls of {_known()} joined by & and |; got {ast.unparse(node)}")


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in ("true", "false"):
        return node.id == "true"
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError) as error:
        raise InvalidInput(f"mask arguments must be numbers, true, false or lists; got {ast.unparse(node)}") from error


def _known() -> str:
    return ", ".join(builder.usage for builder in BUILDERS.values())


def _integer(value: Any, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInput(f"mask: {what} must be an integer of {least} or more; got {value!r}")
    return value


def _fraction(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidInput(f"mask: {what} must be between 0 and 1; got {value!r}")
    return float(value)


def _leading(shape: MaskShape, per_head: Any, per_batch: Any) -> tuple[int, int]:
    for name, value in (("per_head", per_head), ("per_batch", per_batch)):
        if not isinstance(value, bool):
            raise InvalidInput(f"mask: {name} must be true or false; got {value!r}")
    return (shape.batch if per_batch else 1, shape.num_heads if per_head else 1)


def _random_blocks(
    shape: MaskShape,
    generator: torch.Generator,
    block_q: int,
    block_kv: int,
    *,
    density: float | None = None,
    count: int | None = None,
    per_head: bool = False,
    per_batch: bool = False,
) -> masks.Mask:
    if (density is None) == (count is None):
        raise InvalidInput("mask: random_blocks takes either density=x or count=blocks in each row of blocks")
    drawn = _drawn_blocks(shape, generator, block_q, block_kv, per_head, per_batch)
    if count is not None:
        active = _first_drawn(drawn, torch.full(drawn.shape[:-1], _integer(count, "random_blocks count", 1)))
    else:
        # Every query keeps at least one block: a random mask of low density would else have rows with nothing to do.
        active = drawn < _fraction(density, "density")
        active.scatter_(-1, drawn.argmin(-1, keepdim=True), True)
    return masks.block_mask(active, (block_q, block_kv))


def _skewed_blocks(
    shape: MaskShape,
    generator: torch.Generator,
    block_q: int,
    block_kv: int,
    *,
    count: int,
    every: int,
    times: int,
    per_head: bool = False,
    per_batch: bool = False,
) -> masks.Mask:
    drawn = _drawn_blocks(shape, generator, block_q, block_kv, per_head, per_batch)
    counts = torch.full(drawn.shape[:-1], _integer(count, "skewed_blocks count", 1))
    every, times = _integer(every, "skewed_blocks every", 1), _integer(times, "skewed_blocks times", 1)
    # One row of each run of `every`, but not the same one: a regular pattern may fall in step with a kernel's schedule.
    runs = -(-counts.shape[-1] // every)
    heavy = torch.randint(every, (*counts.shape[:-1], runs), generator=generator) + torch.arange(runs) * every
    is_heavy = torch.zeros((*counts.shape[:-1], runs * every), dtype=torch.bool).scatter_(-1, heavy, True)
    counts[is_heavy[..., : counts.shape[-1]]] *= times
    return masks.block_mask(_first_drawn(drawn, counts), (block_q, block_kv))


def _drawn_blocks(
    shape: MaskShape, generator: torch.Generator, block_q: Any, block_kv: Any, per_head: Any, per_batch: Any
) -> torch.Tensor:
    """A number drawn for each block: [batch or 1, heads or 1, blocks_q, blocks_kv], uniform in [0, 1)."""
    block_q, block_kv = _integer(block_q, "block_q", 1), _integer(block_kv, "block_kv", 1)
    grid = (-(-shape.seqlen_q // block_q), -(-shape.seqlen_kv // block_kv))
    return torch.rand((*_leading(shape, per_head, per_batch), *grid), generator=generator)


def _first_drawn(drawn: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """In each row the blocks with the `counts` lowest numbers; ties fall the same way on every machine."""
    most, blocks = int(counts.max()), drawn.shape[-1]
    if most > blocks:
        raise InvalidInput(f"mask: a row of blocks has {blocks} blocks; got {most} of them to be active")
    first = torch.arange(blocks) < counts.unsqueeze(-1)
    return torch.zeros_like(first).scatter_(-1, drawn.argsort(dim=-1, stable=True), first)


def _random_tokens(
    shape: MaskShape, generator: torch.Generator, *, density: float, per_head: bool = False, per_batch: bool = False
) -> masks.Mask:
    size = (*_leading(shape, per_head, per_batch), shape.seqlen_q, shape.seqlen_kv)
    return masks.token_mask(torch.rand(size, generator=generator) < _fraction(density, "density"))


def _global_tokens(
    shape: MaskShape, generator: torch.Generator, tokens: Any = None, *, count: int | None = None
) -> masks.Mask:
    if (tokens is None) == (count is None):
        raise InvalidInput("mask: global_tokens takes either a list of token indices or count=number of random ones")
    if tokens is None:
        wanted = _integer(count, "count", 1)
        if wanted > shape.seqlen_kv:
            raise InvalidInput(f"mask: global_tokens count must be at most seqlen_kv {shape.seqlen_kv}; got {count}")
        return masks.global_tokens(torch.randperm(shape.seqlen_kv, generator=generator)[:wanted].sort().values)
    if not isinstance(tokens, list | tuple) or not tokens:
        raise InvalidInput(f"mask: global_tokens takes a list of token indices; got {tokens!r}")
    return masks.global_tokens(torch.tensor([_integer(t, "a token index", 0) for t in tokens], dtype=torch.int32))


def _document(shape: MaskShape, generator: torch.Generator, *lengths: Any, count: int | None = None) -> masks.Mask:
    if bool(lengths) == (count is not None):
        raise InvalidInput("mask: document takes either the lengths of its segments or count=number of random ones")
    if count is not None:
        wanted = _integer(count, "count", 1)
        if wanted > shape.seqlen_q:
            raise InvalidInput(f"mask: document count must be at most seqlen_q {shape.seqlen_q}; got {count}")
        cuts = torch.randperm(shape.seqlen_q - 1, generator=generator)[: wanted - 1].sort().values + 1
        ends = [*cuts.tolist(), shape.seqlen_q]
    else:
        ends = torch.tensor([_integer(v, "a segment length", 0) for v in lengths]).cumsum(0).tolist()
    if ends[-1] != shape.seqlen_q:
        raise InvalidInput(f"mask: document lengths must sum to seqlen_q {shape.seqlen_q}; got {ends[-1]}")
    if shape.seqlen_q != shape.seqlen_kv:
        raise InvalidInput(f"mask: document needs seqlen_kv equal to seqlen_q; got {shape.seqlen_kv}, {shape.seqlen_q}")
    return masks.document(torch.tensor([0, *ends], dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class _Builder:
    usage: str
    make: Callable[..., masks.Mask]


BUILDERS: dict[str, _Builder] = {
    "full": _Builder("full()", lambda shape, generator: masks.full()),
    "causal": _Builder("causal()", lambda shape, generator: masks.causal()),
    "sliding_window": _Builder(
        "sliding_window(left, right)",
        lambda shape, generator, left, right: masks.sliding_window(
            _integer(left, "sliding_window left", -1), _integer(right, "sliding_window right", -1)
        ),
    ),
    "global_stride": _Builder(
        "global_stride(stride)",
        lambda shape, generator, stride: masks.global_stride(_integer(stride, "global_stride", 1)),
    ),
    "global_tokens": _Builder("global_tokens([i, ...]) or global_tokens(count=n)", _global_tokens),
    "random_blocks": _Builder(
        "random_blocks(block_q, block_kv, density=x or count=n, per_head=false, per_batch=false)", _random_blocks
    ),
    "skewed_blocks": _Builder(
        "skewed_blocks(block_q, block_kv, count=n, every=n, times=n, per_head=false, per_batch=false)", _skewed_blocks
    ),
    "random_tokens": _Builder("random_tokens(density=x, per_head=false, per_batch=false)", _random_tokens),
    "document": _Builder("document(length, ...) or document(count=n)", _document),
}
"""What may stand in a workload's mask, with the text that says how."""

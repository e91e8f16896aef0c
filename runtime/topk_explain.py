"""`explain_topk`: which kernels answer a call of `topk_attention`, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from tilewright.runtime.attention import Explanation, explain
from tilewright.runtime.call import scale_of, wants_gradient
from tilewright.runtime.call_problem import stage_problem
from tilewright.runtime.dispatch import DISPATCHER, Choice
from tilewright.runtime.selection import SELECT_BLOCKS
from tilewright.runtime.topk_call import settle
from tilewright.runtime.topk_ops import choose, listed
from tilewright.runtime.topk_stages import attention_choice


@dataclass(frozen=True, slots=True)
class TopkExplanation:
    """Which kernels answer a call of `topk_attention`, and why. `str()` of it reads as text.

    select_blocks: what chooses; None where every block is in and `attention` answers. attention: what attends.
    """

    select_blocks: Explanation | None
    attention: Explanation

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        choosing = None if self.select_blocks is None else self.select_blocks.to_dict()
        return {"select_blocks": choosing, "attention": self.attention.to_dict()}

    def __str__(self) -> str:
        choosing = "every block is in\n" if self.select_blocks is None else f"choose: {self.select_blocks}\n"
        return f"{choosing}attend: {self.attention}"


def explain_topk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 64,
    top_k: int | Sequence[int] | float = 16,
    causal: bool = False,
    select: Literal["query"] | int = "query",
    select_heads: Literal["query", "kv"] = "query",
    sink_blocks: int = 0,
    window_blocks: int = 0,
    scale: float | None = None,
) -> TopkExplanation:
    """What `topk_attention` does with these arguments: the kernel of each stage and why it is that one.

    Builds the kernels if that was not done and chooses the blocks, exactly as the call would. Raises what it raises.
    """
    call = settle(
        query,
        key,
        value,
        block_size=block_size,
        top_k=top_k,
        causal=causal,
        select=select,
        select_heads=select_heads,
        sink_blocks=sink_blocks,
        window_blocks=window_blocks,
    )
    softmax_scale = scale_of(scale, query.shape[3])
    if call.covers and not wants_gradient(query, key, value):
        return TopkExplanation(None, explain(query, key, value, causal=causal, scale=scale))
    lists = choose(query, key, call, softmax_scale)
    selection = listed(call, lists[0])
    if call.choosing.budgets:
        chooses = DISPATCHER.stage(SELECT_BLOCKS, query, key, selection).choice
    else:
        problem = stage_problem(SELECT_BLOCKS, query, key, selection)
        chooses = Choice(problem, None, "fallback", "PyTorch chooses where top_k is a share to cover")
    attends = attention_choice(query, key, *lists, selection)
    return TopkExplanation(Explanation.of(chooses), Explanation.of(attends))

"""`attention` and `explain`: what users call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tilewright.generator.problem import Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime import ops  # noqa: F401  registers the operators
from tilewright.runtime.call import check_tensors, mask_of, needs_operator, scale_of
from tilewright.runtime.dispatch import DISPATCHER, Choice, Reason


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any = ...,
    *,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any = ...,
    *,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query @ key^T + mask) @ value, by the best kernel known for this call.

    query: [B, Hq, Nq, D]; key, value: [B, Hkv, Nkv, D] with Hq a multiple of Hkv (grouped-query attention); float32,
    float16 or bfloat16; D a multiple of 16 up to 256; any strides whose last is 1.
    mask: from `tilewright.masks`, a FlexAttention `BlockMask`, or None. `causal` and `window_size` (left, right; -1 for
    an open side; inclusive, the token itself not counted) restrict it further, both bottom-right aligned when Nq and
    Nkv differ.
    scale: D ** -0.5 unless given.

    Returns out [B, Hq, Nq, D] in query's dtype; with `return_lse` also the natural-log sum of exponentials
    [B, Hq, Nq] in float32. A query with no active key gives output 0 and lse -inf. Values at inactive keys must be
    finite: a tile that holds any active key of a query tile is multiplied whole, by weights that are 0 there.
    A first call of a new kind may compile a kernel and says so on the `tilewright` logger; where that is impossible
    PyTorch answers, and that is said too. Raises `InvalidInput` for arguments that do not fit together.
    """
    whole_mask = mask_of(mask, causal, window_size)
    if needs_operator(query, key, value):
        check_tensors(query, key, value)
        softmax_scale = scale_of(scale, query.shape[3])
        spec, tensors = ("", []) if whole_mask is None else (whole_mask.spec, list(whole_mask.tensors))
        out, lse = torch.ops.tilewright.attention_forward(query, key, value, tensors, spec, softmax_scale)
    else:
        out, lse = DISPATCHER.attend(query, key, value, whole_mask, scale)
    return (out, lse) if return_lse else out


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which kernel answers a call, and why. `str()` of it reads as text.

    reason: `exact`, `bucket`, `neighbour`, `heuristic` or `fallback` (PyTorch). tuned_time_us: the winner's time when
    it was tuned. plan_bytes: device memory that the mask's plan takes.
    """

    problem: Problem
    kernel: VariantSpec | None
    reason: Reason
    detail: str
    tuned_time_us: float | None
    plan_bytes: int

    @classmethod
    def of(cls, choice: Choice, plan_bytes: int = 0) -> Explanation:
        return cls(choice.problem, choice.spec, choice.reason, choice.detail, choice.tuned_time_us, plan_bytes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "problem": self.problem.to_dict(),
            "kernel": None if self.kernel is None else self.kernel.to_dict(),
            "reason": self.reason,
            "detail": self.detail,
            "tuned_time_us": self.tuned_time_us,
            "plan_bytes": self.plan_bytes,
        }

    def __str__(self) -> str:
        name = "PyTorch" if self.kernel is None else self.kernel.name
        time = "" if self.tuned_time_us is None else f", {self.tuned_time_us:.1f} us when tuned"
        return f"{self.problem.name}\n  -> {name}\n  {self.reason}: {self.detail}{time}"


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
) -> Explanation:
    """What `attention` does with these arguments: the kernel, why it is that one, and its time when it was tuned.

    Builds the kernel if that was not done, exactly as the call would, so that a fallback shows here too.
    Raises what `attention` raises.
    """
    prepared = DISPATCHER.prepare(query, key, value, mask_of(mask, causal, window_size))
    scale_of(scale, query.shape[3])
    return Explanation.of(prepared.choice, 0 if prepared.plan is None else prepared.plan.extra_bytes)


def reload_winners() -> None:
    """Read the tuned winners anew, for instance after tuning in this process."""
    DISPATCHER.reload()

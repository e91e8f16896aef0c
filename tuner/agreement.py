"""The same kernel on a GPU and on the host, call by call: whether what the host executes is what the GPU does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.plans import plan_for
from tilewright.tuner.host_kernel import HostKernel
from tilewright.tuner.layouts import place
from tilewright.tuner.verify import CaseBook, Prepared


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far apart host and GPU were over the cases.

    out_error, lse_error: the largest absolute differences. ratio: the largest difference over what the case allows a
    kernel to be off from fp64; case: where. cases: how many were compared. identical: in how many out was
    the same bit for bit.
    """

    ok: bool
    out_error: float
    lse_error: float
    ratio: float
    case: str
    cases: int
    identical: int


def compare_with_gpu(host: HostKernel, gpu: LoadedKernel, host_book: CaseBook, gpu_book: CaseBook) -> Agreement:
    """Run every case on both and compare the outputs. The books hold the same cases, each on its own device.

    The far layouts are left out: only their addresses are unlike the others'. Raises the `VariantFailed` of a launch.
    """
    worst = (-1.0, "")
    out_error = lse_error = 0.0
    cases = identical = 0
    for on_host, on_gpu in zip(host_book.cases_for(host.kernel), gpu_book.cases_for(gpu.kernel), strict=True):
        if on_host.inputs is None or on_gpu.inputs is None:
            continue
        out, lse = _run(host, on_host)
        gpu_out, gpu_lse = (tensor.cpu() for tensor in _run(gpu, on_gpu))
        differences = (_largest_difference(out, gpu_out), _largest_difference(lse, gpu_lse))
        bounds = (on_host.expected.max_bound, on_host.expected.lse_bound)
        ratio = max(difference / max(bound, 1e-300) for difference, bound in zip(differences, bounds, strict=True))
        worst = max(worst, (ratio, on_host.case.name))
        out_error, lse_error = max(out_error, differences[0]), max(lse_error, differences[1])
        cases += 1
        identical += torch.equal(out, gpu_out)
    return Agreement(worst[0] <= 1.0, out_error, lse_error, worst[0], worst[1], cases, identical)


def _run(loaded: LoadedKernel, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """out and lse of one case, on its own device."""
    assert prepared.inputs is not None
    case, shape = prepared.case, prepared.case.shape
    query, key, value = (placed.view for placed in prepared.inputs)
    out = place(tuple(query.shape), shape.layout, query.dtype, query.device).view
    lse = place(tuple(query.shape[:3]), "packed", torch.float32, query.device).view
    plan = plan_for(
        loaded.kernel,
        prepared.mask,
        batch=shape.batch,
        num_heads=shape.num_heads,
        seqlen_q=shape.seqlen_q,
        seqlen_kv=shape.seqlen_kv,
        device=query.device,
    )
    return loaded.run(query, key, value, plan, case.scale, out=out, lse=lse)


def _largest_difference(one: Tensor, other: Tensor) -> float:
    """NaN where only one of two values is NaN or infinite counts as infinitely far."""
    same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(same, 0.0, (one.double() - other.double()).abs().nan_to_num(torch.inf, torch.inf)).amax())

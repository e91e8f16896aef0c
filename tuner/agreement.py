"""The same kernel on a GPU and on the host, call by call: whether what the host executes is what the GPU does."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.runtime.launch import LoadedKernel
from tilewright.tuner.case_book import CaseBook
from tilewright.tuner.host_kernel import HostKernel


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
        if on_host.is_far:
            continue
        ours = on_host.outputs(host)
        found = on_host.difference(ours, tuple(tensor.cpu() for tensor in on_gpu.outputs(gpu)))
        worst = max(worst, (found.ratio, on_host.name))
        out_error, lse_error = max(out_error, found.errors[0]), max(lse_error, found.errors[1])
        cases += 1
        identical += found.identical
    return Agreement(worst[0] <= 1.0, out_error, lse_error, worst[0], worst[1], cases, identical)

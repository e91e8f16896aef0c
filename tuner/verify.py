"""Checks one compiled kernel: a variant that did not pass here cannot win."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.tuner.case_book import CaseBook
from tilewright.tuner.forward_prepared import Runnable, verify_call
from tilewright.tuner.operations import FarRoom, Prepared
from tilewright.tuner.verdicts import VerifyReport, report_on

__all__ = ["CaseBook", "Prepared", "Runnable", "VerifyReport", "verify", "verify_call"]


def verify(loaded: Any, device: torch.device | str, *, book: CaseBook | None = None) -> VerifyReport:
    """Run the kernel on every adversarial case of its operation and judge it.

    Each case: outputs poisoned, the call, a second identical call; then nothing unwritten, nothing written beside the
    outputs, inputs as before, the answer within its bounds, and the same bits both times (`Prepared.examine`). Reads
    the device once, at the end. `VariantFailed` from the launch passes through; a CUDA error that surfaces late comes
    as PyTorch raises it.
    """
    book = book or CaseBook(torch.device(device))
    prepared = book.cases_for(loaded.kernel)
    far = FarRoom(book.device)
    skipped: list[str] = []
    examined: list[tuple[Prepared, Tensor]] = []
    for item in prepared:
        stats = item.examine(loaded, far)
        if stats is None:
            skipped.append(item.name)
        else:
            examined.append((item, stats))
    report = report_on([(item.name, item.verdict(row)) for item, row in _read(examined)], skipped)
    if not report.ok:
        for item in prepared:
            item.restore()
    return report


def _read(examined: list[tuple[Prepared, Tensor]]) -> list[tuple[Prepared, list[float]]]:
    """The statistics on the host, with one copy for all cases."""
    values = torch.stack([stats for _, stats in examined]).tolist()
    return [(item, row) for (item, _), row in zip(examined, values, strict=True)]

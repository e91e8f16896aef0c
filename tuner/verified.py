"""What ran right on a real GPU: digests of rendered sources, kept in `results/verified/<device>.json`.

CI has no GPU. There, a default or a shipped winner counts as tested when its rendered source is one that was verified.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilewright.generator.arch import Arch, arch_named
from tilewright.generator.build_pool import BuildPool
from tilewright.generator.errors import InvalidInput, VariantFailed
from tilewright.generator.family import Family, all_families
from tilewright.generator.render import render
from tilewright.generator.space import family_default, form_defaults, problem_reason
from tilewright.generator.variant import Kernel, kernel_of
from tilewright.runtime.winners import shipped_winners
from tilewright.tuner.operations import Operation, all_operations
from tilewright.tuner.worker import Worker


@dataclass(frozen=True, slots=True)
class Verified:
    """One kernel that was verified: digest of its rendered source, errors against fp64, the day (UTC)."""

    digest: str
    kernel: Kernel
    max_error: float
    rms_error: float
    date: str

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "kernel": self.kernel.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Verified:
        try:
            return cls(**{**values, "kernel": Kernel.from_dict(values["kernel"])})
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"not a record of a verified kernel: {error}") from error


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one kernel: a record, or the reason why there is none."""

    kernel: Kernel
    verified: Verified | None
    message: str


def kernels_to_verify(arch: Arch) -> list[Kernel]:
    """The kernels that must have run right on an architecture before they ship, each once.

    Every proven family's default for the common classes of masks, each mask form of it, and the winners that ship.
    """
    found: dict[Kernel, None] = {}
    for operation in all_operations():
        for family in all_families().values():
            if family.proven and family.operation == operation.name and family.instructions in arch.instructions:
                found.update(dict.fromkeys(_kernels_of(family, operation, arch)))
    for winner in shipped_winners():
        if winner.problem.target == arch.name and problem_reason(winner.problem, winner.spec) is None:
            found[kernel_of(winner.problem, winner.spec)] = None
    return list(found)


def _kernels_of(family: Family, operation: Operation, arch: Arch) -> Iterator[Kernel]:
    for dtype in family.dtypes:
        for problem in operation.problems_to_verify(arch, dtype):
            spec = family_default(problem, family)
            if spec is not None:
                yield kernel_of(problem, spec)
    for problem in operation.forms_to_verify(arch, family.dtypes[0]):
        for form in family.mask_forms:
            legal = list(form_defaults(problem, family, form))
            for spec in legal if family.purpose == "ladder" else legal[:1]:
                yield kernel_of(problem, spec)


def verify_kernels(kernels: Iterable[Kernel], device: str, *, jobs: int | None = None) -> Iterator[Verdict]:
    """Build each kernel and run it through every adversarial case on `device`, as results come in.

    A kernel that does not build, crashes, hangs or is wrong gives a verdict without a record.
    """
    with BuildPool(jobs) as pool, Worker(device) as worker:
        for built in pool.as_completed(kernels):
            if built.artifact is None:
                yield Verdict(built.kernel, None, str(built.error))
                continue
            try:
                report = worker.verify(built.kernel, built.artifact)
            except VariantFailed as error:
                yield Verdict(built.kernel, None, f"{error.outcome}: {error}")
                continue
            record = None
            if report.ok:
                digest, today = render(built.kernel).digest, datetime.now(UTC).date().isoformat()
                record = Verified(digest, built.kernel, report.max_error, report.rms_error, today)
            yield Verdict(built.kernel, record, report.message)


def verified_path(root: Path, device: str) -> Path:
    """Where a device's records are kept under a `results` directory: `verified/nvidia-h200.json`."""
    return root / "verified" / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def read_verified(path: Path) -> dict[str, Verified]:
    """A device's records by digest; empty where there is no file. Raises `InvalidInput` for a damaged one."""
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{path} is not a list of verified kernels: {error}; run `tilewright verify` anew"
        ) from error
    return {row["digest"]: Verified.from_dict(row) for row in rows}


def write_verified(path: Path, device: str, records: Iterable[Verified]) -> None:
    """Add records to a device's file, newest for each digest, one kernel a line so that changes read well.

    Records of sources that the templates no longer render are dropped: they say nothing about what ships now.
    """
    merged = {**read_verified(path), **{record.digest: record for record in records}}
    current = (record for record in merged.values() if _is_current(record))
    rows = sorted(current, key=lambda r: (r.kernel.spec.name, r.kernel.dtype, r.kernel.head_dim, r.digest))
    lines = ",\n".join("  " + json.dumps(row.to_dict(), sort_keys=True) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(f'{{"device": {json.dumps(device)}, "kernels": [\n{lines}\n]}}\n')
    os.replace(file.name, path)
    path.chmod(0o644)


def _is_current(record: Verified) -> bool:
    try:
        return render(record.kernel).digest == record.digest
    except VariantFailed:
        return False


def missing(arch_name: str, records: dict[str, Verified]) -> list[Kernel]:
    """The kernels of `kernels_to_verify` whose rendered source is not among the records."""
    return [kernel for kernel in kernels_to_verify(arch_named(arch_name)) if render(kernel).digest not in records]

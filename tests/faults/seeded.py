"""Ten faults as patches to the templates, and the kernels on which each has to show."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tilewright.generator.errors import VariantFailed
from tilewright.generator.family import family_named
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.space import problem_reason
from tilewright.generator.variant import AxisValue, Kernel, VariantSpec, kernel_of
from tilewright.tuner.verify import CaseBook, Prepared, Runnable, verify

HERE = Path(__file__).parent
TEMPLATES = Path(str(resources.files("tilewright.templates")))

_FILE = re.compile(r"^--- a/\S+\n\+\+\+ b/(\S+)\n", re.MULTILINE)
_HUNK = re.compile(r"^@@ -\d\S* \+\d\S* @@.*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Point:
    """A kernel before its architecture is known: the family's first legal default that has these axes.

    terms: of the mask. axes: what to hold on to among the family's defaults, as (name, value).
    """

    family: str
    dtype: str
    head_dim: int
    terms: tuple[str, ...] = ()
    axes: tuple[tuple[str, AxisValue], ...] = ()

    def kernel(self, arch: str = "sm_90a") -> Kernel:
        """The kernel on `arch`. Raises `LookupError` where no default is legal."""
        mask = MaskClass(self.terms, " & ".join(self.terms) or "dense")
        problem = Problem(self.dtype, self.head_dim, 1, 2, 1, 256, 256, arch, mask)
        family = family_named(self.family)
        for values in family.defaults:
            for form in family.mask_forms:
                spec = VariantSpec.from_values(self.family, {"mask_form": form, **values})
                if dict(self.axes).items() <= values.items() and problem_reason(problem, spec) is None:
                    return kernel_of(problem, spec)
        raise LookupError(f"no default of {self.family} with {dict(self.axes)} is legal for {problem.name}")

    @property
    def name(self) -> str:
        """`ladder float32 D64 bound rung=tiled_full_row`."""
        axes = [f"{name}={value}" for name, value in self.axes]
        return " ".join([self.family, self.dtype, f"D{self.head_dim}", "+".join(self.terms) or "dense", *axes])


FULL_ROW = Point("ladder", "float32", 64, ("bound",), (("rung", "tiled_full_row"),))
ONLINE = Point("ladder", "float32", 64, ("bound",), (("rung", "online_softmax"),))
SIMT = Point("forward_simt", "float32", 64, ("bound",))
SIMT_LIST = Point("forward_simt", "float16", 64, ("bound", "and_blocks"))
WMMA = Point("forward_wmma", "bfloat16", 64, ("bound", "window", "stride"))
WMMA_LIST = Point("forward_wmma", "float16", 64, ("and_bits",))
WMMA_WIDE = Point("forward_wmma", "float16", 128)


@dataclass(frozen=True, slots=True)
class Fault:
    """One slip in the templates.

    name: of the patch. points: kernels that it has to spoil. message: what the host must say, as a regular expression.
    near: what stands in the source within two lines of one that the message names; nothing for wrong results.
    """

    name: str
    points: tuple[Point, ...]
    message: str
    near: str = ""

    @property
    def patch(self) -> str:
        """The unified diff, with paths from the repository's root."""
        return (HERE / f"{self.name}.patch").read_text(encoding="utf-8")


FAULTS = (
    Fault(
        "01-dropped-barrier",
        (FULL_ROW,),
        "a race for byte .* of shared memory: this thread writes what .* read at .*, with no barrier between",
        r"smem\[row \* KV_PITCH",
    ),
    Fault(
        "02-wrong-tail-bound",
        (WMMA_LIST, WMMA_WIDE),
        "out of bounds: this thread reads .* of query, .* in load_query_rows",
        "row_start",
    ),
    Fault(
        "03-off-by-one-in-list",
        (WMMA_LIST, SIMT_LIST),
        "out of bounds: this thread reads 4 bytes at byte .* of kv_indices",
        r"indices_\[at_\]",
    ),
    Fault(
        "04-missing-async-wait",
        (WMMA, SIMT),
        "reads byte .* of shared memory, and the asynchronous copy to it .* has not been waited for",
        "cp_async_16",
    ),
    Fault("05-swapped-fragment-index", (WMMA,), "the largest error is"),
    Fault(
        "06-int32-offset",
        (SIMT,),
        "out of bounds: this thread writes .* at byte -.* in write_rows",
        "reinterpret_cast<uint",
    ),
    Fault(
        "07-shared-memory-overlap",
        (SIMT, WMMA_LIST),
        "reads byte .* of shared memory, and the asynchronous copy to it .* has not been waited for",
        r"cp_async_16\(smem_v",
    ),
    Fault("08-unwritten-output", (SIMT,), "output elements were never written"),
    Fault("09-wrong-rescale", (ONLINE,), "lse is off by"),
    Fault("10-mask-of-wrong-head", (WMMA_LIST,), "lse is off by|lse = -inf where a key is active"),
)

POINTS = tuple(dict.fromkeys(point for fault in FAULTS for point in fault.points))
"""Every kernel that a fault is shown on, once."""


def apply_patch(patch: str, root: Path) -> None:
    """Apply a unified diff to the files under `root`, where each hunk's old lines stand exactly once.

    Raises `ValueError` where they do not.
    """
    pieces = _FILE.split(patch)[1:]
    for name, hunks in zip(pieces[::2], pieces[1::2], strict=True):
        lines = (root / name).read_text(encoding="utf-8").splitlines(keepends=True)
        for hunk in _HUNK.split(hunks)[1:]:
            changes = hunk.splitlines(keepends=True)
            before = [line[1:] for line in changes if line[0] != "+"]
            after = [line[1:] for line in changes if line[0] != "-"]
            places = [i for i in range(len(lines)) if lines[i : i + len(before)] == before]
            if len(places) != 1:
                raise ValueError(f"what a patch changes must stand in {name} once, found {len(places)} times:\n{hunk}")
            lines[places[0] : places[0] + len(before)] = after
        (root / name).write_text("".join(lines), encoding="utf-8")


def patched_templates(fault: Fault, directory: Path) -> Path:
    """A copy of the templates with the fault in it, under `directory`, to give to `render`."""
    shutil.copytree(TEMPLATES, directory / "templates", ignore=shutil.ignore_patterns("_host", "__pycache__"))
    apply_patch(fault.patch, directory)
    return directory / "templates"


class _Cases(CaseBook):
    """Some of a kernel's cases, so that a check can stop at the first that fails."""

    def __init__(self, book: CaseBook, *cases: Prepared) -> None:
        super().__init__(book.device, [prepared.case.shape for prepared in cases])
        self._cases = list(cases)

    def cases_for(self, kernel: Kernel) -> list[Prepared]:
        return self._cases


def first_failure(loaded: Runnable, book: CaseBook) -> str | None:
    """`case 'one token': ...`: how the kernel fails the first of the book's cases that it does; None when it passes."""
    every = book.cases_for(loaded.kernel)
    for prepared in every:
        shape = prepared.case.shape
        # A far case is skipped where memory is short, and `verify` judges one case at least: the first one, once more.
        cases = _Cases(book, every[0], prepared) if shape.layout.startswith("far") else _Cases(book, prepared)
        try:
            report = verify(loaded, book.device, book=cases)
        except (VariantFailed, RuntimeError) as error:  # RuntimeError: one of CUDA's that came late
            return f"case '{shape.name}': {(str(error).splitlines() or [type(error).__name__])[0]}"
        if not report.ok:
            return report.message
    return None

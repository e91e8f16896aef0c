"""Ten seeded faults: the host check has to catch each, for the right reason, and pass the same kernels without it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from measure import RUNS, measure
from seeded import FAULTS, POINTS, TEMPLATES, WMMA_LIST, Fault, Point, apply_patch, first_failure, patched_templates

from tilewright.generator.host_build import MODULE_NAME, build_host
from tilewright.generator.render import Rendered, render
from tilewright.tuner.cases import HOST_SHAPES
from tilewright.tuner.host_kernel import HostKernel
from tilewright.tuner.verify import CaseBook

WHERE = [(fault, point) for fault in FAULTS for point in fault.points]
OF_EACH = pytest.mark.parametrize(("fault", "point"), WHERE, ids=[f"{f.name}, {p.name}" for f, p in WHERE])

AHEAD = 6
"""Libraries that are compiled while the one before them runs."""

Key = tuple[Fault | None, Point]


class Libraries:
    """Compiles each kernel once, when it is asked for, and those that are asked for next beside it."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._order: list[Key] = [*((None, point) for point in POINTS), *WHERE]
        self._templates = {fault: patched_templates(fault, directory / fault.name) for fault in FAULTS}
        self._rendered: dict[Key, Rendered] = {}
        self._built: dict[Key, Future[Path]] = {}

    def rendered(self, fault: Fault | None, point: Point) -> Rendered:
        """The kernel's source, from templates with the fault where one is given."""
        key = (fault, point)
        if key not in self._rendered:
            self._rendered[key] = render(point.kernel(), self._templates[fault] if fault else None)
        return self._rendered[key]

    def load(self, fault: Fault | None, point: Point) -> HostKernel:
        first = self._order.index((fault, point))
        for key in self._order[first : first + 1 + AHEAD]:
            if key not in self._built:
                self._built[key] = self._pool.submit(build_host, self.rendered(*key))
        return HostKernel(self._built[fault, point].result(), point.kernel(), MODULE_NAME)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Libraries]:
    pool = ThreadPoolExecutor(2)
    yield Libraries(tmp_path_factory.mktemp("faults"), pool)
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def book() -> CaseBook:
    return CaseBook(torch.device("cpu"), HOST_SHAPES)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_kernel_without_a_fault_passes(point: Point, libraries: Libraries, book: CaseBook) -> None:
    assert first_failure(libraries.load(None, point), book) is None


@OF_EACH
def test_fault_is_caught_for_what_it_is(fault: Fault, point: Point, libraries: Libraries, book: CaseBook) -> None:
    message = first_failure(libraries.load(fault, point), book)
    assert message is not None, f"no case of {point.name} shows {fault.name}"
    assert re.search(fault.message, message), message
    if fault.near:
        lines = libraries.rendered(fault, point).sources["kernel.cu"].splitlines()
        named = [int(line) for line in re.findall(r"kernel\.cu:(\d+)", message)]
        around = [text for line in named for text in lines[max(0, line - 3) : line + 2]]
        assert any(re.search(fault.near, text) for text in around), message


@OF_EACH
def test_patch_changes_the_kernel(fault: Fault, point: Point, libraries: Libraries) -> None:
    whole, patched = libraries.rendered(None, point), libraries.rendered(fault, point)
    assert patched.sources["kernel.cu"].replace(patched.digest, whole.digest) != whole.sources["kernel.cu"]


def test_ten_faults_and_each_patch_is_one_of_them() -> None:
    assert len({fault.name for fault in FAULTS}) == 10
    assert {f"{fault.name}.patch" for fault in FAULTS} == {path.name for path in Path(__file__).parent.glob("*.patch")}


def test_patch_of_other_lines_is_refused(tmp_path: Path) -> None:
    """No fuzz: a template that has moved on under a patch must not be changed somewhere else."""
    fault = FAULTS[0]
    name = re.search(r"^\+\+\+ b/(\S+)", fault.patch, re.MULTILINE)
    assert name is not None
    target = tmp_path / name[1]
    target.parent.mkdir(parents=True)
    text = (TEMPLATES.parent / name[1]).read_text()
    target.write_text(text + text)
    with pytest.raises(ValueError, match="found 2"):
        apply_patch(fault.patch, tmp_path)
    target.write_text(text.replace("at.value", "at.values"))
    with pytest.raises(ValueError, match="found 0"):
        apply_patch(fault.patch, tmp_path)
    assert target.read_text() == text.replace("at.value", "at.values")


def test_measuring_tells_the_same(tmp_path: Path) -> None:
    fault = FAULTS[-1]
    rows = measure("host", [fault], tmp_path / "rows.json")
    assert [(row["fault"], row["kernel"]) for row in rows] == [(f, WMMA_LIST.name) for f in ("", fault.name)]
    assert rows[0]["runs"] == [None]
    assert len(rows[1]["runs"]) == RUNS
    assert all(re.search(fault.message, message or "") for message in rows[1]["runs"])
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows

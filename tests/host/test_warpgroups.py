"""Barriers that count, bulk copies and a warpgroup's products on the host: right results, named faults, and a GPU's."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import torch
from torch import Tensor

from tilewright.generator.arch import arch_named, host_cpu_flags
from tilewright.generator.toolchain import cuda_toolkit
from tilewright.tuner.report_lines import located

pytestmark = pytest.mark.early

TEMPLATES = Path(__file__).parents[2] / "templates"
PROBE = Path(__file__).with_name("warpgroups_probe.cu")
TEXT = PROBE.read_text()
KERNELS = re.findall(r"^    \{(\w+), .*\},$", TEXT, re.MULTILINE)
M, K, KEY_ROWS, CONSUMERS, WARPGROUP = 64, 128, 64, 2, 128
USUAL = (64, 96)
"""N of wgmma_keys and of wgmma_values in one library."""
OF_EACH_KIND = pytest.mark.parametrize(
    ("dtype", "widths"),
    [
        ("float16", USUAL),
        ("bfloat16", (128, 256)),
        ("float16", (256, 64)),
        ("bfloat16", (136, 40)),
        ("float16", (8, 8)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}-{value[1]}",
)
ON_HOST_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
LAUNCH_FAILURE = 719


class TensorOf(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
        ("box_rows", ctypes.c_int),
    )


class Arguments(ctypes.Structure):
    _fields_ = (
        ("a", TensorOf),
        ("b", TensorOf),
        ("d", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("column", "row", "head", "batch", "tiles", "wrong")),
        ("accumulate", ctypes.c_bool),
    )


Probe = Callable[[str, str, tuple[int, int]], ctypes.CDLL]


def members(enum: str) -> list[str]:
    found = re.search(rf"enum {enum} \{{(.*?)\}};", TEXT, re.DOTALL)
    assert found is not None
    return re.findall(r"\w+", re.sub(r"//.*", "", found[1]))


def lines_of(text: str) -> set[int]:
    """The lines of the probe that hold this text."""
    return {number for number, line in enumerate(TEXT.splitlines(), 1) if text in line}


def defines(dtype: str, widths: tuple[int, int]) -> tuple[str, ...]:
    return (f"-DELEMENT={dtype}", f"-DN_KEYS={widths[0]}", f"-DN_VALUES={widths[1]}")


def build_for_gpu(folder: Path, dtype: str, widths: tuple[int, int]) -> Path:
    arch = arch_named("sm_90a")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    context = {
        "kernel": SimpleNamespace(operation="select_blocks", dtype=dtype, arch=arch.name, head_dim=widths[1]),
        "family": SimpleNamespace(
            name="warpgroups_probe", operation="select_blocks", instructions="wgmma", workspace=False
        ),
        "spec": SimpleNamespace(name="warpgroups_probe", block_n=widths[0]),
        "arch": arch,
        "digest": "",
    }
    (folder / "device.cuh").write_text(environment.get_template("_stages/device.cuh.jinja").render(context))
    flags = ("-std=c++17", "-O1", "-shared", "-Xcompiler=-fPIC", *arch.nvcc_flags, *defines(dtype, widths))
    command = (cuda_toolkit().path, *flags, f"-I{folder}", PROBE, "-o", folder / "probe.so")
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "probe.so"


@pytest.fixture(scope="module")
def probe(host_library: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """probe(device, dtype, widths): the probe's library, compiled once."""
    libraries: dict[tuple[object, ...], ctypes.CDLL] = {}

    def of(device: str, dtype: str, widths: tuple[int, int]) -> ctypes.CDLL:
        key = (device, dtype, widths)
        if key not in libraries:
            if device == "cuda":
                if torch.cuda.get_device_capability() != (9, 0):
                    pytest.skip("wgmma and bulk copies are those of sm_90a alone")
                library = build_for_gpu(tmp_path_factory.mktemp("probe"), dtype, widths)
            else:
                library = host_library(PROBE, (*defines(dtype, widths), *host_cpu_flags()))
            libraries[key] = ctypes.CDLL(str(library))
            libraries[key].error_text.restype = ctypes.c_char_p
            libraries[key].is_described.restype = ctypes.c_bool
        return libraries[key]

    return of


def described(tensor: Tensor | None, box_rows: int) -> TensorOf:
    """A tensor of [batch, heads, rows, columns], or of fewer dims, which are the last."""
    if tensor is None:
        return TensorOf()
    whole = tensor[(None,) * (4 - tensor.dim())]
    numbers = ctypes.c_int64 * 4
    strides = [stride if size > 1 else 16 for size, stride in zip(whole.shape, whole.stride(), strict=True)]
    strides[3] = whole.stride(3)
    return TensorOf(tensor.data_ptr(), numbers(*whole.shape[::-1]), numbers(*strides[::-1]), box_rows)


def launch(
    library: ctypes.CDLL,
    kernel: str,
    d: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    boxes: tuple[int, int] = (0, 0),
    seed: int = 0,
    **values: Any,
) -> str:
    """What went wrong, or ''. On the host d, a and b are watched: nothing else is to be touched."""
    arguments = Arguments(described(a, boxes[0]), described(b, boxes[1]), d.data_ptr(), **values)
    if not d.is_cuda:
        library.tilewright_host_forget()
        library.tilewright_host_seed(ctypes.c_uint64(seed))
        for name, tensor in {"a": a, "b": b, "d": d}.items():
            if tensor is not None:
                numbers = ctypes.c_int64 * tensor.dim()
                library.tilewright_host_watch(
                    name.encode(), ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.element_size()),
                    tensor.dim(), numbers(*tensor.shape), numbers(*tensor.stride()), int(name == "d"),
                )  # fmt: skip
    code = library.run(KERNELS.index(kernel), ctypes.byref(arguments))
    assert code != -1, "a tensor has no map"
    if d.is_cuda:
        torch.cuda.synchronize()
    if not code:
        return ""
    report = library.error_text(code).decode()
    return report if d.is_cuda else located(report, Path(library._name))


def whole(shape: tuple[int, ...], seed: int, dtype: str, device: str = "cpu") -> Tensor:
    """Whole numbers whose products and sums are exact in float however they are added up."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(getattr(torch, dtype)).to(device)


def normal(shape: tuple[int, ...], seed: int, dtype: str, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype)).to(device)


# Products.


@ON_HOST_AND_GPU
@OF_EACH_KIND
@pytest.mark.parametrize("kernel", ["keys", "registers"])
def test_products_of_keys(probe: Probe, device: str, dtype: str, widths: tuple[int, int], kernel: str) -> None:
    library, n = probe(device, dtype, widths), widths[0]
    for make in (whole, normal):
        a, b = make((M, K), 1, dtype, device), make((n, K), 2, dtype, device)
        for accumulate in (False, True):
            d = torch.full((M, n), torch.nan, device=device)
            assert launch(library, kernel, d, a, b, (M, n), accumulate=accumulate) == ""
            want = a.double() @ b.double().T + float(accumulate)
            if make is whole:
                assert torch.equal(d.double(), want)
            else:
                torch.testing.assert_close(d.double(), want, rtol=1e-5, atol=1e-3)


@ON_HOST_AND_GPU
@OF_EACH_KIND
def test_products_of_values(probe: Probe, device: str, dtype: str, widths: tuple[int, int]) -> None:
    library, n = probe(device, dtype, widths), widths[1]
    for make in (whole, normal):
        a, b = make((M, KEY_ROWS), 3, dtype, device), make((KEY_ROWS, n), 4, dtype, device)
        d = torch.full((M, n), torch.nan, device=device)
        assert launch(library, "values", d, a, b, (M, KEY_ROWS)) == ""
        want = a.double() @ b.double() + 1.0
        if make is whole:
            assert torch.equal(d.double(), want)
        else:
            torch.testing.assert_close(d.double(), want, rtol=1e-5, atol=1e-3)


# Bulk copies.


def box_of(tensor: Tensor, rows: int, column: int, row: int, head: int, batch: int) -> Tensor:
    """The box as it should lie in shared memory that starts at a multiple of 1024 bytes."""
    logical = torch.zeros((rows, 64), dtype=tensor.dtype)
    plane = tensor[batch, head].cpu()
    for r in range(rows):
        for c in range(64):
            if 0 <= row + r < plane.shape[0] and 0 <= column + c < plane.shape[1]:
                logical[r, c] = plane[row + r, column + c]
    swizzled = torch.empty_like(logical)
    for r in range(rows):
        for chunk in range(8):
            at = chunk ^ r % 8
            swizzled[r, at * 8 : at * 8 + 8] = logical[r, chunk * 8 : chunk * 8 + 8]
    return swizzled


def strided(kind: str, device: str = "cpu") -> Tensor:
    """[2, 3, 40, 72] of elements that differ, in memory as its kind says."""
    values = torch.arange(2 * 3 * 40 * 72).remainder(2039).to(torch.float16)
    if kind == "contiguous":
        return values.reshape(2, 3, 40, 72).to(device)
    if kind == "heads inside":
        return values.reshape(2, 40, 3, 72).to(device).transpose(1, 2)
    padded = torch.full((3, 2, 50, 88), -1.0, dtype=torch.float16, device=device)
    padded[:, :, 5:45, 8:80] = values.reshape(3, 2, 40, 72).to(device)
    return padded[:, :, 5:45, 8:80].transpose(0, 1)


PLACES = [(0, 0, 0, 0), (64, 0, 1, 0), (8, 24, 2, 1), (-8, -5, 0, 1), (64, 39, 1, 1), (0, 40, 1, 1), (104, 0, 2, 0)]
"""Column, row, head and batch. Columns are multiples of 8, 16 bytes: at any other one an H200 stops with an illegal
instruction (2026-11-30)."""


@ON_HOST_AND_GPU
@pytest.mark.parametrize("kind", ["contiguous", "heads inside", "padded"])
@pytest.mark.parametrize("rows", [64, 24, 3])
def test_a_box_lands_swizzled_and_filled_with_zeros(probe: Probe, device: str, kind: str, rows: int) -> None:
    library, tensor = probe(device, "float16", USUAL), strided(kind, device)
    for seed, (column, row, head, batch) in enumerate(PLACES):
        d = torch.full((rows, 64), torch.nan, device=device)
        place = {"column": column, "row": row, "head": head, "batch": batch}
        assert launch(library, "boxes", d, tensor, boxes=(rows, 0), seed=seed, **place) == ""
        assert torch.equal(d.cpu(), box_of(tensor, rows, column, row, head, batch).float()), place


@ON_HOST_AND_GPU
def test_what_the_copy_engine_cannot_has_no_map(probe: Probe, device: str) -> None:
    library = probe(device, "float16", USUAL)
    tensor = strided("padded", device)

    def has_map(box_rows: int = 64, **changed: Any) -> bool:
        asked = described(tensor, box_rows)
        for name, value in changed.items():
            field, _, index = name.partition("_")
            if index:
                getattr(asked, field)[int(index)] = value
            else:
                setattr(asked, field, value)
        return bool(library.is_described(ctypes.byref(asked)))

    assert has_map()
    assert has_map(256)
    assert not has_map(257)
    assert not has_map(base=tensor.data_ptr() + 8)
    assert has_map(base=tensor.data_ptr() + 16)
    for dim in (1, 2, 3):
        assert not has_map(**{f"strides_{dim}": 36})
        assert not has_map(**{f"strides_{dim}": 1 << 39})
    for dim in range(4):
        assert not has_map(**{f"sizes_{dim}": 0})
        assert not has_map(**{f"sizes_{dim}": (1 << 32) + 1})


def test_a_bulk_copy_reads_the_tensor_alone(probe: Probe) -> None:
    library, tensor = probe("cpu", "float16", USUAL), strided("contiguous")
    d = torch.zeros((64, 64))
    asked = described(tensor, 64)
    asked.sizes[1] = 41  # one row more than there is
    arguments = Arguments(asked, TensorOf(), d.data_ptr(), row=30, head=2, batch=1)
    assert launch(library, "boxes", d, tensor, boxes=(64, 0), row=30, head=2, batch=1) == ""
    assert library.run(KERNELS.index("boxes"), ctypes.byref(arguments)) == LAUNCH_FAILURE
    report = located(library.error_text(LAUNCH_FAILURE).decode(), Path(library._name))
    assert re.search(r"out of bounds: this thread reads 128 bytes at byte \d+ of a, which spans", report), report
    assert set(map(int, re.findall(r"kernel\.cu:(\d+)", report))) & lines_of("bulk_load(smem, &maps.a"), report


# Ordinary stores and what reads them.


def store_and_multiply(library: ctypes.CDLL, wrong: str, seed: int, device: str = "cpu") -> tuple[str, Tensor, Tensor]:
    n = USUAL[0]
    a, b = whole((M, 64), 5, "float16", device), whole((n, 64), 6, "float16", device)
    d = torch.full((M, n), torch.nan, device=device)
    report = launch(library, "stored", d, a, b, (M, n), seed, wrong=members("Stored").index(wrong))
    return report, d.double(), a.double() @ b.double().T


@ON_HOST_AND_GPU
@pytest.mark.parametrize("right", ["FENCED", "OWN_ROWS", "OVERWRITTEN"])
def test_products_of_what_threads_stored(probe: Probe, device: str, right: str) -> None:
    for seed in range(4):
        report, got, want = store_and_multiply(probe(device, "float16", USUAL), right, seed, device)
        assert report == ""
        assert torch.equal(got, want)


@pytest.mark.parametrize("wrong", ["UNFENCED", "FENCED_TOO_EARLY", "FENCED_TOO_LATE"])
def test_stores_need_a_fence_before_a_product(probe: Probe, wrong: str) -> None:
    for seed in range(4):
        report, _, _ = store_and_multiply(probe("cpu", "float16", USUAL), wrong, seed)
        assert re.search(
            r"this product reads byte \d+ of shared memory, which thread \d+ wrote by ordinary stores at"
            r" .*kernel\.cu:\d+ in store_rows, .*with no fence_proxy_async\(\)",
            report,
        ), report
        assert set(map(int, re.findall(r"kernel\.cu:(\d+)", report))) >= lines_of("// stored"), report


def test_stores_need_a_fence_before_a_bulk_copy(probe: Probe) -> None:
    for seed in range(4):
        report, _, _ = store_and_multiply(probe("cpu", "float16", USUAL), "OVERWRITTEN_UNFENCED", seed)
        assert re.search(r"this bulk copy writes byte \d+ of .*, which thread \d+ wrote by ordinary stores", report), (
            report
        )


# A producer and its consumers.


def run_pipeline(library: ctypes.CDLL, n: int, wrong: str, seed: int, device: str = "cpu", tiles: int = 5) -> Any:
    """(what went wrong, whether the products are right, whether the ordinary reads are)."""
    a, b = whole((CONSUMERS * M, 64), 7, "float16", device), whole((tiles * n, 64), 8, "float16", device)
    d = torch.full((CONSUMERS * M * n + CONSUMERS * WARPGROUP,), torch.nan, device=device)
    number = members("Pipeline").index(wrong)
    report = launch(library, "pipeline", d, a, b, (M, n), seed, tiles=tiles, wrong=number)
    products, sums = d[: CONSUMERS * M * n].reshape(CONSUMERS * M, n), d[CONSUMERS * M * n :]
    want = a.double() @ b.double().reshape(tiles, n, 64).sum(0).T
    read = torch.stack([box_of(part[None, None], n, 0, 0, 0, 0) for part in b.reshape(tiles, n, 64)]).float()
    want_sums = read.reshape(tiles, -1)[:, :WARPGROUP].sum(0).repeat(CONSUMERS)
    return report, torch.equal(products.double(), want), torch.equal(sums.cpu(), want_sums)


@ON_HOST_AND_GPU
@pytest.mark.parametrize("right", ["RIGHT", "BY_WARPS"])
@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_a_pipeline_is_right_in_every_order(probe: Probe, device: str, right: str, tiles: int) -> None:
    for seed in range(12):
        assert run_pipeline(probe(device, "float16", USUAL), USUAL[0], right, seed, device, tiles) == (
            "",
            True,
            True,
        ), seed


BROKEN = [
    (
        "NO_EMPTY_WAIT",
        r"mbarrier_arrive_expect: one arrival too many in phase 0"
        r"|this bulk copy writes what the bulk copy from \S+ .*not waited for",
        "&full[stage]",
    ),
    (
        "NO_FULL_WAIT",
        r"this product reads .*(bulk copy (to it that began|from) .*not (been )?waited for|nobody wrote)",
        "// a tile",
    ),
    (
        "RELEASED_BEFORE_PRODUCTS",
        r"this bulk copy writes what a product of warpgroup \d reads that began at .*; nobody who waited",
        "// a stage",
    ),
    (
        "RELEASED_BEFORE_READS",
        r"this bulk copy writes what thread \d+ read at|this thread reads (byte|what the bulk copy)",
        "read like ordinary memory",
    ),
    (
        "NO_WARP_BARRIER",
        r"this bulk copy writes what thread \d+ read at|this thread reads (byte|what the bulk copy)",
        "read like ordinary memory",
    ),
    (
        "NO_PRODUCT_WAIT",
        r"this bulk copy writes what a product of warpgroup \d reads that began at .*; nobody who waited",
        "// a stage",
    ),
    (
        "TOO_FEW_BYTES",
        r"is complete while the bulk copy of \d+ bytes that thread 256 began .* is in flight: fewer bytes"
        r"|bring 128 bytes more than expected",
        "// a stage",
    ),
    ("TOO_MANY_BYTES", r"256 .* wait in mbarrier_wait at .*its phase 0 lacks 0 of 1 arrivals and 128 bytes", "// full"),
    (
        "ONE_ARRIVAL_MISSING",
        r"1 \(thread 256\) wait in mbarrier_wait at .*its phase 0 lacks 1 of 257 arrivals and 0 bytes",
        "// empty",
    ),
    (
        "ONE_ARRIVAL_TOO_MANY",
        r"this bulk copy writes what thread \d+ read at|this thread reads (byte|what the bulk copy)",
        "read like ordinary memory",
    ),
    (
        "ONE_COPY_TOO_MANY",
        r"nobody waited for the bulk copy to byte \d+ of shared memory: the block may end before it lands",
        "// a stage",
    ),
]
"""What is wrong, what the report says, and text of a line that it names."""


def test_every_wrong_pipeline_has_its_report() -> None:
    assert {"RIGHT", "BY_WARPS", *(wrong for wrong, _, _ in BROKEN)} == set(members("Pipeline"))


@pytest.mark.parametrize(("wrong", "message", "line"), BROKEN, ids=[broken[0].lower() for broken in BROKEN])
def test_a_broken_pipeline_is_reported(probe: Probe, wrong: str, message: str, line: str) -> None:
    library, n = probe("cpu", "float16", USUAL), USUAL[0]
    for seed in range(6):
        report, _, _ = run_pipeline(library, n, wrong, seed)
        assert re.search(message, report), (seed, report)
        assert set(map(int, re.findall(r"kernel\.cu:(\d+)", report))) & lines_of(line), report


# Named barriers.


def hand_over(library: ctypes.CDLL, wrong: str, seed: int, device: str = "cpu") -> tuple[str, Tensor]:
    d = torch.full((WARPGROUP,), torch.nan, device=device)
    return launch(library, "handed", d, seed=seed, wrong=members("Handed").index(wrong)), d.cpu()


@ON_HOST_AND_GPU
def test_named_barriers_hand_over(probe: Probe, device: str) -> None:
    for seed in range(8):
        report, d = hand_over(probe(device, "float16", USUAL), "TURNS", seed, device)
        assert report == ""
        assert torch.equal(d, 2.0 * (torch.arange(float(WARPGROUP)).reshape(2, 2, 32).flip(1).reshape(-1)))


@pytest.mark.parametrize(
    ("wrong", "message", "line"),
    [
        (
            "NO_ARRIVAL",
            r"128 \(the first is thread 0\) wait in named_barrier_sync .*named barrier 2: 128 of 256 threads\)"
            r"|128 .* wait in named_barrier_sync .*named barrier 1: 128 of 256 threads\)",
            "// there",
        ),
        ("NO_TURN_BACK", r"a race for byte \d+ .*: this thread \w+ what thread \d+ \w+|once more before", ""),
        (
            "OTHER_COUNT",
            r"named barrier 1 for \d+ threads, which thread \d+ came to at kernel.cu:\d+ .*for \d+",
            "named_barrier_",
        ),
        ("ONE_LANE", r"wait in named_barrier_sync .*named barrier 1: 132 of 256 threads", "// there"),
        ("TWICE", r"arrives at named barrier 1 once more before the 256 threads have", "// written"),
    ],
)  # fmt: skip
def test_named_barriers_used_wrongly_are_reported(probe: Probe, wrong: str, message: str, line: str) -> None:
    for seed in range(4):
        report, _ = hand_over(probe("cpu", "float16", USUAL), wrong, seed)
        assert re.search(message, report), report
        assert not line or set(map(int, re.findall(r"kernel\.cu:(\d+)", report))) & lines_of(line), report


# One mistake each.

MISTAKES = [
    ("NOT_INITIALISED", r"mbarrier_\w+: nobody initialised the mbarrier at byte \d+ of shared memory", "(barriers, "),
    (
        "INITIALISED_TWICE",
        r"mbarrier_init: the mbarrier at byte \d+ of shared memory is in use, initialised by thread 0 at kernel.cu",
        "// initialised",
    ),
    (
        "NOT_SHOWN",
        r"mbarrier_arrive: (nobody initialised|the mbarrier at .*, which thread 0 initialised at kernel.cu:\d+ .*with"
        r" no barrier between)",
        "// not shown",
    ),
    (
        "NO_INIT_FENCE",
        r"bulk_load: the mbarrier at .* was initialised at kernel.cu:\d+ .*with no mbarrier_init_fence\(\) after it",
        "// a",
    ),
    (
        "USED_AS_DATA",
        r"this thread reads byte \d+ of shared memory like any other, where thread 0 initialised an mbarrier",
        "barriers->word",
    ),
    (
        "COPIED_OVER",
        r"this thread has a bulk copy to byte \d+ of shared memory like any other, where thread 0 initialised",
        "COPIED_OVER",
    ),
    ("NO_ARRIVALS", r"mbarrier_init: arrivals must be 1 to 1048575, got 0", "// initialised"),
    (
        "MISPLACED_BARRIER",
        r"mbarrier_init: an mbarrier at byte \d+ of shared memory, which must be a multiple of 8",
        "MISPLACED_BARRIER",
    ),
    ("STRANGE_PARITY", r"mbarrier_wait: parity must be 0 or 1, got 2", "STRANGE_PARITY"),
    ("STRANGE_PARITY_TESTED", r"mbarrier_test: parity must be 0 or 1, got 3", "STRANGE_PARITY_TESTED"),
    (
        "ODD_DESTINATION",
        r"bulk_load: a box of 64 rows must start at a multiple of 1024 bytes, got byte 8704 of shared memory",
        "// b",
    ),
    ("PAST_THE_END", r"out of bounds: bulk_load of 8192 bytes at byte \d+ of shared memory, which has", "// b"),
    ("NO_SUCH_HEAD", r"bulk_load: a box of head 7, batch 0 of a tensor with 1 heads, 1 batches", "// a"),
    ("ODD_COLUMN", r"bulk_load: a box must start at a column that is a multiple of 8, got 4", "// a"),
    ("NO_MAP", r"bulk_load: make_tensor_map did not make this tensor map", "NO_MAP"),
    (
        "DIVERGENT_WARPGROUP",
        r"a warpgroup diverges: this thread is in wgmma_\w+, thread \d+ in wgmma_\w+ at kernel.cu:\d+",
        "// registers",
    ),
    ("WARPGROUP_IN_PART", r"127 \(the first is thread 0\) wait in wgmma_fence at .* left the kernel", "// registers"),
    (
        "HALF_A_WARPGROUP",
        r"wgmma_fence: a warpgroup is 128 threads from a warp that 4 divides, and this block ends at thread 319",
        "// registers",
    ),
    (
        "DIFFERENT_MATRICES",
        r"wgmma_keys: all threads must pass the same matrices .* thread 33 of the warpgroup differs from thread 0",
        "// first",
    ),
    (
        "ODD_START",
        r"wgmma_keys: b must start at a multiple of 16 bytes, less than 97 past a multiple of 1024, got byte 8320"
        r" .*, 128 past one",
        "// first",
    ),
    ("ODD_CHUNKS", r"wgmma_values: chunk_bytes must be a multiple of 1024, got 512", "shared_matrix(b, 512)"),
    ("PRODUCT_PAST_THE_END", r"out of bounds: wgmma_keys of 16 bytes at byte \d+ of shared memory", "// first"),
    ("PRODUCT_OF_NOTHING", r"this product reads byte \d+ of shared memory, which nobody wrote", "// first"),
    (
        "NO_REGISTER_FENCE",
        r"wgmma_keys: no wgmma_fence\(\) since threads could last write the registers of d",
        "// first",
    ),
    (
        "NO_LEFT_FENCE",
        r"wgmma_keys: no wgmma_fence\(\) since threads could last write the registers of a",
        "// again",
    ),
    (
        "READ_TOO_EARLY",
        r"this thread reads an accumulator of the product at kernel.cu:\d+.*, which no wgmma_wait has settled",
        "READ_TOO_EARLY",
    ),
    (
        "WRITTEN_TOO_EARLY",
        r"this thread writes an accumulator of the product at kernel.cu:\d+.*, which no wgmma_wait has settled",
        "WRITTEN_TOO_EARLY",
    ),
    ("SETTLED_TOO_EARLY", r"wgmma_wait: 1 products of the accumulator are still in flight", "// one too many"),
    (
        "NO_COMMIT",
        r"wgmma_wait: 1 products of the accumulator are still in flight, .* or commit them before",
        "wgmma_wait<0>(d)",
    ),
    (
        "LEFT_EARLY",
        r"a thread leaves the kernel while products of its warpgroup are in flight, which began at kernel.cu:\d+",
        "// first",
    ),
    (
        "STORED_OVER",
        r"a race for byte \d+ .*: this thread writes what a product of warpgroup 0 reads that began at",
        "STORED_OVER",
    ),
    ("NAMED_ZERO", r"named_barrier_sync: the barrier must be 1 to 15, got 0", "NAMED_ZERO"),
    (
        "NAMED_PART",
        r"named_barrier_sync: threads must be a multiple of 32, at most the block's 320, got 40",
        "NAMED_PART",
    ),
    (
        "OVERTAKEN",
        r"wait in mbarrier_wait .*its phase 2 lacks 1 of 1 arrivals and 0 bytes; since the thread last waited"
        r" there 2 phases went by: it came too late for the one of its parity",
        "// parity",
    ),
]
"""What is wrong, what the report says, and text of a line that it names."""


def test_every_mistake_has_its_report() -> None:
    assert {"NOTHING", *(wrong for wrong, _, _ in MISTAKES)} == set(members("Misused"))


def misuse(library: ctypes.CDLL, wrong: str, seed: int, device: str = "cpu") -> tuple[str, Tensor, Tensor]:
    n = USUAL[0]
    a, b = whole((M, 64), 9, "float16", device), whole((n, 64), 10, "float16", device)
    d = torch.full((M, n), torch.nan, device=device)
    report = launch(library, "misused", d, a, b, (M, n), seed, wrong=members("Misused").index(wrong))
    return report, d.double(), a[:, :16].double() @ b[:, :16].double().T


@ON_HOST_AND_GPU
def test_nothing_is_wrong_with_the_rest(probe: Probe, device: str) -> None:
    report, got, want = misuse(probe(device, "float16", USUAL), "NOTHING", 0, device)
    assert report == ""
    assert torch.equal(got, want)


@pytest.mark.parametrize(("wrong", "message", "line"), MISTAKES, ids=[mistake[0].lower() for mistake in MISTAKES])
def test_a_mistake_is_named_with_its_place(probe: Probe, wrong: str, message: str, line: str) -> None:
    library = probe("cpu", "float16", USUAL)
    for seed in range(3):
        report, _, _ = misuse(library, wrong, seed)
        assert re.search(message, report), report
        assert "block 0" in report
        assert set(map(int, re.findall(r"kernel\.cu:(\d+)", report))) & lines_of(line), report
    report, got, want = misuse(library, "NOTHING", 0)  # which knows nothing of it
    assert report == ""
    assert torch.equal(got, want)


# The same source on a GPU.


@pytest.mark.nvcc
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_the_probe_compiles_for_a_gpu(dtype: str, tmp_path: Path) -> None:
    build_for_gpu(tmp_path, dtype, USUAL)

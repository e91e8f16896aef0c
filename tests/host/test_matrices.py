"""Element types and a warp's matrix instructions on the host, against PTX's layouts and, where there is one, a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from torch import Tensor

from tilewright.generator.arch import arch_named, arch_of_capability, host_cpu_flags
from tilewright.generator.toolchain import cuda_toolkit, cxx_compiler

TEMPLATES = Path(__file__).parents[2] / "templates"
HOST = TEMPLATES / "_host"
PROBE = Path(__file__).with_name("matrices_probe.cu")
DTYPES = ("float16", "bfloat16")
STRIDE_A, STRIDE_B, STRIDE_C, STRIDE_D = 24, 40, 20, 28  # the probe's
ON_HOST_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
OF_EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)

# PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": of lane l, element i.
LANE, A_I, B_I = np.arange(32)[:, None], np.arange(8)[None], np.arange(4)[None]
GROUP_ID, THREAD_ID_IN_GROUP = LANE >> 2, LANE % 4
A_ROW = np.where((A_I < 2) | ((A_I >= 4) & (A_I < 6)), GROUP_ID, GROUP_ID + 8)
A_COLUMN = np.where(A_I < 4, THREAD_ID_IN_GROUP * 2 + (A_I & 1), THREAD_ID_IN_GROUP * 2 + (A_I & 1) + 8)
B_ROW = np.where(B_I < 2, THREAD_ID_IN_GROUP * 2 + (B_I & 1), THREAD_ID_IN_GROUP * 2 + (B_I & 1) + 8)
B_COLUMN = GROUP_ID + 0 * B_I
C_ROW = np.where(B_I < 2, GROUP_ID, GROUP_ID + 8)
C_COLUMN = THREAD_ID_IN_GROUP * 2 + (B_I & 1)


def structure(name: str, **types: Any) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(types.items())})


POINTER, FLAG = ctypes.c_void_p, ctypes.c_bool
CONVERSIONS = structure(
    "Conversions", elements=POINTER, floats=POINTER, values=POINTER, rounded=POINTER, words=POINTER, packed=POINTER,
    unpacked=POINTER, powers=POINTER, count=ctypes.c_int,
)  # fmt: skip
PRODUCT = structure(
    "Product", a=POINTER, b=POINTER, c=POINTER, d=POINTER, skew_a=ctypes.c_int64, stride_a=ctypes.c_uint,
    c_row_major=FLAG, d_row_major=FLAG, in_place=FLAG, shared=FLAG, lane_strides=FLAG, not_copied=FLAG,
)  # fmt: skip
REGISTERS = structure("Registers", a=POINTER, b=POINTER, c=POINTER, d=POINTER, in_place=FLAG)
TILE = structure(
    "Tile", elements=POINTER, offsets=POINTER, x4=POINTER, x4_transposed=POINTER, x2=POINTER, x2_transposed=POINTER,
    shared=FLAG,
)  # fmt: skip

Probe = Callable[[str, str, str], ctypes.CDLL]


def run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def build_for_gpu(folder: Path, dtype: str, instructions: str, arch_name: str) -> Path:
    arch = arch_named(arch_name)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    context = {
        "kernel": SimpleNamespace(operation="attention_forward", dtype=dtype, arch=arch.name),
        "family": SimpleNamespace(name="matrices_probe", instructions=instructions, workspace=False),
        "spec": SimpleNamespace(name="matrices_probe"),
        "arch": arch,
        "digest": "",
    }
    (folder / "device.cuh").write_text(environment.get_template("_stages/device.cuh.jinja").render(context))
    library = folder / "probe.so"
    defines = (f"-DELEMENT={dtype}", f"-DWITH_{instructions.upper()}")
    flags = ("-std=c++17", "-O1", "-shared", "-Xcompiler=-fPIC", *arch.nvcc_flags)
    run(cuda_toolkit().path, *flags, *defines, f"-I{folder}", PROBE, "-o", library)
    return library


@pytest.fixture(scope="module")
def probe(host_library: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """probe(device, dtype, instructions): the probe's library, compiled once."""
    libraries: dict[tuple[str, ...], ctypes.CDLL] = {}

    def of(device: str, dtype: str, instructions: str) -> ctypes.CDLL:
        key = (device, dtype, instructions)
        if key not in libraries:
            if device == "cuda":
                name = arch_of_capability(*torch.cuda.get_device_capability()).name
                library = build_for_gpu(tmp_path_factory.mktemp("-".join(key)), dtype, instructions, name)
            else:
                defines = (f"-DELEMENT={dtype}", f"-DWITH_{instructions.upper()}")
                library = host_library(PROBE, (*defines, *host_cpu_flags()))
            libraries[key] = ctypes.CDLL(str(library))
            libraries[key].error_text.restype = ctypes.c_char_p
        return libraries[key]

    return of


def call(library: ctypes.CDLL, function: str, arguments: type[ctypes.Structure], *flags: bool, **values: Any) -> str:
    """What went wrong, or ''. Tensors pass as their addresses."""
    passed = {name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in values.items()}
    code = getattr(library, function)(ctypes.byref(arguments(**passed)), *map(ctypes.c_bool, flags))
    if any(isinstance(v, Tensor) and v.is_cuda for v in values.values()):
        torch.cuda.synchronize()
    return library.error_text(code).decode() if code else ""


def line_of(text: str) -> int:
    """Of the probe's source: where `text` first stands."""
    return PROBE.read_text().split(text)[0].count("\n") + 1


def bits_of(values: Tensor) -> np.ndarray:
    whole = {2: torch.int16, 4: torch.int32}[values.element_size()]
    return values.cpu().view(whole).numpy().view({2: np.uint16, 4: np.uint32}[values.element_size()])


def random(shape: tuple[int, ...], seed: int, *, whole: bool = False) -> Tensor:
    """Normal values, or whole numbers whose products and sums are exact in float however they are added up."""
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return torch.randint(-16, 17, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


# Conversions.


def all_elements(dtype: str) -> Tensor:
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    return torch.from_numpy(patterns).view(getattr(torch, dtype))


def hard_values(dtype: str) -> Tensor:
    """Every element, what lies halfway between neighbours, what is just off that, and floats of any bits."""
    elements = all_elements(dtype).double()
    finite = torch.unique(elements[elements.isfinite()])
    largest = finite[-1]
    halfway = torch.cat(
        [(finite[1:] + finite[:-1]) / 2, largest + (largest - finite[-2]) / 2 * torch.tensor([1.0, -1.0])]
    )
    halfway = torch.cat([halfway, -halfway]).float()
    infinity = torch.tensor(float("inf"))
    generator = torch.Generator().manual_seed(3)
    any_bits = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), generator=generator).to(torch.int32).view(torch.float32)
    near = [torch.nextafter(halfway, infinity), torch.nextafter(halfway, -infinity)]
    values = torch.cat([elements.float(), halfway, *near, any_bits, torch.tensor([0.0, -0.0, 1e-45, -1e-45])])
    return values[: values.numel() // 2 * 2].contiguous()


def converted(library: ctypes.CDLL, dtype: str, device: str) -> dict[str, Tensor]:
    values = hard_values(dtype)
    count = values.numel()
    elements = all_elements(dtype).repeat(-(-count // (1 << 16)))[:count]
    results = {name: torch.zeros(count, device=device) for name in ("floats", "unpacked", "powers")}
    results["rounded"] = torch.zeros(count, dtype=getattr(torch, dtype), device=device)
    results |= {name: torch.zeros(count // 2, dtype=torch.int32, device=device) for name in ("words", "packed")}
    inputs = {"elements": elements.to(device), "values": values.to(device)}
    assert call(library, "run_conversions", CONVERSIONS, **inputs, **results, count=count) == ""
    return {**inputs, **results}


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """NaN aside, whose bits differ between all who make them."""
    got, want = got.cpu(), want.cpu()
    assert torch.equal(got.isnan(), want.isnan())
    assert np.array_equal(bits_of(got[~got.isnan()]), bits_of(want[~want.isnan()]))


@ON_HOST_AND_GPU
@OF_EACH_DTYPE
def test_conversions_are_those_of_torch(probe: Probe, device: str, dtype: str) -> None:
    data = converted(probe(device, dtype, "mma"), dtype, device)
    values, torch_dtype = data["values"].cpu(), getattr(torch, dtype)
    assert_same_bits(data["floats"], data["elements"].float())
    assert_same_bits(data["rounded"], values.to(torch_dtype))
    assert (bits_of(data["rounded"])[values.isnan().numpy()] == 0x7FFF).all()
    halves = data["words"].cpu().view(torch_dtype)  # the low half first
    assert np.array_equal(bits_of(halves), bits_of(data["rounded"]))
    assert torch.equal(data["packed"], data["words"])
    assert_same_bits(data["unpacked"], halves.float())


@ON_HOST_AND_GPU
def test_powers_of_two_are_flushed_below_the_normal_ones(probe: Probe, device: str) -> None:
    data = converted(probe(device, "bfloat16", "mma"), "bfloat16", device)
    values, powers = data["values"].cpu(), data["powers"].cpu()
    assert torch.equal(powers.isnan(), values.isnan())
    exact = torch.exp2(values.double())
    assert (powers[exact < 2.0**-126] == 0.0).all()
    assert not powers[~powers.isnan()].signbit().any()
    normal = (exact >= 2.0**-125.99) & (exact < 2.0**127.99)
    assert ((powers.double() / exact - 1.0)[normal].abs() < 2.0**-21).all()
    assert torch.equal(powers[values == float("inf")], values[values == float("inf")])


TYPES_PROBE = """
#include "types.h"
extern "C" void convert(const uint16_t* from, float* to, int count, const float* values, uint16_t* rounded, int more) {
    for (int i = 0; i < count; ++i) to[i] = to_float(float16{from[i]});
    for (int i = 0; i < more; ++i) rounded[i] = from_float<float16>(values[i]).bits;
}
"""


@pytest.mark.skipif("-mf16c" not in host_cpu_flags(), reason="no F16C here: one way alone is in use")
def test_float16_is_the_same_with_and_without_f16c(tmp_path: Path) -> None:
    (tmp_path / "types.cpp").write_text(TYPES_PROBE)
    patterns, values = all_elements("float16"), hard_values("float16")
    results = []
    for flags in (("-mno-f16c",), ("-mf16c",)):
        library = tmp_path / f"types{flags[0]}.so"
        command = (cxx_compiler().path, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", *flags, "-shared", "-fPIC")
        run(*command, f"-I{HOST}", tmp_path / "types.cpp", "-o", library)
        floats, rounded = torch.zeros(patterns.numel()), torch.zeros(values.numel(), dtype=torch.int16)
        addresses = [ctypes.c_void_p(t.data_ptr()) for t in (patterns, floats, values, rounded)]
        ctypes.CDLL(str(library)).convert(*addresses[:2], patterns.numel(), *addresses[2:], values.numel())
        results.append((bits_of(floats), bits_of(rounded)))
    for without, with_f16c in zip(*results, strict=True):
        assert np.array_equal(without, with_f16c)


# Fragments in memory: 16 lines of a matrix in an array whose padding is NaN.


def lines(matrix: Tensor, stride: int, row_major: bool) -> Tensor:
    whole = torch.full((16, stride), float("nan"), dtype=matrix.dtype)
    whole[:, :16] = matrix if row_major else matrix.T
    return whole


def product(
    library: ctypes.CDLL,
    dtype: str,
    device: str,
    layouts: str,
    *,
    whole: bool = True,
    before: Callable[[str, Tensor], None] = lambda name, values: None,
    **options: Any,
) -> tuple[str, Tensor, Tensor]:
    """(what went wrong, D, 2 A B + C in fp64). layouts: r or c for each of A, B, C and D. before: gets every tensor."""
    a, b = (random((16, 16), seed, whole=whole).to(getattr(torch, dtype)) for seed in (1, 2))
    c = random((16, 16), 3, whole=whole)
    row_major = [letter == "r" for letter in layouts]
    strides = (STRIDE_A, STRIDE_B, STRIDE_C)
    inputs = [lines(m, s, r).to(device) for m, s, r in zip((a, b, c), strides, row_major, strict=False)]
    d = torch.full((16, STRIDE_D), -1.0, device=device)
    arguments: dict[str, Any] = {
        **dict(zip("abc", inputs, strict=True)), "d": d, "stride_a": STRIDE_A, "skew_a": 0,
        "c_row_major": row_major[2], "d_row_major": row_major[3], **options,
    }  # fmt: skip
    for name in "abcd":
        before(name, arguments[name])
    report = call(library, "run_product", PRODUCT, *row_major[:2], **arguments)
    d = d.cpu()
    assert (d[:, 16:] == -1.0).all(), "written past a line"
    return report, d[:, :16] if row_major[3] else d[:, :16].T, 2.0 * a.double() @ b.double() + c.double()


@ON_HOST_AND_GPU
@OF_EACH_DTYPE
@pytest.mark.parametrize("layouts", ["rrrr", "rcrc", "crcr", "cccc"])
def test_wmma_multiplies_in_every_layout(probe: Probe, device: str, dtype: str, layouts: str) -> None:
    library = probe(device, dtype, "wmma")
    for shared in (False, True):
        for in_place in (False, True):
            options: dict[str, Any] = {"shared": shared, "in_place": in_place}
            report, got, want = product(library, dtype, device, layouts, **options)
            assert report == ""
            assert torch.equal(got.double(), want), options
            report, got, want = product(library, dtype, device, layouts, whole=False, **options)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"skew_a": 8}, "multiple of 32 bytes, got .* 16 past"),
        ({"stride_a": 20}, "ldm must be a multiple of 8 elements, at least 16, got 20"),
        ({"stride_a": 8}, "ldm must be a multiple of 8 elements, at least 16, got 8"),
        (
            {"lane_strides": True},
            "all lanes must pass one address, ldm, layout; got .*, 24,.* in lane 0.*, 32,.* in lane 7",
        ),
    ],
    ids=["address", "stride", "short stride", "lanes differ"],
)
@pytest.mark.parametrize("shared", [False, True])
def test_what_wmma_forbids_is_reported(probe: Probe, options: dict[str, Any], said: str, shared: bool) -> None:
    report, _, _ = product(probe("cpu", "bfloat16", "wmma"), "bfloat16", "cpu", "rrrr", shared=shared, **options)
    assert re.search(said, report), report
    assert f":{line_of('load_fragment(a' if shared else 'load_matrix_sync(a')}" in report, report


@pytest.mark.parametrize(
    ("skew", "said"), [(16 * (STRIDE_A + STRIDE_B) + 32 * STRIDE_C, "wrote"), (1 << 12, "out of bounds")]
)
def test_wmma_loads_are_watched_in_shared_memory(probe: Probe, skew: int, said: str) -> None:
    report, _, _ = product(probe("cpu", "float16", "wmma"), "float16", "cpu", "rrrr", shared=True, skew_a=skew)
    assert said in report


@pytest.mark.parametrize(("columns", "writable", "said"), [(16, True, ""), (16, False, "d"), (15, True, "d")])
def test_wmma_is_watched_in_global_memory(probe: Probe, columns: int, writable: bool, said: str) -> None:
    library = probe("cpu", "float16", "wmma")

    def watched(name: str, values: Tensor) -> None:
        sizes = (ctypes.c_int64 * 2)(16, columns if name == "d" else 16)
        strides = (ctypes.c_int64 * 2)(*values.stride())
        library.tilewright_host_watch(
            name.encode(), ctypes.c_void_p(values.data_ptr()), ctypes.c_int64(values.element_size()), 2, sizes, strides,
            name == "d" and writable,
        )  # fmt: skip

    try:
        report, _, _ = product(library, "float16", "cpu", "rcrr", before=watched)
    finally:
        library.tilewright_host_forget()
    assert (report == "") == (said == ""), report
    assert not said or (re.search(rf"\b{said}\b", report) and f":{line_of('store_matrix_sync(args.d')}" in report), (
        report
    )


def test_load_fragment_takes_shared_memory_alone(probe: Probe) -> None:
    report, _, _ = product(probe("cpu", "float16", "wmma"), "float16", "cpu", "rrrr", shared=True, not_copied=True)
    assert "must be in shared memory" in report


# Registers.


def multiplied(library: ctypes.CDLL, registers: list[Tensor], in_place: bool = False) -> Tensor:
    a, b, c = registers
    d = torch.full_like(c, float("nan"))
    assert call(library, "run_multiplied", REGISTERS, a=a, b=b, c=c, d=d, in_place=in_place) == ""
    return d


@ON_HOST_AND_GPU
@OF_EACH_DTYPE
@pytest.mark.parametrize("in_place", [False, True])
def test_mma_holds_its_matrices_as_ptx_says(probe: Probe, device: str, dtype: str, in_place: bool) -> None:
    library, torch_dtype = probe(device, dtype, "mma"), getattr(torch, dtype)
    for whole in (True, False):
        a = random((16, 16), 4, whole=whole).to(torch_dtype)
        b = random((16, 8), 5, whole=whole).to(torch_dtype)
        c = random((16, 8), 6, whole=whole)
        registers = [a[A_ROW, A_COLUMN], b[B_ROW, B_COLUMN], c[C_ROW, C_COLUMN]]
        got = multiplied(library, [r.to(device) for r in registers], in_place).cpu()
        want = (a.double() @ b.double() + c.double())[C_ROW, C_COLUMN]
        if whole:
            assert torch.equal(got.double(), want)
        else:
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


def loaded(
    library: ctypes.CDLL, device: str, offsets: Tensor, shared: bool = True
) -> tuple[str, Tensor, dict[str, Tensor]]:
    """(what went wrong, the tile's elements, registers by instruction)."""
    elements = torch.randperm(40 * 24, generator=torch.Generator().manual_seed(7)).to(torch.int16)
    sizes = {"x4": 4, "x4_transposed": 4, "x2": 2, "x2_transposed": 2}
    results = {name: torch.zeros((32, size), dtype=torch.int32, device=device) for name, size in sizes.items()}
    inputs = {"elements": elements.to(device), "offsets": offsets.to(torch.int32).to(device)}
    return call(library, "run_loaded", TILE, **inputs, **results, shared=shared), elements, results


# Rows of 8 elements anywhere in the tile: [matrix, row].
ROW_OFFSETS = torch.randperm(40 * 3, generator=torch.Generator().manual_seed(8))[:32] * 8


@ON_HOST_AND_GPU
def test_ldmatrix_spreads_rows_and_columns(probe: Probe, device: str) -> None:
    report, elements, results = loaded(probe(device, "float16", "mma"), device, ROW_OFFSETS)
    assert report == ""
    # PTX ISA, ldmatrix: thread t gets elements 2 (t % 4) and 2 (t % 4) + 1 of row t / 4 of each matrix.
    tiles = elements[ROW_OFFSETS[:, None] + torch.arange(8)].reshape(4, 8, 8)
    for name, registers in results.items():
        pairs = registers.cpu().view(torch.int16).reshape(32, -1, 2)
        for lane in range(32):
            for m in range(pairs.shape[1]):
                matrix = tiles[m].T if name.endswith("transposed") else tiles[m]
                column = lane % 4 * 2
                assert torch.equal(pairs[lane, m], matrix[lane // 4, column : column + 2]), (name, lane, m)


def test_what_ldmatrix_forbids_is_reported(probe: Probe) -> None:
    library = probe("cpu", "float16", "mma")
    report, _, _ = loaded(library, "cpu", ROW_OFFSETS + 4 * (torch.arange(32) == 21))
    assert re.search("must be at a multiple of 16 bytes, got .* from lane 21", report), report
    assert f":{line_of('ldmatrix_x4(')}" in report
    report, _, _ = loaded(library, "cpu", ROW_OFFSETS, shared=False)
    assert re.search("must be in shared memory, got .* from lane 0", report), report
    report, _, _ = loaded(library, "cpu", torch.where(torch.arange(32) == 9, 40 * 24, ROW_OFFSETS))
    assert "out of bounds" in report


# The same source on both.


@pytest.mark.nvcc
@pytest.mark.parametrize("instructions", ["wmma", "mma"])
def test_the_probe_compiles_for_a_gpu(instructions: str, tmp_path: Path) -> None:
    build_for_gpu(tmp_path, "bfloat16", instructions, "sm_80")


@pytest.mark.gpu
@OF_EACH_DTYPE
def test_registers_are_those_of_a_gpu(probe: Probe, dtype: str) -> None:
    host, gpu = (probe(device, dtype, "mma") for device in ("cpu", "cuda"))
    on_host, on_gpu = converted(host, dtype, "cpu"), converted(gpu, dtype, "cuda")
    for name in ("floats", "unpacked"):
        assert_same_bits(on_host[name], on_gpu[name])
    for name in ("rounded", "words", "packed"):
        assert np.array_equal(bits_of(on_host[name]), bits_of(on_gpu[name])), name

    rows_on_host, rows_on_gpu = loaded(host, "cpu", ROW_OFFSETS)[2], loaded(gpu, "cuda", ROW_OFFSETS)[2]
    for name, registers in rows_on_host.items():
        assert torch.equal(registers, rows_on_gpu[name].cpu()), name

    a, b, c = (random((32, size), size, whole=True) for size in (8, 4, 4))
    factors = [a.to(getattr(torch, dtype)), b.to(getattr(torch, dtype)), c]
    assert torch.equal(multiplied(host, factors), multiplied(gpu, [f.cuda() for f in factors]).cpu())

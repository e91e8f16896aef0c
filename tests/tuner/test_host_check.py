"""CUDA kernels executed on the CPU: right ones pass, wrong ones are told by line, and no GPU is mistaken for it."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.generator.abi import ARGUMENTS
from tilewright.generator.errors import IllegalAccess, InvalidInput, LaunchFailed, Outcome, TimedOut
from tilewright.generator.family import family_named
from tilewright.generator.host_build import MODULE_NAME, build_host, sanitizer_libraries
from tilewright.generator.legality import legality
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import Rendered, render
from tilewright.generator.space import problem_reason
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of
from tilewright.runtime import masks
from tilewright.runtime.canonical import canonical
from tilewright.runtime.plans import MaskPlan, build_plan
from tilewright.runtime.selected_launch import run_select
from tilewright.runtime.selection import Selection
from tilewright.tuner import host_check
from tilewright.tuner.cases import BLOCK_TERMS, HOST_SHAPES, SHAPES
from tilewright.tuner.host_check import (
    HEAD_DIMS,
    CheckResult,
    case_times,
    check_kernels,
    coverage,
    kernels_to_check,
    worker_environment,
)
from tilewright.tuner.host_kernel import HostKernel, HostReport, check_cases
from tilewright.tuner.layouts import place
from tilewright.tuner.operations import all_operations
from tilewright.tuner.report_lines import located
from tilewright.tuner.verify import CaseBook
from tilewright.tuner.worker import Worker, last_words
from tilewright.tuner.worker_process import Session

pytestmark = pytest.mark.early

CPU = torch.device("cpu")
SHAPE = {"batch": 1, "num_heads": 2, "seqlen_q": 33, "seqlen_kv": 70}


def rendered(
    family: str, dtype: str = "float32", arch: str = "sm_80", terms: tuple[str, ...] = ("bound",), **axes: Any
) -> Rendered:
    """The family's first legal default with these axes, for head_dim 16."""
    problem = Problem(dtype, 16, 1, 1, 1, 64, 64, arch, MaskClass(terms, " & ".join(terms) or "dense"))
    chosen = family_named(family)
    for values in chosen.defaults:
        for form in chosen.mask_forms:
            spec = VariantSpec.from_values(family, {"mask_form": form, **values, **axes})
            if problem_reason(problem, spec) is None:
                return render(kernel_of(problem, spec))
    raise LookupError(f"no default of {family} with {axes} is legal")


def choice(
    family: str, dtype: str = "float16", arch: str = "sm_80", causal: bool = False, head_dim: int | None = None
) -> Rendered:
    """The same of a family that chooses blocks, or attends to chosen ones; for head_dim 64 where it starts there."""
    sizes = {"batch": 1, "num_heads": 8, "num_kv_heads": 8, "seqlen_q": 4096, "seqlen_kv": 4096}
    chosen = family_named(family)
    sizes["head_dim"] = head_dim or (64 if chosen.instructions == "wgmma" else 16)
    problem = Selection(64, 16, 8, 1, causal).problem(chosen.operation, dtype=dtype, target=arch, **sizes)
    specs = [VariantSpec.from_values(family, {"mask_form": "selected", **values}) for values in chosen.defaults]
    kernels = [kernel_of(problem, spec) for spec in specs]
    return render(next(kernel for kernel in kernels if legality(kernel) is None))


def without(one: Rendered, text: str, instead: str = "") -> Rendered:
    """The kernel with this text, which it has once, replaced."""
    source = one.sources["kernel.cu"]
    assert source.count(text) == 1, source.count(text)
    return dataclasses.replace(one, sources={**one.sources, "kernel.cu": source.replace(text, instead)})


def line_of(one: Rendered, text: str) -> int:
    (number,) = (n for n, line in enumerate(one.sources["kernel.cu"].splitlines(), 1) if text in line)
    return number


def host_kernel_of(one: Rendered, seed: int = 0) -> HostKernel:
    return HostKernel(build_host(one), one.kernel, MODULE_NAME, seed)


@pytest.fixture(scope="module")
def book() -> CaseBook:
    return CaseBook(CPU, HOST_SHAPES)


@pytest.fixture(scope="module")
def choice_book() -> CaseBook:
    return CaseBook(CPU, "host")


def shapes_for(terms: tuple[str, ...]) -> list[str]:
    """The names of the cases that a kernel of these terms gets."""
    return [shape.name for shape in HOST_SHAPES if shape.style != "few_blocks" or BLOCK_TERMS & set(terms)]


@pytest.fixture(scope="module")
def simt() -> Rendered:
    return rendered("forward_simt")


@pytest.fixture(scope="module")
def good(simt: Rendered) -> Path:
    """The library of a right kernel."""
    return build_host(simt)


def plan_for(kernel: Kernel, mask: masks.Mask | None, **shape: int) -> MaskPlan:
    spec, form = kernel.spec, canonical(mask, shape["seqlen_q"], shape["seqlen_kv"])
    return build_plan(form, spec.mask_form, spec.block_m, spec.block_n, device=CPU, **shape)


# Right kernels.


@pytest.mark.parametrize(
    ("family", "dtype", "arch", "terms"),
    [
        ("forward_simt", "float32", "sm_75", ("bound", "document")),
        ("forward_simt", "bfloat16", "sm_90a", ("bound", "window", "tokens")),
        ("forward_wmma", "float16", "sm_75", ("window", "stride")),
        ("forward_wmma", "bfloat16", "sm_80", ("bound", "and_blocks")),
        ("forward_mma", "bfloat16", "sm_80", ("bound",)),
        ("forward_mma", "float16", "sm_90a", ("window", "or_blocks")),
        ("forward_decode", "bfloat16", "sm_80", ("bound", "window", "stride")),
        ("forward_decode", "float16", "sm_90a", ("bound", "and_blocks")),
        ("ladder", "float16", "sm_80", ("and_bits",)),
    ],
)
def test_a_right_kernel_passes(family: str, dtype: str, arch: str, terms: tuple[str, ...], book: CaseBook) -> None:
    loaded = host_kernel_of(rendered(family, dtype, arch, terms))
    found = check_cases(loaded, book)
    assert found.report.ok, found.report.message
    shapes = shapes_for(terms)
    assert found.report.cases == len(shapes)
    assert found.report.skipped == ()
    assert 0 < found.report.worst_ratio < 1
    assert [name for name, _ in found.case_ms] == shapes
    assert sum(ms for _, ms in found.case_ms) == pytest.approx(sum(loaded.launch_ms))


@pytest.mark.parametrize(
    ("family", "dtype", "arch", "causal"),
    [
        ("select_mma", "bfloat16", "sm_80", True),
        ("select_mma", "float16", "sm_90a", False),
        ("select_wgmma", "bfloat16", "sm_90a", True),
        ("selected_query", "bfloat16", "sm_90a", True),
        ("selected_key", "float16", "sm_80", False),
    ],
)
def test_a_right_kernel_of_a_choice_passes(
    family: str, dtype: str, arch: str, causal: bool, choice_book: CaseBook
) -> None:
    one = choice(family, dtype, arch, causal)
    found = check_cases(host_kernel_of(one), choice_book)
    assert found.report.ok, found.report.message
    assert found.report.skipped == ()
    assert [name for name, _ in found.case_ms] == [case.name for case in choice_book.cases_for(one.kernel)]
    assert found.report.cases >= 12


def in_small_segments(one: Rendered) -> Rendered:
    """The kernel with so few entries of a list in a segment, and in a part of one, that small regions have several."""
    one = without(one, "SEGMENT_ENTRIES = 65535", "SEGMENT_ENTRIES = 160")
    return without(one, " PART_ENTRIES = 8192", " PART_ENTRIES = 33")


@pytest.mark.parametrize(
    ("family", "dtype", "arch"), [("selected_key", "bfloat16", "sm_80"), ("selected_wgmma", "bfloat16", "sm_90a")]
)
def test_regions_of_several_segments_are_put_together(
    family: str, dtype: str, arch: str, choice_book: CaseBook
) -> None:
    small = in_small_segments(choice(family, dtype, arch))
    found = check_cases(host_kernel_of(small), choice_book)
    assert found.report.ok, found.report.message
    # Without the beginning of its segment an entry is another's.
    wrong = without(small, "segment_of(item, row) * at.segment_groups + of_segment", "of_segment")
    with pytest.raises(IllegalAccess, match=r"a race for byte \d+ of workspace"):
        check_cases(host_kernel_of(wrong), choice_book)


@pytest.mark.parametrize(("seqlen", "most_mib"), [(32768, 64), (131072, 256)])
@pytest.mark.parametrize(("family", "arch"), [("selected_key", "sm_80"), ("selected_wgmma", "sm_90a")])
def test_a_long_call_takes_little_memory(family: str, arch: str, seqlen: int, most_mib: int) -> None:
    loaded = host_kernel_of(choice(family, "bfloat16", arch, head_dim=64))
    heads, top, block = 8, 16, 64
    sizes = {"batch": 1, "num_heads": heads, "num_kv_heads": heads, "num_choosers": heads, "query_group": 1}
    sizes |= {"seqlen_q": seqlen, "seqlen_kv": seqlen, "num_groups": seqlen}
    sizes |= {"block_size": block, "num_blocks": seqlen // block, "list_width": top}
    names = [argument.name for argument in ARGUMENTS[loaded.kernel.operation]]
    assert sizes.keys() <= set(names)
    workspace = loaded.workspace_bytes([sizes.get(name, 0) for name in names])
    lists_and_sums = heads * seqlen * (4 * top + 4 + 4)  # indices, counts, lse
    assert workspace + lists_and_sums <= most_mib * 2**20


def test_the_sample_has_every_operation() -> None:
    sample = kernels_to_check(["sm_80"], [family_named(name) for name in ("ladder", "select_mma", "selected_key")])
    assert {kernel.operation for kernel in sample.kernels} == {operation.name for operation in all_operations()}
    for name in ("select_mma", "selected_key"):
        mine = [kernel for kernel in sample.kernels if kernel.spec.family == name]
        assert {kernel.mask_terms for kernel in mine} == {(), ("bound",)}
        assert {kernel.dtype for kernel in mine} == {"float16", "bfloat16"}
        assert {kernel.head_dim for kernel in mine} == set(HEAD_DIMS)


@pytest.mark.parametrize(("form", "terms"), [("list", ("bound", "and_blocks")), ("bitmap", ("window", "or_blocks"))])
def test_blocks_that_start_longest_first_do_every_row_once(form: str, terms: tuple[str, ...], book: CaseBook) -> None:
    ordered = rendered("forward_mma", "bfloat16", "sm_90a", terms, mask_form=form, tile_order="longest")
    assert check_cases(host_kernel_of(ordered), book).report.ok
    first = without(ordered, "(args.tile_order)[blockIdx.x]", "(args.tile_order)[0]")
    with pytest.raises(IllegalAccess, match=r"a race for byte .* of \w+: this thread writes what .* of block 0 wrote"):
        check_cases(host_kernel_of(first), book)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("load_acquire(blocks_done);", "a race for byte"),
        ("cp_async_wait<LOOKAHEAD - 1>();\n        __syncwarp();", "a race for byte|has not been waited for"),
        ("if (split.splits > 1) error = cudaMemsetAsync", "workspace"),
    ],
    ids=["unordered merge", "no wait for a tile", "counters not cleared"],
)
def test_faults_of_keys_split_between_blocks_are_told(text: str, message: str, book: CaseBook) -> None:
    right = rendered("forward_decode", "float16", "sm_90a", (), block_m=16, num_warps=2)
    instead = "if (false) error = cudaMemsetAsync" if "Memset" in text else ""
    with pytest.raises(IllegalAccess, match=message):
        check_cases(host_kernel_of(without(right, text, instead)), book)


def test_the_cases_have_the_ideas_of_a_gpus_few_blocks_and_rows_at_odd_elements() -> None:
    added = [shape for shape in HOST_SHAPES if shape.layout == "unaligned" or shape.style == "few_blocks"]

    def ideas(shapes: Any) -> list[tuple[str, str, str]]:
        return [(shape.style, shape.numbers, shape.layout) for shape in shapes if shape not in added]

    assert len(added) == 2
    assert ideas(HOST_SHAPES) == ideas(SHAPES)
    placed = place((1, 2, 21, 16), "unaligned", torch.float32, CPU)
    starts = {placed.view[0, 0, row].data_ptr() % 16 for row in range(21)}
    assert starts == {0, 4, 8, 12}
    assert int(placed.outside()) == 0


def test_a_report_tells_the_seed_and_every_call_takes_the_next(simt: Rendered, good: Path) -> None:
    loaded = HostKernel(good, simt.kernel, MODULE_NAME, seed=7)
    query, key = torch.randn(1, 2, 33, 16), torch.randn(1, 2, 70, 16)
    plan = plan_for(simt.kernel, masks.causal(), **SHAPE)
    first, second = (loaded.run(query, key, key, plan, 0.25)[0].clone() for _ in range(2))
    assert torch.equal(first, second)
    assert len(loaded.launch_ms) == 2
    broken = without(simt, "__syncwarp();  // a row's probabilities are read by all of its lanes")
    with pytest.raises(IllegalAccess, match=r"^case 'one token', seed 11: |^case '[^']+', seed 11: "):
        check_cases(host_kernel_of(broken, seed=11), CaseBook(CPU, HOST_SHAPES[2:5]))


# Wrong kernels.


@pytest.mark.parametrize(
    ("text", "instead", "message", "at"),
    [
        (
            "__syncwarp();  // a row's probabilities are read by all of its lanes",
            "",
            r"a race for byte \d+ of shared memory",
            "",
        ),
        (
            "cp_async_wait<LOOKAHEAD - 1>();",
            "cp_async_wait<LOOKAHEAD>();",
            "has not been waited for",
            "cp_async_16(smem_k",
        ),
        ("const bool real = chunk.key < args.seqlen_kv;", "const bool real = true;", "of key", "cp_async_16(smem_k"),
        (
            "if (row >= at.row_stop) continue;",
            "",
            r"out of bounds: .*, from kernel\.cu:\d+ in write_rows",
            "",
        ),
        (
            "if (!aligned) return copy_tile<false>",
            "if (false) return copy_tile<false>",
            "rows at odd elements.*must be multiples of its size",
            "cp_async_16(smem_k",
        ),
        ("if (lane.row_lane == 0) {", "if (lane.row_lane == 0) __syncwarp(); {", "warp", ""),
    ],
    ids=["no warp barrier", "waits too little", "reads past the end", "writes past it", "misaligned", "diverges"],
)
def test_a_fault_is_told_by_line(
    text: str, instead: str, message: str, at: str, simt: Rendered, book: CaseBook
) -> None:
    broken = without(simt, text, instead)
    with pytest.raises(IllegalAccess, match=message) as failed:
        check_cases(host_kernel_of(broken), book)
    said = str(failed.value)
    assert re.search(r"kernel\.cu:\d+", said), said
    assert "[pc " not in said
    assert "thread " in said
    if at:
        assert f"kernel.cu:{line_of(broken, at)} in load_tile" in said


@pytest.mark.parametrize(
    ("text", "instead", "message"),
    [
        (
            "atomic_add_release(progress, completed)",
            "atomicAdd(progress, completed)",
            "this thread reads .* in merge_rows",
        ),
        ("atomic_add_release(counted, 1u)", "atomicAdd(counted, 1u)", "this thread reads .* in invert_lists"),
        ("    load_acquire(done);\n", "", "this thread reads .* has acquired nothing"),
        (
            "load_relaxed(done) < wanted",
            "load_relaxed(done) <= wanted",
            "waits for a value that never comes.* in wait_for",
        ),
    ],
    ids=["results not released", "counts not released", "nothing acquired", "waits for one too many"],
)
def test_what_blocks_do_for_each_other_must_be_ordered(
    text: str, instead: str, message: str, choice_book: CaseBook
) -> None:
    with pytest.raises(IllegalAccess, match=message):
        check_cases(host_kernel_of(without(choice("selected_key"), text, instead)), choice_book)


@pytest.mark.parametrize(("family", "arch"), [("select_mma", "sm_80"), ("select_wgmma", "sm_90a")])
def test_every_head_has_its_turn_where_budgets_order_them(family: str, arch: str, choice_book: CaseBook) -> None:
    one = without(choice(family, arch=arch), "return first + __ffs(int(found)) - 1;", "return __ffs(int(found)) - 1;")
    twice = "case '40 heads, budgets per head'.*a race for byte .* of indices: this thread writes what thread"
    with pytest.raises(IllegalAccess, match=twice):
        check_cases(host_kernel_of(one), choice_book)


@pytest.mark.parametrize(
    ("family", "arch"), [("select_mma", "sm_80"), ("select_wgmma", "sm_90a"), ("select_short_wgmma", "sm_90a")]
)
@pytest.mark.parametrize("budget", [1, 2, 5])
def test_of_infinite_scores_as_many_are_taken_as_are_wanted(family: str, arch: str, budget: int) -> None:
    """The lowest blocks of those; NaN is the score of none."""
    one = choice(family, "bfloat16", arch)
    query, key = (torch.zeros(1, 1, rows, one.kernel.head_dim).bfloat16() for rows in (64, 40))
    query[..., :2] = 4.0
    key[..., 0] = torch.arange(40.0)
    key[..., [7, 20, 33], 1] = 3e38
    key[..., 21, 3] = torch.nan
    budgets = torch.tensor([budget], dtype=torch.int32)
    indices, counts = run_select(host_kernel_of(one), query, key, budgets, Selection(1, 5, 1, 1, causal=False))
    best = sorted([7, 20, 33, 39, 38][:budget])
    assert torch.equal(counts, torch.full_like(counts, budget))
    assert torch.equal(indices, torch.tensor(best + [-1] * (5 - budget), dtype=torch.int32).expand_as(indices))


def test_a_score_of_minus_infinity_must_not_stand_for_its_neighbour(choice_book: CaseBook) -> None:
    one = choice("select_wgmma", arch="sm_90a")
    one = without(one, "const float2 two = scores(place, slot);", "float2 two = scores(place, slot);")
    one = without(
        one, "return {two.x >=", "two = {fmaxf(two.x, -LARGEST), fmaxf(two.y, -LARGEST)};\n        return {two.x >="
    )
    key = "score * factor[half] + offset[half]"
    one = without(one, f"return {key};", f"return score > NEGATIVE_INFINITY ? {key} : 1.0f;")
    found = check_cases(host_kernel_of(one), choice_book)
    assert not found.report.ok
    assert found.report.message.startswith("case 'few scores above -inf':")


def test_a_wrong_result_names_its_case(simt: Rendered, book: CaseBook) -> None:
    loaded = host_kernel_of(without(simt, "1.4426950408889634);  // log2(e)", "1.4433);  // log2(e)"))
    found = check_cases(loaded, book)
    assert not found.report.ok
    assert re.match(r"case '[^']+': lse is off by", found.report.message)
    assert found.report.case == found.case_ms[-1][0]


def test_a_full_row_that_does_not_fit_is_refused_at_launch(book: CaseBook) -> None:
    row = rendered("ladder", arch="sm_75", rung="tiled_full_row", block_m=16, block_n=32)
    loaded = host_kernel_of(row)
    for seqlen_kv, fits in ((900, True), (1100, False)):  # 16 rows of 1100 scores are 70400 bytes, allowed are 65536
        query, key = torch.randn(1, 1, 5, 16), torch.randn(1, 1, seqlen_kv, 16)
        plan = plan_for(row.kernel, masks.causal(), batch=1, num_heads=1, seqlen_q=5, seqlen_kv=seqlen_kv)
        if fits:
            loaded.run(query, key, key, plan, 0.25)
        else:
            with pytest.raises(LaunchFailed, match="ladder/scan 16x32 rung=tiled_full_row"):
                loaded.run(query, key, key, plan, 0.25)
    found = check_cases(host_kernel_of(row), book)
    assert found.report.ok
    assert found.report.skipped == ("5 queries, 1025 keys",)
    assert "skipped 5 queries, 1025 keys" in found.report.message


def test_a_main_familys_kernel_may_not_refuse(simt: Rendered, book: CaseBook) -> None:
    refuses = without(simt, "blocks, THREADS, SMEM_BYTES, stream", "blocks, THREADS, 300000, stream")
    with pytest.raises(LaunchFailed, match=r"case 'one token', seed 0: forward_simt.*invalid argument"):
        check_cases(host_kernel_of(refuses), book)


# What is no GPU.


def test_a_gpus_tensors_are_refused(simt: Rendered, good: Path) -> None:
    loaded = HostKernel(good, simt.kernel, MODULE_NAME)
    tensor = torch.empty(1, 2, 33, 16, device="meta")
    shape = {**SHAPE, "seqlen_kv": 33}
    with pytest.raises(InvalidInput, match="query is on meta: a kernel built for the host check runs on the CPU alone"):
        loaded.run(tensor, tensor, tensor, plan_for(simt.kernel, masks.causal(), **shape), 0.25)


def test_another_kernels_library_is_no_host_library(tmp_path: Path) -> None:
    empty = tmp_path / "kernel.so"
    empty.write_bytes(b"no library")
    with pytest.raises(LaunchFailed, match="does not load"):
        HostKernel(empty, rendered("ladder").kernel, MODULE_NAME)


@pytest.mark.parametrize("request_name", ["measure", "verify", "compare", "verify_at_shape"])
def test_nothing_built_for_the_host_is_timed_or_taken_for_verified(
    request_name: str, simt: Rendered, good: Path
) -> None:
    session = Session("cpu")
    session._prepared = SimpleNamespace(bind=None)  # type: ignore[assignment] - never called
    one = (simt.kernel, good)
    arguments: dict[str, tuple[Any, ...]] = {"measure": (*one, None), "compare": ([one], 3)}
    with pytest.raises(InvalidInput, match="was built for the host check: its times and results are no GPU's"):
        getattr(session, request_name)(*arguments.get(request_name, one))


# The worker.


def test_a_worker_checks_and_goes_on_after_a_fault(simt: Rendered, good: Path) -> None:
    broken = without(simt, "const bool real = chunk.key < args.seqlen_kv;", "const bool real = true;")
    with Worker("cpu", environment=worker_environment(sanitize=False)) as worker:
        with pytest.raises(IllegalAccess, match=r"of key, .*kernel\.cu:\d+ in load_tile"):
            worker.check(broken.kernel, build_host(broken))
        pid = worker.pid
        found = worker.check(simt.kernel, good, seed=3)
        assert isinstance(found, HostReport)
        assert found.report.ok
        assert worker.pid == pid
        start = "    int stage = 0, load_stage = LOOKAHEAD;"
        hangs = without(simt, start, f"    while (args.seqlen_q > 0) {{}}\n{start}")
        with pytest.raises(TimedOut, match=r"no answer within 0\.5 s"):
            worker.check(hangs.kernel, build_host(hangs), timeout_s=0.5)
        assert worker.check(simt.kernel, good).report.ok


@pytest.fixture(scope="module")
def sanitizer() -> None:
    try:
        sanitizer_libraries()
    except InvalidInput as error:
        pytest.skip(str(error))


def test_address_sanitizer_is_heard(sanitizer: None, simt: Rendered) -> None:
    broken = without(simt, "if (lane.row_lane == 0) {", "if (lane.row_lane == 0) { lse[1 << 20] = 0.0f;")
    right, wrong = build_host(simt, sanitize=True), build_host(broken, sanitize=True)
    with Worker("cpu", environment=worker_environment(sanitize=True)) as worker:
        assert worker.check(simt.kernel, right).report.ok
        with pytest.raises(IllegalAccess, match=r"AddressSanitizer: \S+.*kernel\.cu:\d+"):
            worker.check(broken.kernel, wrong)
        overflow = without(
            simt, "if (lane.row_lane == 0) {", "if (lane.row_lane == 0) { lse[row] = float(2147483647 + args.batch);"
        )
        with pytest.raises(IllegalAccess, match=r"kernel\.cu:\d+:\d+: runtime error: signed integer overflow"):
            worker.check(overflow.kernel, build_host(overflow, sanitize=True))


def test_a_sanitized_library_is_not_loaded_without_its_sanitizer(sanitizer: None) -> None:
    plain = rendered("ladder")
    with pytest.raises(InvalidInput, match="is watched by AddressSanitizer, which must be in the process"):
        HostKernel(build_host(plain, sanitize=True), plain.kernel, MODULE_NAME)


def test_the_last_words_of_a_sanitizer_are_its_summary_and_the_line() -> None:
    report = """
==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x60 at pc 0x7f bp 0x7f sp 0x7f
WRITE of size 4 at 0x60 thread T0
    #0 0x7f01 in tilewright_host::put(void*) /x/templates/_host/memory.cpp:30
    #1 0x7f02 in write_rows /x/host/54ad/kernel.cu:212
    #2 0x7f03 in attention_forward kernel.cu:300
SUMMARY: AddressSanitizer: heap-buffer-overflow /x/templates/_host/memory.cpp:30 in tilewright_host::put(void*)
==7==ABORTING"""
    said = last_words(report)
    assert said.startswith("AddressSanitizer: heap-buffer-overflow")
    assert said.endswith("; kernel.cu:212 in write_rows")
    assert last_words("first\nsecond\n") == "second"
    assert last_words("") == ""


# Reports.


def test_without_addr2line_the_offset_stays(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert located("read at [pc 0x0], thread 3", good) == "read at [pc 0x0], thread 3"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert located("read at [pc 0x1f3c]", good) == "read at [pc 0x1f3c]"


def test_a_line_is_told_with_its_function(simt: Rendered, good: Path, tmp_path: Path) -> None:
    def said(text: str) -> str:
        return located(f"wait at kernel.cu:{line_of(simt, text)}, block 0", good).split(" ", 2)[2]

    assert said("cp_async_16(smem_k").endswith("in load_tile, block 0")
    assert said("lse[row] = empty").endswith("in write_rows, block 0")
    assert said("online_softmax(lane, shared.smem_p").endswith("in attention_forward, block 0")
    assert said("return launch_grid(").endswith("in launch_blocks, block 0")
    # One of a struct's own functions is told by the struct; a line outside all of them stays as it is.
    assert said("bool next(Tile& tile) {").endswith("in TileIterator, block 0")
    assert said("constexpr int HEAD_DIM").endswith(f":{line_of(simt, 'constexpr int HEAD_DIM')}, block 0")
    assert located("kernel.cu:3", tmp_path / "kernel.so") == "kernel.cu:3"


# Many kernels.


def test_kernels_are_checked_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [rendered("ladder", dtype).kernel for dtype in ("float32", "float16", "bfloat16")]

    def spoilt(kernel: Kernel) -> Rendered:
        one = render(kernel)
        return one if kernel.dtype != "float16" else without(one, "__global__ void", "__global__ broken")

    monkeypatch.setattr(host_check, "render", spoilt)
    results = {result.kernel: result for result in check_kernels(kernels, jobs=2)}
    assert set(results) == set(kernels)
    for kernel, result in results.items():
        if kernel.dtype == "float16":
            assert result.outcome is Outcome.COMPILE
            assert "kernel.cu:" in result.message
            assert result.case_ms == ()
        else:
            assert result.ok, result.message
            assert [name for name, _ in result.case_ms] == shapes_for(kernel.mask_terms)
    median, worst = case_times(results.values())
    assert 0 < median <= worst


def children() -> set[int]:
    """The workers of this process; each is listed under the thread that started it."""
    listed = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return {int(pid) for pid in listed if "worker_process" in Path(f"/proc/{pid}/cmdline").read_text()}


def test_leaving_early_leaves_no_process() -> None:
    before = children()
    kernels = [rendered("ladder", dtype).kernel for dtype in ("float32", "float16", "bfloat16")]
    results = check_kernels(kernels, jobs=1)
    assert next(results).ok
    assert children() - before
    results.close()  # type: ignore[attr-defined]
    assert not children() - before


def test_past_the_time_limit_no_kernel_is_started() -> None:
    assert list(check_kernels([rendered("ladder").kernel], time_limit_s=0.0)) == []


def test_no_jobs_are_an_error() -> None:
    with pytest.raises(InvalidInput, match="jobs must be 1 or more, got 0"):
        next(check_kernels([], jobs=0))


def test_coverage_counts_what_was_checked() -> None:
    sample = kernels_to_check(["sm_80"], [family_named("ladder")])
    results = [CheckResult(kernel, Outcome.OK, "", 0.0) for kernel in sample.kernels]
    whole = coverage(results, sample)
    assert (whole.covered, whole.missing) == (whole.legal, ())
    part = coverage(results[:3], sample)
    assert 0 < part.covered < part.legal
    assert len(part.missing) == part.legal - part.covered

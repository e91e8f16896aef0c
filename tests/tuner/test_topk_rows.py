"""Rows that choose blocks and rows that attend to chosen ones: what they say, what they make, how they are measured."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from topk_stubs import SelectedStub, SelectStub

from tilewright.generator.build import build
from tilewright.generator.errors import InvalidInput, Outcome
from tilewright.generator.space import default_variant
from tilewright.generator.variant import Kernel, kernel_of
from tilewright.runtime.selection import SELECT_BLOCKS, SELECTED_ATTENTION
from tilewright.tuner import topk_baselines
from tilewright.tuner.history import fairest_baseline
from tilewright.tuner.operations import all_operations, operation_named
from tilewright.tuner.timing import Stopwatch
from tilewright.tuner.topk_baselines import attend_runs, choose_by_pytorch
from tilewright.tuner.topk_oracle import ListedPairs, select_blocks_oracle, selected_attention_oracle
from tilewright.tuner.topk_rows import SelectedRow, SelectRow
from tilewright.tuner.worker import Worker
from tilewright.tuner.workloads import WorkloadRow, load_workload, parse_workload

CPU = torch.device("cpu")
OPERATIONS = (SELECT_BLOCKS, SELECTED_ATTENTION)

CHOOSE = WorkloadRow(
    "shared", "float32", 32, 4, 150, num_kv_heads=2, seqlen_kv=199, operation=SELECT_BLOCKS, block_size=16,
    top_k=(3, 5), causal=True, query_group=4, select_heads="kv", sink_blocks=1, window_blocks=1,
)  # fmt: skip
ATTEND = dataclasses.replace(CHOOSE, operation=SELECTED_ATTENTION)

ROW = """
[[row]]
name = "mine"
operation = "select_blocks"
dtype = "float32"
head_dim = 64
num_heads = 4
num_kv_heads = 2
seqlen_q = 512
"""


def test_operations_are_known_by_name() -> None:
    assert [operation.name for operation in all_operations()] == ["attention_forward", *OPERATIONS]
    said = "operation must be one of attention_forward, select_blocks, selected_attention; got 'sort'"
    with pytest.raises(InvalidInput, match=said):
        operation_named("sort")


def test_a_file_of_ones_own_may_choose() -> None:
    (row,) = parse_workload(ROW + 'top_k = [2, 3]\nselect_heads = "kv"\ncausal = true\nquery_group = 8\n', "mine").rows
    assert (row.top_k, row.block_size, row.causal) == ((2, 3), 64, True)
    problem = row.problem("cpu")
    assert (problem.operation, problem.mask.terms) == (SELECT_BLOCKS, ("bound",))
    assert problem.mask.structure.startswith("causal() & block_size(64) & top_blocks(3) & query_group(8)")
    assert problem.name.startswith("select_blocks fp32 B1 H4/2 D64 N512 causal()")
    assert hash(row) == hash(dataclasses.replace(row))


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("top_k = 0", "top_k must be an integer of 1 or more, or a list of them; got 0"),
        ("top_k = [2, true]", "top_k must be an integer of 1 or more, or a list of them"),
        ("top_k = [2, 3, 4]", "top_k"),
        ("causal = 1", "causal must be true or false; got 1"),
        ("block_size = 0", "block_size must be an integer of 1 or more"),
        ('select_heads = "all"', "select_heads must be 'query'"),
        ("top_k = 1\nsink_blocks = 2", "top_k"),
        ('mask = "causal()"', "mask is for rows of attention_forward; this one is of select_blocks"),
    ],
)
def test_mistakes_name_file_row_and_key(added: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(said)) as raised:
        parse_workload(ROW + added, "mine.toml")
    assert str(raised.value).startswith("mine.toml: row 1 (mine)")


def test_keys_of_a_choice_are_not_for_other_rows() -> None:
    said = "top_k is for rows of select_blocks and selected_attention; this one is of attention_forward"
    with pytest.raises(InvalidInput, match=said):
        parse_workload(ROW.replace('operation = "select_blocks"', "top_k = 4"), "mine.toml")
    with pytest.raises(InvalidInput, match="row shared is of select_blocks, which has no mask"):
        CHOOSE.make_inputs("cpu")


def test_the_shipped_rows_have_kernels_and_each_stage_its_twin() -> None:
    workload = load_workload("topk")
    for target in ("cpu", "sm_90a"):
        problems = [row.problem(target) for row in workload.rows_for(target)]
        for problem in problems:
            assert default_variant(problem).family
        by_operation = {
            name: {p.mask.structure + str(p.seqlen_q) for p in problems if p.operation == name} for name in OPERATIONS
        }
        assert by_operation[SELECT_BLOCKS] == by_operation[SELECTED_ATTENTION]


def test_pytorchs_lists_are_the_references() -> None:
    row = SelectRow(CHOOSE, CPU)
    indices, counts = choose_by_pytorch(row.query, row.key, row.budgets, row.selection)
    choice = select_blocks_oracle(row.query, row.key, row.budgets, row.selection)
    assert torch.equal(indices, choice.indices)
    assert torch.equal(counts, choice.counts)
    assert counts[0, 0].max() == 3
    assert counts[0, 1].max() == 5


def test_pytorchs_ways_to_attend_agree_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    row = SelectedRow(ATTEND, CPU)
    tensors = (row.query, row.key, row.value)
    want, _ = selected_attention_oracle(*tensors, row.indices, row.counts, row.selection, row.scale)
    arguments = (*tensors, row.indices, row.counts, row.selection, row.scale)
    runs = attend_runs(*arguments)
    assert set(runs) == set(row.baselines(Stopwatch(CPU))) == {"sdpa_dense", "sdpa_masked"}
    monkeypatch.setattr(topk_baselines, "free_bytes", lambda device: 0)  # no room for a dense mask
    without = attend_runs(*arguments)
    assert set(without) == {"sdpa_dense", "gathered"}
    for run in (runs["sdpa_masked"], without["gathered"]):
        torch.testing.assert_close(run().double(), want, rtol=1e-4, atol=1e-5)
    # Dense attention is another function, though there is no mask whose terms would say so.
    problem = dataclasses.replace(ATTEND, causal=False).problem("cpu")
    assert fairest_baseline(problem, {"sdpa_dense": 1.0, "gathered": 9.0}) == ("gathered", 9.0)
    assert fairest_baseline(problem, {"sdpa_dense": 1.0}) == ("sdpa_dense", 1.0)


def test_work_is_counted_over_scored_and_over_chosen_pairs() -> None:
    row = SelectedRow(ATTEND, CPU)
    pairs = int(ListedPairs(row.indices, row.counts, row.selection).dense_rows(1, 4, 150, 199, "cpu", 0, 150).sum())
    work = ATTEND.asked_of.work(ATTEND, "cpu")
    assert work.flops == 4 * 32 * pairs
    assert work.density == pairs / (4 * 150 * 199)
    # A group of 4 queries may take the blocks up to that of its last one; 2 choosers.
    scored = 2 * sum(min(4 * group + 3, 149) + 49 >= 16 * block for group in range(38) for block in range(13))
    assert CHOOSE.asked_of.work(CHOOSE, "cpu").flops == 2 * 32 * scored
    free = dataclasses.replace(CHOOSE, causal=False)
    assert free.asked_of.work(free, "cpu").flops == 2 * 32 * 2 * 38 * 13


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_of_a_row_is_judged_as_a_case_is(causal: bool) -> None:
    choose, attend = (dataclasses.replace(row, causal=causal) for row in (CHOOSE, ATTEND))

    def beside(numbers: object, tensors: object) -> None:
        tensors["query"][0, 0, 0, 0] += 1  # type: ignore[index]

    for prepared, stub, text in (
        (SelectRow(choose, CPU), SelectStub, "38 of 38 groups of queries"),
        (SelectedRow(attend, CPU), SelectedStub, "150 of 150 query rows"),
    ):
        prepared.answer()
        report = prepared.bind(stub(causal=causal)).check()  # type: ignore[arg-type]
        assert report.ok, report.message
        assert report.message == f"tuned shape: {text} within bounds"
        query = prepared.query.clone()
        assert "inputs were changed" in prepared.bind(stub(causal=causal, spoil=beside)).check().message  # type: ignore[arg-type]
        assert not torch.equal(prepared.query, query)
        prepared.renew()
        assert torch.equal(prepared.query, query)


@pytest.fixture(scope="module")
def built() -> dict[str, tuple[Kernel, Path]]:
    kernels = [
        kernel_of(problem, default_variant(problem)) for problem in (CHOOSE.problem("cpu"), ATTEND.problem("cpu"))
    ]
    return {kernel.operation: (kernel, build(kernel)) for kernel in kernels}


@pytest.mark.parametrize("row", [CHOOSE, ATTEND], ids=lambda row: row.operation)
def test_a_worker_measures_both_stages(
    row: WorkloadRow, built: dict[str, tuple[Kernel, Path]], session_worker: Callable[[str], Worker]
) -> None:
    kernel, artifact = built[row.operation]
    worker = session_worker("cpu")
    worker.prepare(row)
    measured = worker.measure(kernel, artifact)
    assert measured.outcome is Outcome.OK, measured.message
    assert measured.time_us is not None
    assert measured.time_us > 0
    assert "tuned shape" in measured.message
    surveyed = worker.survey(kernel, artifact, limit_us=1e-3)
    assert surveyed.stopped_early
    assert worker.verify(kernel, artifact).ok
    assert worker.verify_at_shape(kernel, artifact).ok
    (times,) = worker.compare([(kernel, artifact)], 3)
    assert len(times) == 3
    baseline = fairest_baseline(row.problem("cpu"), worker.baselines())
    assert baseline is not None
    assert baseline[0] in ("torch_topk", "sdpa_masked")

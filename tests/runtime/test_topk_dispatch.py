"""Which kernels answer attention over chosen blocks, the reason that is given, and what does without a compiler."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.generator.arch import arch_named
from tilewright.generator.errors import ToolMissing
from tilewright.generator.problem import Problem
from tilewright.generator.space import default_variant, families_for, legal_variants
from tilewright.generator.variant import VariantSpec
from tilewright.runtime import dispatch, topk_explain, topk_stages
from tilewright.runtime.dispatch import DISPATCHER, Dispatcher
from tilewright.runtime.environment import device_name
from tilewright.runtime.records import Winner
from tilewright.runtime.selection import SELECT_BLOCKS, SELECTED_ATTENTION
from tilewright.runtime.winners import WinnerTable
from tilewright.tuner.topk_oracle import selected_attention_oracle

STAGES = (SELECT_BLOCKS, SELECTED_ATTENTION)


def inputs(length: int = 256) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn((1, 2, length, 32), generator=generator) for _ in range(3))


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Winner]]:
    """Winners that the process-wide dispatcher will read."""
    winners: list[Winner] = []
    monkeypatch.setattr(dispatch, "load_winners", lambda: WinnerTable(winners))
    DISPATCHER.reload()
    yield winners
    monkeypatch.undo()
    DISPATCHER.reload()


def explanations(length: int = 256, **options: Any) -> list[tw.Explanation]:
    found = tw.explain_topk(*inputs(length), **{"block_size": 16, "top_k": 4, **options})
    assert found.select_blocks is not None
    return [found.select_blocks, found.attention]


def winner(problem: Problem, spec: VariantSpec, device: str = "") -> Winner:
    return Winner(
        problem=problem,
        spec=spec,
        time_us=12.5,
        default_time_us=20.0,
        device=device or device_name("cpu"),
        source="a test",
    )


def test_nothing_tuned_gives_each_stages_default(tuned: list[Winner]) -> None:
    for operation, found in zip(STAGES, explanations(causal=True), strict=True):
        assert families_for(operation, arch_named("cpu"))
        assert found.problem.operation == operation
        assert found.reason == "heuristic"
        assert found.kernel == default_variant(found.problem)
        assert found.problem.mask.terms == ("bound",)
        assert "block_size(16) & top_blocks(4)" in found.problem.mask.structure


def test_exact_bucket_neighbour_in_this_order_for_each_stage(tuned: list[Winner]) -> None:
    asked = [found.problem for found in explanations()]
    specs = [next(s for s in legal_variants(p) if s != default_variant(p)) for p in asked]
    tuned.extend(winner(problem, spec) for problem, spec in zip(asked, specs, strict=True))
    DISPATCHER.reload()
    for length, top_k, reason in ((256, 4, "exact"), (200, 3, "bucket"), (600, 4, "neighbour")):
        for spec, found in zip(specs, explanations(length, top_k=top_k), strict=True):
            assert (found.reason, found.kernel) == (reason, spec)
    assert explanations(causal=True)[0].reason == "heuristic"
    tuned[:] = [winner(w.problem, w.spec, "NVIDIA Imaginary 9000") for w in tuned]
    DISPATCHER.reload()
    assert {found.reason for found in explanations()} == {"heuristic"}


def test_the_tuned_kernels_really_run(tuned: list[Winner]) -> None:
    found = tw.explain_topk(*inputs(), block_size=16, top_k=4)
    assert found.select_blocks is not None
    for problem in (found.select_blocks.problem, found.attention.problem):
        tuned.append(winner(problem, next(s for s in legal_variants(problem) if s != default_variant(problem))))
    DISPATCHER.reload()
    query, key, value = inputs()
    out, indices, counts = tw.topk_attention(query, key, value, block_size=16, top_k=4, return_indices=True)
    stages = list(DISPATCHER._stages.values())
    assert [s.loaded.kernel.spec for s in stages if s.loaded] == [w.spec for w in tuned]
    selection = next(key[5] for key in DISPATCHER._stages)
    want, _ = selected_attention_oracle(query, key, value, indices, counts, selection, 32**-0.5)
    assert (out.double() - want).abs().max() < 1e-5


def test_an_explanation_reads_as_text_and_as_json() -> None:
    found = tw.explain_topk(*inputs(), block_size=16, top_k=4)
    assert str(found).startswith("choose: select_blocks fp32 B1 H2 D32 N256 block_size(16)")
    assert "\nattend: selected_attention fp32 B1 H2 D32 N256 block_size(16)" in str(found)
    read = json.loads(json.dumps(found.to_dict()))
    assert read["select_blocks"]["problem"]["operation"] == SELECT_BLOCKS
    assert read["attention"]["problem"]["operation"] == SELECTED_ATTENTION
    dense = tw.explain_topk(*inputs(), block_size=16, top_k=16)
    assert dense.select_blocks is None
    assert dense.to_dict()["select_blocks"] is None
    assert dense.attention.problem.operation == "attention_forward"
    assert str(dense).startswith("every block is in")
    share = tw.explain_topk(*inputs(), block_size=16, top_k=0.25)
    assert share.select_blocks is not None
    assert share.select_blocks.reason == "fallback"
    assert "share to cover" in share.select_blocks.detail


def test_without_a_kernel_for_lists_a_mask_answers_short_calls_and_pytorch_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU for a dtype that no family of the second stage has."""
    query, key, value = inputs()
    want = tw.topk_attention(query, key, value, block_size=16, top_k=4, causal=True)
    real = Dispatcher._load

    def refuse(self: Dispatcher, kernel: Any, capturing: bool) -> Any:
        if kernel.operation == SELECTED_ATTENTION:
            raise ToolMissing("not in this test")
        return real(self, kernel, capturing)

    monkeypatch.setattr(Dispatcher, "_load", refuse)
    DISPATCHER.reload()
    before = len(DISPATCHER._prepared)
    try:
        for limit, operation in ((256, "attention_forward"), (255, SELECTED_ATTENTION)):
            monkeypatch.setattr(topk_stages, "MASKED_SEQLEN", limit)
            got = tw.topk_attention(query, key, value, block_size=16, top_k=4, causal=True)
            assert (got - want).abs().max() < 1e-5
            found = explanations(causal=True)[1]
            assert found.problem.operation == operation
            assert (found.kernel is None) == (operation == SELECTED_ATTENTION)
            assert "not in this test" in found.detail
        assert len(DISPATCHER._prepared) == before, "a mask that no other call will have is not kept"
    finally:
        monkeypatch.undo()
        DISPATCHER.reload()


def test_no_compiler_means_pytorch_and_is_said_once_for_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    query, key, value = inputs()
    want = tw.topk_attention(query, key, value, block_size=16, top_k=4, return_lse=True, return_indices=True)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    one = Dispatcher()
    monkeypatch.setattr(topk_stages, "DISPATCHER", one)
    monkeypatch.setattr(topk_explain, "DISPATCHER", one)
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        for _ in range(2):
            got = tw.topk_attention(query, key, value, block_size=16, top_k=4, return_lse=True, return_indices=True)
    for mine, right in zip(got, want, strict=True):
        assert (mine - right).abs().max() < 1e-5
    for found in explanations():
        assert found.reason == "fallback"
        assert "compiler" in found.detail
        assert found.kernel is None
    said = [r.getMessage() for r in caplog.records if "answered by PyTorch" in r.getMessage()]
    assert [text.split()[0] for text in said] == [SELECT_BLOCKS, SELECTED_ATTENTION]


def test_prepared_stages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_PREPARED", 4)
    for length in range(100, 108):
        explanations(length)
    assert len(DISPATCHER._stages) <= 4


def test_the_documents_example_prints_what_it_says(tuned: list[Winner], capsys: pytest.CaptureFixture[str]) -> None:
    """But for the variants, which are this machine's."""
    text = (Path(__file__).parents[2] / "docs" / "topk.md").read_text(encoding="utf-8")
    program, _, printed = text.partition("```python\n")[2].partition("```\n\n```\n")
    exec(compile(program, "docs/topk.md", "exec"), {})
    want, got = (
        [line for line in lines.splitlines() if not line.startswith("  -> ")]
        for lines in (printed.partition("```")[0], capsys.readouterr().out)
    )
    assert got == want

"""Which kernel answers, and the reason that is given."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tilewright as tw
from tilewright.generator.problem import Problem
from tilewright.generator.space import default_variant, legal_variants
from tilewright.generator.variant import VariantSpec
from tilewright.runtime import dispatch
from tilewright.runtime.call_problem import problem_of
from tilewright.runtime.dispatch import DISPATCHER, Dispatcher
from tilewright.runtime.environment import device_name
from tilewright.runtime.records import Winner
from tilewright.runtime.winners import WinnerTable

MASK = tw.masks.sliding_window(8, 8) | tw.masks.global_stride(16)


def call(length: int = 128, heads: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, heads, length, 32) for _ in range(3))


def problem(length: int = 128, mask: tw.masks.Mask = MASK) -> Problem:
    query, key, _ = call(length)
    return problem_of(query, key, mask)


def winner(asked: Problem, spec: VariantSpec, device: str | None = None) -> Winner:
    return Winner(
        problem=asked,
        spec=spec,
        time_us=12.5,
        default_time_us=20.0,
        device=device or device_name("cpu"),
        source="a test",
    )


def other_variant(asked: Problem) -> VariantSpec:
    """A legal variant that is not the default."""
    default = default_variant(asked)
    return next(s for s in legal_variants(asked) if s != default and s.mask_form == "analytic" and s.block_m == 16)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Winner]]:
    """Winners that the process-wide dispatcher will read."""
    winners: list[Winner] = []
    monkeypatch.setattr(dispatch, "load_winners", lambda: WinnerTable(winners))
    DISPATCHER.reload()
    yield winners
    monkeypatch.undo()
    DISPATCHER.reload()


def test_nothing_tuned_gives_the_default(tuned: list[Winner]) -> None:
    explanation = tw.explain(*call(), MASK)
    assert explanation.reason == "heuristic"
    assert explanation.kernel == default_variant(problem())
    assert explanation.tuned_time_us is None
    assert "tilewright tune" in str(explanation)


def test_exact_bucket_neighbour_in_this_order(tuned: list[Winner]) -> None:
    spec = other_variant(problem())
    tuned.append(winner(problem(), spec))
    exact = tw.explain(*call(128), MASK)
    assert (exact.reason, exact.kernel, exact.tuned_time_us) == ("exact", spec, 12.5)
    bucket = tw.explain(*call(100), MASK)
    assert (bucket.reason, bucket.kernel) == ("bucket", spec)
    neighbour = tw.explain(*call(512), MASK)
    assert (neighbour.reason, neighbour.kernel) == ("neighbour", spec)
    assert tw.explain(*call(128), tw.masks.causal()).reason == "heuristic"


def test_many_queries_tell_nothing_of_few(tuned: list[Winner]) -> None:
    """What is for few queries alone was not tried where many were tuned, near as that is."""
    many, few = call(512), (torch.randn(1, 2, 2, 32), *call(512)[1:])
    spec = VariantSpec.from_values("forward_cpu", default_variant(problem_of(*many[:2], None)).values())
    tuned.append(winner(problem_of(*many[:2], None), spec))
    assert tw.explain(*(tensor[:, :, :500] for tensor in many)).reason == "bucket"
    explanation = tw.explain(*few)
    assert explanation.kernel is not None
    assert (explanation.reason, explanation.kernel.family) == ("heuristic", "forward_decode_cpu")
    # Where both were tried, the neighbour's winner counts.
    near = problem_of(torch.randn(1, 2, 8, 32), few[1], None)
    tuned.append(winner(near, spec))
    DISPATCHER.reload()
    assert tw.explain(*few).reason == "neighbour"


def test_another_devices_winner_is_never_used(tuned: list[Winner]) -> None:
    tuned.append(winner(problem(), other_variant(problem()), device="NVIDIA Imaginary 9000"))
    assert tw.explain(*call(), MASK).reason == "heuristic"


def test_the_tuned_kernel_really_runs(tuned: list[Winner]) -> None:
    spec = other_variant(problem())
    tuned.append(winner(problem(), spec))
    query, key, value = call()
    prepared = DISPATCHER.prepare(query, key, value, MASK)
    assert prepared.loaded is not None
    assert prepared.loaded.kernel.spec == spec
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=MASK.dense(1, 2, 128, 128))
    assert (tw.attention(query, key, value, MASK) - want).abs().max() < 1e-5


def test_a_winner_that_no_longer_is_legal_is_passed_over(tuned: list[Winner]) -> None:
    spec = dataclasses.replace(other_variant(problem()), block_m=17)
    tuned.append(winner(problem(), spec))
    assert tw.explain(*call(), MASK).reason == "heuristic"


def test_no_compiler_means_pytorch_said_once(
    tuned: list[Winner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    dispatcher = Dispatcher()
    query, key, value = call()
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=MASK.dense(1, 2, 128, 128))
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        for length in (128, 128, 64):
            q, k, v = (t[:, :, :length] for t in (query, key, value))
            out, _ = dispatcher.attend(q, k, v, MASK, 32**-0.5)
            if length == 128:
                assert (out - want).abs().max() < 1e-5
    prepared = dispatcher.prepare(query, key, value, MASK)
    assert prepared.choice.reason == "fallback"
    assert "compiler" in prepared.choice.detail
    said = [r.getMessage() for r in caplog.records if "answered by PyTorch" in r.getMessage()]
    assert len([s for s in said if "N128" in s]) == 1


def test_a_database_that_cannot_be_read_is_told_of_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "tilewright.db").write_bytes(b"this is no database" * 100)
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        assert dispatch.load_winners().find(problem(), device_name("cpu")) is None
    assert "tuned winners are not used" in caplog.text
    assert (tmp_path / "cache" / "tilewright.db").read_bytes().startswith(b"this is no database")


def test_prepared_calls_are_bounded(tuned: list[Winner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_PREPARED", 4)
    dispatcher = Dispatcher()
    for length in range(1, 12):
        query, key, value = call(length)
        dispatcher.attend(query, key, value, MASK, 0.1)
    assert len(dispatcher._prepared) <= 4

"""`tilewright sweep-topk`: figures against plain PyTorch, inputs from files and made, mistakes told."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tilewright.cli import main
from tilewright.generator.errors import InvalidInput
from tilewright.runtime.topk import select_blocks, topk_attention
from tilewright.tuner.topk_inputs import LOCAL_WIDTH, SINKS, SYNTHETIC, AttentionInputs, read_inputs, synthetic
from tilewright.tuner.topk_sweep import Choosing, SweepPoint, marked, sweep_topk

SMALL = ["--target", "cpu", "--no-time"]


def tensors(
    heads: int = 2, kv_heads: int = 2, seqlen: int = 96, head_dim: int = 32, *, batch: int = 1
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    counts = {"query": heads, "key": kv_heads, "value": kv_heads}
    return {name: 2 * torch.randn(batch, n, seqlen, head_dim, generator=generator) for name, n in counts.items()}


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_made_inputs_give_a_table_a_csv_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new"
    arguments = ["sweep-topk", "--synthetic", "mix", "--length", "192", "--heads", "3", "--head-dim", "32"]
    arguments += ["--target", "cpu", "--blocks", "16,64", "--budgets", "2,9", "--out", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    rows = read_rows(out / "mix.csv")
    # Of 3 blocks of 64 no more than 3 can be taken.
    assert [(row["block_size"], row["top_k"], row["num_blocks"]) for row in rows] == [
        ("16", "2", "12"),
        ("16", "9", "12"),
        ("64", "2", "3"),
        ("64", "3", "3"),
    ]
    assert float(rows[-1]["mass_mean"]) == float(rows[-1]["dense_share"]) == 1
    assert float(rows[-1]["error"]) < 1e-5
    assert all(float(row["time_ms"]) > 0 and float(row["dense_ms"]) > 0 for row in rows)
    assert all(float(r["mass_low"]) <= float(r["mass_mean"]) <= float(r["best_mass"]) + 1e-9 for r in rows)
    assert "flops" in rows[-1]["fronts"]
    assert "mix: H3 D32 N192 float32" in printed
    assert f"wrote {out / 'mix.csv'} and {out / 'mix.svg'}" in printed
    assert "blocks of 64" in (out / "mix.svg").read_text()


@pytest.mark.parametrize(
    "choosing",
    [
        Choosing(),
        Choosing(causal=True),
        Choosing(causal=True, select=4, select_heads="kv", sink_blocks=1),
        Choosing(select_heads="kv", window_blocks=1),
    ],
    ids=["plain", "causal", "shared", "window"],
)
def test_mass_and_error_are_dense_attention_s(choosing: Choosing) -> None:
    query, key, value = tensors(4, 2, batch=2).values()
    inputs = AttentionInputs("made", query, key, value, 0.3)
    result = sweep_topk(inputs, choosing, block_sizes=(12,), budgets=(4,), queries=96, timed=False)
    (point,) = result.points
    assert (point.num_blocks, point.time_ms, result.dense_ms) == (8, None, None)

    arguments = {name: getattr(choosing, name) for name in Choosing.__slots__}
    indices, counts = select_blocks(query, key, block_size=12, top_k=4, **arguments)
    keys, values = (t.repeat_interleave(2, 1).double() for t in (key, value))
    scores = query.double() @ keys.mT * 0.3
    if choosing.causal:
        scores.masked_fill_(torch.ones(96, 96).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    chosen = torch.zeros(2, 4, 96, 96)
    for batch in range(2):
        for head in range(4):
            chooser = head * indices.shape[1] // 4
            for row in range(96):
                group = row // choosing.select
                for block in indices[batch, chooser, group, : counts[batch, chooser, group]].tolist():
                    chosen[batch, head, row, block * 12 : block * 12 + 12] = 1
    mass = (weights * chosen).sum(-1)
    assert point.mass_mean == pytest.approx(float(mass.mean()), rel=1e-6)
    assert point.mass_low == pytest.approx(float(mass.flatten().sort().values[7]), rel=1e-6)  # 1 % of 768
    best = weights.view(2, 4, 96, 8, 12).sum(-1).topk(4).values.sum(-1).mean()
    assert point.best_mass == pytest.approx(float(best), rel=1e-6)
    dense = weights @ values
    out = topk_attention(query, key, value, block_size=12, top_k=4, scale=0.3, **arguments)
    error = (out - dense).square().mean().sqrt() / dense.square().mean().sqrt()
    assert point.error == pytest.approx(float(error), rel=1e-4)
    assert point.error > 0.01
    seen = torch.ones(96, 96).tril() if choosing.causal else torch.ones(96, 96)
    assert point.dense_share - point.choosing_share == pytest.approx(float((chosen * seen).sum() / (8 * seen.sum())))


def test_budgets_that_cannot_hold_what_is_always_in_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sweep-topk", "--synthetic", "local", "--length", "128", "--heads", "1", *SMALL, "--causal"]
    arguments += ["--sink-blocks", "2", "--blocks", "16"]
    assert main([*arguments, "--budgets", "2,3"]) == 0
    told = capsys.readouterr()
    assert "left out: block size 16, 2 blocks: top_k must be at least 3" in told.err
    assert main([*arguments, "--budgets", "1,2"]) == 2
    assert "no point of the sweep can be measured; block size 16, 1 blocks" in capsys.readouterr().err


def test_points_on_a_front_are_those_that_none_beats() -> None:
    def point(share: float, mass: float, time_ms: float | None, error: float) -> SweepPoint:
        return SweepPoint(16, 1, 9, share, 0.0, mass, 0.0, 1.0, error, time_ms)

    given = [
        point(0.1, 0.5, 2.0, 0.3),  # the cheapest, and the fastest
        point(0.2, 0.8, 3.0, 0.1),
        point(0.3, 0.7, 4.0, 0.2),  # beaten in both
        point(0.3, 0.8, 2.0, 0.3),  # beaten at a tie; as good as the first in time
        point(0.4, 0.9, None, 0.0),  # not timed
    ]
    assert [found.fronts for found in marked(given)] == [
        ("flops", "time"),
        ("flops", "time"),
        (),
        ("time",),
        ("flops",),
    ]


def test_made_kinds_are_what_they_say() -> None:
    def weights(kind: str) -> Tensor:
        made = synthetic(kind, num_heads=3, seqlen=2048, head_dim=64)
        return (made.query @ made.key.mT * made.scale).softmax(-1)[0]

    sink, needle, local, mix = (weights(kind) for kind in ("sink", "needle", "local", "mix"))
    assert 0.4 < sink[..., :SINKS].sum(-1).mean() < 0.7
    assert 0.4 < needle.topk(2).values.sum(-1).mean() < 0.75
    distance = (torch.arange(2048) - torch.arange(2048).unsqueeze(1)).abs()
    assert (local * (distance <= LOCAL_WIDTH)).sum(-1).mean() > 0.85
    assert (needle * (distance <= LOCAL_WIDTH)).sum(-1).mean() < 0.25
    assert (mix[0] * (distance <= LOCAL_WIDTH)).sum(-1).mean() > 0.85
    assert 0.4 < mix[1, :, :SINKS].sum(-1).mean() < 0.7
    assert mix[2].topk(2).values.sum(-1).mean() > 0.4
    again = synthetic("mix", num_heads=3, seqlen=2048, head_dim=64)
    assert torch.equal(again.query, synthetic("mix", num_heads=3, seqlen=2048, head_dim=64).query)
    with pytest.raises(InvalidInput, match=f"must be one of {', '.join(SYNTHETIC)}; got 'flat'"):
        synthetic("flat", num_heads=1, seqlen=8, head_dim=16)


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    whole = tensors(4, 2, 20, 24)
    save_file({**{name: t[0] for name, t in whole.items()}, "other": torch.ones(1)}, path)
    inputs = read_inputs(path)
    assert inputs.name == "layer"
    assert inputs.scale == 24**-0.5
    for name, tensor in whole.items():
        read = getattr(inputs, name)
        assert read.shape == (*tensor.shape[:3], 32), "filled up to a multiple of 16"
        assert torch.equal(read[..., :24], tensor)
        assert not read[..., 24:].any()
    save_file(tensors(batch=3), path)
    assert read_inputs(path, 0.5).query.shape == (3, 2, 96, 32)
    assert read_inputs(path, 0.5).scale == 0.5


def test_a_file_can_be_swept_and_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layer.safetensors"
    save_file({name: t.bfloat16() for name, t in tensors(4, 2).items()}, path)
    arguments = ["sweep-topk", "--input", str(path), *SMALL, "--blocks", "16", "--budgets", "2", "--causal"]
    assert main([*arguments, "--length", "64", "--dtype", "float32", "--out", str(tmp_path)]) == 0
    assert "layer, causal: H4/2 D32 N64 float32" in capsys.readouterr().out
    (row,) = read_rows(tmp_path / "layer.csv")
    assert (row["num_blocks"], row["time_ms"], row["dense_ms"]) == ("4", "", "")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"value": None}, "has no value; it needs tensors named query, key, value, and has key, query"),
        ({"key": torch.ones(5)}, "key in FILE must be [batch, heads, tokens, head_dim] or [heads, tokens, head_dim]"),
        (
            {"query": torch.ones(1, 2, 3, 32, dtype=torch.int32)},
            "query in FILE must be float32, float16, bfloat16; got",
        ),
        ({"query": torch.ones(1, 2, 0, 32)}, "query in FILE must have elements"),
        ({"query": torch.ones(1, 2, 3, 32).half()}, "must have one dtype"),
        (
            {"query": torch.ones(1, 3, 96, 32)},
            "query's heads a multiple of theirs; got query [1, 3, 96, 32], key [1, 2",
        ),
        ({"query": torch.ones(1, 2, 96, 64)}, "batch and head_dim must be query's"),
        ({"value": torch.ones(1, 2, 95, 32)}, "key and value must have one shape"),
    ],
)
def test_a_file_that_does_not_fit_says_what_is_wrong(
    changed: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "FILE"
    save_file({name: t for name, t in {**tensors(), **changed}.items() if t is not None}, path)
    with pytest.raises(InvalidInput) as caught:
        read_inputs(path)
    assert message in str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "none.safetensors"], "none.safetensors cannot be read as safetensors: "),
        (["--input", __file__], "cannot be read as safetensors: "),
        (["--synthetic", "flat"], "--synthetic must be one of local, sink, needle, mix; got 'flat'"),
        (["--synthetic", "mix", "--head-dim", "20"], "head_dim must be a multiple of 16"),
        (["--input", "LAYER", "--heads", "3"], "--heads is for --synthetic"),
        (["--input", "LAYER", "--length", "97"], "--length must be at most 96, the tokens of layer; got 97"),
        (["--synthetic", "mix", "--out", "/proc/nothing"], "--out /proc/nothing cannot be made"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = tmp_path / "layer.safetensors"
    save_file(tensors(), layer)
    given = [str(layer) if argument == "LAYER" else argument for argument in arguments]
    assert main(["sweep-topk", *given, *SMALL]) == 2
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1


def test_without_safetensors_a_file_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(["sweep-topk", "--input", str(tmp_path / "layer.safetensors")]) == 2
    assert "pip install 'tilewright[safetensors]'" in capsys.readouterr().err

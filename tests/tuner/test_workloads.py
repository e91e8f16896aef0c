"""Workload files: what ships, what a file of one's own may say, and how mistakes in it are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tilewright.generator.errors import InvalidInput
from tilewright.generator.space import default_variant
from tilewright.tuner.mask_text import MaskShape, parse_mask
from tilewright.tuner.workloads import WorkloadRow, load_workload, parse_workload, shipped_workloads

SHIPPED = {
    *("anchors", "blocksparse", "decode", "dense", "density"),
    *("longcontext", "longformer", "quick", "scaling", "skew", "topk"),
}

SHAPE = MaskShape(batch=2, num_heads=3, seqlen_q=96, seqlen_kv=96, seed=7)

ROW = """
[[row]]
name = "mine"
dtype = "float32"
head_dim = 64
num_heads = 4
seqlen_q = 128
"""


def dense(text: str, shape: MaskShape = SHAPE) -> torch.Tensor:
    mask = parse_mask(text, shape)
    assert mask is not None
    return mask.dense(shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_kv, torch.device("cpu"))


def test_shipped_names() -> None:
    assert set(shipped_workloads()) == SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_shipped_row_has_a_kernel(name: str) -> None:
    workload = load_workload(name)
    assert workload.description
    for target in ("cpu", "sm_80", "sm_90a"):
        for row in workload.rows_for(target):
            problem = row.problem(target)
            assert problem.target == target
            assert default_variant(problem).family


def test_anchors_are_named_by_number() -> None:
    names = [row.name.split()[0] for row in load_workload("anchors").rows]
    assert names == ["W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W13", "C1"]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        ROW + 'num_kv_heads = 2\nseqlen_kv = 256\nmask = "causal() & global_stride(8)"\ntargets = ["cpu"]\n'
    )
    workload = load_workload(str(path))
    (row,) = workload.rows
    assert (workload.name, row.batch, row.num_kv_heads, row.seqlen_kv) == ("mine", 1, 2, 256)
    assert workload.rows_for("cpu") == (row,)
    with pytest.raises(InvalidInput, match="no row for target sm_90a"):
        workload.rows_for("sm_90a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param("head_dim = 64 -> head_dim = 40", r"row 1 \(mine\): head_dim .* got 40", id="head_dim"),
        pytest.param('head_dim = 64 -> head_dim = "64"', r"row 1 \(mine\): head_dim must be an integer", id="type"),
        pytest.param("head_dim = 64 -> head_dim = true", r"head_dim must be an integer", id="bool"),
        pytest.param("num_heads = 4 -> num_heads = 0", r"num_heads must be an integer of 1 or more; got 0", id="zero"),
        pytest.param("num_heads = 4 -> num_heads = 4\nnum_kv_heads = 3", "multiple of num_kv_heads", id="gqa"),
        pytest.param(
            '"float32" -> "float8"', "dtype must be one of float32, float16, bfloat16; got 'float8'", id="dtype"
        ),
        pytest.param("seqlen_q = 128 -> seqlen = 128", "unknown key seqlen; allowed: .*seqlen_q", id="unknown-key"),
        pytest.param("seqlen_q = 128 -> ", "seqlen_q missing", id="missing"),
        pytest.param(
            'seqlen_q = 128 -> seqlen_q = 128\nmask = "casual()"', "mask must be calls of .*; got casual", id="mask"
        ),
        pytest.param(
            'seqlen_q = 128 -> seqlen_q = 128\ntargets = ["tpu"]',
            "targets must be among cpu, cuda; got tpu",
            id="targets",
        ),
        pytest.param(
            "seqlen_q = 128 -> seqlen_q = 128\ntargets = []",
            "targets must be among cpu, cuda; got none",
            id="no-target",
        ),
        pytest.param("[[row]] -> [[row", "not TOML", id="toml"),
        pytest.param("[[row]] -> [rows]", "unknown key rows; allowed: description, along, row", id="no-rows"),
    ],
)
def test_mistakes_name_file_row_and_key(change: str, said: str) -> None:
    old, new = change.split(" -> ")
    assert old in ROW
    with pytest.raises(InvalidInput, match=said) as raised:
        parse_workload(ROW.replace(old, new), "mine.toml")
    assert str(raised.value).startswith("mine.toml")


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match="row names must differ; got mine more than once"):
        parse_workload(ROW + ROW, "mine.toml")


@pytest.mark.parametrize("name", ["nothing", "missing.toml"])
def test_a_workload_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"workload must be one of|cannot be read: No such file"):
        load_workload(str(tmp_path / name))


def test_masks_follow_the_algebra() -> None:
    """`&` binds tighter than `|`, as in Python, and parentheses group."""
    key = torch.arange(96)
    causal = key[None, :] <= key[:, None]
    near = (key[None, :] - key[:, None]).abs() <= 2
    strided = (key % 16 == 0)[None, :].expand(96, 96)
    flat = dense("sliding_window(2, 2) | global_stride(16) & causal()")
    grouped = dense("(sliding_window(2, 2) | global_stride(16)) & causal()")
    assert torch.equal(flat[0, 0], near | (strided & causal))
    assert torch.equal(grouped[0, 0], (near | strided) & causal)


def test_random_masks_are_the_same_every_time_and_differ_by_seed_and_head() -> None:
    text = "random_blocks(16, 32, density=0.3, per_head=true)"
    assert torch.equal(dense(text), dense(text))
    assert not torch.equal(dense(text), dense(text, MaskShape(2, 3, 96, 96, seed=8)))
    mask = dense(text)
    assert mask.shape[:2] == (1, 3)
    assert not torch.equal(mask[0, 0], mask[0, 1])


def test_random_blocks_have_their_density_and_no_empty_row() -> None:
    shape = MaskShape(1, 8, 4096, 4096)
    mask = parse_mask("random_blocks(128, 128, density=0.1, per_head=True)", shape)
    assert mask is not None
    blocks = mask.tensors[0]
    assert blocks.shape[-2:] == (32, 32)
    assert 0.08 < blocks.float().mean().item() < 0.13
    assert bool(blocks.any(-1).all())


def test_a_count_of_blocks_is_exact() -> None:
    mask = parse_mask("random_blocks(16, 16, count=5, per_head=true)", SHAPE)
    assert mask is not None
    blocks = mask.tensors[0]
    assert blocks.shape == (1, 3, 6, 6)
    assert bool((blocks.sum(-1) == 5).all())
    assert not torch.equal(blocks[0, 0], blocks[0, 1])


def test_one_row_of_blocks_in_so_many_has_so_many_times_more() -> None:
    shape = MaskShape(1, 2, 704, 704)
    text = "skewed_blocks(16, 16, count=5, every=8, times=7, per_head=true)"
    mask, again = parse_mask(text, shape), parse_mask(text, shape)
    assert mask is not None
    assert again is not None
    assert torch.equal(mask.tensors[0], again.tensors[0])
    counts = mask.tensors[0].sum(-1)
    assert set(counts.unique().tolist()) == {5, 35}
    runs = (counts == 35)[0, :, :40].unflatten(-1, (5, 8))  # 44 rows of blocks: 5 whole runs of 8
    assert bool((runs.sum(-1) == 1).all())
    assert len({tuple(run) for run in runs[0].tolist()}) > 1, "not the same row of each run"


def test_the_skewed_rows_have_as_many_blocks_as_the_balanced_ones() -> None:
    rows = {row.name: row for row in load_workload("skew").rows}
    skewed = [row for row in rows.values() if row.beside]
    assert [row.targets for row in skewed] == [("cpu",), ("cuda",), ("cuda",)]
    for row in skewed:
        heavy, even = row.make_mask(), rows[row.beside].make_mask()
        assert heavy is not None
        assert even is not None
        assert heavy.tensors[0].sum() == even.tensors[0].sum()
        counts = heavy.tensors[0].sum(-1).flatten()
        assert counts.max() == 8 * counts.min()
        assert (counts == counts.max()).float().mean() == 1 / 16
        fields = ("dtype", "head_dim", "num_heads", "seqlen_q", "targets")
        assert all(getattr(row, name) == getattr(rows[row.beside], name) for name in fields)


def test_series_are_along_what_they_say() -> None:
    scaling = load_workload("scaling")
    assert scaling.along == "length"
    assert [row.seqlen_q for row in scaling.rows_for("cuda")] == [2**i for i in range(10, 18)]
    density = load_workload("density")
    assert density.along == "density"
    assert {row.seqlen_q for row in density.rows_for("cuda")} == {16384}
    densities = [float(row.make_mask().tensors[0].float().mean()) for row in density.rows_for("cuda")]  # type: ignore[union-attr]
    assert densities == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0], abs=0.01)
    assert densities[-1] == 1.0


def test_a_row_is_shown_beside_an_earlier_one_only() -> None:
    second = ROW.replace('"mine"', '"other"')
    workload = parse_workload(ROW + second + 'beside = "mine"\n', "mine.toml")
    assert workload.rows[1].beside == "mine"
    said = r"mine.toml: row 1 \(mine\): beside must name an earlier row \(there is none\); got 'other'"
    with pytest.raises(InvalidInput, match=said):
        parse_workload(ROW + 'beside = "other"\n' + second, "mine.toml")
    with pytest.raises(InvalidInput, match=r"mine\.toml: along must be length or density; got 'heads'"):
        parse_workload('along = "heads"\n' + ROW, "mine.toml")


def test_documents_and_tokens() -> None:
    assert torch.equal(dense("document(32, 64)")[0, 0], torch.block_diag(torch.ones(32, 32), torch.ones(64, 64)).bool())
    assert torch.equal(dense("global_tokens([5, 0])")[0, 0, 3].nonzero().flatten(), torch.tensor([0, 5]))
    assert int(dense("global_tokens(count=9)")[0, 0, 0].sum()) == 9
    segments = dense("document(count=5)")[0, 0]
    assert torch.equal(segments, segments.T)
    assert len({tuple(row) for row in segments.int().tolist()}) == 5


def test_full_is_no_mask() -> None:
    assert parse_mask("full()", SHAPE) is None
    assert WorkloadRow("r", "float32", 16, 1, 8).problem("cpu").mask.terms == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "mask must be calls of"),
        ("causal", "got causal"),
        ("causal() + causal()", "joined by & and |"),
        ("~causal()", "joined by & and |"),
        ("masks.causal()", "mask must be calls of"),
        ("__import__('os').system('true')", "mask must be calls of"),
        ("sliding_window(32)", r"expected sliding_window\(left, right\); got sliding_window\(32\)"),
        ("sliding_window(-2, 0)", "left must be an integer of -1 or more; got -2"),
        ("sliding_window(left=1.5, right=0)", "got 1.5"),
        ("global_stride(0)", "global_stride must be an integer of 1 or more"),
        ("global_stride(open('x'))", "must be numbers, true, false or lists"),
        ("global_stride(*[8])", "must be numbers, true, false or lists"),
        ("random_blocks(8, 8, density=2)", "density must be between 0 and 1; got 2"),
        ("random_blocks(8, 8)", "random_blocks takes either density=x or count"),
        ("random_blocks(8, 8, density=0.1, count=3)", "random_blocks takes either density=x or count"),
        ("random_blocks(8, 8, count=13)", "a row of blocks has 12 blocks; got 13"),
        ("skewed_blocks(8, 8, count=2, every=4)", "expected skewed_blocks"),
        ("skewed_blocks(8, 8, count=2, every=0, times=2)", "skewed_blocks every must be an integer of 1 or more"),
        ("skewed_blocks(8, 8, count=2, every=4, times=7)", "a row of blocks has 12 blocks; got 14"),
        ("random_blocks(8, 8, density=0.1, per_head=1)", "per_head must be true or false; got 1"),
        ("document(32, 32)", "lengths must sum to seqlen_q 96; got 64"),
        ("document()", "either the lengths of its segments or count"),
        ("global_tokens(count=97)", "at most seqlen_kv 96; got 97"),
        ("global_tokens([])", "takes a list of token indices"),
    ],
)
def test_mask_mistakes(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said.replace("|", r"\|")):
        parse_mask(text, SHAPE)


def test_inputs_are_random_and_repeatable() -> None:
    row = WorkloadRow("r", "bfloat16", 32, 4, 24, batch=2, num_kv_heads=2, seqlen_kv=48, mask="causal()", seed=3)
    query, key, value, mask = row.make_inputs("cpu")
    assert query.shape == (2, 4, 24, 32)
    assert key.shape == value.shape == (2, 2, 48, 32)
    assert query.dtype is torch.bfloat16
    assert mask is not None
    for tensor in (query, key, value):
        assert 0.8 < tensor.float().std().item() < 1.2
    assert not torch.equal(key, value)
    assert all(torch.equal(a, b) for a, b in zip((query, key, value), row.make_inputs("cpu")[:3], strict=True))


def test_a_cuda_call_has_no_density_where_it_would_have_to_wait() -> None:
    row = WorkloadRow("r", "bfloat16", 64, 2, 256, mask="random_blocks(64, 64, density=0.5)")
    assert row.problem("cpu").mask.density is not None
    assert row.problem("sm_90a").mask.density is None
    assert WorkloadRow("r", "bfloat16", 64, 2, 256, mask="causal()").problem("sm_90a").mask.density is not None

"""`WinnerTable`: exact, bucket, neighbour, and never another device's."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.environment import Environment
from tilewright.runtime.lines import LineWriter
from tilewright.runtime.winners import (
    DISTANCE_CAP,
    Winner,
    WinnerTable,
    bucket_key,
    distance,
    next_power_of_two,
    read_winner_lines,
    shipped_winners,
    structure_bucket,
)

MakeProblem = Callable[..., Problem]


def spec(block_n: int) -> VariantSpec:
    return VariantSpec("forward_cpu", "gather", 64, block_n)


def winner(problem: Problem, block_n: int = 64, device: str = "here", source: str = "store") -> Winner:
    return Winner(problem, spec(block_n), 10.0, 20.0, device, source)


def masked(structure: str, terms: tuple[str, ...] = ("window", "stride"), density: float | None = 0.01) -> MaskClass:
    return MaskClass(terms, structure, density=density)


def test_the_problem_itself_is_exact(make_problem: MakeProblem) -> None:
    known = winner(make_problem())
    found = WinnerTable([known]).find(make_problem(), "here")
    assert found is not None
    assert (found.winner, found.reason, found.distance) == (known, "exact", 0.0)


def test_of_equal_problems_the_first_given_counts(make_problem: MakeProblem) -> None:
    own, shipped = winner(make_problem(), 32), winner(make_problem(), 128, source="results/here")
    table = WinnerTable([own, shipped])
    found = table.find(make_problem(), "here")
    assert found is not None
    assert found.winner is own
    assert len(table) == 1


def test_another_devices_winner_is_never_the_answer(make_problem: MakeProblem) -> None:
    table = WinnerTable([winner(make_problem(), device="there")])
    assert table.find(make_problem(), "here") is None
    assert table.find(make_problem(seqlen_q=8000), "here") is None
    assert table.find(make_problem(head_dim=80), "here") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"seqlen_q": 5000, "seqlen_kv": 8191},
        {"batch": 2, "num_heads": 4, "num_kv_heads": 4},
        {"mask": masked("sliding_window(17, 30) | global_stride(512)")},
        {"mask": masked("sliding_window(32, 32) | global_stride(512)", density=None)},
        {"mask": masked("sliding_window(32, 32) | global_stride(512)", density=0.02)},
    ],
    ids=str,
)
def test_sizes_of_one_power_of_two_share_a_bucket(make_problem: MakeProblem, fields: dict[str, object]) -> None:
    table = WinnerTable([winner(make_problem(seqlen_q=100)), winner(make_problem())])
    found = table.find(make_problem(**fields), "here")
    assert found is not None
    assert found.reason == "bucket"
    assert found.winner.problem == make_problem()


@pytest.mark.parametrize(
    "fields",
    [
        {"seqlen_q": 8193},
        {"seqlen_kv": 4096},
        {"head_dim": 80},
        {"batch": 3},
        {"num_kv_heads": 4},
        {"mask": masked("sliding_window(33, 32) | global_stride(512)")},
        {"mask": masked("sliding_window(32, 32) | global_stride(500)")},
        {"mask": dataclasses.replace(masked("sliding_window(32, 32) | global_stride(512)"), per_head=True)},
    ],
    ids=str,
)
def test_what_is_outside_the_bucket_is_a_neighbour(make_problem: MakeProblem, fields: dict[str, object]) -> None:
    found = WinnerTable([winner(make_problem())]).find(make_problem(**fields), "here")
    assert found is not None
    assert found.reason == "neighbour"
    assert 0 < found.distance <= DISTANCE_CAP


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float16"},
        {"target": "sm_80"},
        {"operation": "attention_backward"},
        {"mask": masked("sliding_window(32, 32)", ("window",))},
        {"mask": masked("sliding_window(32, 32) | global_stride(512) & causal()", ("bound", "window", "stride"))},
        {"head_dim": 256, "seqlen_q": 2**20},
        {"seqlen_q": 1, "seqlen_kv": 1},
    ],
    ids=str,
)
def test_what_differs_in_kind_or_too_much_has_no_answer(make_problem: MakeProblem, fields: dict[str, object]) -> None:
    assert WinnerTable([winner(make_problem())]).find(make_problem(**fields), "here") is None


def test_the_nearest_neighbour_is_taken(make_problem: MakeProblem) -> None:
    table = WinnerTable([winner(make_problem(seqlen_q=n, seqlen_kv=n), n // 128) for n in (2048, 16384, 131072)])
    for length, block_n in ((1024, 16), (20000, 128), (300000, 1024)):
        found = table.find(make_problem(seqlen_q=length, seqlen_kv=length), "here")
        assert found is not None
        assert found.winner.spec.block_n == block_n


def test_a_block_masks_granularity_outweighs_its_length(make_problem: MakeProblem) -> None:
    def blocks(granularity: int, **fields: object) -> Problem:
        return make_problem(mask=masked(f"block_mask({granularity}, {granularity})", ("and_blocks",)), **fields)

    table = WinnerTable([winner(blocks(128), 128), winner(blocks(64, seqlen_q=32768, seqlen_kv=32768), 64)])
    found = table.find(blocks(64), "here")
    assert found is not None
    assert found.winner.spec.block_n == 64


def test_a_variant_that_is_not_legal_is_passed_over(make_problem: MakeProblem) -> None:
    table = WinnerTable(
        [winner(make_problem(), 16), winner(make_problem(seqlen_q=8000), 32), winner(make_problem(head_dim=80), 64)]
    )

    def found(*illegal: int) -> tuple[int, str] | None:
        match = table.find(make_problem(), "here", lambda s: s.block_n not in illegal)
        return (match.winner.spec.block_n, match.reason) if match else None

    assert found() == (16, "exact")
    assert found(16) == (32, "bucket")
    assert found(16, 32) == (64, "neighbour")
    assert found(16, 32, 64) is None


def test_warm_starts_come_from_any_device_nearest_first_without_repeats(make_problem: MakeProblem) -> None:
    asked = make_problem(target="sm_90a")
    far = make_problem(target="sm_80", head_dim=256, seqlen_q=2**20)
    table = WinnerTable(
        [
            winner(far, 16, "there"),
            winner(make_problem(target="sm_80"), 32, "there"),
            winner(make_problem(target="sm_90a", seqlen_q=8000), 32),
            winner(make_problem(target="sm_75"), 64, "elsewhere"),
            winner(make_problem(target="cpu"), 8),
            winner(make_problem(target="sm_90a", dtype="float16"), 128),
        ]
    )
    # sm_80 is nearer than sm_75; nothing comes from a CPU, nor from another dtype.
    assert [m.winner.spec.block_n for m in table.warm_starts(asked)] == [32, 64, 16]
    assert [m.winner.spec.block_n for m in table.warm_starts(asked, limit=1)] == [32]
    assert table.warm_starts(asked, lambda s: s.block_n == 16)[0].winner.problem == far


def test_distance_is_symmetric_and_zero_only_for_the_same_shape(make_problem: MakeProblem) -> None:
    a, b = make_problem(), make_problem(head_dim=128, seqlen_q=0, mask=masked("causal()", density=None))
    assert distance(a, a) == 0
    assert distance(a, b) == distance(b, a) > 0


def test_empty_problems_have_a_place(make_problem: MakeProblem) -> None:
    empty = make_problem(batch=0, num_heads=0, num_kv_heads=0, seqlen_q=0, seqlen_kv=0)
    assert bucket_key(empty) != bucket_key(make_problem())
    assert WinnerTable([winner(make_problem())]).find(empty, "here") is None


def test_buckets_round_up_and_keep_what_tiles_depend_on() -> None:
    assert [next_power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 1025)] == [0, 1, 2, 4, 4, 8, 2048]
    text = "(sliding_window(33, -1) | global_stride(500)) & block_mask(48, 96) & causal()"
    assert structure_bucket(text) == "(sliding_window(64, -1) | global_stride(500)) & block_mask(48, 96) & causal()"


def written(*winners: Winner) -> bytes:
    writer = LineWriter()
    return "".join([writer.header(), *(line for w in winners for line in writer.winner(w))]).encode()


def test_shipped_lines_come_back_as_winners(
    tmp_path: Path, make_problem: MakeProblem, environment: Environment
) -> None:
    full = dataclasses.replace(winner(make_problem()), device=environment.device, environment=environment)
    bare = winner(make_problem(seqlen_q=1))
    folder = tmp_path / "test-device"
    folder.mkdir()
    (folder / "winners.jsonl").write_bytes(written(full, bare))
    found = read_winner_lines(folder / "winners.jsonl")
    assert [f.source for f in found] == ["test-device", "test-device"]
    assert dataclasses.replace(found[0], source="store") == full
    assert (found[1].problem, found[1].spec, found[1].device) == (bare.problem, bare.spec, "here")


def test_a_damaged_shipped_file_is_named_with_its_line(tmp_path: Path, make_problem: MakeProblem) -> None:
    content = written(winner(make_problem()))
    with pytest.raises(InvalidInput, match=r"shipped, line 5: not JSON"):
        read_winner_lines(io.BytesIO(content[:-20]), "shipped")
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_winner_lines(tmp_path / "winners.jsonl")


def test_what_ships_is_readable_verified_and_of_its_target() -> None:
    for found in shipped_winners():
        assert found.verified
        assert found.environment is not None
        assert found.environment.arch == found.problem.target

"""Which tuned variant answers a problem: exact, by shape bucket, or by its nearest tuned neighbour.

Needs no SQL: winners come from the store as values, and from the shipped files as text.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Literal

from tilewright.generator.arch import arch_distance
from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.lines import read_winner_lines
from tilewright.runtime.records import Winner

Reason = Literal["exact", "bucket", "neighbour"]
Legal = Callable[[VariantSpec], bool]

DISTANCE_CAP = 4.0
"""A neighbour further away than this says too little; the heuristic default is used instead."""

WEIGHTS: dict[str, float] = {
    "head_dim": 2.0,
    "seqlen_q": 0.25,
    "seqlen_kv": 0.25,
    "heads": 0.25,
    "group": 0.25,
    "density": 0.5,
    "sliding_window": 0.5,
    "global_stride": 0.5,
    "block_mask": 1.0,
}
"""What a factor of two in each quantity counts for: a judgement of how much it moves the best tile, not a measurement.

The head dimension decides what fits in registers and shared memory; lengths hardly matter once the machine is full.
"""

SHAPE_MISMATCH = 1.0
"""What a constructor present in one mask only, or one side of a window open, counts for."""


@dataclass(frozen=True, slots=True)
class Match:
    """An answer and why: `distance` is 0 for the exact problem, and the summed weighted log2 difference else."""

    winner: Winner
    reason: Reason
    distance: float


class WinnerTable:
    """Winners by problem and device. Of equal problems on one device the first given counts, so one's own go first."""

    def __init__(self, winners: Iterable[Winner]) -> None:
        self._exact: dict[tuple[str, Problem], Winner] = {}
        self._buckets: defaultdict[tuple[object, ...], list[Winner]] = defaultdict(list)
        self._kinds: defaultdict[tuple[object, ...], list[Winner]] = defaultdict(list)
        for winner in winners:
            key = (winner.device, winner.problem)
            if key in self._exact:
                continue
            self._exact[key] = winner
            self._buckets[winner.device, *bucket_key(winner.problem)].append(winner)
            self._kinds[_kind(winner.problem)].append(winner)

    def __len__(self) -> int:
        return len(self._exact)

    def find(
        self,
        problem: Problem,
        device: str,
        legal: Legal | None = None,
        tells: Callable[[Winner], bool] | None = None,
    ) -> Match | None:
        """The best known answer for `problem` on `device`, or None; never another device's winner.

        legal: whether a spec may run `problem`; one that may not is passed over for the next. tells: whether a
        neighbour says anything about `problem`; the same.
        """
        winner = self._exact.get((device, problem))
        if winner is not None and (legal is None or legal(winner.spec)):
            return Match(winner, "exact", 0.0)
        bucket = self._buckets.get((device, *bucket_key(problem)), ())
        for match in _nearest(problem, bucket, "bucket"):
            if legal is None or legal(match.winner.spec):
                return match
        near = [w for w in self._kinds.get(_kind(problem), ()) if w.device == device]
        near = [w for w in near if w.problem.target == problem.target]
        for match in _nearest(problem, near, "neighbour"):
            if (legal is None or legal(match.winner.spec)) and (tells is None or tells(match.winner)):
                return match
        return None

    def warm_starts(self, problem: Problem, legal: Legal | None = None, limit: int = 3) -> list[Match]:
        """Up to `limit` different variants to try first when tuning, nearest first, other devices' among them.

        They are only tried, so neither the device nor the target must agree, and the cap does not apply; how far apart
        the architectures are counts like a distance of the problems, and nothing is taken from a CPU to a GPU.
        """
        found: list[Match] = []
        winners = self._kinds.get(_kind(problem), ())
        away = (
            (distance(problem, w.problem) + _arch_distance(problem, w.problem), n, w) for n, w in enumerate(winners)
        )
        for total, _, winner in sorted(a for a in away if a[0] < math.inf):
            match = Match(winner, "neighbour", total)
            known = any(match.winner.spec == f.winner.spec for f in found)
            if not known and (legal is None or legal(match.winner.spec)):
                found.append(match)
            if len(found) == limit:
                break
        return found


def _arch_distance(a: Problem, b: Problem) -> float:
    try:
        return arch_distance(a.target, b.target)
    except InvalidInput:  # an imported winner of an architecture that is not known here
        return math.inf


def _nearest(problem: Problem, winners: Sequence[Winner], reason: Reason) -> Iterator[Match]:
    measured = ((distance(problem, w.problem), n, w) for n, w in enumerate(winners))
    for away, _, winner in sorted(m for m in measured if m[0] <= DISTANCE_CAP):
        yield Match(winner, reason, away)


def _kind(problem: Problem) -> tuple[object, ...]:
    return problem.operation, problem.dtype, problem.mask.terms


def bucket_key(problem: Problem) -> tuple[object, ...]:
    """What problems of one bucket share: lengths and batch*heads to the next power of two, the mask's sizes too."""
    mask = problem.mask
    return (
        *(problem.operation, problem.target, problem.dtype, problem.head_dim),
        *(mask.terms, mask.per_head, mask.per_batch, structure_bucket(mask.structure)),
        *(next_power_of_two(n) for n in (problem.seqlen_q, problem.seqlen_kv, problem.batch * problem.num_heads)),
        problem.num_heads // max(problem.num_kv_heads, 1),
    )


@lru_cache(maxsize=4096)
def structure_bucket(structure: str) -> str:
    """The mask's text with its numbers rounded up to powers of two, except strides and granularities, kept exactly."""

    def rounded(call: re.Match[str]) -> str:
        if call[1] in ("global_stride", "block_mask", "block_size"):
            return call[0]
        return f"{call[1]}({re.sub(r'[0-9]+', lambda n: str(next_power_of_two(int(n[0]))), call[2])})"

    return _CALL.sub(rounded, structure)


_CALL = re.compile(r"([a-z_]+)\(([^()]*)\)")


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`; 0 stays 0."""
    return 1 << (value - 1).bit_length() if value > 0 else 0


def distance(a: Problem, b: Problem) -> float:
    """How far two problems of one operation, dtype and terms are from each other; 0 for the same, symmetric."""
    pairs = {
        "head_dim": (a.head_dim, b.head_dim),
        "seqlen_q": (a.seqlen_q, b.seqlen_q),
        "seqlen_kv": (a.seqlen_kv, b.seqlen_kv),
        "heads": (a.batch * a.num_heads, b.batch * b.num_heads),
        "group": (a.num_heads // max(a.num_kv_heads, 1), b.num_heads // max(b.num_kv_heads, 1)),
    }
    total = sum(WEIGHTS[name] * _log2_ratio(*pair) for name, pair in pairs.items())
    if a.mask.density and b.mask.density:
        total += WEIGHTS["density"] * abs(math.log2(a.mask.density / b.mask.density))
    total += SHAPE_MISMATCH * 0.25 * ((a.mask.per_head != b.mask.per_head) + (a.mask.per_batch != b.mask.per_batch))
    return total + _structure_distance(a.mask.structure, b.mask.structure)


@lru_cache(maxsize=4096)
def _sizes(structure: str) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, arguments in _CALL.findall(structure):
        found.setdefault(name, []).append(tuple(int(n) for n in re.findall(r"-?\d+", arguments)))
    return found


def _structure_distance(a: str, b: str) -> float:
    if a == b:
        return 0.0
    total, sizes_a, sizes_b = 0.0, _sizes(a), _sizes(b)
    for name in sorted(sizes_a.keys() | sizes_b.keys()):
        calls_a, calls_b = sizes_a.get(name, []), sizes_b.get(name, [])
        total += SHAPE_MISMATCH * abs(len(calls_a) - len(calls_b))
        for arguments_a, arguments_b in zip(calls_a, calls_b, strict=False):
            for x, y in zip(arguments_a, arguments_b, strict=False):
                if (x < 0) != (y < 0):
                    total += SHAPE_MISMATCH
                else:
                    total += WEIGHTS.get(name, 0.0) * _log2_ratio(max(x, 0), max(y, 0))
    return total


def _log2_ratio(a: int, b: int) -> float:
    # One more, so that an empty length or a window side of 0 has a place on the scale.
    return abs(math.log2((a + 1) / (b + 1))) if a != b else 0.0


def shipped_winners() -> list[Winner]:
    """The winners that come with the package, as `results/<device>/winners.jsonl` hold them.

    Raises `InvalidInput` when a shipped file was damaged; the message names file and line.
    """
    found: list[Winner] = []
    for folder in sorted(resources.files("tilewright.results").iterdir(), key=lambda f: f.name):
        file = folder.joinpath("winners.jsonl")
        if folder.is_dir() and file.is_file():
            with file.open("rb") as stream:
                found += read_winner_lines(stream, source=f"results/{folder.name}")
    return found


__all__ = ["Match", "Winner", "WinnerTable", "bucket_key", "distance", "read_winner_lines", "shipped_winners"]

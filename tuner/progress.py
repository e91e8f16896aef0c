"""What a tuning run tells about itself while it goes: `Listener`, and the results it ends with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tilewright.generator.build_pool import BuildResult
from tilewright.generator.errors import Outcome
from tilewright.generator.problem import Problem
from tilewright.generator.variant import VariantSpec
from tilewright.tuner.devices import TuningTarget
from tilewright.tuner.workloads import WorkloadRow


class Status(StrEnum):
    """How far the tuning of one problem came.

    tuned: searched as far as the effort says, winner verified. known: an earlier run had done all that.
    partial: the time limit ended the search; the winner is the verified best so far.
    failed: no variant gave a usable kernel. unreached: the time limit or the user ended the run before any did.
    """

    TUNED = "tuned"
    KNOWN = "known"
    PARTIAL = "partial"
    FAILED = "failed"
    UNREACHED = "unreached"


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done for one problem: `known` of the `budget` variants, out of all `candidates`, are measured."""

    row: WorkloadRow
    problem: Problem
    index: int
    total: int
    candidates: int
    budget: int
    known: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One variant measured or failed; times in microseconds, None where there is none.

    done: variants with an outcome so far, earlier runs' included. best_us, default_us: after this attempt.
    """

    spec: VariantSpec
    outcome: Outcome
    time_us: float | None
    message: str
    done: int
    best: VariantSpec | None
    best_us: float | None
    default_us: float | None


@dataclass(slots=True)
class ProblemResult:
    """What became of one problem. Times in microseconds.

    winner: None unless there is one; its times come from one interleaved run with the default's.
    incumbent: whether the winner is one from before. measured, known: outcomes of this run, of earlier ones.
    outcomes: counts over both.
    """

    row: WorkloadRow
    problem: Problem
    status: Status
    winner: VariantSpec | None = None
    time_us: float | None = None
    default: VariantSpec | None = None
    default_time_us: float | None = None
    baselines: dict[str, float] = field(default_factory=dict)
    max_error: float | None = None
    measured: int = 0
    known: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    message: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class TuneReport:
    """A whole run. `interrupted`: the user ended it; `out_of_time`: the time limit did."""

    target: TuningTarget
    results: list[ProblemResult]
    seconds: float
    interrupted: bool = False
    out_of_time: bool = False

    @property
    def outcomes(self) -> Counter[str]:
        """Counts by outcome over all problems."""
        return sum((result.outcomes for result in self.results), Counter())


class Listener:
    """Told what happens, in order, always from the thread that called `tune`. Does nothing; override what is of use."""

    def run_started(self, target: TuningTarget, problems: int) -> None:
        """Before anything else."""

    def problem_started(self, plan: Plan) -> None:
        """Before the first build of a problem."""

    def building(self, count: int) -> None:
        """This many variants are compiled next."""

    def built(self, result: BuildResult) -> None:
        """One of them is compiled, or failed to."""

    def baselines(self, times_us: Mapping[str, float]) -> None:
        """PyTorch's own implementations on this problem."""

    def measuring(self, spec: VariantSpec, device: str) -> None:
        """A variant is verified and timed next."""

    def attempted(self, attempt: Attempt) -> None:
        """A variant has its outcome."""

    def comparing(self, specs: Sequence[VariantSpec]) -> None:
        """These finalists are measured interleaved."""

    def problem_finished(self, result: ProblemResult) -> None:
        """A problem is done, one way or another."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

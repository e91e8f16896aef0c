"""What `tilewright tune` shows: a live bar on a terminal, plain lines elsewhere, and the table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tilewright.generator.build_pool import BuildResult
from tilewright.generator.errors import Outcome
from tilewright.generator.problem import Problem
from tilewright.generator.variant import VariantSpec
from tilewright.tuner.devices import TuningTarget
from tilewright.tuner.history import fairest_baseline
from tilewright.tuner.progress import Attempt, Listener, Plan, ProblemResult, Status, TuneReport

PIPE_WIDTH = 200
"""Columns of a table that goes into a pipe or a file."""


def duration(time_us: float) -> str:
    """Microseconds as people read them: `84.2 us`, `1.30 ms`, `2.04 s`."""
    if time_us < 1e3:
        return f"{time_us:.1f} us"
    return f"{time_us / 1e3:.3g} ms" if time_us < 1e6 else f"{time_us / 1e6:.3g} s"


def first_line(text: str, limit: int = 160) -> str:
    """The first line of a message, cut to fit, and only what may be printed."""
    line = (text.strip().splitlines() or ["no message"])[0]
    line = "".join(character if character.isprintable() else " " for character in line)
    return line if len(line) <= limit else line[: limit - 4] + " ..."


class TuneDisplay(Listener):
    """Turns what happens into a state line and lasting lines; subclasses put them somewhere."""

    def __init__(self, workload: str, effort: str, database: str) -> None:
        self._workload, self._effort, self._database = workload, effort, database
        self._problem: Problem | None = None
        self._to_build = self._built = 0
        self._best: Attempt | None = None
        self._baseline: tuple[str, float] | None = None

    def line(self, text: str, style: str = "") -> None:
        """Print a line that stays."""

    def state(self, doing: str, done: int | None = None) -> None:
        """Say what is being done now; done: variants with an outcome, where that changed."""

    def plan(self, plan: Plan) -> None:
        """A problem begins."""

    def standing(self) -> str:
        """The best so far against the default and PyTorch."""
        parts = []
        if self._best is not None and self._best.best_us is not None and self._best.best is not None:
            best_us = self._best.best_us
            parts.append(f"best {duration(best_us)}")
            if self._best.default_us is not None:
                parts.append(f"default {duration(self._best.default_us)} ({self._best.default_us / best_us:.2f}x)")
            if self._baseline is not None:
                name, time_us = self._baseline
                parts.append(f"PyTorch {name} {duration(time_us)} ({time_us / best_us:.2f}x)")
            parts.append(self._best.best.name)
        elif self._baseline is not None:
            parts.append(f"PyTorch {self._baseline[0]} {duration(self._baseline[1])}")
        return ", ".join(parts)

    def run_started(self, target: TuningTarget, problems: int) -> None:
        devices = f" on {len(target.devices)} devices" if len(target.devices) > 1 else ""
        noun = "problem" if problems == 1 else "problems"
        self.line(
            f"Tuning {problems} {noun} of {self._workload} for {target.environment.device} ({target.arch}){devices},"
            f" effort {self._effort}, into {self._database}"
        )
        if target.note:
            self.line(f"Note: {target.note}", "yellow")

    def problem_started(self, plan: Plan) -> None:
        self._problem, self._best, self._baseline = plan.problem, None, None
        self.plan(plan)

    def building(self, count: int) -> None:
        self._to_build, self._built = count, 0
        self.state(f"compiling 0/{count}")

    def built(self, result: BuildResult) -> None:
        self._built += 1
        self.state(f"compiling {self._built}/{self._to_build}")

    def baselines(self, times_us: Mapping[str, float]) -> None:
        if self._problem is not None:
            self._baseline = fairest_baseline(self._problem, times_us)

    def measuring(self, spec: VariantSpec, device: str) -> None:
        self.state(f"verifying and timing {spec.name}")

    def attempted(self, attempt: Attempt) -> None:
        better = self._best is None or attempt.best_us != self._best.best_us
        self._best = attempt
        if attempt.outcome is not Outcome.OK:
            self.line(f"  {attempt.outcome}: {attempt.spec.name}: {first_line(attempt.message)}", "red")
        self.new_attempt(attempt, better)

    def new_attempt(self, attempt: Attempt, better: bool) -> None:
        """A variant has its outcome; better: it is the best so far."""
        self.state("", attempt.done)

    def comparing(self, specs: Sequence[VariantSpec]) -> None:
        self.state(f"comparing {len(specs)} finalists, interleaved")

    def problem_finished(self, result: ProblemResult) -> None:
        if result.winner is None or result.time_us is None:
            self.line(f"  {result.status}: {first_line(result.message or 'no winner', 400)}", "red")
            return
        gains = []
        if result.default_time_us is not None:
            same = result.winner == result.default
            gains.append("the default" if same else f"{result.default_time_us / result.time_us:.2f}x the default")
        baseline = fairest_baseline(result.problem, result.baselines)
        if baseline is not None:
            gains.append(f"{baseline[1] / result.time_us:.2f}x PyTorch {baseline[0]}")
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items()))
        states = {Status.KNOWN: "tuned before", Status.PARTIAL: "best so far, the time is up"}
        state = f" [{states[result.status]}]" if result.status in states else ""
        self.line(f"  {duration(result.time_us)}, {', '.join(gains)}: {result.winner.name} ({counts}){state}", "green")

    def note(self, text: str) -> None:
        self.line(f"  note: {first_line(text, 300)}", "yellow")


class PlainDisplay(TuneDisplay):
    """Lines only: for logs, pipes and CI."""

    def __init__(self, workload: str, effort: str, database: str) -> None:
        super().__init__(workload, effort, database)
        self._started = time.monotonic()
        self._budget = 0

    def line(self, text: str, style: str = "") -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)

    def plan(self, plan: Plan) -> None:
        self._budget = plan.budget
        self.line(
            f"{plan.index}/{plan.total} {plan.row.name}: {plan.problem.name}, {plan.budget} of {plan.candidates}"
            f" variants to measure, {plan.known} known"
        )

    def building(self, count: int) -> None:
        super().building(count)
        self.line(f"  compiling {count} variants")

    def new_attempt(self, attempt: Attempt, better: bool) -> None:
        if better:
            self.line(f"  {attempt.done}/{self._budget} {self.standing()}")

    def comparing(self, specs: Sequence[VariantSpec]) -> None:
        self.line(f"  comparing {len(specs)} finalists, interleaved")


class LiveDisplay(TuneDisplay):
    """A bar and a line below it that change in place, and lasting lines above."""

    def __init__(self, workload: str, effort: str, database: str, console: Console) -> None:
        super().__init__(workload, effort, database)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[doing]}", style="dim"),
            console=console,
        )
        self._task = self._progress.add_task("starting", total=None, doing="")
        self._below = Text("", no_wrap=True, overflow="ellipsis")
        self.live = Live(Group(self._progress, self._below), console=console, transient=True)

    def line(self, text: str, style: str = "") -> None:
        self.live.console.print(Text(text, style=style))

    def state(self, doing: str, done: int | None = None) -> None:
        if done is not None:
            self._progress.update(self._task, completed=done)
        self._progress.update(self._task, doing=doing)
        self._below.plain = f"  {self.standing()}"

    def plan(self, plan: Plan) -> None:
        self.line(f"{plan.row.name}: {plan.problem.name}", "bold")
        self._progress.reset(
            self._task,
            description=f"{plan.index}/{plan.total}",
            total=plan.budget,
            completed=min(plan.known, plan.budget),
            doing=f"{plan.budget} of {plan.candidates} variants, {plan.known} known",
        )
        self._below.plain = ""


@contextmanager
def display_on_stderr(workload: str, effort: str, database: str) -> Iterator[TuneDisplay]:
    """The display that fits standard error: live on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        display = LiveDisplay(workload, effort, database, console)
        with display.live:
            yield display
    else:
        yield PlainDisplay(workload, effort, database)


def print_summary(report: TuneReport, database: str, *, dispatched: bool) -> None:
    """The table of winners on standard output, with what to do next."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("problem", "winner", "time:", "default:", "PyTorch:", "measured:", "state"):
        table.add_column(heading.rstrip(":"), justify="right" if heading.endswith(":") else "left", overflow="fold")
    for result in report.results:
        baseline = fairest_baseline(result.problem, result.baselines)
        table.add_row(
            Text(result.row.name),
            Text(result.winner.name if result.winner else first_line(result.message)),
            duration(result.time_us) if result.time_us else "",
            _against(result.default_time_us, result.time_us),
            _against(baseline[1] if baseline else None, result.time_us) + (f" {baseline[0]}" if baseline else ""),
            str(sum(result.outcomes.values())),
            str(result.status),
        )
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(table)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items())) or "nothing measured"
    console.print(Text(f"{report.seconds:.1f} s; {counts}; stored in {database}"))
    if report.interrupted or report.out_of_time:
        console.print(Text("Not finished: run the same command again to go on from here."))
    elif dispatched:
        console.print(Text("tw.attention now uses these kernels; `tilewright db best` shows them."))
    else:
        console.print(Text("tw.attention reads the default database: bring them there with db export and db import."))


def _against(other_us: float | None, time_us: float | None) -> str:
    if other_us is None:
        return ""
    return f"{duration(other_us)} ({other_us / time_us:.2f}x)" if time_us else duration(other_us)

"""The errors tilewright raises, and the outcome each one is stored as."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import ClassVar


class Outcome(StrEnum):
    """What became of one variant on one problem; the `outcome` column of a measurement."""

    OK = "ok"
    COMPILE = "compile"
    LAUNCH = "launch"
    TIMEOUT = "timeout"
    WRONG = "wrong"
    ILLEGAL = "illegal"
    MEMORY = "memory"


class TilewrightError(Exception):
    """Base of every error raised on purpose; its text says what, got, allowed, next."""


class InvalidInput(TilewrightError, ValueError):
    """An argument, file or setting that cannot be used as given."""


class StoreError(TilewrightError):
    """A database that cannot be opened, read, written or migrated."""


class ToolMissing(TilewrightError):
    """A compiler, ninja or another tool that is not on this machine."""


class NotSupported(TilewrightError, NotImplementedError):
    """A well-formed request that no kernel answers yet."""


class VariantFailed(TilewrightError):
    """A variant that gave no usable kernel; `outcome` is what the store records."""

    outcome: ClassVar[Outcome]


class IllegalVariant(VariantFailed):
    """The variant cannot exist for this problem and architecture."""

    outcome = Outcome.ILLEGAL


class CompileFailed(VariantFailed):
    """The compiler refused the rendered source.

    log: all that the compiler printed. source_path: the dumped source that its errors point at.
    """

    outcome = Outcome.COMPILE

    def __init__(self, message: str, *, log: str = "", source_path: Path | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.source_path = source_path


class LaunchFailed(VariantFailed):
    """The kernel could not be loaded or launched."""

    outcome = Outcome.LAUNCH


class IllegalAccess(VariantFailed):
    """The kernel touched memory it may not: an illegal address, or a signal on the CPU."""

    outcome = Outcome.ILLEGAL


class TimedOut(VariantFailed):
    """The build or the run outlasted its limit and was killed."""

    outcome = Outcome.TIMEOUT


class WrongResult(VariantFailed):
    """The output, the inputs afterwards or a repeated call differ from what is right."""

    outcome = Outcome.WRONG


class OutOfMemory(VariantFailed):
    """The variant needs more memory than the device has free."""

    outcome = Outcome.MEMORY


OUTCOME_ERRORS: dict[Outcome, type[VariantFailed]] = {
    Outcome.COMPILE: CompileFailed,
    Outcome.LAUNCH: LaunchFailed,
    Outcome.TIMEOUT: TimedOut,
    Outcome.WRONG: WrongResult,
    Outcome.ILLEGAL: IllegalAccess,
    Outcome.MEMORY: OutOfMemory,
}

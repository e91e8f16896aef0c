"""The command line: one subcommand a module in `tilewright.commands`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from tilewright.generator.errors import TilewrightError
from tilewright.runtime.environment import tilewright_version

COMMANDS = (
    "tune",
    "sweep",
    "sweep_topk",
    "replay",
    "db",
    "generate",
    "bench",
    "plot",
    "explain",
    "profile",
    "verify",
    "check",
    "doctor",
)

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand; each sets `run`, a function from its arguments to an exit code."""
    parser = argparse.ArgumentParser(
        prog="tilewright",
        description="Tune, inspect, benchmark and regenerate sparse attention kernels.",
        epilog="Exit codes: 0 done, 1 done with failures, 2 bad input or a missing tool, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"tilewright {tilewright_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"tilewright.commands.{name}").add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every expected failure is one line on stderr and an exit code that means something."""
    args = build_parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except TilewrightError as error:
        print(f"tilewright: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("tilewright: interrupted; what was measured is stored", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`| head`): keep Python from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

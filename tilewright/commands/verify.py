"""`tilewright verify`: run what ships through the adversarial cases on this machine's device."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

DESCRIPTION = """\
Build every family's default kernels and every winner that ships, run each through the adversarial cases on the device,
and record the digests of those that were right. Run it on a GPU after a template changed: the test suite fails while a
default or a shipped winner renders to a source that was never verified on one."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `verify`."""
    parser = subparsers.add_parser(
        "verify",
        help="run what ships through the adversarial cases on this device",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="auto", metavar="TARGET", help="auto, cpu or cuda[:i] (default: auto)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="add the records to DIR/verified/<device>.json")
    parser.add_argument("--missing", action="store_true", help="only kernels that DIR does not list yet")
    parser.add_argument("--jobs", type=int, metavar="N", help="builds at a time (default: what cores and memory allow)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a line for each failure and a summary; 0 when every kernel was right, else 1."""
    from tilewright.generator.arch import arch_named
    from tilewright.runtime.environment import device_name
    from tilewright.tuner.devices import resolve_target
    from tilewright.tuner.verified import (
        kernels_to_verify,
        missing,
        read_verified,
        verified_path,
        verify_kernels,
        write_verified,
    )

    target = resolve_target(args.target)
    device = target.devices[0]
    name = device_name(device)
    path = verified_path(args.out, name) if args.out else None
    kernels = kernels_to_verify(arch_named(target.arch))
    if args.missing and path is not None:
        kernels = missing(target.arch, read_verified(path))
    passed, failed = [], []
    for count, verdict in enumerate(verify_kernels(kernels, device, jobs=args.jobs), 1):
        if verdict.verified is not None:
            passed.append(verdict.verified)
        else:
            failed.append(verdict)
            what = f"{verdict.kernel.spec.name} {verdict.kernel.dtype} D{verdict.kernel.head_dim}"
            print(f"failed: {what} [{' '.join(verdict.kernel.mask_terms)}]: {verdict.message}", file=sys.stderr)
        if sys.stderr.isatty():
            print(f"\r{count}/{len(kernels)} kernels", end="", file=sys.stderr)
    if path is not None and passed:
        write_verified(path, name, passed)
    if args.json:
        failures = [{"kernel": verdict.kernel.to_dict(), "message": verdict.message} for verdict in failed]
        print(json.dumps({"device": name, "verified": [v.to_dict() for v in passed], "failed": failures}, indent=2))
    else:
        print(f"{name}: {len(passed)} of {len(kernels)} kernels right" + (f"; recorded in {path}" if path else ""))
    return 1 if failed else 0

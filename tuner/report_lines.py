"""The runtime's reports, with addresses and line numbers as places in kernel.cu that a reader finds."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = "kernel.cu"

_ADDRESS = re.compile(r"\[pc (0x[0-9a-f]+)\]")
_LINE = re.compile(rf"\b{re.escape(SOURCE)}:(\d+)")
_ATTRIBUTES = re.compile(r"__launch_bounds__\([^)]*\)|__attribute__\(\(.*?\)\)\)?")


def located(report: str, library: Path) -> str:
    """The report with `[pc 0x...]`, an offset in the library, and `kernel.cu:462` told as
    `kernel.cu:462 in store_vector, from kernel.cu:746 in write_rows`.

    Functions come from the source beside the library. Where addr2line is missing or knows nothing, an offset stays.
    """
    addresses = list(dict.fromkeys(_ADDRESS.findall(report)))
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if addresses and tool:
        places = {address: _lines_at(tool, library, address) for address in addresses}
        report = _ADDRESS.sub(lambda found: places[found[1]] or found[0], report)
    try:
        source = library.with_name(SOURCE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return report

    def named(found: re.Match[str]) -> str:
        name = function_at(source, int(found[1]))
        return f"{found[0]} in {name}" if name else found[0]

    return _LINE.sub(named, report)


def function_at(source: Sequence[str], number: int) -> str:
    """The function, or the struct with the function, that line `number` (from 1) lies in; empty where there is none.

    Read off the source, where these start at the left margin: addr2line gives an inlined function the name of the one
    that it was inlined into.
    """
    for line in reversed(source[:number]):
        if not line or line[0].isspace() or line[0] in "}#/":
            continue
        function = re.search(r"([A-Za-z_]\w*)\(", _ATTRIBUTES.sub("", line))
        struct = re.match(r"(?:struct|class) (\w+)", line)
        found = struct or function
        return found[1] if found else ""
    return ""


def _lines_at(tool: str, library: Path, address: str) -> str:
    """`kernel.cu:462, from kernel.cu:746`: the innermost inlined frame in kernel.cu and its callers; empty for none."""
    command = [tool, "-i", "-e", str(library), address]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    numbers = re.findall(rf"(?m)(?:^|/){re.escape(SOURCE)}:(\d+)", run.stdout)
    return ", from ".join(f"{SOURCE}:{number}" for number in numbers)

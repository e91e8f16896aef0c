"""`Environment`: what a measurement was taken on; times are comparable only inside one of them."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import digest_of

TEXT_MAX = 300
"""Characters a name or version may have: a guard against nonsense in imported files."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A device and the software that compiled and ran the kernels on it.

    device: the name the hardware gives itself (`NVIDIA H200`, `AMD EPYC 9B14`); winners are never taken across it.
    arch: the architecture's name (`cpu`, `sm_90a`).
    driver, cuda, torch, compiler, python, os, tilewright: versions; empty where there is none.
    threads: OpenMP threads on the CPU, 0 on a GPU. The same CPU with other threads is another environment.
    """

    device: str
    arch: str
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    compiler: str = ""
    python: str = ""
    os: str = ""
    tilewright: str = ""
    threads: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "threads":
                if type(value) is not int or not 0 <= value < 2**31:
                    raise InvalidInput(f"environment: threads must be a count, got {value!r}")
            elif not isinstance(value, str) or len(value) > TEXT_MAX or not value.isprintable():
                raise InvalidInput(f"environment: {field.name} must be printable text up to {TEXT_MAX} characters")
        if not self.device or not self.arch:
            raise InvalidInput("environment: device and arch must not be empty")

    @classmethod
    def current(cls, target: str = "cpu", *, compiler: str = "") -> Environment:
        """The environment of this process on `target`: `cpu`, `cuda`, `cuda:1` or an `sm_` architecture's name.

        compiler: the identity of the compiler that builds for it, as `generator.toolchain` words it; it is passed in
        because dispatch and inspection run where there is none.
        Raises `InvalidInput` for a CUDA target where torch finds no such device.
        """
        import torch

        shared: dict[str, Any] = {
            "torch": str(torch.__version__),
            "compiler": compiler,
            "python": ".".join(platform.python_version_tuple()[:2]),
            # Without the kernel's release: a host update must not throw away what was tuned.
            "os": f"{platform.system()} {platform.machine()}",
            "tilewright": tilewright_version(),
        }
        if target == "cpu":
            return cls(device=cpu_name(), arch="cpu", threads=cpu_threads(), **shared)
        index = cuda_index(target)
        arch = target
        if not target.startswith("sm_"):
            from tilewright.generator.arch import arch_of_capability

            arch = arch_of_capability(*torch.cuda.get_device_capability(index)).name
        return cls(
            device=torch.cuda.get_device_name(index),
            arch=arch,
            driver=nvidia_driver_version(),
            cuda=str(torch.version.cuda or ""),
            **shared,
        )

    def to_dict(self) -> dict[str, Any]:
        """Every field as JSON-ready values; `from_dict` takes it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Environment:
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidInput(f"not an environment record: {error}") from error

    @property
    def digest(self) -> str:
        """The key of this environment in the store, computed from every field."""
        return digest_of(self.to_dict())


def device_name(target: str) -> str:
    """The name of the device behind `target`, as `Environment.device` has it and winners are looked up by."""
    if target == "cpu":
        return cpu_name()
    import torch

    return torch.cuda.get_device_name(cuda_index(target))


def cuda_index(target: str) -> int:
    """The ordinal that a CUDA target means: `cuda:1` is 1; `cuda` and `sm_*` are the current device."""
    import torch

    match = re.fullmatch(r"cuda(?::(\d{1,3}))?|sm_\d+[a-z]?", target)
    if match is None:
        raise InvalidInput(f"target must be cpu, cuda, cuda:INDEX or an sm_ architecture; got {target}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise InvalidInput(f"target {target}: torch finds no CUDA device here; use cpu, or see `tilewright doctor`")
    index = int(match[1]) if match[1] else torch.cuda.current_device()
    if index >= count:
        raise InvalidInput(f"target {target}: torch finds {count} CUDA device(s), so the index goes up to {count - 1}")
    return index


@cache
def cpu_name() -> str:
    """The CPU's model name; its machine type where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for key in ("model name", "Model", "Hardware", "CPU part"):
        found = re.search(rf"^{key}\s*:\s*(.+)$", text, flags=re.MULTILINE)
        if found:
            return " ".join(found[1].split())[:TEXT_MAX]
    return platform.processor() or platform.machine() or "cpu"


def cpu_threads() -> int:
    """OpenMP threads a kernel gets here: `OMP_NUM_THREADS` where set, else the cores this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isdigit() and int(wanted) > 0:
        return min(int(wanted), 2**20)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def nvidia_driver_version() -> str:
    """The NVIDIA kernel driver's version (`550.54.15`), or an empty string."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def tilewright_version() -> str:
    """This package's version; `0` from a tree that was never installed."""
    try:
        return metadata.version("tilewright")
    except metadata.PackageNotFoundError:
        return "0"

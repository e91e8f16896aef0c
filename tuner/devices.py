"""What to tune on: the architecture, the devices of one model, and the lock that keeps timings alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tilewright.generator import toolchain
from tilewright.generator.arch import arch_named, arch_of_capability
from tilewright.generator.errors import InvalidInput, ToolMissing
from tilewright.runtime.environment import Environment, cuda_index, device_name


@dataclass(frozen=True, slots=True)
class TuningTarget:
    """An architecture and the devices it is tuned on, all of one model.

    devices: as torch names them (`cpu`, `cuda:0`). note: what the user should know about the choice, or empty.
    """

    arch: str
    devices: tuple[str, ...]
    environment: Environment
    note: str = ""


def resolve_target(text: str) -> TuningTarget:
    """The target that `auto`, `cpu`, `cuda` or `cuda:INDEX` means on this machine.

    `auto` is the GPU where it and nvcc work, else the CPU; `cuda` is every device of the first one's model.
    Raises `ToolMissing` (what to install) or `InvalidInput` (what else may stand there).
    """
    if text == "auto":
        return _auto()
    if text == "cpu":
        return _cpu("")
    if text == "cuda" or text.startswith("cuda:"):
        return _cuda(text)
    raise InvalidInput(f"target must be auto, cpu, cuda or cuda:INDEX; got {text!r}")


def _auto() -> TuningTarget:
    import torch

    if not torch.cuda.is_available():
        return _cpu("")
    try:
        return _cuda("cuda")
    except (ToolMissing, InvalidInput) as error:
        return _cpu(f"not the GPU: {error}")


def _cpu(note: str) -> TuningTarget:
    toolchain.ninja()
    environment = Environment.current("cpu", compiler=toolchain.compiler_identity("cpp"))
    return TuningTarget("cpu", ("cpu",), environment, note)


def _cuda(text: str) -> TuningTarget:
    import torch

    first = 0 if text == "cuda" and torch.cuda.is_available() else cuda_index(text)
    arch = arch_of_capability(*torch.cuda.get_device_capability(first)).name
    toolchain.ninja()
    toolchain.check_nvcc_release(toolchain.cuda_toolkit_for_torch(), arch_named(arch))
    environment = Environment.current(f"cuda:{first}", compiler=toolchain.compiler_identity("cuda"))
    if text != "cuda":
        return TuningTarget(arch, (f"cuda:{first}",), environment)
    # Times are compared with each other, so another model of GPU in the same machine is another tuning run.
    names = {f"cuda:{i}": device_name(f"cuda:{i}") for i in range(torch.cuda.device_count())}
    devices = tuple(device for device, name in names.items() if name == environment.device)
    others = sorted(set(names) - set(devices))
    note = f"only the {environment.device}; tune {', '.join(others)} with --target" if others else ""
    return TuningTarget(arch, devices, environment, note)


@contextmanager
def measuring_alone(device: str) -> Iterator[None]:
    """Hold this device for timing, so that two tuning processes on one machine do not spoil each other's times.

    A process that is killed lets go of it.
    """
    locks = toolchain.cache_dir() / "locks"
    locks.mkdir(mode=0o700, exist_ok=True)
    with open(locks / f"{device.replace(':', '-')}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield

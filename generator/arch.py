"""Architectures as data: what a kernel may use on each, and how it is compiled for it."""

from __future__ import annotations

import platform
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from tilewright.generator.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Arch:
    """One row of `architectures.toml`.

    name: `cpu`, or nvcc's real architecture (`sm_90a`).
    compute_capability: (major, minor); None on the CPU.
    instructions: the instruction families that exist there.
    smem_limit_bytes: shared memory one block may ask for; registers_per_block, max_registers_per_thread and
    max_threads_per_block: the other limits of a block.
    cp_async: whether shared memory can be filled asynchronously (`cp.async`, sm_80 and newer).
    min_nvcc: the oldest nvcc that knows the architecture.
    """

    name: str
    compute_capability: tuple[int, int] | None
    instructions: tuple[str, ...]
    dtypes: tuple[str, ...]
    smem_limit_bytes: int
    registers_per_block: int
    max_registers_per_thread: int
    max_threads_per_block: int
    cp_async: bool
    min_nvcc: tuple[int, int]

    @property
    def is_cpu(self) -> bool:
        return self.compute_capability is None

    @property
    def nvcc_flags(self) -> tuple[str, ...]:
        """The `-gencode` that emits machine code for this architecture alone; empty on the CPU."""
        if self.is_cpu:
            return ()
        number = self.name.removeprefix("sm_")
        return (f"-gencode=arch=compute_{number},code=sm_{number}",)

    @property
    def torch_arch(self) -> str:
        """The spelling of `TORCH_CUDA_ARCH_LIST`: `9.0a`."""
        if self.compute_capability is None:
            raise InvalidInput(f"{self.name} has no CUDA architecture; ask for one of {', '.join(gpu_names())}")
        major, minor = self.compute_capability
        return f"{major}.{minor}" + ("a" if self.name.endswith("a") else "")


@cache
def all_archs() -> dict[str, Arch]:
    """Every known architecture by name, the CPU first."""
    text = resources.files("tilewright.generator").joinpath("architectures.toml").read_text(encoding="utf-8")
    archs = {}
    for name, row in tomllib.loads(text).items():
        capability = row.get("compute_capability")
        archs[name] = Arch(
            name=name,
            compute_capability=(capability[0], capability[1]) if capability else None,
            instructions=tuple(row["instructions"]),
            dtypes=tuple(row["dtypes"]),
            smem_limit_bytes=row["smem_limit_bytes"],
            registers_per_block=row.get("registers_per_block", 65536),
            max_registers_per_thread=row.get("max_registers_per_thread", 255),
            max_threads_per_block=row.get("max_threads_per_block", 1024),
            cp_async=row["cp_async"],
            min_nvcc=tuple(row.get("min_nvcc", (11, 8))),
        )
    return archs


def gpu_names() -> list[str]:
    """The names of the GPU architectures."""
    return [name for name, arch in all_archs().items() if not arch.is_cpu]


def arch_named(name: str) -> Arch:
    """The architecture called `name`; `InvalidInput` lists the known ones otherwise."""
    archs = all_archs()
    if name not in archs:
        raise InvalidInput(f"unknown architecture {name!r}; known: {', '.join(archs)}")
    return archs[name]


def arch_of_capability(major: int, minor: int) -> Arch:
    """The newest known architecture whose machine code runs on compute capability `major.minor`.

    Code for X.Y runs on X.Z with Z >= Y; architecture-specific code (the `a` names) runs on its own X.Y alone.
    Raises `InvalidInput` for a device older or newer than every known architecture.
    """
    fitting = [
        arch
        for arch in all_archs().values()
        if arch.compute_capability is not None
        and arch.compute_capability[0] == major
        and (
            arch.compute_capability[1] == minor or (arch.compute_capability[1] < minor and not arch.name.endswith("a"))
        )
    ]
    if not fitting:
        raise InvalidInput(
            f"no known architecture runs on compute capability {major}.{minor}; known: {', '.join(gpu_names())}"
            "; add a table to generator/architectures.toml"
        )
    return max(fitting, key=lambda arch: arch.compute_capability or (0, 0))


def arch_distance(a: str, b: str) -> float:
    """How far apart two architectures are, for warm starts: 0 for the same, infinite between CPU and GPU."""
    one, other = arch_named(a).compute_capability, arch_named(b).compute_capability
    if a == b:
        return 0.0
    if one is None or other is None:
        return float("inf")
    return abs((one[0] + one[1] / 10) - (other[0] + other[1] / 10))


@cache
def host_cpu_flags() -> tuple[str, ...]:
    """The compiler flags for this CPU's vector instructions, spelled out.

    `-march=native` would hide the choice from the build digest, and a cache shared by two machines would then hand one
    machine's code to the other.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return ()
    flags = set(line.split())
    chosen: list[str] = []
    if {"avx2", "fma", "f16c"} <= flags:
        chosen += ["-mavx2", "-mfma", "-mf16c"]
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
            chosen += ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
    return tuple(chosen)

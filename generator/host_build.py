"""From a CUDA kernel to a library that a CPU executes: the same kernel.cu, compiled against `templates/_host`.

The library is a check, never a way to run fast: each access to memory calls the runtime that is linked into it.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import re
import shutil
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tilewright.generator import toolchain
from tilewright.generator.arch import host_cpu_flags
from tilewright.generator.build import ARTIFACT, MANIFEST, compile_failed, publish
from tilewright.generator.build_pool import available_cores
from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import digest_of
from tilewright.generator.render import Rendered
from tilewright.generator.resources import run_compiler

HOST = "host"
"""The directory in the cache: what lies there is never timed, stored or dispatched."""

MODULE_NAME = "tw_" + "0" * 16
"""What every module is called, so that one compilation of the binding serves all kernels."""

TIMEOUT_S = 300.0

SHARED_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-w")
RUNTIME_FLAGS = (*SHARED_FLAGS, "-O2")
BINDING_FLAGS = (*SHARED_FLAGS, "-O0")
KERNEL_FLAGS = (*SHARED_FLAGS, "-x", "c++", "-O1", "-g1")
WATCHED_FLAGS = (
    # Only the calls that tell of each access are wanted: the runtime answers them, and libtsan is not linked.
    "-fsanitize=thread",
    "-fsanitize=signed-integer-overflow,shift,bounds,alignment",
)
SANITIZE_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LINK_FLAGS = ("-shared", "-Wl,-Bsymbolic", "-Wl,--version-script=exports.map")
EXPORTS = "{ global: PyInit_*; tilewright_host_*; local: *; };\n"
"""With -Bsymbolic: every kernel in a process keeps to its own runtime."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Something compiled once for many kernels: an object named by a digest of all that went into it."""

    name: str
    key: dict[str, Any]

    @property
    def path(self) -> Path:
        return _root() / f"{self.name}-{digest_of(self.key)}" / f"{self.name}.o"


def build_host(rendered: Rendered, *, sanitize: bool = False) -> Path:
    """The library that executes a CUDA kernel on this CPU, compiled now unless it is already published.

    sanitize: watched by AddressSanitizer and UndefinedBehaviorSanitizer instead of by the runtime; it loads only into a
    process that has libasan first (`sanitizer_libraries`).
    Raises `CompileFailed` (its `log` and `source_path` are on disk), `TimedOut`, `ToolMissing`, and `InvalidInput` for
    kernels of another language and where the cache directory cannot be used.
    """
    if rendered.language != "cuda":
        raise InvalidInput(
            f"only CUDA kernels are built for the host check, got {rendered.kernel.spec.name} for"
            f" {rendered.kernel.arch}; a CPU kernel runs as it is, see `tilewright verify --target cpu`"
        )
    artifact = host_artifact_path(rendered, sanitize=sanitize)
    if not artifact.exists():
        toolchain.cache_dir()
        binding = _binding_part(rendered).path
        publish(binding, lambda directory: _make_binding(directory, rendered))
        objects = (binding, runtime_object())
        publish(artifact, lambda directory: _make_kernel(directory, rendered, objects, sanitize))
    return artifact


def runtime_object() -> Path:
    """What executes a kernel and watches it, as one object to link; compiled now unless it is already published.

    Raises what `build_host` does.
    """
    toolchain.cache_dir()
    path = runtime_path()
    publish(path, _make_runtime)
    return path


def runtime_path() -> Path:
    """Where `runtime_object` is published, whether or not it is there yet. Raises `ToolMissing`."""
    return _runtime_part().path


def host_artifact_path(rendered: Rendered, *, sanitize: bool = False) -> Path:
    """Where this kernel's host library is published, whether or not it is there yet. Raises `ToolMissing`."""
    return _root() / digest_of(_kernel_key(rendered, sanitize)) / ARTIFACT


def is_host_artifact(artifact: Path) -> bool:
    """Whether a library was built for the host check."""
    return artifact.parent.parent.name == HOST


def is_sanitized(artifact: Path) -> bool:
    """Whether a host library needs AddressSanitizer in its process."""
    try:
        return bool(json.loads(artifact.with_name(MANIFEST).read_text())["key"]["sanitize"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def sanitizer_libraries() -> list[Path]:
    """What LD_PRELOAD must name for sanitized libraries: libasan, then libstdc++, whose exceptions libasan looks up
    before Python's extensions bring them. Raises `ToolMissing`, and `InvalidInput` where the compiler has no libasan.
    """
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        _, output = run_compiler([str(toolchain.cxx_compiler().path), f"-print-file-name={name}"], TIMEOUT_S)
        path = Path(output.strip())
        if not path.is_absolute():
            raise InvalidInput(
                f"{toolchain.cxx_compiler().version} has no {name}; check without --sanitize, or install it with g++"
            )
        found.append(path.resolve())
    return found


def _root() -> Path:
    return toolchain.cache_path() / HOST


def _runtime_folder() -> Path:
    return Path(str(resources.files("tilewright.templates"))) / "_host"


def _runtime_digest() -> str:
    """A digest of every file of the runtime, names included."""
    digest = hashlib.sha256()
    for path in sorted(p for p in _runtime_folder().iterdir() if p.suffix in (".cpp", ".cuh", ".h")):
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _runtime_part() -> _Part:
    return _Part("runtime", {"runtime": _runtime_digest(), "flags": _runtime_flags(), "compiler": _compiler_version()})


def _binding_part(rendered: Rendered) -> _Part:
    text = hashlib.sha256(_binding_text(rendered).encode()).hexdigest()
    key = {"text": text, "flags": BINDING_FLAGS, "compiler": _compiler_version()}
    return _Part("binding", {**key, "python_abi": toolchain.python_abi()})


def _kernel_key(rendered: Rendered, sanitize: bool) -> dict[str, Any]:
    return {
        "module": MODULE_NAME,
        "source": hashlib.sha256(rendered.sources["kernel.cu"].encode()).hexdigest(),
        "runtime": _runtime_part().key,
        "binding": _binding_part(rendered).key,
        "flags": [*_kernel_flags(sanitize), *LINK_FLAGS, EXPORTS],
        "sanitize": sanitize,
    }


def _compiler_version() -> str:
    return toolchain.compiler_identity("cpp")


def _runtime_flags() -> list[str]:
    return [*RUNTIME_FLAGS, *host_cpu_flags()]


def _kernel_flags(sanitize: bool) -> list[str]:
    if sanitize:
        return [*KERNEL_FLAGS, *SANITIZE_FLAGS]
    # Entering and leaving functions is of no interest, and half of all calls.
    functions = ["-mllvm", "-tsan-instrument-func-entry-exit=0"]
    if "clang" not in _compiler_version():
        functions = ["--param", "tsan-instrument-func-entry-exit=0"]
    return [*KERNEL_FLAGS, *WATCHED_FLAGS, *functions]


def _binding_text(rendered: Rendered) -> str:
    """The binding as every kernel has it: its module called `MODULE_NAME`, and no comments, which name the variant."""
    text = rendered.sources["binding.cpp"].replace(rendered.module_name, MODULE_NAME)
    return re.sub(r"(?m)^//.*\n", "", text)


def _make_runtime(directory: Path) -> Path:
    """Every file of the runtime, as one object."""
    sources = sorted(_runtime_folder().glob("*.cpp"))
    objects = [directory / f"{source.stem}.o" for source in sources]
    with concurrent.futures.ThreadPoolExecutor(min(len(sources), available_cores())) as pool:
        compiled = [
            pool.submit(_compile, source, [*_runtime_flags(), "-c", str(source), "-o", str(target)], directory)
            for source, target in zip(sources, objects, strict=True)
        ]
        for done in compiled:
            done.result()
    linked = directory / "linked.o"
    _compile(sources[0], ["-r", "-nostdlib", *map(str, objects), "-o", str(linked)], directory)
    for leftover in objects:
        leftover.unlink()
    return linked


def _make_binding(directory: Path, rendered: Rendered) -> Path:
    source, made = directory / "binding.cpp", directory / "compiled.o"
    source.write_text(_binding_text(rendered), encoding="utf-8")
    python = f"-I{sysconfig.get_path('include', scheme='posix_prefix')}"
    _compile(source, [*BINDING_FLAGS, python, "-c", source.name, "-o", str(made)], directory)
    return made


def _make_kernel(directory: Path, rendered: Rendered, objects: Sequence[Path], sanitize: bool) -> Path:
    started = time.perf_counter()
    # Alone in its directory: beside the GPU's device.cuh that one would be included.
    source, compiled, linked = (directory / name for name in ("kernel.cu", "kernel.o", "linked.so"))
    source.write_text(rendered.sources["kernel.cu"], encoding="utf-8")
    include = f"-I{_runtime_folder()}"
    _compile(source, [*_kernel_flags(sanitize), include, "-c", source.name, "-o", compiled.name], directory)
    exports = directory / "exports.map"
    exports.write_text(EXPORTS)
    # Linked with the kernel's -fsanitize, the watched library would depend on libtsan.
    flags = [*LINK_FLAGS, *(SANITIZE_FLAGS if sanitize else ())]
    _compile(source, [*flags, compiled.name, *map(str, objects), "-o", linked.name], directory)
    for leftover in (compiled, exports):
        leftover.unlink()
    manifest = {
        "key": _kernel_key(rendered, sanitize),
        "kernel": rendered.kernel.to_dict(),
        "compile_s": round(time.perf_counter() - started, 3),
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return linked


def _compile(source: Path, arguments: Sequence[str], directory: Path) -> None:
    """Run the C++ compiler in the build directory; what fails is reported as this source's."""
    code, log = run_compiler([str(toolchain.cxx_compiler().path), *arguments], TIMEOUT_S, directory)
    if code:
        if source.parent != directory:  # a file of the runtime: its log belongs where the others' are
            source = Path(shutil.copy(source, directory / source.name))
        raise compile_failed(log, source)

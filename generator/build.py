"""From a kernel to a loadable `kernel.so`: look for the artifact, else compile it once and publish it whole."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewright.generator import toolchain
from tilewright.generator.arch import arch_named
from tilewright.generator.errors import CompileFailed, InvalidInput, LaunchFailed, ToolMissing
from tilewright.generator.problem import digest_of
from tilewright.generator.render import Rendered, render
from tilewright.generator.variant import Kernel

ARTIFACT = "kernel.so"
MANIFEST = "manifest.json"
LOG = "build.log"
SOURCES = {"kernel.cu": "cuda.cu", "kernel.cpp": "main.cpp", "binding.cpp": "main.cpp"}
"""What load_inline calls each source in the build directory; compiler errors point there. Others keep their names."""

FULL_DISK_BYTES = 4 << 20
"""With less than this free after a failed build, the disk is what failed."""

_IN_PROCESS = threading.Lock()


def build_key(rendered: Rendered) -> dict[str, Any]:
    """Everything but the compiler that a build depends on."""
    arch = arch_named(rendered.kernel.arch)
    sources = json.dumps(rendered.sources, sort_keys=True)
    return {
        "module": rendered.module_name,
        "sources": hashlib.sha256(sources.encode()).hexdigest(),
        "language": rendered.language,
        "arch": arch.name,
        "flags": toolchain.build_flags(arch, rendered.language),
        "torch": toolchain.torch_version(),
        "python_abi": toolchain.python_abi(),
    }


def build_digest(rendered: Rendered) -> str:
    """The name of a build: sources, flags, compiler, PyTorch, Python ABI and architecture. Raises `ToolMissing`."""
    return digest_of({**build_key(rendered), "compiler": toolchain.compiler_identity(rendered.language)})


def artifact_path(rendered: Rendered) -> Path:
    """Where this kernel's library is published, whether or not it is there yet. Raises `ToolMissing`."""
    return toolchain.cache_path() / "kernels" / build_digest(rendered) / ARTIFACT


def find_artifact(rendered: Rendered) -> Path | None:
    """The published library, or None.

    Needs no compiler: where there is none, a library counts whose manifest agrees in everything else.
    """
    root = toolchain.cache_path()
    if not root.is_dir():
        return None
    toolchain.check_cache_dir(root)
    try:
        path = artifact_path(rendered)
    except ToolMissing:
        return _find_by_manifest(root / "kernels", build_key(rendered))
    return path if path.exists() else None


def _find_by_manifest(kernels: Path, key: dict[str, Any]) -> Path | None:
    for manifest in sorted(kernels.glob(f"*/{MANIFEST}")):
        try:
            recorded = json.loads(manifest.read_text())
        except (OSError, ValueError):
            continue
        artifact = manifest.with_name(ARTIFACT)
        if isinstance(recorded, dict) and recorded.get("key") == key and artifact.exists():
            return artifact
    return None


def build(kernel: Kernel | Rendered) -> Path:
    """The kernel's library, compiled now unless it is already published.

    Of several processes that want the same kernel one compiles and the others wait for it.
    Raises `CompileFailed` (its `log` and `source_path` are on disk), `LaunchFailed` where the library cannot be
    loaded, `ToolMissing`, and `InvalidInput` where the cache directory cannot be used.
    """
    if isinstance(kernel, Kernel):
        kernel = render(kernel)
    found = find_artifact(kernel)
    if found is not None:
        return found
    key = build_key(kernel)
    toolchain.ninja()
    if kernel.language == "cuda":
        toolchain.check_nvcc_release(toolchain.cuda_toolkit_for_torch(), arch_named(kernel.kernel.arch))
    toolchain.cache_dir()
    artifact = artifact_path(kernel)
    publish(artifact, lambda directory: _build_in(directory, kernel, key))
    return artifact


def publish(artifact: Path, make: Callable[[Path], Path]) -> None:
    """Have `make` fill the artifact's directory, unless the artifact is there; appears whole or not at all.

    make: is given the empty directory and returns the finished file in it. Of several processes one makes it and the
    others wait. Raises what `make` raises, and `InvalidInput` where the cache directory cannot be used.
    """
    directory = artifact.parent
    try:
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        with _locked(directory.with_name(f"{directory.name}.lock")):
            if artifact.exists():
                return
            _discard(directory)
            directory.mkdir(mode=0o700)
            made = make(directory)
            with open(made, "rb") as handle:
                os.fsync(handle.fileno())
            made.rename(artifact)
    except OSError as error:
        raise InvalidInput(
            f"the cache directory {directory.parent} cannot be used: {error.strerror or error}"
            f"; free some space or set {toolchain.CACHE_VARIABLE}"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold this lock file; the kernel lets go of it whatever becomes of the process, so a killed build hangs nobody."""
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build_in(directory: Path, rendered: Rendered, key: dict[str, Any]) -> Path:
    started = time.perf_counter()
    for name in rendered.sources.keys() - SOURCES.keys():  # what is included, which load_inline does not write
        (directory / name).write_text(rendered.sources[name], encoding="utf-8")
    library = _load_inline(rendered, key["flags"], directory)
    manifest = {
        "key": key,
        "compiler": toolchain.compiler_identity(rendered.language),
        "kernel": rendered.kernel.to_dict(),
        "compile_s": round(time.perf_counter() - started, 3),
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for leftover in [*directory.glob("*.o"), *directory.glob("*.d"), *directory.glob(".ninja*")]:
        leftover.unlink()
    return library


def _discard(directory: Path) -> None:
    """Remove what a failed or killed build left, load_inline's own lock included.

    The directory is renamed first: a compiler that outlived its killed parent works relative to its own directory
    and must not write into the new one.
    """
    if directory.exists():
        stale = directory.with_name(f"{directory.name}.stale.{os.getpid()}.{time.monotonic_ns()}")
        directory.rename(stale)
        shutil.rmtree(stale, ignore_errors=True)


def _load_inline(rendered: Rendered, flags: list[str], directory: Path) -> Path:
    """Compile in `directory` through `load_inline`; returns the linked library."""
    from torch.utils import cpp_extension

    load_inline: Callable[..., object] = cpp_extension.load_inline  # PyTorch gives it no types
    name = rendered.module_name
    cuda = rendered.language == "cuda"
    cpp_source = rendered.sources["binding.cpp" if cuda else "kernel.cpp"]
    # --as-needed: the library then depends on nothing of libtorch, whose symbols it does not use.
    link_flags = ["-Wl,--as-needed"] if os.uname().sysname == "Linux" else []
    with _IN_PROCESS, toolchain.environment(toolchain.build_environment()):
        # load_inline keeps count of names within a process, and would skip a second build or rename its module.
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
        if cuda:
            home = toolchain.cuda_toolkit().home
            # Guessed from PATH when torch was imported, and wrong where nvcc there is a wrapper script.
            cpp_extension.CUDA_HOME = str(home)
            link_flags.append(f"-Wl,-rpath,{home / 'lib64'}")
        try:
            load_inline(
                name,
                cpp_sources=[cpp_source],
                cuda_sources=[rendered.sources["kernel.cu"]] if cuda else None,
                functions=None,
                extra_cflags=list(toolchain.CXX_FLAGS) if cuda else flags,
                # The flags name the architecture, so load_inline adds none and TORCH_CUDA_ARCH_LIST is not read.
                extra_cuda_cflags=[*flags, *toolchain.host_compiler_flags()] if cuda else None,
                extra_ldflags=link_flags if cuda else [*link_flags, "-fopenmp"],
                build_directory=str(directory),
                with_cuda=cuda,
                no_implicit_headers=True,
            )
        except ImportError as error:
            raise LaunchFailed(f"{name} was built but cannot be loaded: {error}; see {directory}") from error
        except RuntimeError as error:
            source = directory / SOURCES["kernel.cu" if cuda else "kernel.cpp"]
            raise compile_failed(str(error), source) from error
    return directory / f"{name}.so"


def compile_failed(log: str, source: Path) -> CompileFailed | InvalidInput:
    """What to raise after a compiler said `log` about this file in its build directory; the log is written there.

    `InvalidInput` where the disk is full.
    """
    directory = source.parent
    free = shutil.disk_usage(directory).free
    if free < FULL_DISK_BYTES:
        return InvalidInput(
            f"the disk of the cache directory {directory.parent} is full ({free >> 10} KiB left)"
            f"; free some space or set {toolchain.CACHE_VARIABLE}"
        )
    log_path = directory / LOG
    log_path.write_text(log)
    return CompileFailed(f"{first_errors(log)}; full log: {log_path}", log=log, source_path=source)


def first_errors(log: str, limit: int = 2) -> str:
    """The first lines of a compiler's log that report an error, as one line; the last line where none does."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\s*:|undefined reference|\bfatal\b\s*:", line)]
    return " | ".join(errors[:limit] or lines[-1:]) or "the compiler failed without a word"

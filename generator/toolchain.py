"""The compilers of this machine, the flags they are given, and the cache directory their artifacts go to."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tilewright.generator.arch import Arch, host_cpu_flags
from tilewright.generator.errors import InvalidInput, ToolMissing

CACHE_VARIABLE = "TILEWRIGHT_CACHE_DIR"
CXX_NAMES = ("c++", "g++", "clang++")
DEFAULT_CUDA_HOME = "/usr/local/cuda"

CXX_FLAGS = (
    "-O3",
    "-std=c++17",
    # Two variants define the same names; hidden, neither can be bound to the other's.
    "-fvisibility=hidden",
)
CPU_FLAGS = (
    *CXX_FLAGS,
    "-fopenmp",
    # Not -ffast-math: a masked score is -inf, and lse of an empty row must stay -inf.
    "-fno-math-errno",
    "-ffp-contract=fast",
)
CUDA_FLAGS = (
    "-O3",
    "-std=c++17",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fvisibility=hidden",
    # load_inline switches the half and bfloat16 operators off; the templates are written with them on.
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
)


@dataclass(frozen=True, slots=True)
class Tool:
    """One program: where it is and the line of `--version` that tells it from others."""

    path: Path
    version: str


@dataclass(frozen=True, slots=True)
class CudaToolkit:
    """nvcc, the toolkit directory that holds its headers and libraries, and its (major, minor) release."""

    path: Path
    version: str
    home: Path
    release: tuple[int, int]


def cxx_compiler() -> Tool:
    """The C++ compiler: `CXX` where set, else the first of c++, g++, clang++. Raises `ToolMissing`."""
    return _cxx_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@lru_cache
def _cxx_compiler(cxx: str, search_path: str) -> Tool:
    for name in (cxx,) if cxx else CXX_NAMES:
        found = shutil.which(name, path=search_path)
        if found:
            return Tool(Path(found), _version_line(found))
    if cxx:
        raise ToolMissing(
            f"the C++ compiler that CXX names does not exist: {cxx!r}; set CXX to one program, or unset it"
        )
    raise ToolMissing(
        f"no C++ compiler: none of {', '.join(CXX_NAMES)} is on PATH; install g++ (`apt install g++`) or set CXX"
    )


def ninja() -> Tool:
    """ninja: the one on PATH, else the one of the Python package `ninja`. Raises `ToolMissing`."""
    return _ninja(os.environ.get("PATH", ""))


@lru_cache
def _ninja(search_path: str) -> Tool:
    # A console script run as .venv/bin/tilewright has its own ninja beside it, but not on PATH.
    beside_python = str(Path(sys.executable).parent)
    for place in (search_path, beside_python, _packaged_ninja()):
        found = shutil.which("ninja", path=place) if place else None
        if found:
            return Tool(Path(found), _version_line(found))
    raise ToolMissing("no ninja: it is neither on PATH nor a Python package here; run `pip install ninja`")


def _packaged_ninja() -> str:
    try:
        import ninja as package
    except ImportError:
        return ""
    return str(getattr(package, "BIN_DIR", ""))


def cuda_toolkit() -> CudaToolkit:
    """nvcc and its toolkit: `CUDA_HOME` or `CUDA_PATH`, then PATH, then /usr/local/cuda. Raises `ToolMissing`."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or ""
    return _cuda_toolkit(home, os.environ.get("PATH", ""))


@lru_cache
def _cuda_toolkit(home: str, search_path: str) -> CudaToolkit:
    if home:
        candidates = [Path(home) / "bin" / "nvcc"]
    else:
        on_path = shutil.which("nvcc", path=search_path)
        candidates = [Path(on_path)] if on_path else []
        candidates.append(Path(DEFAULT_CUDA_HOME) / "bin" / "nvcc")
    for nvcc in candidates:
        # A wrapper script in /usr/local/bin runs nvcc, but its directory has no headers: the next candidate then.
        toolkit = next((h for h in (nvcc.parent.parent, nvcc.resolve().parent.parent) if _has_headers(h)), None)
        if toolkit and os.access(toolkit / "bin" / "nvcc", os.X_OK):
            nvcc = toolkit / "bin" / "nvcc"
            text = _version_text(str(nvcc))
            release = re.search(r"release (\d+)\.(\d+), (V[\d.]+)", text)
            if release:
                return CudaToolkit(nvcc, f"nvcc {release[3]}", toolkit, (int(release[1]), int(release[2])))
    raise ToolMissing(
        f"no CUDA compiler: nvcc with its headers is not at {', '.join(map(str, candidates))}; install the CUDA toolkit"
        " of PyTorch's CUDA version (torch.version.cuda) and set CUDA_HOME to its directory"
    )


def _has_headers(home: Path) -> bool:
    return (home / "include" / "cuda_runtime.h").exists()


def cuda_toolkit_for_torch() -> CudaToolkit:
    """The toolkit, checked to be usable through `load_inline` with this PyTorch. Raises `ToolMissing`."""
    import torch

    if torch.version.cuda is None:
        raise ToolMissing(
            f"this PyTorch ({torch.__version__}) is built without CUDA, so CUDA kernels cannot be built for it"
            "; install a CUDA build of PyTorch, or use target cpu"
        )
    return cuda_toolkit()


def check_nvcc_release(toolkit: CudaToolkit, arch: Arch) -> None:
    """Raise `ToolMissing` where this nvcc is older than the first that knows `arch`."""
    if toolkit.release < arch.min_nvcc:
        needed = ".".join(map(str, arch.min_nvcc))
        raise ToolMissing(
            f"{arch.name} needs nvcc {needed} or newer, found {toolkit.version} at {toolkit.path}; update it"
        )


def _version_text(program: str) -> str:
    try:
        run = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as cause:
        raise ToolMissing(
            f"{program} is there but `{program} --version` fails: {cause}; repair or reinstall it"
        ) from cause
    return run.stdout


def _version_line(program: str) -> str:
    return (_version_text(program).splitlines() or ["unknown"])[0].strip()


def build_flags(arch: Arch, language: str) -> list[str]:
    """The flags for kernels of `arch`: of the C++ compiler for language "cpp", of nvcc for "cuda"."""
    if language == "cuda":
        return [*CUDA_FLAGS, *arch.nvcc_flags]
    return [*CPU_FLAGS, *host_cpu_flags()]


def host_compiler_flags() -> list[str]:
    """What makes nvcc use the C++ compiler that `CXX` names, where nothing else already tells it which."""
    if os.environ.get("CXX") and not os.environ.get("CC") and not os.environ.get("NVCC_CCBIN"):
        return [f"-ccbin={cxx_compiler().path}"]
    return []


def compiler_identity(language: str) -> str:
    """The versions that a build depends on, as one line. Raises `ToolMissing` where there is no compiler."""
    cxx = cxx_compiler().version
    return f"{cuda_toolkit().version}, {cxx}" if language == "cuda" else cxx


def python_abi() -> str:
    """The ABI that an extension module is tied to, such as `cpython-312-x86_64-linux-gnu`."""
    return str(sysconfig.get_config_var("SOABI"))


def torch_version() -> str:
    """PyTorch's version, local part included: load_inline's own flags change with it."""
    import torch

    return str(torch.__version__)


def build_environment() -> dict[str, str]:
    """What must differ from this process's environment so that load_inline finds the same tools as we do."""
    changes: dict[str, str] = {}
    search_path = os.environ.get("PATH", "")
    if shutil.which("ninja", path=search_path) is None:
        changes["PATH"] = os.pathsep.join(p for p in (search_path, str(ninja().path.parent)) if p)
    if not os.environ.get("CXX") and shutil.which("c++", path=search_path) is None:
        changes["CXX"] = str(cxx_compiler().path)
    return changes


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Set these environment variables, and put back what was there."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cache_path() -> Path:
    """Where the cache directory is or would be; nothing is created or checked."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tilewright"


def cache_dir() -> Path:
    """The cache directory, created with mode 0700 where it is missing, and writable.

    Raises `InvalidInput` where it cannot be made or written, or where others could plant binaries in it.
    """
    path = cache_path()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(_cache_advice(path, f"cannot be created: {error.strerror}")) from error
    check_cache_dir(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidInput(_cache_advice(path, "cannot be written"))
    return path


def check_cache_dir(path: Path) -> None:
    """Raise `InvalidInput` where another user could put a library of his own into this directory."""
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidInput(_cache_advice(path, "is not a directory"))
    if status.st_uid != os.getuid():
        raise InvalidInput(_cache_advice(path, f"belongs to user id {status.st_uid}, not to you ({os.getuid()})"))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise InvalidInput(
            f"the cache directory {path} has mode {mode:04o}, so others could plant binaries in it"
            f"; run `chmod go-w {path}` or set {CACHE_VARIABLE} to a directory of your own"
        )


def _cache_advice(path: Path, problem: str) -> str:
    return f"the cache directory {path} {problem}; set {CACHE_VARIABLE} to a directory of your own that can be written"

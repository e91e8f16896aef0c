"""A compiled kernel, loaded: the way from tensors and a mask plan to one launch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from tilewright.generator.errors import IllegalAccess, LaunchFailed, OutOfMemory
from tilewright.generator.variant import Kernel

if TYPE_CHECKING:
    from tilewright.runtime.plans import MaskPlan

MAX_SEQLEN = 2**30 - 1
"""Positions and window sides are 32-bit in kernels, and the sum of two of them must be too."""

WORKSPACE_ALIGNED = 256
"""What a kernel may expect of its workspace's address; PyTorch's allocators give 64 on the CPU."""

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, which the CPU kernels report too
_ILLEGAL_ACCESS = frozenset({700, 714, 715, 716, 717, 718, 719})  # CUDA's errors of a kernel that faulted


def current_stream(index: int) -> int:
    """The current CUDA stream's address; a stream object would cost 2 us more."""
    if hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return int(torch._C._cuda_getCurrentRawStream(index))
    return int(torch.cuda.current_stream(index).cuda_stream)


def make_workspace(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes of scratch from a multiple of `WORKSPACE_ALIGNED` on."""
    room = torch.empty(size, dtype=torch.uint8, device=device)
    if room.data_ptr() % WORKSPACE_ALIGNED == 0:  # always so from CUDA's allocators; slicing takes 2 to 4 us
        return room
    room = torch.empty(size + WORKSPACE_ALIGNED, dtype=torch.uint8, device=device)
    return room[-room.data_ptr() % WORKSPACE_ALIGNED :][:size]


class LoadedKernel:
    """One artifact in this process.

    path: the shared object that `generator.build` published. kernel: what it was made from.
    Raises `LaunchFailed` when it cannot be loaded.
    """

    def __init__(self, path: Path, kernel: Kernel, module_name: str) -> None:
        self.path = path
        self.kernel = kernel
        loader = importlib.machinery.ExtensionFileLoader(module_name, str(path))
        spec = importlib.util.spec_from_file_location(module_name, str(path), loader=loader)
        if spec is None:
            raise LaunchFailed(f"{path} is not a Python extension module")
        try:
            module: Any = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            raise LaunchFailed(f"{path} does not load: {error}") from error
        self._launch = cast(Callable[..., int], module.launch)
        self._error_name = cast(Callable[[int], str], module.error_name)
        self._info = cast(Callable[[], dict[str, int]], module.info)
        self._workspace_bytes = cast("Callable[..., int] | None", getattr(module, "workspace_bytes", None))

    def info(self) -> dict[str, int]:
        """Registers and local bytes a thread, shared memory in bytes and most threads a block; zeros on the CPU."""
        return self._info()

    def launch(self, values: Sequence[int | float], touched: Mapping[str, tuple[torch.Tensor, bool]]) -> None:
        """Run it on these arguments, in the order of `generator.abi.ARGUMENTS`.

        touched: the tensors that they point at by argument, and whether the kernel may write them; a kernel that is
        watched (`tuner.host_kernel`) may touch nothing else. Raises `LaunchFailed`, `OutOfMemory` or `IllegalAccess`.
        """
        code = self._launch(*values)
        if code:
            self._raise(code)

    def workspace_bytes(self, values: Sequence[int | float]) -> int:
        """Bytes of scratch that `launch` of these arguments needs, the workspace's own address left out (0)."""
        assert self._workspace_bytes is not None, "only asked of kernels that have one"
        return self._workspace_bytes(*values)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: MaskPlan,
        scale: float,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of [B, Hq, Nq, D] over [B, Hkv, Nkv, D], any strides with the last one 1.

        Returns `out` ([B, Hq, Nq, D], query's dtype) and `lse` ([B, Hq, Nq], float32), which may be given.
        Raises `LaunchFailed`, `OutOfMemory` or `IllegalAccess`.
        """
        batch, num_heads, seqlen_q, _ = query.shape
        num_kv_heads, seqlen_kv = key.shape[1], key.shape[2]
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if lse is None:
            lse = torch.empty((batch, num_heads, seqlen_q), dtype=torch.float32, device=query.device)
        if out.numel() == 0:
            return out, lse
        if query.is_cuda:
            index = query.device.index
            where = (index, 0, current_stream(index))
        else:
            where = (0, torch.get_num_threads(), 0)
        values = (
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            batch,
            num_heads,
            num_kv_heads,
            seqlen_q,
            seqlen_kv,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *out.stride()[:3],
            float(scale),
            *plan.arguments,
            *where,
        )
        if self._workspace_bytes is None:
            code = self._launch(*values)
        else:
            # Asked with its device the current one: a kernel may prepare itself there, and count multiprocessors.
            elsewhere = query.is_cuda and torch.cuda.current_device() != query.device.index
            with torch.cuda.device(query.device) if elsewhere else nullcontext():
                size = self._workspace_bytes(*values, 0)
            workspace = self.workspace(size, query.device) if size else None
            code = self._launch(*values, 0 if workspace is None else workspace.data_ptr())
        if code:
            self._raise(code)
        return out, lse

    def workspace(self, size: int, device: torch.device) -> torch.Tensor:
        """Scratch for one launch of `run`."""
        return make_workspace(size, device)

    def _raise(self, code: int) -> None:
        message = f"{self.kernel.spec.name} for {self.kernel.dtype} D{self.kernel.head_dim}: {self._error_name(code)}"
        if code == _OUT_OF_MEMORY:
            raise OutOfMemory(message)
        if code in _ILLEGAL_ACCESS:
            raise IllegalAccess(message)
        raise LaunchFailed(message)

"""A kernel whose workspace is watched: poisoned before each launch, and what is written beside it counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tilewright.generator.abi import ARGUMENTS
from tilewright.generator.variant import Kernel
from tilewright.runtime.launch import WORKSPACE_ALIGNED, LoadedKernel

ALIGNED = WORKSPACE_ALIGNED
"""In bytes; it also is the room that is watched on either side."""

POISON = 0xA5


class GuardedWorkspace:
    """Stands before a loaded kernel of an operation with a workspace; `written_beside` tells of all its launches."""

    def __init__(self, loaded: LoadedKernel) -> None:
        self._loaded = loaded
        names = [argument.name for argument in ARGUMENTS[loaded.kernel.operation]]
        self._place = names.index("workspace")
        self._damage: list[Tensor] = []

    @property
    def kernel(self) -> Kernel:
        """What the kernel was made from."""
        return self._loaded.kernel

    def workspace_bytes(self, values: Sequence[int | float]) -> int:
        """As the kernel says."""
        return self._loaded.workspace_bytes(values)

    def launch(self, values: Sequence[int | float], touched: Mapping[str, tuple[Tensor, bool]]) -> None:
        """Launch it on a workspace of its own, of the same size."""
        given, _ = touched["workspace"]
        room = torch.full((given.numel() + 3 * ALIGNED,), POISON, dtype=torch.uint8, device=given.device)
        start = ALIGNED + -room.data_ptr() % ALIGNED
        own = room[start : start + given.numel()]
        values = (*values[: self._place], own.data_ptr(), *values[self._place + 1 :])
        self._loaded.launch(values, {**touched, "workspace": (own, True)})
        beside = (room[:start], room[start + given.numel() :])
        self._damage.append(torch.stack([(part != POISON).count_nonzero() for part in beside]).sum())

    def written_beside(self) -> Tensor:
        """Bytes beside the workspaces that are not what they were (a device scalar)."""
        return torch.stack(self._damage).sum()

"""Kernels of the two stages in PyTorch: called as compiled ones are, by the arguments of a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.generator.abi import ARGUMENTS
from tilewright.generator.space import default_variant
from tilewright.generator.variant import Kernel, kernel_of
from tilewright.runtime.selection import SELECT_BLOCKS, SELECTED_ATTENTION, Selection

WORKSPACE_BYTES = 512

Spoil = Callable[[Mapping[str, Any], Mapping[str, Tensor]], None]
"""Something wrong that is done after a right answer: the launch's numbers, and its tensors by argument."""


class Stub:
    """What a `LoadedKernel` is to whoever launches it. Writes its workspace from end to end."""

    operation: str

    def __init__(self, dtype: str = "float32", causal: bool = False, spoil: Spoil | None = None, head_dim: int = 32):
        selection = Selection(16, 2, 2, causal=causal)
        sizes = {"batch": 1, "num_heads": 2, "num_kv_heads": 2, "seqlen_q": 64, "seqlen_kv": 64}
        problem = selection.problem(self.operation, dtype=dtype, head_dim=head_dim, target="cpu", **sizes)
        self.kernel: Kernel = kernel_of(problem, default_variant(problem))
        self.causal = causal
        self.spoil = spoil or (lambda numbers, tensors: None)
        self.launches = 0

    def workspace_bytes(self, values: Sequence[int | float]) -> int:
        return WORKSPACE_BYTES

    def launch(self, values: Sequence[int | float], touched: Mapping[str, tuple[Tensor, bool]]) -> None:
        names = [argument.name for argument in ARGUMENTS[self.operation]]
        numbers: dict[str, Any] = dict(zip(names, values, strict=True))
        tensors = {name: tensor for name, (tensor, _) in touched.items()}
        for name, tensor in tensors.items():
            assert numbers[name] == tensor.data_ptr()
        assert tensors["workspace"].numel() == WORKSPACE_BYTES
        assert numbers["workspace"] % 256 == 0
        tensors["workspace"].fill_(7)
        self.launches += 1
        self.compute(numbers, tensors)
        self.spoil({**numbers, "launches": self.launches}, tensors)

    def compute(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        raise NotImplementedError


class SelectStub(Stub):
    """Chooses in float32, block by block and group by group."""

    operation = SELECT_BLOCKS

    def compute(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        query, key, budgets = (tensors[name] for name in ("query", "key", "budgets"))
        indices, counts = tensors["indices"], tensors["counts"]
        size, group, choosers = (numbers[name] for name in ("block_size", "query_group", "num_choosers"))
        means = [block.float().mean(2).to(key.dtype) for block in key.split(size, 2)]
        blocks = torch.stack(means, 2).float()
        heads, shared = query.shape[1] // choosers, choosers // key.shape[1]
        offset = key.shape[2] - query.shape[2]
        for b in range(query.shape[0]):
            for c in range(choosers):
                for g in range(numbers["num_groups"]):
                    first, stop = g * group, min((g + 1) * group, query.shape[2])
                    rows = query[b, c * heads : (c + 1) * heads, first:stop]
                    asker = rows.reshape(-1, rows.shape[-1]).float().mean(0).to(query.dtype).float()
                    scores = self.scores(asker, blocks[b, c // shared])
                    scores = scores.nan_to_num(-torch.inf, torch.finfo(torch.float32).max, -torch.inf)
                    ranked = self.rank(scores, first + offset, stop - 1 + offset, numbers)
                    order = ranked.argsort(descending=True, stable=True)
                    taken = order[: int(min((ranked > -torch.inf).sum(), budgets[c]))].sort().values
                    indices[b, c, g] = -1
                    indices[b, c, g, : len(taken)] = taken.to(torch.int32)
                    counts[b, c, g] = len(taken)

    def scores(self, asker: Tensor, blocks: Tensor) -> Tensor:
        return blocks @ asker

    def rank(self, scores: Tensor, first: int, last: int, numbers: Mapping[str, Any]) -> Tensor:
        size = numbers["block_size"]
        window = max(numbers["window_blocks"], int(self.causal))
        for block in range(len(scores)):
            near = max(first, 0) // size - window < block <= last // size + (0 if self.causal else window - 1)
            if self.causal and block * size > last:
                scores[block] = -torch.inf
            elif block < numbers["sink_blocks"] or (window and near):
                scores[block] = torch.inf
        return scores


class SelectedStub(Stub):
    """Attends in float32, row by row."""

    operation = SELECTED_ATTENTION

    def compute(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        query, key, value, out, lse = (tensors[name] for name in ("query", "key", "value", "out", "lse"))
        size, choosers = numbers["block_size"], numbers["num_choosers"]
        for b in range(query.shape[0]):
            for head in range(query.shape[1]):
                kv_head = head // (query.shape[1] // key.shape[1])
                chooser = head // (query.shape[1] // choosers)
                for row in range(query.shape[2]):
                    group = row // numbers["query_group"]
                    count = int(tensors["counts"][b, chooser, group])
                    entries = tensors["indices"][b, chooser, group, :count].tolist()
                    tokens = self.tokens(entries, size, key.shape[2], row + key.shape[2] - query.shape[2], numbers)
                    if not tokens:
                        out[b, head, row], lse[b, head, row] = 0.0, -torch.inf
                        continue
                    logits = key[b, kv_head, tokens].float() @ query[b, head, row].float() * numbers["softmax_scale"]
                    lse[b, head, row] = torch.logsumexp(logits, 0)
                    out[b, head, row] = torch.softmax(logits, 0) @ value[b, kv_head, tokens].float()

    def tokens(
        self, entries: Sequence[int], size: int, seqlen_kv: int, position: int, numbers: Mapping[str, Any]
    ) -> list[int]:
        real = [block for block in entries if 0 <= block < numbers["num_blocks"]]
        seen = [token for block in real for token in range(block * size, min((block + 1) * size, seqlen_kv))]
        return [token for token in seen if token <= position] if self.causal else seen

"""Queries, keys and values to try block sizes and budgets on: made here in known ways, or read from a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.generator.errors import InvalidInput, ToolMissing
from tilewright.generator.problem import DTYPES, HEAD_DIM_MAX, HEAD_DIM_MULTIPLE

NAMES = ("query", "key", "value")
"""The tensors that a file must have."""

MISSING = "safetensors is not installed, which reads the file; pip install 'tilewright[safetensors]'"

SINKS = 4
"""Tokens at the beginning that `sink` lets draw mass, as language models' first tokens do."""

SINK_MASS = 0.5
"""What they draw together, about."""

LOCAL_WIDTH = 128
"""The distance, in tokens, at which `local` has let most of its preference go (a Gaussian's standard deviation)."""

LOCAL_LOGIT = 8.0
"""The logit of a query's own position under `local`, above that of a far one: exp(8) is 3000 times the weight."""

NEEDLES = 2
"""Keys that each query of `needle` matches, anywhere in the sequence."""

NEEDLE_MASS = 0.5
"""What they draw together, about; less where head_dim is too small for so many directions."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One attention call's tensors: query [B, H, Nq, D], key and value [B, Hkv, Nkv, D].

    name: what they are, for titles. scale: what multiplies query . key.
    """

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float

    def to(self, device: torch.device, dtype: torch.dtype) -> AttentionInputs:
        """The same on a device, in a dtype."""
        query, key, value = (t.to(device, dtype) for t in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)


def synthetic(
    kind: str, *, num_heads: int, seqlen: int, head_dim: int, scale: float | None = None, seed: int = 0
) -> AttentionInputs:
    """One batch entry in float32 of a kind in `SYNTHETIC`, the same everywhere; raises `InvalidInput` for another.

    Logits are what the kinds say at the default scale, head_dim ** -0.5.
    """
    if kind not in SYNTHETIC:
        raise InvalidInput(f"--synthetic must be one of {', '.join(SYNTHETIC)}; got {kind!r}")
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(num_heads, seqlen, head_dim, generator=generator) for _ in range(3))
    query, key = SYNTHETIC[kind](query, key, generator)
    return AttentionInputs(kind, query[None], key[None], value[None], head_dim**-0.5 if scale is None else scale)


def first_tokens(inputs: AttentionInputs, count: int) -> AttentionInputs:
    """The first `count` tokens; raises `InvalidInput` where there are fewer queries or keys."""
    there = min(inputs.query.shape[2], inputs.key.shape[2])
    if count > there:
        raise InvalidInput(f"--length must be at most {there}, the tokens of {inputs.name}; got {count}")
    query, key, value = (t[:, :, :count].contiguous() for t in (inputs.query, inputs.key, inputs.value))
    return replace(inputs, query=query, key=key, value=value)


Pair = tuple[Tensor, Tensor]


def _local(query: Tensor, key: Tensor, generator: torch.Generator) -> Pair:
    """Logits of `LOCAL_LOGIT` exp(-distance^2 / 2 `LOCAL_WIDTH`^2), about, and noise of deviation 1.

    Positions are random Fourier features: cosines and sines of angles whose speeds are normal, so that the product of
    two has a Gaussian of their distance as its mean.
    """
    _, seqlen, head_dim = query.shape
    speeds = torch.randn(head_dim // 2, generator=generator) / LOCAL_WIDTH
    angles = torch.arange(seqlen).unsqueeze(1) * speeds
    places = torch.cat([angles.cos(), angles.sin()], 1) * (head_dim // 2) ** -0.5
    strength = math.sqrt(LOCAL_LOGIT * math.sqrt(head_dim))
    return query + strength * places, key + strength * places


def _sink(query: Tensor, key: Tensor, generator: torch.Generator) -> Pair:
    """Noise, and a direction that all queries and the first `SINKS` keys have, which draw `SINK_MASS`."""
    _, seqlen, head_dim = query.shape
    direction = F.normalize(torch.randn(query.shape[0], 1, head_dim, generator=generator), dim=-1)
    logit = _logit_for(SINK_MASS, SINKS, seqlen)
    strength = math.sqrt(max(logit, 0.0) * math.sqrt(head_dim))
    # Out of the noise, so that the direction means nothing but this.
    query, key = (t - (t * direction).sum(-1, keepdim=True) * direction for t in (query, key))
    key = key.clone()
    key[:, :SINKS] += strength * direction
    return query + strength * direction, key


def _needle(query: Tensor, key: Tensor, generator: torch.Generator) -> Pair:
    """Noise, and in each query the directions of `NEEDLES` keys of its head, at random, which draw `NEEDLE_MASS`."""
    heads, seqlen, head_dim = query.shape
    places = torch.randint(0, seqlen, (heads, seqlen, NEEDLES), generator=generator)
    found = key.gather(1, places.flatten(1).unsqueeze(2).expand(-1, -1, head_dim)).view(heads, seqlen, NEEDLES, -1)
    wanted = F.normalize(found, dim=-1).sum(2)
    # The directions score other keys too, with a variance of NEEDLES logit^2 / head_dim, half of which adds to the
    # logarithm of the others' mass: a quadratic equation for the logit.
    half, needed = NEEDLES / (2 * head_dim), _logit_for(NEEDLE_MASS, NEEDLES, seqlen)
    logit = (1 - math.sqrt(max(0.0, 1 - 4 * half * needed))) / (2 * half)
    return 0.5 * query + logit * wanted, key


def _mix(query: Tensor, key: Tensor, generator: torch.Generator) -> Pair:
    """Heads in turn of the three other kinds."""
    kinds = [_local, _sink, _needle]
    parts = [kinds[head % len(kinds)](query[head, None], key[head, None], generator) for head in range(len(query))]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


SYNTHETIC: dict[str, Callable[[Tensor, Tensor, torch.Generator], Pair]] = {
    "local": _local,
    "sink": _sink,
    "needle": _needle,
    "mix": _mix,
}
"""Kinds of inputs: from standard normal queries and keys [H, N, D] to those that the kind makes of them."""


def _logit_for(mass: float, keys: int, seqlen: int) -> float:
    """The logit at which `keys` keys hold this share of the softmax over `seqlen`, others being standard normal."""
    others = max(seqlen - keys, 1) * math.exp(0.5)  # the mean of exp of a standard normal
    return max(0.0, math.log(mass / (1 - mass) * others / keys))


def read_inputs(path: Path, scale: float | None = None) -> AttentionInputs:
    """The tensors query, key and value of a safetensors file, [B, H, N, D] or [H, N, D].

    A head_dim that is no multiple of 16 is filled up with zeros, which changes no score; scale is by default that of
    the file's head_dim. Raises `ToolMissing` without safetensors, `InvalidInput` for what does not fit.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ToolMissing(MISSING) from error
    try:
        with safe_open(path, framework="pt") as file:
            there = list(file.keys())
            missing = [name for name in NAMES if name not in there]
            if missing:
                raise InvalidInput(
                    f"{path} has no {', '.join(missing)}; it needs tensors named {', '.join(NAMES)}, and has "
                    f"{', '.join(there) or 'none'}"
                )
            query, key, value = (file.get_tensor(name) for name in NAMES)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidInput(f"{path} cannot be read as safetensors: {reason}") from error
    query, key, value = (_four_dimensions(name, t, path) for name, t in zip(NAMES, (query, key, value), strict=True))
    _check_fit(query, key, value, path)
    head_dim = query.shape[3]
    short = -head_dim % HEAD_DIM_MULTIPLE
    query, key, value = (F.pad(t, (0, short)) for t in (query, key, value))
    return AttentionInputs(path.stem, query, key, value, head_dim**-0.5 if scale is None else scale)


def _four_dimensions(name: str, tensor: Tensor, path: Path) -> Tensor:
    if tensor.dim() not in (3, 4):
        raise InvalidInput(
            f"{name} in {path} must be [batch, heads, tokens, head_dim] or [heads, tokens, head_dim]; "
            f"got {list(tensor.shape)}"
        )
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise InvalidInput(f"{name} in {path} must be {', '.join(DTYPES)}; got {tensor.dtype}; convert it first")
    if not tensor.numel() or tensor.shape[-1] > HEAD_DIM_MAX:
        raise InvalidInput(
            f"{name} in {path} must have elements and a head_dim of at most {HEAD_DIM_MAX}; got {list(tensor.shape)}"
        )
    return tensor if tensor.dim() == 4 else tensor[None]


def _check_fit(query: Tensor, key: Tensor, value: Tensor, path: Path) -> None:
    shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(NAMES, (query, key, value), strict=True))
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        raise InvalidInput(f"query, key and value in {path} must have one dtype; convert two of them")
    fits = key.shape == value.shape and query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    if not fits or query.shape[1] % key.shape[1]:
        raise InvalidInput(
            f"{path}: key and value must have one shape, batch and head_dim must be query's, and query's heads a "
            f"multiple of theirs; got {shapes}"
        )

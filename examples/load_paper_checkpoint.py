"""Load a checkpoint in the format of the Depth-Attention paper, mix it and run it.

python examples/load_paper_checkpoint.py FOLDER [--text FILE] [--prompt TEXT]

The folder holds config.json, safetensors files and a tokenizer. The decoder is Llama with a norm of queries
before the rotary embedding and of keys after it, in plain PyTorch that knows nothing of mixing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthify import depthify, explain

Pair = tuple[Tensor, Tensor]


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.size = config.get("head_dim") or width // heads
        kv_heads, bias = config.get("num_key_value_heads") or heads, bool(config.get("attention_bias"))
        self.q_proj = nn.Linear(width, heads * self.size, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(heads * self.size, width, bias=bias)
        normed = config.get("use_qk_norm", True)
        self.q_norm = nn.RMSNorm(self.size, config["rms_norm_eps"]) if normed else nn.Identity()
        self.k_norm = nn.RMSNorm(self.size, config["rms_norm_eps"]) if normed else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: Pair | None
    ) -> tuple[Tensor, Pair]:
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for project in projections)
        q = rotated(self.q_norm(q), cos, sin)
        k = self.k_norm(rotated(k, cos, sin))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.self_attn = Attention(config)
        sizes = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, Pair]:
        attended, present = self.self_attn(self.input_layernorm(x), *rest)
        x = x + attended
        h, mlp = self.post_attention_layernorm(x), self.mlp
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h)), present


class Decoder(nn.Module):
    """forward(ids, past=None) -> (logits, present); the cache is a list of a key and a value per layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        if config.get("rope_scaling"):
            raise ValueError(f"rope_scaling={config['rope_scaling']!r}: only plain rotation is known here")
        width = config["hidden_size"]
        self.size = config.get("head_dim") or width // config["num_attention_heads"]
        self.base = config.get("rope_theta") or 10000.0
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(width, config["rms_norm_eps"])
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)
        if config.get("tie_word_embeddings"):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor, past: list[Pair] | None = None) -> tuple[Tensor, list[Pair]]:
        x, before = self.model.embed_tokens(ids), 0 if past is None else past[0][0].shape[2]
        at = torch.arange(before, before + ids.shape[1], device=ids.device)
        frequencies = self.base ** -(torch.arange(0, self.size, 2, device=ids.device).double() / self.size)
        angles = (at[:, None] * frequencies).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = torch.arange(before + ids.shape[1], device=ids.device)[None] <= at[:, None]
        present = []
        for layer, old in zip(self.model.layers, past or [None] * len(self.model.layers), strict=True):
            x, pair = layer(x, cos, sin, mask, old)
            present.append(pair)
        return self.lm_head(self.model.norm(x)), present


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Decoder, dict[str, Any]]:
    """The decoder with exactly the weights of ``folder``, mixed as its config says."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    state = {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}
    model = Decoder(config).to(dtype).eval()
    if config.get("tie_word_embeddings"):
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, strict=True)
    if config.get("use_depth_attention"):
        window = config["depth_attention_recent_window"]
        depthify(model, config["depth_attention_stride"], recent_window=window)
    return model, config


@torch.no_grad()
def perplexity(model: nn.Module, ids: Tensor) -> float:
    return F.cross_entropy(model(ids)[0][0, :-1].float(), ids[0, 1:]).exp().item()


@torch.no_grad()
def generate(model: nn.Module, ids: Tensor, count: int) -> Tensor:
    """Greedily, one token at a time through the cache."""
    new, cache = ids, None
    for _ in range(count):
        logits, cache = model(new, cache)
        ids = torch.cat([ids, new := logits[:, -1:].argmax(-1)], 1)
    return ids


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, help="take its perplexity")
    parser.add_argument("--prompt", default="The capital of France is")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = load(args.folder)[0]
    found = generate(model, tokenizer(args.prompt, return_tensors="pt").input_ids, 20)
    print(explain(model), tokenizer.decode(found[0]), sep="\n\n")
    if args.text:
        read = tokenizer(args.text.read_text(), return_tensors="pt").input_ids[:, :2048]
        print(f"\nperplexity of {read.shape[1]} tokens: {perplexity(model, read):.3f}")

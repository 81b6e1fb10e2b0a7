"""A small decoder that depends on nothing but torch, and its definition computed from its weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthify import DepthConfig
from depthify.reference import depth_mix

Cache = list[tuple[Tensor, Tensor]]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.project(x)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return self.attend(q, k, v, causal=past is None), (k, v)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, present = self.attention(self.norm(x), past)
        x = x + attended
        return x + self.mlp(x), present


class Decoder(nn.Module):
    """forward(ids, past=None) -> (logits, present): a cache of (key, value) pairs goes in and comes out."""

    def __init__(
        self, layers: int = 4, width: int = 32, heads: int = 4, kv_heads: int = 2, vocabulary: int = 50
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        x, present = self.embed(ids), []
        for i, block in enumerate(self.blocks):
            x, pair = block(x, None if past is None else past[i])
            present.append(pair)
        return self.head(x), present


def definition(model: Decoder, ids: Tensor, stride: int | None = None, recent_window: int = 0) -> Tensor:
    """Logits of the mixed model, from the weights of ``model`` and the eager formula alone."""
    config = DepthConfig(stride=stride, recent_window=recent_window).resolve(len(model.blocks))
    x = model.embed(ids)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for depth, block in enumerate(model.blocks):
        attention = block.attention
        q, k, v = attention.project(block.norm(x))
        sources = config.sources(depth)
        if sources:
            v = depth_mix(
                q, [keys[j] for j in sources] + [k], [values[j] for j in sources] + [v], attention.size**-0.5
            )
        keys.append(k)
        values.append(v)
        x = x + attention.attend(q, k, v)
        x = x + block.mlp(x)
    return model.head(x)


def decoder(dtype: torch.dtype = torch.float64, seed: int = 0, **shape: int) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(**shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4)
    return model.to(dtype).eval()


def tokens(length: int = 6, batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(seed))

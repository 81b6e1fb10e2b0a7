"""A Qwen3-style decoder in plain PyTorch, to be trained from random weights and to build baselines on.

RMSNorm before each sublayer, grouped queries, a norm of every query and key head, rotary embedding, SwiGLU,
tied embeddings. Baselines override :meth:`Decoder.run`, which threads the hidden state through the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes; ``width`` is split evenly over ``heads``."""

    layers: int = 8
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    inner: int = 384
    vocabulary: int = 1024
    base: float = 10000.0

    @property
    def head_size(self) -> int:
        return self.width // self.heads


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size = shape.head_size
        self.q = nn.Linear(shape.width, shape.heads * size, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * size, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * size, bias=False)
        self.o = nn.Linear(shape.heads * size, shape.width, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)

    def values(self, x: Tensor) -> Tensor:
        """(B, H_kv, T, E)"""
        return self.v(x).unflatten(-1, (self.shape.kv_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], value: Tensor | None = None) -> Tensor:
        """``value`` takes the place of the layer's own values."""
        q = self.q_norm(self.q(x).unflatten(-1, (self.shape.heads, -1))).transpose(1, 2)
        k = self.k_norm(self.k(x).unflatten(-1, (self.shape.kv_heads, -1))).transpose(1, 2)
        q, k = _rotated(q, *turn), _rotated(k, *turn)
        v = self.values(x) if value is None else value
        group = self.shape.heads // self.shape.kv_heads
        out = F.scaled_dot_product_attention(q, _repeated(k, group), _repeated(v, group), is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _repeated(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention, self.mlp = Attention(shape), MLP(shape)

    def attend(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """What the first sublayer adds to ``x``."""
        return self.attention(self.attention_norm(x), turn)

    def transform(self, x: Tensor) -> Tensor:
        """What the second sublayer adds to ``x``."""
        return self.mlp(self.mlp_norm(x))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attend(x, turn)
        return x + self.transform(x)


class Decoder(nn.Module):
    """forward(ids) -> logits"""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """Normal with 0.02; what writes to the residual stream smaller, by its number of writers."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            for out in (module.attention.o, module.mlp.down):
                nn.init.normal_(out.weight, std=0.02 / (2 * self.shape.layers) ** 0.5)

    def run(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        for block in self.blocks:
            x = block(x, turn)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        x = self.run(self.embed(ids), self.turn(ids))
        return F.linear(self.norm(x), self.embed.weight)

    def turn(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, (T, D) each."""
        size, dtype = self.shape.head_size, self.embed.weight.dtype
        exact = torch.promote_types(dtype, torch.float32)
        frequencies = self.shape.base ** -(torch.arange(0, size, 2, device=ids.device, dtype=exact) / size)
        angles = torch.arange(ids.shape[1], device=ids.device, dtype=exact)[:, None] * frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

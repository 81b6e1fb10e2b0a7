"""A decoder of any head shape, its captured graph, and the closed form's shape of it."""

from __future__ import annotations

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from depthify.cost_model import symbols as S
from depthify.cost_model.capture import capture
from depthify.cost_model.polynomials import Count, to_sympy
from depthify.cost_model.shapes import DecoderShape


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, key_size: int, value_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q = nn.Linear(width, heads * key_size, bias=False)
        self.k = nn.Linear(width, kv_heads * key_size, bias=False)
        self.v = nn.Linear(width, kv_heads * value_size, bias=False)
        self.o = nn.Linear(heads * value_size, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads > self.kv_heads)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """forward(ids) -> logits."""

    def __init__(
        self,
        layers: int = 3,
        width: int = 24,
        heads: int = 4,
        kv_heads: int = 2,
        key_size: int = 8,
        value_size: int = 8,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, kv_heads, key_size, value_size) for _ in range(layers)
        )
        self.head = nn.Linear(width, 31, bias=False)
        self.shape = DecoderShape(
            layers=layers,
            width=width,
            query_heads=heads,
            kv_heads=kv_heads,
            key_size=key_size,
            value_size=value_size,
            ff=2 * width,
            vocabulary=31,
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def captured(model: nn.Module, length: int = 11) -> tuple[GraphModule, dict[sympy.Expr, sympy.Expr]]:
    """The graph of ``model(ids)``, open in batch and length, and its symbols as B and T."""
    found = capture(model, 3, length, 0, torch.float32)
    return found.module, found.names


def named(count: Count, names: dict[sympy.Expr, sympy.Expr]) -> sympy.Expr:
    """A count as an expression in B and T."""
    result = to_sympy(count).subs(names)
    if result.free_symbols - {S.B, S.T, S.C}:
        raise AssertionError(f"{result} has symbols of no known meaning")
    return result

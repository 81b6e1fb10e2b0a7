"""Small decoders in the styles of well-known code bases, none of them from transformers: same maths, other
spellings.

Every model is called with token ids and returns logits; those with a cache also take positions and keep their
cache in buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, GROUPS, SIZE, LAYERS, VOCABULARY, LONGEST = 32, 4, 2, 8, 4, 50, 32


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = attention
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        x = x + self.attention(self.norm(x), *given)
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Blocks around ``attention()``; ``given(start, length)`` is what every block gets besides its input."""

    def __init__(self, attention: Callable[[], nn.Module], learned_positions: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH) if learned_positions else None
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def given(self, positions: Tensor) -> tuple[Any, ...]:
        return ()

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(positions)
        given = self.given(positions)
        for block in self.blocks:
            x = block(x, *given)
        return self.head(self.norm(x))


def rotary_table(base: float = 100.0) -> tuple[Tensor, Tensor]:
    inverse = base ** -(torch.arange(0, SIZE, 2, dtype=torch.double) / SIZE)
    angles = torch.arange(LONGEST)[:, None] * inverse
    return angles.cos(), angles.sin()


def causal_mask(positions: Tensor, length: int) -> Tensor:
    return torch.arange(length, device=positions.device)[None, :] <= positions[:, None]


class FusedSplit(nn.Module):
    """One projection for query, key and value, cut into three along the features."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("allowed", torch.ones(LONGEST, LONGEST).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for t in (q, k, v))
        if self.by_hand:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.allowed[:, :, :length, :length] == 0, float("-inf"))
            y = F.dropout(F.softmax(scores, dim=-1), 0.0, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class InterleavedGroups(nn.Module):
    """One projection whose features are (groups, queries of the group + key + value, size), and a cache that
    is written by position into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.share = HEADS // GROUPS
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.cached = False

    def allocate(self, batch: int) -> None:
        weight = self.qkv.weight
        for name in ("keys", "values"):
            self.register_buffer(name, weight.new_zeros(batch, GROUPS, LONGEST, SIZE), persistent=False)
        self.cached = True

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.size()
        qkv = self.qkv(x).view(batch, length, GROUPS, self.share + 2, SIZE).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((self.share, 1, 1), dim=2)
        q = q.reshape(batch, -1, length, SIZE)
        k, v = k.reshape(batch, -1, length, SIZE), v.reshape(batch, -1, length, SIZE)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        if self.cached:
            k, v = self.keys.index_copy_(2, positions, k), self.values.index_copy_(2, positions, v)
        k, v = k.repeat_interleave(self.share, dim=1), v.repeat_interleave(self.share, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(batch, length, HEADS * SIZE))

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.size(-1) // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return ((x * cos) + (rotated * sin)).to(dtype=x.dtype)


class InterleavedGroupsDecoder(Decoder):
    def __init__(self) -> None:
        super().__init__(InterleavedGroups)
        cos, sin = rotary_table()
        self.register_buffer("cos", torch.cat([cos, cos], -1), persistent=False)
        self.register_buffer("sin", torch.cat([sin, sin], -1), persistent=False)

    def given(self, positions: Tensor) -> tuple[Any, ...]:
        cached = self.blocks[0].attention.cached
        mask = causal_mask(positions, LONGEST)[None, None] if cached else None
        return positions, self.cos[positions], self.sin[positions], mask

    def allocate(self, batch: int) -> None:
        for block in self.blocks:
            block.attention.allocate(batch)


class ComplexRotary(nn.Module):
    """(batch, tokens, heads, size) up to the attention, rotation by complex numbers, heads
    repeated by expand."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    @staticmethod
    def rotate(x: Tensor, rotation: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotation[None, :, None, :]).flatten(3).type_as(x)

    @staticmethod
    def repeat(x: Tensor) -> Tensor:
        batch, length, heads, size = x.shape
        wide = x[:, :, :, None, :].expand(batch, length, heads, HEADS // GROUPS, size)
        return wide.reshape(batch, length, HEADS, size)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, SIZE) for layer in (self.q, self.k, self.v))
        q, k = self.rotate(q, rotation), self.rotate(k, rotation)
        k, v = self.repeat(k), self.repeat(v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, -1))


class ComplexRotaryDecoder(Decoder):
    def __init__(self) -> None:
        super().__init__(ComplexRotary)
        self.register_buffer("rotation", torch.complex(*rotary_table()), persistent=False)

    def given(self, positions: Tensor) -> tuple[Any, ...]:
        return (self.rotation[positions],)


class SlotCache(nn.Module):
    """A cache that counts its own tokens: values are set at indices taken from a counter that is added to in
    place."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        shape = (batch, GROUPS, LONGEST, SIZE)
        self.register_buffer("keys", torch.zeros(shape, dtype=torch.double), persistent=False)
        self.register_buffer("values", torch.zeros(shape, dtype=torch.double), persistent=False)
        self.register_buffer("slots", torch.arange(LONGEST), persistent=False)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        length = k.shape[2]
        keys, values = self.keys, self.values
        keys[:, :, self.slots[:length]] = k
        values[:, :, self.slots[:length]] = v
        self.slots.add_(length)
        return keys, values


class SlotCached(nn.Module):
    """Queries grouped by key, (batch, tokens, groups x queries, size), interleaved rotation
    stacked from halves."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.cache: SlotCache | None = None

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = x.double().reshape(*x.shape[:-1], -1, 2)
        cos, sin = cos[None, :, None], sin[None, :, None]
        turned = torch.stack(
            [pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin], -1
        )
        return turned.flatten(3).type_as(x)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        share = HEADS // GROUPS
        q = self.q(x).view(batch, length, GROUPS * share, SIZE)
        q = self.rotate(q, cos, sin).transpose(1, 2)
        k = self.rotate(self.k(x).view(batch, length, -1, SIZE), cos, sin).transpose(1, 2)
        v = self.v(x).view(batch, length, -1, SIZE).transpose(1, 2)
        if self.cache is not None:
            k, v = self.cache.update(k, v)
        wide = (batch, GROUPS, share, -1, SIZE)
        k = k.unsqueeze(2).expand(wide).flatten(1, 2)
        v = v.unsqueeze(2).expand(wide).flatten(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, -1))


class SlotCachedDecoder(Decoder):
    def __init__(self) -> None:
        super().__init__(SlotCached)
        cos, sin = rotary_table()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def given(self, positions: Tensor) -> tuple[Any, ...]:
        cached = self.blocks[0].attention.cache is not None
        mask = causal_mask(positions, LONGEST)[None, None] if cached else None
        return self.cos[positions], self.sin[positions], mask

    def allocate(self, batch: int) -> None:
        for block in self.blocks:
            block.attention.cache = SlotCache(batch)


class LargerCache(nn.Module):
    """A cache for more sequences and tokens than are in use, sliced on writing and on reading."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.k = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.v = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(8, LONGEST, HEADS, SIZE, dtype=torch.double))

    def forward(self, x: Tensor, start: int) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, HEADS, SIZE) for layer in (self.q, self.k, self.v))
        self.keys[:batch, start : start + length] = k
        self.values[:batch, start : start + length] = v
        k, v = self.keys[:batch, : start + length], self.values[:batch, : start + length]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(SIZE)
        if length > 1:
            mask = torch.full((length, length), float("-inf"), dtype=x.dtype)
            mask = torch.triu(mask, diagonal=1)
            mask = torch.hstack([torch.zeros((length, start), dtype=x.dtype), mask])
            scores = scores + mask
        y = torch.matmul(F.softmax(scores.double(), dim=-1).type_as(q), v)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, -1))


class LargerCacheDecoder(Decoder):
    """Called with the integer position of the first token."""

    def __init__(self) -> None:
        super().__init__(LargerCache)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, start)
        return self.head(self.norm(x))


class Einsums(nn.Module):
    """Products by einsum, heads by rearranging, one key and value for all heads, a learned temperature.

    ``rearranged``: the heads are split and merged by einops.
    """

    def __init__(self, rearranged: bool = False) -> None:
        super().__init__()
        self.rearranged = rearranged
        self.q = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.randn(HEADS, 2 * LONGEST))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q = self.split(self.q(x))
        k, v = self.kv(x).chunk(2, dim=-1)
        here = torch.arange(length)
        bias = self.bias[:, here[None, :] - here[:, None] + LONGEST]
        scores = torch.einsum("b h i d, b j d -> b h i j", F.normalize(q, dim=-1), F.normalize(k, dim=-1))
        scores = scores * self.temperature.exp() + bias
        scores = scores.masked_fill(here[None, :] > here[:, None], -torch.finfo(scores.dtype).max)
        y = torch.einsum("b h i j, b j d -> b h i d", scores.softmax(dim=-1), v)
        return self.out(self.merge(y))

    def split(self, x: Tensor) -> Tensor:
        if not self.rearranged:
            return x.unflatten(-1, (HEADS, SIZE)).movedim(-2, 1)
        from einops import rearrange

        return rearrange(x, "b t (h d) -> b h t d", h=HEADS)

    def merge(self, x: Tensor) -> Tensor:
        if not self.rearranged:
            return x.movedim(1, -2).flatten(-2)
        from einops import rearrange

        return rearrange(x, "b h t d -> b t (h d)")


class TorchAttention(nn.Module):
    """``nn.MultiheadAttention``; with ``weights`` it also returns its probabilities, which are not used."""

    def __init__(self, weights: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attention(x, x, x, attn_mask=hidden, need_weights=self.weights)[0]


class TorchDecoder(nn.Module):
    """``nn.TransformerEncoder`` with a causal mask, or ``nn.TransformerDecoder`` over a memory."""

    def __init__(self, memory: bool = False, batch_first: bool = True, norm_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        options = dict(dropout=0.0, batch_first=batch_first, norm_first=norm_first)
        if memory:
            layer: nn.Module = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, **options)
            self.stack: nn.Module = nn.TransformerDecoder(layer, LAYERS)
        else:
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **options)
            self.stack = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.memory = nn.Parameter(torch.randn(1, 5, WIDTH)) if memory else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if not self.batch_first:
            x = x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        if self.memory is not None:
            memory = self.memory.expand(ids.shape[0], -1, -1)
            memory = memory if self.batch_first else memory.transpose(0, 1)
            x = self.stack(x, memory, tgt_mask=mask, tgt_is_causal=True)
        else:
            x = self.stack(x, mask=mask, is_causal=True)
        return self.head(x if self.batch_first else x.transpose(0, 1))


class Flex(nn.Module):
    """``flex_attention`` with a block mask and a score function; ``plain``: the same, computed in full."""

    def __init__(self, length: int, mask: Callable | None, score: Callable | None) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import create_block_mask

        self.mask, self.score, self.plain = mask, score, False
        self.blocks = (
            None if mask is None else create_block_mask(mask, None, None, length, length, device="cpu")
        )
        self.q = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if self.plain:
            y = self.in_full(q, k, v)
        else:
            y = flex_attention(q, k, v, score_mod=self.score, block_mask=self.blocks, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))

    def in_full(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) * SIZE**-0.5
        head, row, column = (
            torch.arange(n).view(shape)
            for n, shape in zip(scores.shape[1:], ((-1, 1, 1), (-1, 1), (1, -1)), strict=True)
        )
        if self.score is not None:
            scores = self.score(scores, 0, head, row, column)
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask(0, head, row, column), -float("inf"))
        return scores.softmax(-1) @ v


class Opaque(nn.Module):
    """Attention as one operation that the compiler cannot look into: ``attend(q, k, v)`` in (B, T, H, D)."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.q = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, SIZE) for layer in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v).reshape(batch, length, -1))


def plain_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the opaque operations compute."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def decoder(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model in float64 and evaluation mode, with weights large enough for mixing to matter."""
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return model.double().eval()


def tokens(length: int = 9, batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))

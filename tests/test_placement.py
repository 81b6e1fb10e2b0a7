"""Program order and memory: values used early, queries made late, changes in place, and readers that
forbid mixing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain import Attention, Decoder, decoder, definition, tokens
from torch import Tensor

from depthify import depthify
from depthify.errors import UnsupportedModelError

IDS = tokens()


def _with(forward: Callable[..., Any], **shape: int) -> Decoder:
    model = decoder(**shape)
    kind = type("Variant", (Attention,), {"forward": forward})
    for block in model.blocks:
        block.attention.__class__ = kind
    return model


def _heads(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def late_query(self: Attention, x: Tensor, past: Any = None) -> Any:
    """The cache is written before the query is computed."""
    k, v = _heads(self.k(x), self.size), _heads(self.v(x), self.size)
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    q = _heads(self.q(x), self.size) * 1.0
    return self.attend(q, k, v, causal=past is None), (k, v)


def early_value(self: Attention, x: Tensor, past: Any = None) -> Any:
    """All views of the value come before query and key exist."""
    v = _heads(self.v(x), self.size).contiguous()
    q, k = _heads(self.q(x), self.size), _heads(self.k(x), self.size)
    if past is not None:
        v = torch.cat([past[1], v], 2)
        k = torch.cat([past[0], k], 2)
    return self.attend(q, k, v, causal=past is None), (k, v)


def clamped_projections(self: Attention, x: Tensor, past: Any = None) -> Any:
    """Projections changed in place, as a clip of query, key and value does."""
    q, k, v = self.q(x), self.k(x), self.v(x)
    for part in (q, k, v):
        part.clamp_(-1e9, 1e9)
    q, k, v = (_heads(part, self.size) for part in (q, k, v))
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return self.attend(q, k, v, causal=past is None), (k, v)


def token_major_cache(self: Attention, x: Tensor, past: Any = None) -> Any:
    """The cache is (B, T, H, D) and returned as it is: what the projection made, before any transposition."""
    batch, length, _ = x.shape
    q = self.q(x).view(batch, length, self.heads, self.size)
    k = self.k(x).view(batch, length, self.kv_heads, self.size)
    v = self.v(x).view(batch, length, self.kv_heads, self.size)
    if past is not None:
        k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
    out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=past is None)
    return out, (k, v)


def flat_cache(self: Attention, x: Tensor, past: Any = None) -> Any:
    """The cache holds the projection itself, heads not split."""
    q, k, v = self.q(x), self.k(x), self.v(x)
    if past is not None:
        k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
    return self.attend(*(_heads(part, self.size) for part in (q, k, v)), causal=past is None), (k, v)


def repeated_before_the_cache(self: Attention, x: Tensor, past: Any = None) -> Any:
    q, k, v = self.project(x)
    k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
    return self.o(out.transpose(1, 2).flatten(2)), (k, v)


def joined_projection(self: Attention, x: Tensor, past: Any = None) -> Any:
    """One tensor for query, key and value, split afterwards."""
    sizes = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
    q, k, v = torch.cat([self.q(x), self.k(x), self.v(x)], -1).split(sizes, -1)
    q, k, v = (_heads(part, self.size) for part in (q, k, v))
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return self.attend(q, k, v, causal=past is None), (k, v)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "forward",
    [late_query, early_value, clamped_projections, token_major_cache, flat_cache, repeated_before_the_cache,
     joined_projection],
)  # fmt: skip
def test_order_and_layout_do_not_matter(forward: Callable[..., Any], cached: bool) -> None:
    model = _with(forward)
    with torch.no_grad():
        expected = definition(model, IDS, 2)
        depthify(model, 2)
        if cached:
            logits, past = model(IDS[:, :3])
            parts = [logits]
            for i in range(3, 6):
                logits, past = model(IDS[:, i : i + 1], past)
                parts.append(logits)
            found = torch.cat(parts, 1)
        else:
            found = model(IDS)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def gated_by_its_value(self: Attention, x: Tensor, past: Any = None) -> Any:
    q, k, v = self.project(x)
    return self.attend(q, k, v) * v.mean().sigmoid(), (k, v)


def masked_by_its_value(self: Attention, x: Tensor, past: Any = None) -> Any:
    q, k, v = self.project(x)
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1) + v.mean()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return self.o(out.transpose(1, 2).flatten(2)), (k, v)


def random_late_query(self: Attention, x: Tensor, past: Any = None) -> Any:
    k, v = _heads(self.k(x), self.size), _heads(self.v(x), self.size)
    k, v = torch.cat([k[:, :, :0], k], 2), torch.cat([v[:, :, :0], v], 2)
    q = _heads(F.dropout(self.q(x), 0.5, True), self.size)
    return self.attend(q, k, v), (k, v)


def value_changed_late(self: Attention, x: Tensor, past: Any = None) -> Any:
    q, k, v = self.project(x)
    copied = v.contiguous()
    v.mul_(2.0)
    return self.attend(q, k, copied), (k, v)


def key_is_value(self: Attention, x: Tensor, past: Any = None) -> Any:
    q, k, _ = self.project(x)
    return self.attend(q, k, k), (k, k)


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (gated_by_its_value, "also read by"),
        (masked_by_its_value, "also read by"),
        (value_changed_late, "also read by|in place"),
        (key_is_value, "one tensor"),
    ],
)
def test_what_cannot_be_right_is_refused(forward: Callable[..., Any], text: str) -> None:
    model = depthify(_with(forward), 2)
    with pytest.raises(UnsupportedModelError, match=text):
        model(IDS)


def test_random_numbers_keep_their_order() -> None:
    """A query computed late from random numbers cannot be brought forward; without a cache it need not be."""
    model = _with(random_late_query)
    depthify(model, 2)
    with pytest.raises(UnsupportedModelError, match="cannot be moved|more than one|joined"):
        model(IDS)

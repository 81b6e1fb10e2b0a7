"""What looks like a layer and is none: for every role, a model that must not match.

Each stands between real attention layers. It is either no site, with its reason where it is attention at all,
and the real layers still are; or the model is refused with exactly this reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import styles
import torch
import torch.nn.functional as F
from definition import relative
from eager_definition import by_definition
from styles import HEADS, SIZE, WIDTH
from torch import Tensor, nn

from depthify import depthify, explain
from depthify.errors import UnsupportedModelError


class LookAlike(nn.Module):
    """Three projections; ``attend`` gets them as (B, H, T, D), and the input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v, x).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError


def later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


class LinearAttention(LookAlike):
    """Causal, two products, no softmax."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        scores = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-2, -1)
        scores = scores.masked_fill(later(q.shape[2]), 0.0)
        return (scores / scores.sum(-1, keepdim=True)) @ v


class SoftmaxOfFeatures(LookAlike):
    """Softmax of query and key each, before their product: efficient attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)


class SoftmaxOverQueries(LookAlike):
    """Every key shares itself out among the queries."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)).masked_fill(later(q.shape[2]), -1e9)
        return scores.softmax(-2) @ v


class ExpOverQueries(LookAlike):
    """The same, written as exponential and sum."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        weights = (q @ k.transpose(-2, -1)).exp().masked_fill(later(q.shape[2]), 0.0)
        return (weights / weights.sum(-2, keepdim=True)) @ v


class OneMore(LookAlike):
    """Softmax attention that may attend to nothing: not known in this spelling, and not to go unnoticed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        weights = (q @ k.transpose(-2, -1)).masked_fill(later(q.shape[2]), -1e9).exp()
        return (weights / (weights.sum(-1, keepdim=True) + 1)) @ v


class Bidirectional(LookAlike):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class WindowToBothSides(LookAlike):
    """A mask that differs between queries, and does not hide the future."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        near = torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(near[:, None] - near).abs() < 3)


class AcrossFeatures(LookAlike):
    """Features attend to features: cross-covariance attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        q, k = F.normalize(q, dim=2), F.normalize(k, dim=2)
        return ((q.transpose(-2, -1) @ k).softmax(-1) @ v.transpose(-2, -1)).transpose(-2, -1)


class KeyIsValue(LookAlike):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)


class OverLearnedTokens(LookAlike):
    """Cross-attention whose keys and values are projections of learned tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, 5, WIDTH))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        _, k, v = (t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in self.qkv(self.memory).chunk(3, -1))
        return F.scaled_dot_product_attention(
            q, k.expand(x.shape[0], -1, -1, -1), v.expand(x.shape[0], -1, -1, -1)
        )


class KeyValueStore(LookAlike):
    """A softmax over products of tokens and weights: a memory layer, or a feed-forward one."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = (nn.Parameter(torch.randn(HEADS, 16, SIZE)) for _ in range(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return (q @ self.keys.transpose(-2, -1)).softmax(-1) @ self.values


class LearnedQueries(nn.Module):
    """Learned queries read the tokens; what they found is added to all."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 1, 3, WIDTH))
        self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.k(x)[:, None], self.v(x)[:, None]
        queries = self.queries.expand(x.shape[0], -1, -1, -1)
        return F.scaled_dot_product_attention(queries, k, v).mean(2)


class Pooling(nn.Module):
    """Attention pooling: one learned score per token, a softmax over tokens, a weighted sum."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.v = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x).softmax(1).transpose(1, 2) @ self.v(x)


class Experts(nn.Module):
    """A router's softmax weighs the outputs of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        return torch.einsum("bte,btew->btw", self.router(x).softmax(-1), outputs)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class OverDepth(nn.Module):
    """Every token attends over three vectors of its own: attention over depth, as a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        own = torch.stack([part(x) for part in self.parts], -2)
        weights = (self.q(x)[:, :, None] @ own.transpose(-2, -1)).softmax(-1)
        return (weights @ own.sin())[:, :, 0]


class SumsOfProducts(LookAlike):
    """Causal attention without a product of matrices: every pair is multiplied, and summed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        scores = (q[:, :, :, None] * k[:, :, None]).sum(-1).masked_fill(later(q.shape[2]), float("-inf"))
        return (scores.softmax(-1)[..., None] * v[:, :, None]).sum(-2)


NO_SITE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear attention": (LinearAttention, ""),
    "softmax of features": (SoftmaxOfFeatures, ""),
    "a store of keys and values": (KeyValueStore, ""),
    "pooling": (Pooling, ""),
    "experts": (Experts, ""),
    "convolution": (Convolution, ""),
    "bidirectional": (Bidirectional, "it is not causal"),
    "window to both sides": (WindowToBothSides, "it is not causal"),
    "across features": (AcrossFeatures, "it is not causal"),
    "over learned tokens": (OverLearnedTokens, "its value does not depend on the tokens"),
    "learned queries": (LearnedQueries, "another stream|its query does not depend on the tokens"),
}


class HeadByHead(LookAlike):
    """Right attention, but each entry of the batch in a function of its own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return torch.vmap(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))(q, k, v)


class WrittenOutHeadByHead(LookAlike):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        mask = later(q.shape[2])
        one = lambda q, k, v: (q @ k.mT / 2).masked_fill(mask, float("-inf")).softmax(-1) @ v  # noqa: E731
        return torch.vmap(one)(q, k, v)


class Scaled(LookAlike):
    """Scores times ``factor(x)``, which is not one number."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.linspace(0.5, 1.5, HEADS)[:, None, None])

    def factor(self, x: Tensor) -> Tensor:
        return self.temperature

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        scores = (q @ k.mT) * self.factor(x)
        return scores.masked_fill(later(q.shape[2]), float("-inf")).softmax(-1) @ v


class ScaledByPosition(Scaled):
    def factor(self, x: Tensor) -> Tensor:
        return torch.arange(1, x.shape[1] + 1, dtype=x.dtype).log1p()[:, None]


class ScaledByKey(Scaled):
    def factor(self, x: Tensor) -> Tensor:
        return x[:, None, :, :1].mT.sigmoid()


class Written(LookAlike):
    """Softmax attention in a spelling that no finder follows, by ``scores`` and ``weights``."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(HEADS, HEADS))
        self.pointwise = nn.Linear(1, 1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return self.weights(self.scores(q, k).masked_fill(later(q.shape[2]), float("-inf"))) @ v


def written(
    scores: Callable[[Written, Tensor, Tensor], Tensor] | None = None,
    weights: Callable[[Written, Tensor], Tensor] | None = None,
) -> type[Written]:
    body = {name: f for name, f in (("scores", scores), ("weights", weights)) if f is not None}
    return type("Spelling", (Written,), body)


def normalized(exponential: Callable[[Tensor], Tensor]) -> type[Written]:
    def weights(self: Written, scores: Tensor) -> Tensor:
        e = exponential(scores)
        return e / e.sum(-1, keepdim=True)

    return written(weights=weights)


SOFTMAX, EXPONENTIAL = (
    f"{what} products of activations weighs other" for what in ("a softmax over", "an exponential of")
)
SPELLINGS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "exp2": (normalized(lambda x: torch.exp2(x * math.log2(math.e))), EXPONENTIAL),
    "power of e": (normalized(lambda x: math.e**x), EXPONENTIAL),
    "power of 2": (normalized(lambda x: torch.pow(2.0, x)), EXPONENTIAL),
    "expm1": (normalized(lambda x: torch.expm1(x) + 1), EXPONENTIAL),
    "softmin": (written(weights=lambda self, x: F.softmin(-x, -1)), SOFTMAX),
    "talking heads": (
        written(scores=lambda self, q, k: torch.einsum("bhij,hg->bgij", q @ k.mT, self.mix)),
        SOFTMAX,
    ),
    "talking heads, behind the softmax": (
        written(weights=lambda self, x: torch.einsum("bhij,hg->bgij", x.softmax(-1), self.mix)),
        SOFTMAX,
    ),
    "scores through a linear layer": (
        written(scores=lambda self, q, k: self.pointwise((q @ k.mT)[..., None])[..., 0]),
        SOFTMAX,
    ),
    "vecdot": (
        written(scores=lambda self, q, k: torch.linalg.vecdot(q[..., :, None, :], k[..., None, :, :])),
        SOFTMAX,
    ),
    "tensordot": (
        written(
            scores=lambda self, q, k: torch.stack(
                [
                    torch.stack([torch.tensordot(a[h], b[h], dims=([1], [1])) for h in range(HEADS)])
                    for a, b in zip(q.unbind(0), k.unbind(0), strict=True)
                ]
            )
        ),
        SOFTMAX,
    ),
    "distances": (written(scores=lambda self, q, k: -torch.cdist(q, k)), SOFTMAX),
}

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "softmax over queries": (SoftmaxOverQueries, "a softmax over products of activations weighs other"),
    "exponential over queries": (ExpOverQueries, "an exponential of products of activations weighs other"),
    "softmax with one more in its sum": (OneMore, "an exponential of products of activations weighs other"),
    "sums of products": (SumsOfProducts, "a softmax over products of activations weighs other"),
    "key is value": (KeyIsValue, "its key and its value are one tensor"),
    "inside vmap": (HeadByHead, "it is computed inside torch.vmap"),
    "written out inside vmap": (WrittenOutHeadByHead, "it is computed inside torch.vmap"),
    "temperature of a head": (Scaled, "which is not one number for all of them"),
    "temperature of a position": (ScaledByPosition, "which is not one number for all of them"),
    "scaled by the key's token": (ScaledByKey, "which is not one number for all of them"),
    **SPELLINGS,
    "over depth": (OverDepth, "several streams of tokens in one"),
}


def beside(look_alike: Callable[[], nn.Module]) -> nn.Module:
    """Two attention layers, each followed by the look-alike."""
    turns = itertools.cycle((styles.FusedSplit, look_alike))
    return styles.decoder(lambda: styles.Decoder(lambda: next(turns)(), learned_positions=True))


@pytest.mark.parametrize("kind", NO_SITE)
def test_it_is_no_site_and_real_attention_is(kind: str) -> None:
    build, reason = NO_SITE[kind]
    with torch.no_grad():
        report = explain(beside(build), styles.tokens())
    assert [layer.module for layer in report.layers] == ["blocks.0.attention", "blocks.2.attention"]
    assert [x.module for x in report.refusals] == (
        ["blocks.1.attention", "blocks.3.attention"] if reason else []
    )
    for refusal in report.refusals:
        assert not refusal.unsupported
        assert any(part in refusal.reason for part in reason.split("|")), refusal


@pytest.mark.parametrize("kind", REFUSED)
def test_the_model_is_refused_for_this_reason(kind: str) -> None:
    build, reason = REFUSED[kind]
    with pytest.raises(UnsupportedModelError, match=reason), torch.no_grad():
        explain(beside(build), styles.tokens())


@pytest.mark.parametrize("kind", ["linear attention", "window to both sides"])
def test_mixing_around_it_equals_the_definition(kind: str) -> None:
    model, ids = beside(NO_SITE[kind][0]), styles.tokens()
    expected, seen = by_definition(model, ids, 1)
    assert [x.mixed for x in seen].count(True) == 2
    depthify(model, 1, budget=float("inf"))
    with torch.no_grad():
        assert relative(model(ids), expected) < 1e-10


class OtherStream(styles.Decoder):
    """The second half of the layers reads keys and values of the embedded tokens, not of its own input."""

    def __init__(self) -> None:
        super().__init__(styles.FusedSplit, learned_positions=True)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        start = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        k, v = (t(start).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in (self.k, self.v))
        x = start
        for block in self.blocks:
            x = block(x)
            q = x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(self.norm(x))


def test_keys_and_values_of_another_stream_are_left_out() -> None:
    with torch.no_grad():
        report = explain(styles.decoder(OtherStream), styles.tokens())
    assert len(report.layers) == styles.LAYERS and len(report.refusals) == styles.LAYERS
    reasons = {refusal.reason for refusal in report.refusals}
    assert all("another stream than its query" in x or "reuses key and value" in x for x in reasons), reasons

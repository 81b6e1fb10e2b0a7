"""The closed form of a decoder without any cross-layer method: parameters, FLOPs, cache.

Products follow Kaplan et al. (arXiv 2001.08361, section 2.1), with attention over all keys added; the
elementwise part follows what transformers computes, operation by operation. Sizes: :mod:`.symbols`.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy import Expr

from .flops import SOFTMAX_PER_PAIR
from .shapes import DecoderShape
from .symbols import B, C, E, Hkv, Hq, L, M, T, V, d, dk, dn, dr, dv, fe, ff, fs, k, rkv, rq

ZERO = sympy.Integer(0)
TOKENS = B * T


@dataclass(frozen=True)
class Cost:
    """What a decoder costs, or what a method adds to one.

    FLOPs are those of one forward pass over T new tokens of B batch entries with C cached tokens each:
    prefill with C = 0, decoding with T = 1.
    """

    name: str
    source: str
    parameters: Expr = ZERO
    matmul: Expr = ZERO
    other: Expr = ZERO
    masked: Expr = ZERO
    """The part of the FLOPs that the causal mask makes needless."""

    state: Expr = ZERO
    """Elements kept for the next call, over all layers."""

    live: Expr = ZERO
    """Elements per token of the current call that are kept across layers, at most; they end with the call."""

    @property
    def executed(self) -> Expr:
        return self.matmul + self.other

    @property
    def needed(self) -> Expr:
        return self.matmul + self.other - self.masked

    @property
    def training(self) -> Expr:
        """Forward and backward of T tokens: three times the forward, see :mod:`.symbols`."""
        return 3 * self.executed.subs(C, 0)


@dataclass(frozen=True)
class _Part:
    parameters: Expr = ZERO
    matmul: Expr = ZERO
    other: Expr = ZERO

    def __add__(self, more: _Part) -> _Part:
        return _Part(self.parameters + more.parameters, self.matmul + more.matmul, self.other + more.other)

    def __mul__(self, times: Expr) -> _Part:
        return _Part(self.parameters * times, self.matmul * times, self.other * times)


def _linear(rows: Expr, inner: Expr, outer: Expr, bias: bool = False) -> _Part:
    """An (inner, outer) matrix on ``rows`` vectors: 2 rows inner outer; a bias adds 1 per result."""
    biased = sympy.Integer(bias)
    return _Part((inner + biased) * outer, 2 * rows * inner * outer, rows * outer * biased)


def norm_flops(width: Expr, kind: str = "rms") -> Expr:
    """One vector. RMSNorm: square, mean, product, weight, and epsilon and root of one number. LayerNorm also:
    mean, difference, bias."""
    return 4 * width + 2 if kind == "rms" else 7 * width + 2


def _norm(rows: Expr, width: Expr, kind: str = "rms") -> _Part:
    return _Part(width if kind == "rms" else 2 * width, ZERO, rows * norm_flops(width, kind))


def _rotary(vectors: Expr, pairwise: bool = False) -> _Part:
    """x cos + rotate(x) sin: two products, half a negation, a sum. Written per pair of numbers: four
    products, a sum and a difference."""
    return _Part(other=vectors * dr * (sympy.Integer(3) if pairwise else sympy.Rational(7, 2)))


def _rotary_table() -> _Part:
    """Per position, whatever the batch: the angles of half the dimensions, then sine and cosine of all of
    them, each with a factor (YaRN's, 1 elsewhere)."""
    return _Part(other=T * dr * sympy.Rational(9, 2))


def pairs() -> Expr:
    """Queries times keys of one layer, masked ones included."""
    return B * Hq * T * (T + C)


def _pair_flops() -> tuple[Expr, Expr]:
    """Two products; the scale and the softmax."""
    return 2 * (dk + dv), sympy.Integer(1 + SOFTMAX_PER_PAIR)


def _attention(shape: DecoderShape) -> _Part:
    """Projections, norms and rotation of query and key, scores, softmax, output projection."""
    if shape.latent:
        part = _latent_projections(shape)
    else:
        part = (
            _linear(TOKENS, d, Hq * dk, shape.qkv_bias)
            + _linear(TOKENS, d, Hkv * dk, shape.qkv_bias)
            + _linear(TOKENS, d, Hkv * dv, shape.qkv_bias)
        )
        if shape.rotated:
            part += _rotary(TOKENS * (Hq + Hkv))
        if shape.qk_norm:
            part += _norm(TOKENS * Hq, dk) + _norm(TOKENS * Hkv, dk)
    products, rest = _pair_flops()
    part += _Part(matmul=pairs() * products, other=pairs() * rest)
    return part + _linear(TOKENS, Hq * dv, d, shape.other_bias)


def _latent_projections(shape: DecoderShape) -> _Part:
    """DeepSeek-V2's latent attention (arXiv 2405.04434, section 2.1), as transformers computes it: keys and
    values of all T + C tokens are projected from the cached latent in every call."""
    if shape.query_rank:
        part = _linear(TOKENS, d, rq) + _norm(TOKENS, rq) + _linear(TOKENS, rq, Hq * (dn + dr))
    else:
        part = _linear(TOKENS, d, Hq * (dn + dr))
    part += _linear(TOKENS, d, rkv + dr) + _norm(TOKENS, rkv)
    part += _linear(B * (T + C), rkv, Hq * (dn + dv))
    return part + _rotary(TOKENS * (Hq + 1), pairwise=True)


def _feed_forward(shape: DecoderShape, width: Expr = ff) -> _Part:
    """Two matrices and an activation; with a gate three, and a product."""
    part = _linear(TOKENS, d, width, shape.other_bias) + _linear(TOKENS, width, d, shape.other_bias)
    part += _Part(other=TOKENS * width * shape.activation_flops)
    if shape.gated:
        part += _linear(TOKENS, d, width, shape.other_bias) + _Part(other=TOKENS * width)
    return part


def _experts(shape: DecoderShape) -> _Part:
    """The router's scores of E experts, the choice of k with weights of sum 1, k experts, their weighted sum,
    and the shared expert where there is one.

    Choice: a softmax, the k largest, their sum and quotients. DeepSeek-V3: a sigmoid and a correction; the
    two
    best of every group, their sum, the best groups; the others filled, the k largest; sum, epsilon, quotients
    and a factor.
    """
    expert = 3 * d * fe
    normed = int(shape.normed_choice)
    choice = (SOFTMAX_PER_PAIR + 1) * E + 2 * k * normed
    if shape.router_groups:
        choice = 5 * E + 3 * shape.router_groups + k + (2 * k + 1) * normed
    part = _linear(TOKENS, d, E) + _Part(other=TOKENS * choice)
    part += _Part(
        expert * E, TOKENS * k * 2 * expert, TOKENS * k * (fe * (shape.activation_flops + 1) + 2 * d)
    )
    if shape.shared_ff:
        part += _feed_forward(shape, fs) + _Part(other=TOKENS * d)
    return part


def cache_elements(shape: DecoderShape) -> Expr:
    """Keys and values of T + C tokens in L layers; with latent attention the latent and the rotated key."""
    per_token = rkv + dr if shape.latent else Hkv * (dk + dv)
    return B * (T + C) * L * per_token


def vanilla(shape: DecoderShape) -> Cost:
    """The decoder itself, head included, on all T tokens."""
    layer = _attention(shape) + _norm(TOKENS, d, shape.norm) * 2 + _Part(other=TOKENS * 2 * d)
    total = layer * L + _feed_forward(shape) * (L - M)
    if shape.moe_layers:
        total += _experts(shape) * M
    total += _norm(TOKENS, d, shape.norm) + _Part(V * d)
    head = _linear(TOKENS, d, V)
    total += _Part(ZERO if shape.tied else head.parameters, head.matmul)
    if shape.rotated:
        total += _rotary_table()
    if shape.positions:
        total += _Part(sympy.Integer(shape.positions) * d, ZERO, TOKENS * d)
    products, rest = _pair_flops()
    return Cost(
        "vanilla",
        "Kaplan et al., arXiv 2001.08361; this module",
        total.parameters,
        total.matmul,
        total.other,
        L * B * Hq * T * (T - 1) / 2 * (products + rest),
        cache_elements(shape),
    )

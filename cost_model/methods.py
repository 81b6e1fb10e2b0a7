"""What cross-layer methods add to a decoder: closed forms, each with its derivation and source.

All are per forward pass over B T tokens, on top of :func:`.decoder.vanilla`. A method that replaces the
residual additions of the 2L sublayers (attention and feed-forward) is credited for them. Sizes:
:mod:`.symbols`.
"""

from __future__ import annotations

import sympy
from sympy import Expr

from .decoder import TOKENS, Cost, norm_flops
from .flops import SOFTMAX_PER_PAIR
from .shapes import DecoderShape
from .symbols import B, Hkv, Hq, L, N, T, at, d, dilation, dk, dv, n, period, s, w

STREAMS = 4
"""Of hyper-connections, in both papers' main experiments."""

SINKHORN_ROUNDS = 20
"""Of mHC (arXiv 2512.24880, section 4.2)."""

BLOCKS = 8
"""Of block attention residuals (arXiv 2603.15031, section 5)."""


def sources_of_layer(layer: Expr) -> Expr:
    """|S(l)| = min(l, w) + ceil(max(0, l - w) / s).

    The window holds min(l, w) layers. Below it, 0 .. l - w - 1, every s-th layer from 0 on is a source.
    """
    return sympy.Min(layer, w) + sympy.ceiling(sympy.Max(0, layer - w) / s)


def sources_in_all() -> Expr:
    """Sum of |S(l)| over all layers.

    With u = min(w, L - 1): layers 0 .. u - 1 have l sources, u (u - 1) / 2 in all; the L - u others have u in
    the window, and ceil(m / s) below it for m = 0 .. K, K = L - 1 - u. With q = floor(K / s), r = K - q s
    that sum is s (1 + .. + q) + r (q + 1).
    """
    u = sympy.Min(w, L - 1)
    most = L - 1 - u
    q = sympy.floor(most / s)
    return u * (u - 1) / 2 + u * (L - u) + s * q * (q + 1) / 2 + (most - q * s) * (q + 1)


def layers_with_one_source() -> Expr:
    """Layers 1 .. s without a window; with one, layer 1 only, whose window is layer 0."""
    return sympy.Piecewise((sympy.Min(s, L - 1), sympy.Eq(w, 0)), (sympy.Min(1, L - 1), True))


def mixture_flops(sources: Expr, grouped: bool, one: bool) -> Expr:
    """One token and one key/value head of a layer with ``sources`` sources.

    - mean query: every query head of the group is read, H_q / H_kv d_k; nothing without groups; what groups
      of 8 and more take besides is in :func:`parts_of_mean`
    - scores with the sources' keys and the own one: a product and a sum over d_k each
    - weights: for one source the difference of the scores, the scale, a sigmoid and 1 minus it; for more, the
      scale of the n + 1 scores, n differences and sigmoids, n - 1 times log-sigmoid and a difference for the
      logarithm of the sum so far, then 1 minus the own weight and for every other source but the first two
      products and 1 minus a sigmoid
    - mixture: n + 1 products with, n sums of values
    """
    mean = Hq * dk / Hkv if grouped else sympy.Integer(0)
    scores = 2 * dk * (sources + 1)
    weights = sympy.Integer(4) if one else 8 * sources - 3
    return mean + scores + weights + dv * (2 * sources + 1)


def parts_of_mean(shape: DecoderShape) -> int:
    """What the mean over a large group takes beyond one per query head, per feature: it is a sum of n sums,
    so n - 1 to add them and one to divide."""
    from ..passes import mix_values  # which loads the tracer

    parts = len(mix_values.parts_of_mean(shape.query_heads // shape.kv_heads))
    return parts if parts > 1 else 0


def depth_attention(shape: DecoderShape | None = None) -> Cost:
    """Depth-Attention (Zeng et al., arXiv 2606.05014) as depthify inserts it.

    The sum of :func:`mixture_flops` over the layers 1 .. L - 1, all of which have layer 0 among their
    sources.
    It is linear in the number of sources, apart from the layers with one source, whose weights are cheaper.
    No parameter; the mixed value takes the slot of the value in the cache. Live: the key and mixed value of
    the sources of the last layer, the most there are at any time.
    """
    grouped = shape is None or shape.grouped
    total, mixed, single = sources_in_all(), L - 1, layers_with_one_source()
    x = sympy.Symbol("x")
    many = sympy.Poly(mixture_flops(x, grouped, one=False), x)
    slope, constant = many.coeff_monomial(x), many.coeff_monomial(1)
    saved = mixture_flops(sympy.Integer(1), grouped, one=False) - mixture_flops(
        sympy.Integer(1), grouped, one=True
    )
    flops = slope * total + constant * mixed - saved * single
    if shape is not None:
        flops += parts_of_mean(shape) * dk * mixed
    most = sources_of_layer(L - 1)
    return Cost(
        "Depth-Attention",
        "arXiv 2606.05014; this module",
        other=B * T * Hkv * flops,
        live=most * Hkv * (dk + dv),
    )


def shorthand() -> Expr:
    """The paper's estimate of Depth-Attention's cost per layer, 2 T d / s.

    The count differs by the factors it leaves out (see :func:`shorthand_factors`): it stands for the growth,
    T L / s in all, and not for a number of FLOPs.
    """
    return 2 * T * d / s


def shorthand_factors(shape: DecoderShape, stride: int, window: int = 0) -> dict[str, sympy.Rational]:
    """What the exact count per layer (one batch entry) is in terms of 2 T d / s, as factors.

    - "sources": a layer l has about l / s sources and itself, not 1 / s of one
    - "two products": the score and the weighted sum, 2 d each per source, not one of them
    - "heads": keys and values are H_kv d_k wide, not d
    - "rest": mean query, softmax, and what the sum of values saves
    """
    values = {**shape.values(), s: stride, w: window}
    per_layer = at(depth_attention(shape).executed, {**values, B: 1}) / shape.layers
    reads = at(sources_in_all() + L - 1, values) / sympy.Integer(shape.layers)
    first = reads * stride
    heads = sympy.Rational(shape.kv_heads * (shape.key_size + shape.value_size), 2 * shape.width)
    whole = sympy.simplify(per_layer / at(shorthand(), values))
    return {
        "sources": first,
        "two products": sympy.Integer(2),
        "heads": heads,
        "rest": sympy.nsimplify(whole / (first * 2 * heads)),
        "product": whole,
    }


def denseformer() -> Cost:
    """DenseFormer (Pagliardini et al., arXiv 2402.02622): after every p-th block i the weighted average of
    the outputs X_j of the blocks j <= i with j = i modulo k, X_0 the embedding.

    Block i has m = floor(i / k) + 1 weights: m products and m - 1 sums of d numbers. Without dilation and
    period that is L (L + 3) / 2 weights in all. Live: the outputs of all earlier blocks.
    """
    block = sympy.Symbol("i", integer=True, positive=True)
    weights = sympy.Sum(sympy.floor(block * period / dilation) + 1, (block, 1, sympy.floor(L / period)))
    averages = sympy.floor(L / period)
    return Cost(
        "DenseFormer",
        "arXiv 2402.02622, section 3",
        parameters=weights,
        other=TOKENS * d * (2 * weights - averages),
        live=L * d,
    )


def _aggregation(sources: Expr, aggregations: Expr) -> tuple[Expr, Expr, Expr]:
    """Attention over ``sources`` vectors in all, in so many aggregations, per token: parameters, products,
    rest.

    An RMSNorm of every vector, a score with the aggregation's own query, a softmax, the weighted sum. Its own
    are the query and the weight of the norm.
    """
    return 2 * d * aggregations, 4 * d * sources, (norm_flops(d) + SOFTMAX_PER_PAIR) * sources


def attention_residuals() -> Cost:
    """Attention Residuals, full (Kimi Team, arXiv 2603.15031, section 3.1): every sublayer reads a softmax
    average of the embedding and all earlier sublayers' outputs, and so does the head.

    Sublayer m = 2 .. 2L has m sources (the first reads the embedding), the head 2L + 1. No residual
    additions: 2 L d less. Live: the embedding and the outputs of 2L - 1 sublayers, beside the one at work.
    """
    sublayers = 2 * L
    sources = (sublayers + 1) * (sublayers + 2) / 2 - 1
    parameters, matmul, other = _aggregation(sources, sublayers)
    return Cost(
        "AttnRes, full",
        "arXiv 2603.15031, section 3.1",
        parameters,
        TOKENS * matmul,
        TOKENS * (other - sublayers * d),
        live=sublayers * d,
    )


def block_attention_residuals() -> Cost:
    """Attention Residuals over N blocks of 2L / N sublayers (arXiv 2603.15031, section 3.2).

    Sublayer i of block b reads the embedding and the b - 1 sums of the earlier blocks, and, from the second
    sublayer on, the sum of its own block so far: b + 1 sources, b for the first. The head reads N + 1. The
    first of all reads the embedding only. Residual additions are left within blocks: N d fewer. Live: the
    embedding and the N - 1 sums, beside the block at work.
    """
    sublayers = 2 * L
    per_block = sublayers / N
    sources = per_block * N * (N + 1) / 2 + N * (per_block - 1) - 1 + (N + 1)
    parameters, matmul, other = _aggregation(sources, sublayers)
    return Cost(
        "AttnRes, blocks",
        "arXiv 2603.15031, section 3.2",
        parameters,
        TOKENS * matmul,
        TOKENS * (other - N * d),
        live=N * d,
    )


def hyper_connections() -> Cost:
    """Dynamic hyper-connections with n streams (Zhu et al., arXiv 2409.19606, algorithm 2), per sublayer:

    - a norm of every stream; its products with matrices of n + 1 columns (width) and 1 (depth); of each of
      the n (n + 2) results tanh, scale and static part
    - width: n + 1 weighted sums of n streams; depth: n products and sums
    - d residual additions less

    Own: norm d, matrices d (n + 2), static parts n (n + 2), 2 scales. At the end the n streams are added up.
    """
    sublayers = 2 * L
    weights = n * (n + 2)
    matmul = 2 * d * weights + 2 * (n + 1) * n * d
    other = n * norm_flops(d) + 3 * weights + 2 * n * d - d
    return Cost(
        "hyper-connections",
        "arXiv 2409.19606, algorithm 2",
        sublayers * (d + d * (n + 2) + weights + 2),
        TOKENS * sublayers * matmul,
        TOKENS * (sublayers * other + n * d),
        live=(n - 1) * d,
    )


def manifold_hyper_connections(rounds: int = SINKHORN_ROUNDS) -> Cost:
    """mHC with n streams (Xie et al., arXiv 2512.24880, section 4), per sublayer:

    - an RMSNorm (without weight) of the n d numbers of a token, its product with a matrix of n^2 + 2n
      columns, a scale and a bias
    - sigmoid of n, twice the sigmoid of n, exponential of n^2; per Sinkhorn round the sums and quotients of
      rows and of columns, 4 n^2
    - n products and sums for the input, n^2 for the streams, n for the output; d residual additions less

    Own: the matrix n d (n^2 + 2n), n^2 + 2n biases, 3 scales. At the end the n streams are added up.
    """
    sublayers = 2 * L
    weights = n**2 + 2 * n
    matmul = 2 * n * d * weights + 2 * n * d + 2 * n**2 * d
    other = 3 * n * d + 2 + 2 * weights + 3 * n + n**2 + rounds * 4 * n**2 + 2 * n * d - d
    return Cost(
        "mHC",
        "arXiv 2512.24880, section 4",
        sublayers * (n * d * weights + weights + 3),
        TOKENS * sublayers * matmul,
        TOKENS * (sublayers * other + n * d),
        live=(n - 1) * d,
    )


def all_methods(shape: DecoderShape) -> list[tuple[Cost, dict[sympy.Symbol, int]]]:
    """Every method with the setting its paper recommends, to be put beside each other."""
    blocks = next(b for b in range(min(BLOCKS, 2 * shape.layers), 0, -1) if 2 * shape.layers % b == 0)
    return [
        (depth_attention(shape), {}),
        (denseformer(), {dilation: 1, period: 1}),
        (denseformer(), {dilation: 4, period: 5}),
        (attention_residuals(), {}),
        (block_attention_residuals(), {N: blocks}),
        (hyper_connections(), {n: STREAMS}),
        (manifold_hyper_connections(), {n: STREAMS}),
    ]

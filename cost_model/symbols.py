"""The names of every size, and what is counted.

One convention everywhere, in the closed forms and in the count of a graph:

- FLOPs are operations on floating-point numbers; arithmetic on integers and booleans (positions, masks)
  is none. A multiplication is 1, an addition is 1.
- A product of an (m, k) and a (k, n) matrix is 2mnk.
- An elementwise operation is 1 per element of its result, whatever it computes (``exp`` as ``add``).
- A reduction (sum, mean, maximum) is 1 per element it reads.
- What only moves data (views, casts, copies, concatenation, look-ups) is 0.
- Causal attention is counted twice, and the two are named apart: *executed* is every pair of a query and a
  key, masked ones included; *needed* leaves out the T (T - 1) / 2 pairs per head that the mask removes.
- Training is three times the forward pass: two products per product in the backward pass (Kaplan et al.,
  arXiv 2001.08361, section 2.1). Recomputation is not counted. For the mixture, which is elementwise, 3 is on
  the safe side: its traced forward and backward come to 2.4.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy


def _positive(names: str) -> tuple[sympy.Symbol, ...]:
    return sympy.symbols(names, integer=True, positive=True)


def _natural(names: str) -> tuple[sympy.Symbol, ...]:
    return sympy.symbols(names, integer=True, nonnegative=True)


B, T = _positive("B T")
"""Batch entries; new tokens per batch entry (1 in decoding)."""

(C,) = _natural("C,")
"""Tokens per batch entry that are in the cache already."""

L, s = _positive("L s")
"""Layers; stride of Depth-Attention."""

(w,) = _natural("w,")
"""Recent window of Depth-Attention."""

Hq, Hkv, dk, dv = _positive("H_q H_kv d_k d_v")
"""Query heads, key/value heads, head sizes of keys and values."""

d, ff, V = _positive("d d_ff V")
"""Width of the residual stream, of the feed-forward layer, size of the vocabulary."""

E, k, fe = _positive("E k d_e")
"""Experts, experts used per token, width of an expert."""

M, fs = _natural("L_moe d_s")
"""Layers with experts; width of the shared expert beside them (0: none)."""

rq, rkv, dn, dr = _positive("r_q r_kv d_n d_r")
"""Latent attention: ranks of query and key/value, unrotated and rotated part of a head."""

n = sympy.Symbol("n", integer=True, positive=True)
"""Streams of hyper-connections."""

N = sympy.Symbol("N", integer=True, positive=True)
"""Blocks of block attention residuals."""

dilation, period = _positive("k_D p_D")
"""Dilation and period of DenseFormer."""

e = sympy.Symbol("e", positive=True)
"""Bytes per element."""


def at(expression: sympy.Expr, values: Mapping[sympy.Symbol, int]) -> sympy.Expr:
    """``expression`` with sizes filled in: ``subs`` at once instead of one symbol after the other, and sums
    computed."""
    filled = expression.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    return filled.xreplace({total: _summed(total) for total in filled.atoms(sympy.Sum)})


def _summed(total: sympy.Sum) -> sympy.Expr:
    """A sum over a known range, term by term; ``doit`` looks for a closed form first, which takes longer."""
    (index, first, last), *more = total.limits
    if more or not (first.is_Integer and last.is_Integer):
        return total.doit()
    return sympy.Add(*(total.function.xreplace({index: sympy.Integer(i)}) for i in range(first, last + 1)))

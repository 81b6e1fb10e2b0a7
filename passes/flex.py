"""What the functions inside ``flex_attention`` do to scores: told by running them on all pairs of tokens.

``flex_attention(query, key, value, score_mod, block_mask)`` carries two small graphs: ``score_mod(score,
batch, head, query, key, *buffers)`` and the block mask's ``mask_mod(batch, head, query, key, *buffers)``.
Between them they say which key a query sees, and may scale the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_HIDDEN = -1e3
_UNLIMITED = 1 << 30
"""The block size of the block mask that ``flex_attention`` makes for itself where it is given none."""


@dataclass(frozen=True, eq=False)
class Mods:
    """The two functions of one ``flex_attention``, and the nodes of the buffers they read besides."""

    score: GraphModule | None
    mask: GraphModule | None
    score_reads: tuple[Node, ...]
    mask_reads: tuple[Node, ...]
    blocks: bool
    """Which blocks are looked at is decided by tensors as well, whose values a capture does not hold."""


def mods_of(bound: dict[str, object], bodies: dict[Node, GraphModule]) -> Mods:
    """``bound``: the arguments of a ``flex_attention`` node."""
    block_mask = bound.get("block_mask") or ()
    last = block_mask[-1] if block_mask else None
    sizes = [x for x in block_mask if isinstance(x, int)]
    reads = [
        tuple(x for x in (bound.get(name) or ()) if isinstance(x, Node))
        for name in ("score_reads", "mask_reads")
    ]
    return Mods(
        bodies.get(bound.get("score_mod")), bodies.get(last), *reads, max(sizes, default=0) < _UNLIMITED
    )


def visible(
    mods: Mods, score: Sequence[object], mask: Sequence[object], sizes: tuple[int, int, int]
) -> Tensor:
    """Which key each query sees, in any head: (queries, keys), bool.

    Args:
        score, mask: values of the buffers the two functions read.
        sizes: numbers of heads, queries and keys.
    """
    seen = torch.ones(sizes, dtype=torch.bool)
    if mods.mask is not None:
        seen = _on_all_pairs(lambda h, q, k: mods.mask(_ZERO, h, q, k, *mask), sizes).to(torch.bool)
    if mods.score is not None:
        zero = torch.zeros((), dtype=torch.double)
        change = _on_all_pairs(lambda h, q, k: mods.score(zero, _ZERO, h, q, k, *score), sizes).double()
        seen = seen & (change > change.amax(-1, keepdim=True) + _HIDDEN)
    return seen.any(0)


def slope(mods: Mods, score: Sequence[object], sizes: tuple[int, int, int]) -> float | None:
    """The number that ``score_mod`` multiplies small scores with; None if it differs between pairs."""
    if mods.score is None:
        return 1.0

    def single(h: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        zero = torch.zeros((), dtype=torch.double)
        changed = lambda s: mods.score(s, _ZERO, h, q, k, *score)  # noqa: E731
        value, grown = torch.func.jvp(changed, (zero,), (torch.ones_like(zero),))
        return value.double(), grown.double()

    value, grown = _on_all_pairs(single, sizes)
    kept = grown[value > value.amax(-1, keepdim=True) + _HIDDEN]
    if kept.numel() == 0 or float(kept.max() - kept.min()) > 1e-9 * float(kept.abs().max()):
        return None
    return float(kept.mean()) or None


_ZERO = torch.zeros((), dtype=torch.int)


def _on_all_pairs(function: Callable[..., Any], sizes: tuple[int, int, int]) -> Any:
    """``function(head, query, key)`` for all of them: (heads, queries, keys)."""
    for axis in (2, 1, 0):
        places: list[int | None] = [None, None, None]
        places[axis] = 0
        function = torch.vmap(function, in_dims=tuple(places))
    return function(*(torch.arange(n, dtype=torch.int) for n in sizes))

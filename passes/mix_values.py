"""The rewrite: in every layer with sources, the value becomes the mixture over depth.

    raw value ----------------------> value -> [cache write] -> attention
    becomes
    raw value -> mix(query, keys) --> value -> [cache write] -> attention

Everything is computed in the order in which the value lies in memory (tokens before heads, as a projection
leaves it), unrolled over the sources, with no stack, no softmax call and no cast of a source: Inductor then
fuses the mixture into kernels that are there anyway.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..errors import UnsupportedModelError
from .axes import Axis, AxisRole
from .emit import TAG, emit, move_before, turn_into
from .nodes import describe, dtype_of, hint, same_size, value_of
from .order_layers import Layer, Stack, groups, lanes
from .placement import Placement
from .sites import AttentionSite, Factor, Operand
from .subgraphs import Threads


@dataclass(frozen=True)
class Form:
    """How to bring a tensor into the common order ``(lanes and tokens as in memory, [groups,] features)``,
    and back."""

    splits: tuple[tuple[int, tuple[int, ...]], ...]
    drops: tuple[int, ...]
    order: tuple[int, ...]
    adds: tuple[int, ...]

    def apply(self, x: Any) -> Any:
        for dim, sizes in self.splits:
            x = x.unflatten(dim, sizes)
        for dim in self.drops:
            x = x.squeeze(dim)
        x = _permute(x, self.order)
        for dim in self.adds:
            x = x.unsqueeze(dim)
        return x

    def undo(self, x: Any) -> Any:
        for dim in reversed(self.adds):
            x = x.squeeze(dim)
        inverse = [0] * len(self.order)
        for new, old in enumerate(self.order):
            inverse[old] = new
        x = _permute(x, tuple(inverse))
        for dim in reversed(self.drops):
            x = x.unsqueeze(dim)
        for dim, sizes in reversed(self.splits):
            x = x.flatten(dim, dim + len(sizes) - 1)
        return x


def _permute(x: Any, order: tuple[int, ...]) -> Any:
    moved = [i for i, dim in enumerate(order) if i != dim]
    if not moved:
        return x
    if len(moved) == 2:
        return x.transpose(*moved)
    return x.permute(order)


def _keys(site: AttentionSite) -> list[Any]:
    """Names of the axes in the order of the attention: lanes, then tokens."""
    return [*lanes(site), AxisRole.TOKEN]


def _name(axis: Axis) -> Any:
    return axis if axis.role is AxisRole.LANE else axis.role


def memory_order(site: AttentionSite) -> tuple[int, ...]:
    """In which order lanes and tokens lie in the memory of the value, as indices into its lanes and
    tokens."""
    names = _keys(site)
    value = value_of(site.value.node)
    strides = [hint(n, 1 << 30) for n in value.stride()]
    dims = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    found = [
        names.index(_name(axis)) for dim in dims for axis in site.value.layout[dim] if _name(axis) in names
    ]
    missing = [i for i in range(len(names)) if i not in found]
    return (*missing, *found)


def form_of(operand: Operand, site: AttentionSite, order: Sequence[int], grouped: bool = False) -> Form:
    """The :class:`Form` of one operand; axes of size 1 that it does not show are added.

    ``grouped``: the operand is a query, with an axis of query heads per key and value.
    """
    names = _keys(site)
    target = [names[i] for i in order] + (list(groups(site)) if grouped else []) + [AxisRole.FEATURE]
    splits, drops, shown = [], [], []
    dim = 0
    for axes in site.attention.axes.resolve(operand.layout):
        if len(axes) > 1:
            splits.append((dim, _sizes(axes, site)))
        if not axes:
            drops.append(dim)
        shown += [_name(axis) for axis in axes] or [None]
        dim += max(1, len(axes))
    kept = [name for name in shown if name is not None]
    present = [name for name in target if name in kept]
    adds = tuple(i for i, name in enumerate(target) if name not in kept)
    if sorted(map(id, kept)) != sorted(map(id, present)):
        raise AssertionError(f"{operand.node.name} holds axes {kept}, expected among {target}")
    return Form(tuple(splits), tuple(reversed(drops)), tuple(kept.index(name) for name in present), adds)


def _sizes(axes: Sequence[Axis], site: AttentionSite) -> tuple[int, ...]:
    sizes: list[int] = []
    for axis in axes:
        size = site.tokens if axis.role is AxisRole.TOKEN else axis.size
        sizes.append(size if isinstance(size, int) else -1)
    if sizes.count(-1) > 1:
        raise UnsupportedModelError(
            f"{describe(site.output)}: two sizes that vary between calls are merged into one dimension of "
            "its query, "
            "key or value. Capture with dynamic=False, or keep batch and tokens in dimensions of their own"
        )
    return tuple(sizes)


LARGEST_PART = 7
"""Inductor writes a sum of fewer than 8 numbers out in the kernel that uses it; from 8 on it takes one of its
own."""


def parts_of_mean(size: int) -> list[int]:
    """How many query heads of a group of ``size`` are summed at a time."""
    count = -(-size // LARGEST_PART)
    return [size // count + (i < size % count) for i in range(count)]


def group_mean(query: Any, dims: Sequence[int], sizes: Sequence[int], dtype: torch.dtype | None) -> Any:
    """The mean over ``dims``, in ``dtype``; over large groups as a sum of sums."""
    size = math.prod(sizes)
    parts = parts_of_mean(size)
    if len(parts) == 1:
        return query.mean(dim=list(dims), dtype=dtype)
    if len(dims) > 1:
        query = query.flatten(dims[0], dims[-1])
    ends = itertools.accumulate(parts)
    sums = [
        query.narrow(dims[0], end - n, n).sum(dims[0], dtype=dtype)
        for n, end in zip(parts, ends, strict=True)
    ]
    return functools.reduce(operator.add, sums) * (1 / size)


def softmax_weights(scores: Sequence[Any], own: Any) -> list[Any]:
    """Softmax over ``scores`` and last ``own``, as a chain of sigmoids: of each score against all before it.

    The softmax over n + 1 scores in n numbers: no more is saved for backward.
    """
    total, shares = scores[0], []
    for score in scores[1:]:
        ahead = score - total
        shares.append(torch.sigmoid(ahead))
        total = score - F.logsigmoid(ahead)  # log(exp(total) + exp(score))
    shares.append(torch.sigmoid(own - total))
    weights, rest = [shares[-1]], 1 - shares[-1]
    for share in reversed(shares[:-1]):
        weights.append(rest * share)
        rest = rest * (1 - share)
    return [rest, *reversed(weights)]


@dataclass(frozen=True)
class Scaling:
    """The softmax scale of the layer, and the factor each source's key is used with (the layer's own
    last)."""

    number: float
    times: Sequence[Any] = ()
    over: Sequence[Any] = ()
    factors: Sequence[float] = ()
    bias: Any = None
    """Is added to the layer's own scaled score; None adds nothing."""

    def biased(self, score: Any) -> Any:
        return score if self.bias is None else score + self.bias

    def apply(self, score: Any, factor: float = 1.0) -> Any:
        if self.number * factor != 1.0:
            score = score * (self.number * factor)
        for scalar in self.times:
            score = score * scalar
        for scalar in self.over:
            score = score / scalar
        return score


def weights(scores: Sequence[Any], scaling: Scaling) -> list[Any]:
    """Depth weights from unscaled scores. For one source, softmax is one sigmoid of the difference."""
    factors = scaling.factors or [1.0] * len(scores)
    if len(scores) == 2 and factors[0] == factors[1]:
        own = torch.sigmoid(scaling.biased(scaling.apply(scores[1] - scores[0], factors[0])))
        return [1 - own, own]
    scaled = [scaling.apply(score, f) for score, f in zip(scores, factors, strict=True)]
    return softmax_weights(scaled[:-1], scaling.biased(scaled[-1]))


def scored(
    query: Any,
    keys: Sequence[Any],
    scaling: Scaling,
    group_dims: Sequence[int] = (),
    group_sizes: Sequence[int] = (),
    query_dtype: torch.dtype | None = None,
) -> list[Any]:
    """The depth weights of one layer in the common order; plain PyTorch, run on tensors, fakes or proxies.

    Args:
        query: (..., groups, D).
        keys: (..., D) each, in depth order, the layer's own last.
        group_dims: the dimensions of ``query`` to take the mean over, next to each other.
        group_sizes: their sizes, which decide how the mean is taken.
        query_dtype: dtype of scores and weights, if the query has to be cast. Keys are not cast: multiplying
            them with a wider factor promotes them, and no wider copy is saved for backward.
    """
    if group_dims:
        query = group_mean(query, group_dims, group_sizes, query_dtype)
    elif query_dtype is not None:
        query = query.to(query_dtype)
    return weights([(query * key).sum(-1, keepdim=True) for key in keys], scaling)


def combined(shares: Sequence[Any], values: Sequence[Any], value_dtype: torch.dtype | None = None) -> Any:
    """The mixture from weights (..., 1) and values (..., E) in depth order, the layer's own raw one last.

    Args:
        value_dtype: dtype of the result, if it has to be cast. Values are not cast, see :func:`scored`.
    """
    parts = [share * value for share, value in zip(shares, values, strict=True)]
    mixed = functools.reduce(operator.add, parts)
    return mixed if value_dtype is None else mixed.to(value_dtype)


@dataclass(frozen=True, eq=False)
class Source:
    """What later layers read of a layer: key and (mixed) value in a common order."""

    key: Node
    value: Node
    order: tuple[int, ...]
    factor: float
    """What the product of a query and this key still has to be multiplied with."""


@dataclass(frozen=True, eq=False)
class Mixed(Source):
    """A layer after the rewrite."""

    layer: Layer
    raw: Node | None
    """What the value was before; None in a layer without sources."""

    reads: tuple[tuple[Node, Node], ...]
    """Key and value of each source, as they are in this layer's graph."""

    inserted: tuple[Node, ...]
    shares: tuple[Node, ...] = ()
    """The depth weights: those of the sources and last the layer's own, in the common order."""

    bias: Node | None = None
    """What is added to the layer's own score, as it is in this layer's graph."""


def mix_stack(
    stack: Stack, placements: dict[Layer, Placement], threads: Threads, bias: Node | None = None
) -> dict[int, Mixed]:
    """Rewrite every layer of ``stack`` that has sources; returns sources and mixed layers by depth."""
    needed = {j for layer in stack.layers for j in layer.sources}
    done: dict[int, Mixed] = {}
    for layer in stack.layers:
        placement = placements[layer]
        if layer.sources:
            done[layer.depth] = mix_layer(layer, placement, done, threads, stack.config.recompute, bias)
        elif layer.depth in needed:
            done[layer.depth] = keep_raw(layer, placement)
    return done


def keep_raw(layer: Layer, placement: Placement) -> Mixed:
    """A layer without sources keeps its value; later layers read it and its key in the common order."""
    site = layer.site
    order = memory_order(site)
    for node in placement.forward:
        move_before(node, placement.anchor)
    key_side, value_form = _Side.of_key(layer, order), form_of(site.value, site, order)
    (key, value), new = emit(
        placement.anchor.graph,
        placement.anchor,
        lambda v, *k: (key_side.apply(k), value_form.apply(v)),
        [site.value.node, *key_side.nodes],
        site.value.node,
        layer.depth,
    )
    return Mixed(key, value, order, _factor(layer), layer, None, (), tuple(new))


@dataclass(frozen=True)
class _Side:
    """A query or key as the score reads it: one tensor, and what it is scaled with token by token."""

    form: Form
    factors: tuple[tuple[Form, bool], ...]
    nodes: tuple[Node, ...]
    dtype: torch.dtype | None
    """To cast the scaled tensor to, where scaling widens it."""

    @staticmethod
    def of_key(layer: Layer, order: Sequence[int]) -> _Side:
        return _Side.of(layer.score.key, layer.score.key_factors, layer.site, order)

    @staticmethod
    def of_query(layer: Layer, order: Sequence[int]) -> _Side:
        return _Side.of(layer.score.query, layer.score.query_factors, layer.site, order, grouped=True)

    @staticmethod
    def of(
        operand: Operand,
        factors: Sequence[Factor],
        site: AttentionSite,
        order: Sequence[int],
        grouped: bool = False,
    ) -> _Side:
        forms = tuple((form_of(f.operand, site, order, grouped), f.divides) for f in factors)
        nodes = (operand.node, *(f.operand.node for f in factors))
        dtypes = [dtype_of(node) for node in nodes]
        widened = functools.reduce(torch.promote_types, dtypes) != dtypes[0]
        return _Side(form_of(operand, site, order, grouped), forms, nodes, dtypes[0] if widened else None)

    def apply(self, tensors: Sequence[Any]) -> Any:
        x = self.form.apply(tensors[0])
        for (form, divides), factor in zip(self.factors, tensors[1:], strict=True):
            x = x / form.apply(factor) if divides else x * form.apply(factor)
        return x if self.dtype is None else x.to(self.dtype)


def _factor(layer: Layer) -> float:
    """What a product with the layer's key still has to be multiplied with."""
    return layer.site.key_factor * layer.score.key_number


def mix_layer(
    layer: Layer,
    placement: Placement,
    sources: Mapping[int, Source],
    threads: Threads,
    recompute: bool = False,
    bias: Node | None = None,
) -> Mixed:
    """Rewrite one layer; ``sources`` by depth, wherever they come from; ``bias`` is a scalar of the outermost
    graph."""
    site, score, anchor = layer.site, layer.score, placement.anchor
    graph = anchor.graph
    point = site.value.node
    order = memory_order(site)
    dtype = functools.reduce(
        torch.promote_types, (dtype_of(n) for n in (score.query.node, score.key.node, point)), torch.float32
    )
    for node in placement.forward:
        move_before(node, anchor)
    with graph.inserting_before(point):
        raw = graph.node_copy(point)
    raw.meta = {**point.meta, TAG: layer.depth}
    for node in placement.wait:
        move_before(node, anchor)

    query_side, key_side = _Side.of_query(layer, order), _Side.of_key(layer, order)
    value_form = form_of(site.value, site, order)
    shared = [axis.size for axis in groups(site)]
    group_dims = range(len(order), len(order) + len(shared))
    group_sizes = shared if all(isinstance(size, int) for size in shared) else []
    mixed = [sources[j] for j in layer.sources]
    reads = tuple((threads.bring(x.key, graph), threads.bring(x.value, graph)) for x in mixed)
    turns = [_turn(other.order, order) for other in mixed]
    factors = [factor * score.query_number for factor in (*(x.factor for x in mixed), _factor(layer))]
    scale = site.attention.scale
    extra = [] if bias is None else [threads.bring(bias, graph)]
    count = len(mixed)
    query_dtype = dtype if dtype_of(score.query.node) != dtype else None
    value_dtype = dtype_of(point) if dtype_of(point) != dtype else None

    def score_all(*given: Any) -> Any:
        ours, theirs, keys, times, over, own = _split(
            given, len(query_side.nodes), len(key_side.nodes), count, len(scale.times), len(scale.over)
        )
        query, key = query_side.apply(ours), key_side.apply(theirs)
        keys = [_permute(x, turn) for x, turn in zip(keys, turns, strict=True)]
        scaling = Scaling(scale.number, times, over, factors, *own)
        return key, scored(query, [*keys, key], scaling, group_dims, group_sizes, query_dtype)

    def combine(value: Any, *rest: Any) -> Any:
        values, shares, _ = _split(rest, count, count + 1)
        values = [_permute(x, turn) for x, turn in zip(values, turns, strict=True)]
        common = combined(shares, [*values, value_form.apply(value)], value_dtype)
        return common, value_form.undo(common)

    before = placement.wait[0] if placement.wait else anchor
    inputs = [*query_side.nodes, *key_side.nodes, *(key for key, _ in reads)]
    inputs += [*scale.times, *scale.over, *extra]
    (key, shares), weighing = emit(graph, before, score_all, inputs, point, layer.depth, known=threads.fakes)
    inputs = [raw, *(value for _, value in reads), *shares]
    (common, last), mixing = emit(
        graph, before, combine, inputs, point, layer.depth, recompute, threads.fakes
    )
    new = [*weighing, *mixing]
    turn_into(point, last)
    new = [node for node in new if node is not last]
    if common is last:
        common = point
    _check_shape(site, raw)
    inserted = (raw, *new)
    return Mixed(key, common, order, _factor(layer), layer, raw, reads, inserted, tuple(shares), *extra)


def _split(items: Sequence[Any], *counts: int) -> tuple[Sequence[Any], ...]:
    """Cut ``items`` into pieces of these lengths, and the rest."""
    pieces, start = [], 0
    for count in counts:
        pieces.append(items[start : start + count])
        start += count
    return (*pieces, items[start:])


def in_order(x: Any, order: Sequence[int]) -> Any:
    """A tensor in a common order, brought into the order of the attention: lanes, tokens, features."""
    return _permute(x, _turn(order, range(len(order))))


def _turn(theirs: Sequence[int], mine: Sequence[int]) -> tuple[int, ...]:
    """The permutation that brings a source in its own common order into this layer's."""
    place = {name: i for i, name in enumerate(theirs)}
    return (*(place[name] for name in mine), len(mine))


def _check_shape(site: AttentionSite, raw: Node) -> None:
    new, old = value_of(site.value.node), value_of(raw)
    alike = new.dtype == old.dtype and new.dim() == old.dim()
    if not alike or not all(same_size(a, b) for a, b in zip(new.shape, old.shape, strict=True)):
        raise AssertionError(
            f"mixing changed {site.value.node.name} from {old.dtype}{list(old.shape)} to "
            f"{new.dtype}{list(new.shape)}"
        )

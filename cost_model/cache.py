"""Bytes of the key/value cache, from what a graph writes into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from ..passes.find_sites import Findings
from ..passes.nodes import value_of
from ..passes.ops import Role, arguments, first_tensor, has_role, mutated, op_of
from ..passes.sites import AttentionSite
from ..passes.trace_values import trace
from .polynomials import Count, numel


def value_cache_bytes(site: AttentionSite, instead: Mapping[Node, Node] | None = None) -> Count:
    """Bytes of the cache that the value of ``site`` is written to; 0 where it is not cached.

    Computed from the inputs of the write, not from what the write's own metadata says, so that it follows a
    change of the value.

    Args:
        instead: nodes to take the size of, for others and views of these: ``{value: raw}`` gives the cache
            before a rewrite, ``{value: value}`` after it, whatever the views' own metadata says.
    """
    return _state_bytes(site.cache_writes, instead or {})


def cache_bytes(graph: Graph, findings: Findings) -> Count:
    """Bytes of all keys and values that the layers of ``graph`` keep for the next call.

    Where a sliding window keeps a slice of what was joined, the slice counts. Caches that several layers
    read are counted once.
    """
    kept = _kept(graph)
    seen: dict[Node, Count] = {}
    for site in findings.sites:
        attention = site.attention
        key = trace(attention.key, attention.axes, findings.flow, attention.value_argument, attention.tokens)
        for writes in (key.writes, site.cache_writes):
            if writes:
                state = _state(writes[0])
                seen.setdefault(state, kept.get(state) or _state_bytes(writes, {}))
    return sum(seen.values())


def _state(write: Node) -> Node:
    """The tensor that holds the cache after ``write``."""
    targets = mutated(write)
    return targets[0] if targets else write


def _state_bytes(writes: Sequence[Node], instead: Mapping[Node, Node]) -> Count:
    """``writes``: nearest to the attention first, as :func:`..passes.trace_values.trace` lists them."""
    if not writes:
        return 0
    state = _state(writes[0])
    if not has_role(state, Role.JOIN):
        return _bytes(value_of(instead.get(state, state)))
    parts = [x for x in arguments(state)["tensors"] if isinstance(x, Node)]
    return sum(_bytes(_resized(x, instead)) for x in parts)


def _resized(node: Node, instead: Mapping[Node, Node]) -> torch.Tensor:
    """The value of ``node``; where it is a view of a node to be replaced, that of the replacement."""
    origin = node
    while origin not in instead and has_role(origin, Role.PERMUTE, Role.RESHAPE, Role.COPY):
        source = first_tensor(origin)
        if source is None:
            break
        origin = source
    return value_of(instead.get(origin, node))


def _bytes(tensor: torch.Tensor) -> Count:
    return numel(tensor) * tensor.dtype.itemsize


def _kept(graph: Graph) -> dict[Node, Count]:
    """Joined tensors of which the graph returns a slice only, with the bytes of the slice."""
    output = next((node for node in reversed(graph.nodes) if node.op == "output"), None)
    returned = set(output.all_input_nodes) if output is not None else set()
    kept: dict[Node, Count] = {}
    for node in returned:
        op = op_of(node)
        source = first_tensor(node) if op is not None and op.role in (Role.SLICE, Role.INDEX) else None
        if source is not None and has_role(source, Role.JOIN) and source not in returned:
            kept[source] = _bytes(value_of(node))
    return kept

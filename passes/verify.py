"""What must hold after a rewrite, checked on every graph. Raises AssertionError: a failure is a fault of
depthify."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..errors import UnsupportedModelError
from .dataflow import Dataflow
from .mix_values import Mixed, Source
from .nodes import describe, same_size, value_of
from .ops import Role, has_role
from .subgraphs import Threads

Snapshot = dict[Node, tuple[Any, ...]]


def snapshot(graphs: Iterable[Graph]) -> Snapshot:
    """Operation, arguments and kind of tensor of every node of a program and its bodies."""
    return {
        node: (node.op, node.target, node.args, node.kwargs, value_of(node))
        for graph in graphs
        for node in graph.nodes
    }


def verify(flow: Dataflow, before: Snapshot, mixed: Sequence[dict[int, Any]], threads: Threads) -> None:
    """Compare a rewritten program, freshly indexed in ``flow``, with its snapshot.

    - inputs, weights and outputs are the same nodes, in the same order;
    - every node computes what it computed from the same arguments, mixed values excepted;
    - mixed values, and with them what caches hold, keep shape, dtype and device;
    - in its own layer, nothing but the value path reads the mixed value: query, key, mask and scale do not
      depend on it;
    - each mixture reads its own query, key and raw value and those of its sources, and nothing else.
    """
    for graph in flow.graphs:
        graph.lint()
    done = [layer for stack in mixed for layer in stack.values() if isinstance(layer, Mixed)]
    values = {layer.layer.site.value.node for layer in done if layer.raw is not None}
    inserted = {node for layer in done for node in layer.inserted} | set(threads.inserted)
    _verify_nodes(flow, before, values, inserted, threads.extended)
    for stack in mixed:
        for layer in stack.values():
            if not isinstance(layer, Mixed):
                continue  # a source from outside
            if layer.raw is not None:
                _verify_reads(layer, stack, flow)
                _verify_readers(layer, flow)
            else:
                _same_up_to_layout(layer.value, layer.layer.site.value.node)


def _verify_nodes(
    flow: Dataflow, before: Snapshot, values: set[Node], inserted: set[Node], extended: set[Node]
) -> None:
    now = [node for graph in flow.graphs for node in graph.nodes]
    lost = before.keys() - set(now)
    added = set(now) - before.keys() - inserted
    if lost or added:
        raise AssertionError(f"nodes were lost: {_names(lost)}, or added unseen: {_names(added)}")
    for graph in flow.graphs:
        for kind in ("placeholder", "get_attr", "output"):
            old = [n for n in before if before[n][0] == kind and n.graph is graph]
            if [n for n in graph.nodes if n.op == kind and n not in inserted] != old:
                raise AssertionError(f"the graph's {kind} nodes changed")
    for node, (op, target, args, kwargs, value) in before.items():
        if node in values:
            _same_tensor(node, value)
        elif node in extended:
            if (node.op, node.target, node.kwargs) != (op, target, kwargs) or not _only_longer(
                node.args, args
            ):
                raise AssertionError(f"{describe(node)} changed by more than a source carried through it")
        elif (node.op, node.target) != (op, target) or node.args is not args or node.kwargs is not kwargs:
            raise AssertionError(f"{describe(node)} changed")


def _only_longer(now: Any, before: Any) -> bool:
    """Whether a call got more operands, or an output more results, behind those it had."""
    if len(now) == 1 and len(before) == 1 and isinstance(now[0], (tuple, list)):
        now, before = now[0], before[0]
    return tuple(now[: len(before)]) == tuple(before)


def _same_tensor(node: Node, old: Any) -> None:
    new = value_of(node)
    alike = isinstance(new, torch.Tensor) and new.dtype == old.dtype and new.device == old.device
    if not alike or new.dim() != old.dim() or not all(map(same_size, new.shape, old.shape)):
        raise AssertionError(f"{describe(node)} changed from {old.dtype}{list(old.shape)}")


def _verify_readers(layer: Mixed, flow: Dataflow) -> None:
    site = layer.layer.site
    reached = flow.reached_from(site.value.node, until=site.output)
    scale = site.attention.scale
    fixed = {
        site.query.node,
        site.key.node,
        *layer.layer.score.nodes,
        *scale.times,
        *scale.over,
        *(mask for mask, _ in site.attention.masks),
    }
    if fixed & reached:
        raise UnsupportedModelError(
            f"{describe(site.output)}: its query, key, mask or scale is computed from its own value "
            f"({_names(fixed & reached)}), so the value cannot change alone"
        )
    if site.output not in reached:
        raise AssertionError(f"{describe(site.output)} does not read its mixed value")


def _verify_reads(layer: Mixed, stack: dict[int, Source], flow: Dataflow) -> None:
    site, score = layer.layer.site, layer.layer.score
    wanted = [(stack[j].key, stack[j].value) for j in layer.layer.sources]
    if [(flow.behind(key), flow.behind(value)) for key, value in layer.reads] != [
        (flow.behind(key), flow.behind(value)) for key, value in wanted
    ]:
        raise AssertionError(f"the mixture of {describe(site.output)} reads other sources than its own")
    must = {*score.nodes, layer.raw, *(node for pair in layer.reads for node in pair)}
    must |= set() if layer.bias is None else {layer.bias}
    may = must | {*site.attention.scale.times, *site.attention.scale.over}
    own = set(layer.inserted)
    found: set[Node] = set()
    seen: set[Node] = set()
    todo = list(site.value.node.all_input_nodes)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in may or node not in own:
            found.add(node)
        else:
            todo += node.all_input_nodes
    if found - may or must - found:
        raise AssertionError(
            f"the mixture of {describe(site.output)} reads {_names(found - may)} and lacks "
            f"{_names(must - found)}"
        )
    _same_up_to_layout(site.value.node, layer.value)


def _same_up_to_layout(node: Node, origin: Node) -> None:
    while node is not origin:
        if not has_role(node, Role.PERMUTE, Role.RESHAPE):
            raise AssertionError(f"{describe(node)} is more than a view of {describe(origin)}")
        node = node.all_input_nodes[0]


def _names(nodes: Iterable[Node | None]) -> list[str]:
    return sorted(node.name for node in nodes if node is not None)

"""Put plain tensor operations into a graph, with everything a traced node carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from ..torch_internals import RECOMPUTE_TAGS, TIMESTAMP, fake_mode_of, propagating
from .nodes import value_key, value_of

TAG = "depthify"
"""Metadata entry of inserted nodes: the number of the layer they mix."""

_PAPERS = ("nn_module_stack", "stack_trace", "custom", *RECOMPUTE_TAGS, "torch_fn", TIMESTAMP)


class _Tracer(GraphAppendingTracer):
    """Records operations on proxies; their names begin with ``prefix``."""

    def __init__(self, graph: Graph, prefix: str) -> None:
        super().__init__(graph)
        self.prefix = prefix

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> Node:
        if name is None and self.prefix:
            name = self.prefix + (target if isinstance(target, str) else target.__name__)
        return super().create_node(kind, target, args, kwargs, name, type_expr)


def emit(
    graph: Graph,
    before: Node,
    function: Callable[..., Any],
    inputs: Sequence[Node],
    like: Node,
    layer: int,
    recompute: bool = False,
    known: dict[str, list[Any]] | None = None,
) -> tuple[Any, list[Node]]:
    """Insert the operations of ``function(*inputs)`` in front of ``before``.

    Args:
        function: plain PyTorch code; it sees proxies (torch-level graphs) or is traced to ATen (export
        graphs). inputs: nodes of ``graph`` that come before ``before``.
        like: the node whose module, source line and recompute tags the new nodes take over.
        layer: number of the mixed layer, kept in the metadata.
        recompute: tag the operations for recomputation in backward, unless ``like`` is tagged. Their names
            tell it as well: caches of compiled graphs do not see tags.
        known: fake results by what was computed, from earlier calls for the same program: most layers are
        mixed
            alike, and running operations on fake tensors is what takes time here.

    Returns:
        The function's result as nodes, and all inserted nodes in order.
    """
    key = value_key(like)
    first = before.prev
    prefix = "recomputed_" if recompute else ""
    with graph.inserting_before(before):
        if key == "val":
            result = _emit_aten(graph, function, inputs, prefix)
        else:
            tracer = _Tracer(graph, prefix)
            proxies = function(*(Proxy(node, tracer) for node in inputs))
            result = torch.utils._pytree.tree_map_only(Proxy, lambda proxy: proxy.node, proxies)
    new: list[Node] = []
    node = first.next
    while node is not before:
        new.append(node)
        node = node.next
    if key != "val":
        _propagate(new, inputs, key, known)
    papers = {name: like.meta[name] for name in _PAPERS if name in like.meta}
    for node in new:
        node.meta = {**papers, **node.meta, TAG: layer}
        if recompute:
            tag_for_recomputation(node)
    return result, new


def _propagate(
    new: Sequence[Node], inputs: Sequence[Node], key: str, known: dict[str, list[Any]] | None
) -> None:
    """Give every new node its fake value."""
    signature = "" if known is None else _signature(new, inputs)
    values = known.get(signature) if known is not None else None
    if values is None:
        with propagating(fake_mode_of([value_of(n) for n in inputs])):
            for node in new:
                node.meta[key] = _run(node)
        if known is not None:
            known[signature] = [node.meta[key] for node in new]
    else:
        for node, value in zip(new, values, strict=True):
            node.meta[key] = value


class _Number:
    """Stands for a node in a signature."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"


def _signature(new: Sequence[Node], inputs: Sequence[Node]) -> str:
    """What is computed, from what kind of tensors: equal for equal work, whichever nodes do it."""
    numbers = {node: _Number(i) for i, node in enumerate(dict.fromkeys((*inputs, *new)))}
    rows = [(n.op, n.target, map_arg((n.args, n.kwargs), numbers.__getitem__)) for n in new]
    return str([*map(_kind, inputs), rows])


def _kind(node: Node) -> Any:
    known = value_of(node)
    if not isinstance(known, torch.Tensor):
        return known
    return known.dtype, known.device, known.requires_grad, tuple(known.shape), known.stride()


def tag_for_recomputation(node: Node) -> None:
    """As activation checkpointing would; where it has done so already, its choice stays."""
    for name, value in RECOMPUTE_TAGS.items():
        node.meta.setdefault(name, value)


def _run(node: Node) -> Any:
    args = map_arg(node.args, value_of)
    kwargs = map_arg(node.kwargs, value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def _emit_aten(graph: Graph, function: Callable[..., Any], inputs: Sequence[Node], prefix: str) -> Any:
    values = [value_of(node) for node in inputs]
    with propagating(fake_mode_of(values)):
        traced = make_fx(function)(*values)
    known: dict[Node, Node] = {}
    placeholders = iter(inputs)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(placeholders)
        elif node.op == "output":
            return map_arg(node.args[0], lambda n: known[n])
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
            known[node] = graph.create_node(node.op, node.target, args, kwargs, prefix + node.name, node.type)
            known[node].meta = {"val": node.meta["val"]}
    raise AssertionError("a traced function has no output")


def move_before(node: Node, target: Node) -> None:
    """Put ``node`` directly in front of ``target``; its users and arguments stay as they are."""
    target.prepend(node)


def turn_into(node: Node, last: Node) -> None:
    """Make ``node`` compute what ``last`` computes and erase ``last``: all that reads ``node`` reads the
    new value.

    Also what does not exist yet: while Dynamo traces, Python variables still hold ``node``.
    """
    if last.graph is not node.graph:
        raise AssertionError("nodes of two graphs")
    node.op, node.target = last.op, last.target
    args, kwargs = last.args, last.kwargs
    meta = {name: last.meta[name] for name in (value_key(last), TAG, *RECOMPUTE_TAGS) if name in last.meta}
    last.replace_all_uses_with(node)
    last.graph.erase_node(last)
    node.args, node.kwargs = args, kwargs
    node.meta.update(meta)

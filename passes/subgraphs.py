"""Bodies of higher-order operations: activation checkpointing and regions put layers into graphs of their
own.

    parent:  get_attr body -> call(body, operand 0, operand 1, ...) -> getitem 0, getitem 1, ...
    body:    placeholder 0, placeholder 1, ... -> ... -> output (result 0, result 1, ...)

The dataflow looks through both ends, so that finders see one program. A source in one body reaches a layer
in another as one more result of the first call and one more operand of the second, at every level of
nesting in between.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any, Protocol

from torch.fx import Graph, GraphModule, Node

from ..errors import UnsupportedModelError
from .emit import TAG
from .nodes import describe, value_key, value_of

_TRANSPARENT = ("tag_activation_checkpoint", "wrap", "invoke_subgraph", "wrap_with_set_grad_enabled",
                "wrap_with_autocast")  # fmt: skip


class Bodies(Protocol):
    """Where the graph modules named by ``get_attr`` nodes live."""

    def get(self, name: str) -> GraphModule | None: ...

    def add(self, name: str, body: GraphModule) -> str:
        """Store ``body`` under a new name that begins with ``name``; returns the name."""
        ...


class ModuleBodies:
    """Bodies stored as submodules of a graph module."""

    def __init__(self, owner: GraphModule) -> None:
        self._owner = owner

    def get(self, name: str) -> GraphModule | None:
        found = getattr(self._owner, name, None) if "." not in name else self._owner.get_submodule(name)
        return found if isinstance(found, GraphModule) else None

    def add(self, name: str, body: GraphModule) -> str:
        count = 0
        while hasattr(self._owner, f"{name}_{count}"):
            count += 1
        self._owner.add_module(f"{name}_{count}", body)
        return f"{name}_{count}"


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a body that is part of the program."""

    node: Node
    body: GraphModule
    first: int
    """Index of the first operand in the call's arguments."""

    def operand(self, placeholder: Node) -> Node | None:
        index = self.placeholders.index(placeholder) + self.first
        found = self.node.args[index] if index < len(self.node.args) else None
        return found if isinstance(found, Node) else None

    @property
    def placeholders(self) -> list[Node]:
        return [n for n in self.body.graph.nodes if n.op == "placeholder"]

    @property
    def output(self) -> Node:
        return next(n for n in reversed(self.body.graph.nodes) if n.op == "output")


def read_call(node: Node, bodies: Bodies | None) -> Call | None:
    """The call of a body that only groups operations; None for everything else."""
    if bodies is None or node.op != "call_function" or getattr(node.target, "name", None) is None:
        return None
    name = node.target.name() if callable(node.target.name) else node.target.name
    if str(name).rpartition("::")[2].rpartition(".")[2] not in _TRANSPARENT:
        return None
    for i, argument in enumerate(node.args):
        if isinstance(argument, Node) and argument.op == "get_attr":
            body = bodies.get(str(argument.target))
            if body is not None:
                first = i + 1
                if first < len(node.args) and isinstance(node.args[first], str):
                    first += 1  # invoke_subgraph names its body once more
                return Call(node, body, first)
    return None


def opaque_bodies(node: Node, bodies: Bodies | None) -> list[GraphModule]:
    """The bodies of an operation that does more than run them once: a condition, a loop, a map."""
    if bodies is None or node.op != "call_function" or read_call(node, bodies) is not None:
        return []
    found = (bodies.get(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr")
    return [body for body in found if body is not None]


def own_bodies(graph: Graph, bodies: Bodies, start: Node | None = None) -> None:
    """Give every call a body of its own: a body shared by several calls, or kept to be called again, is
    copied."""
    seen: set[int] = set()
    after = start is None
    for node in list(graph.nodes):
        call = read_call(node, bodies) if after else None
        after = after or node is start
        if call is None:
            continue
        name = str(node.target)
        if id(call.body) in seen or "invoke_subgraph" in name:
            _copy_body(graph, bodies, call)
            call = read_call(node, bodies)
            if call is None:
                raise AssertionError(f"{node.name} lost its body")
        seen.add(id(call.body))
        own_bodies(call.body.graph, ModuleBodies(call.body))


def _copy_body(graph: Graph, bodies: Bodies, call: Call) -> None:
    index = call.first - 1
    named = isinstance(call.node.args[index], str)
    reference = call.node.args[index - 1 if named else index]
    body = GraphModule(call.body, copy.deepcopy(call.body.graph))
    body.meta = copy.copy(call.body.meta)
    name = bodies.add(f"{reference.target}_own", body)
    with graph.inserting_before(call.node):
        own = graph.get_attr(name)
    own.meta = dict(reference.meta)
    args = list(call.node.args)
    args[index - 1 if named else index] = own
    if named:
        args[index] = name
    call.node.args = tuple(args)


class Threads:
    """Carries nodes from graph to graph through calls; each is carried once."""

    def __init__(self, calls: dict[Graph, Call]) -> None:
        self._calls = calls
        self._known: dict[tuple[Graph, Node], Node] = {}
        self.inserted: list[Node] = []
        self.extended: set[Node] = set()
        """Calls and outputs that got one more operand or result."""

        self.fakes: dict[str, list[Any]] = {}
        """Fake results of what was inserted, see :func:`~depthify.passes.emit.emit`."""

    def _path(self, graph: Graph) -> list[Graph]:
        path = [graph]
        while path[0] in self._calls:
            path.insert(0, self._calls[path[0]].node.graph)
        return path

    def bring(self, node: Node, graph: Graph) -> Node:
        """``node``, or what stands for it in ``graph``."""
        here, there = self._path(node.graph), self._path(graph)
        common = 0
        while common < min(len(here), len(there)) and here[common] is there[common]:
            common += 1
        for inner in reversed(here[common:]):
            node = self._out(node, inner)
        for inner in there[common:]:
            node = self._into(node, inner)
        return node

    def _out(self, node: Node, graph: Graph) -> Node:
        call = self._calls[graph]
        parent = call.node.graph
        if (parent, node) in self._known:
            return self._known[parent, node]
        results = call.output.args[0]
        outer = value_of(call.node)
        if not isinstance(results, (tuple, list)) or not isinstance(outer, (tuple, list)):
            raise UnsupportedModelError(
                f"{describe(call.node)} returns a single value, so no source can leave it"
            )
        call.output.args = ((*results, node),)
        key = value_key(call.node)
        call.node.meta[key] = (*outer, value_of(node))
        with parent.inserting_after(call.node):
            result = parent.call_function(operator.getitem, (call.node, len(results)))
        self._finish(result, node, call)
        self._known[parent, node] = result
        return result

    def _into(self, node: Node, graph: Graph) -> Node:
        call = self._calls[graph]
        if (graph, node) in self._known:
            return self._known[graph, node]
        last = call.placeholders[-1] if call.placeholders else None
        with (
            graph.inserting_after(last)
            if last is not None
            else graph.inserting_before(next(iter(graph.nodes)))
        ):
            result = graph.placeholder(f"depth_{node.name}")
        call.node.args = (*call.node.args, node)
        self._finish(result, node, call)
        self._known[graph, node] = result
        return result

    def _finish(self, result: Node, node: Node, call: Call) -> None:
        kept = ("nn_module_stack", "stack_trace", "creation_timestamp")
        like: dict[str, Any] = call.node.meta
        result.meta = {value_key(node): value_of(node), TAG: node.meta.get(TAG, -1)}
        result.meta.update({name: like[name] for name in kept if name in like})
        self.inserted.append(result)
        self.extended |= {call.node, call.output}

"""Dataflow of one graph: program order, shared memory, writes in place, and what depends on what.

A Dynamo graph is not functional: a cache is a graph input that some node changes in place and another reads
later. So "which value does this node hold" has a time, the position of the node that reads it.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule, Node

from .nodes import is_number, is_tensor, value_of
from .ops import Role, arguments, has_role, mutated, op_of
from .subgraphs import Bodies, Call, ModuleBodies, opaque_bodies, read_call


class Dataflow:
    """An index over the nodes of ``graph`` that come after ``start`` (all of them if ``start`` is None).

    Nodes up to ``start`` count as inputs: in a graph that holds several models or several decoding steps,
    they belong to someone else. The bodies of calls count as if they stood in place of the call.
    """

    def __init__(self, graph: Graph, start: Node | None = None, bodies: Bodies | None = None) -> None:
        self.graph = graph
        self.position: dict[Node, int] = {}
        self.calls: dict[Graph, Call] = {}
        """By body: the call that runs it."""

        self.opaque: list[tuple[Node, GraphModule]] = []
        """Operations that may run a body several times or not at all, with that body."""

        self.bodies: dict[Node, GraphModule] = {}
        """By the node that refers to it: every body of an operation."""

        self._same: dict[Node, Node] = {}
        self.first = -1
        self._index(graph, bodies, start)
        self.nodes: list[Node] = [
            n
            for n, i in self.position.items()
            if i > self.first and (n.op != "placeholder" or n in self._same)
        ]
        self._roots: dict[Node, Node] = {}
        self._writes: dict[Node, list[Node]] = {}
        for node in self.position:
            self._roots[node] = self._find_root(node)
            for target in mutated(node):
                self._writes.setdefault(self._roots[target], []).append(node)

    def _index(self, graph: Graph, bodies: Bodies | None, start: Node | None) -> None:
        for node in graph.nodes:
            call = read_call(node, bodies)
            if call is not None:
                self.calls[call.body.graph] = call
                for placeholder in call.placeholders:
                    operand = call.operand(placeholder)
                    if operand is not None:
                        self._same[placeholder] = operand
                self._index(call.body.graph, ModuleBodies(call.body), None)
                results = call.output.args[0]
                for user in node.users:
                    if user.target is operator.getitem and isinstance(results, (tuple, list)):
                        result = results[user.args[1]]
                        if isinstance(result, Node):
                            self._same[user] = result
            if node.op == "get_attr" and bodies is not None:
                body = bodies.get(str(node.target))
                if body is not None:
                    self.bodies[node] = body
            self.opaque += [(node, body) for body in opaque_bodies(node, bodies)]
            self.position[node] = len(self.position)
            if node is start:
                self.first = self.position[node]

    def behind(self, node: Node) -> Node:
        """The node that computes ``node``, looking through the ends of bodies."""
        while node in self._same:
            node = self._same[node]
        return node

    def enters(self, node: Node) -> bool:
        """Whether ``node`` is where a value enters a body from outside."""
        return node.op == "placeholder" and node in self._same

    def reads(self, node: Node) -> list[Node]:
        """What ``node`` is computed from, looking through the ends of bodies; nothing for sizes."""
        if is_number(node):
            return []
        same = self._same.get(node)
        return node.all_input_nodes if same is None else [same]

    @property
    def graphs(self) -> list[Graph]:
        return [self.graph, *self.calls]

    def external(self, node: Node) -> bool:
        """Whether ``node`` is an input of the region: a graph input, a constant, or made before it began."""
        if node in self._same:
            return False
        return node.op in ("placeholder", "get_attr") or self.position[node] <= self.first

    def _find_root(self, node: Node) -> Node:
        if node in self._same:
            return self._roots[self._same[node]]
        op = op_of(node)
        if op is not None and node.all_input_nodes:
            in_place = bool(mutated(node))
            if op.aliases or in_place:
                source = arguments(node).get("input")
                if isinstance(source, Node):
                    return self._roots[source]
        elif mutated(node) and is_tensor(node):
            return self._roots[mutated(node)[0]]
        return node

    def root(self, node: Node) -> Node:
        """The node whose memory ``node`` may share."""
        return self._roots[node]

    def writes(self, node: Node, before: int | None = None) -> list[Node]:
        """The in-place changes of the memory of ``node`` inside the region, in order, up to position
        ``before``."""
        found = self._writes.get(self._roots[node], ())
        return [
            w
            for w in found
            if self.position[w] > self.first and (before is None or self.position[w] < before)
        ]

    def reached_from(self, source: Node, until: Node) -> set[Node]:
        """``source`` and everything up to ``until`` that depends on it, through data or memory."""
        tainted = {source}
        memory: set[Node] = set()
        first = bisect_left(self.nodes, self.position[source], key=self.position.__getitem__)
        for node in self.nodes[first + 1 :]:
            if any(n in tainted or self._roots[n] in memory for n in self.reads(node)):
                tainted.add(node)
                memory.update(self._roots[t] for t in mutated(node))
            if node is until:
                break
        return tainted


class Dependencies:
    """For every node, which inputs of the model and which attention operations it is computed from.

    Sizes depend on nothing: reading the shape of a tensor is not reading the tensor.

    Attributes:
        inputs: bit ``i`` stands for the graph input at position ``i``, weights left out.
        content: whether a node depends on weights, hence on tokens, rather than on positions alone.
        attentions: bit ``i`` stands for the i-th node given to :meth:`mark`.
    """

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        self.inputs: dict[Node, int] = {}
        self.content: dict[Node, bool] = {}
        self.attentions: dict[Node, int] = {}
        memory: dict[Node, tuple[int, bool]] = {}
        for node, position in flow.position.items():
            inputs, content = 0, has_role(node, Role.PROJECT) or _is_weight(node)
            if flow.external(node) and node.op == "placeholder" and is_tensor(node) and not content:
                inputs = 1 << position
            for read in flow.reads(node):
                written_inputs, written_content = memory.get(flow.root(read), (0, False))
                inputs |= self.inputs[read] | written_inputs
                content = content or self.content[read] or written_content
            self.inputs[node], self.content[node] = inputs, content
            for target in mutated(node):
                old_inputs, old_content = memory.get(flow.root(target), (0, False))
                memory[flow.root(target)] = (old_inputs | inputs, old_content or content)

    def activation(self, node: Node) -> bool:
        """Whether ``node`` is computed from tokens: through weights and from an input, neither of them
        alone."""
        return self.content[node] and self.inputs[node] != 0

    def mark(self, attentions: Iterable[Node]) -> None:
        """Number the attention operations and find what depends on them, through data and memory."""
        flow = self._flow
        bit = {node: 1 << i for i, node in enumerate(attentions)}
        memory: dict[Node, int] = {}
        for node in flow.position:
            bits = bit.get(node, 0)
            for read in flow.reads(node):
                bits |= self.attentions[read] | memory.get(flow.root(read), 0)
            self.attentions[node] = bits
            for target in mutated(node):
                root = flow.root(target)
                memory[root] = memory.get(root, 0) | bits


WEIGHT = "depthify_weight"
"""Metadata entry of graph inputs that are weights although their value does not tell: programs exported
without Dynamo say so in their signature."""


def _is_weight(node: Node) -> bool:
    return WEIGHT in node.meta or isinstance(value_of(node), torch.nn.Parameter)

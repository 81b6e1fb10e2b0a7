"""FLOPs of an FX graph, counted from node metadata, symbolic where the capture is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph, GraphModule, Node
from torch.nn import Parameter

from ..errors import UnsupportedModelError
from ..passes.nodes import describe, module_path, shape_of, value_of
from ..passes.ops import op_name
from ..passes.sites import AttentionSite
from ..passes.subgraphs import ModuleBodies, read_call
from .flops import SOFTMAX_PER_PAIR, Flops, masked_flops, masked_pairs, node_flops, total
from .polynomials import Count, numel, product, size


@dataclass(frozen=True)
class GraphCount:
    """What the nodes of a graph compute together."""

    flops: Flops
    by_node: dict[Node, Flops]
    """Nodes that compute something."""

    unknown: tuple[Node, ...] = ()
    """Nodes without a rule, counted as 0; always empty unless that was asked for."""

    def by_operation(self) -> dict[str, Count]:
        """Executed FLOPs by operation."""
        groups: dict[str, list[Flops]] = {}
        for node, flops in self.by_node.items():
            groups.setdefault(op_name(node) or str(node.target), []).append(flops)
        return {name: total(parts).executed for name, parts in groups.items()}

    def by_module(self) -> dict[str, Count]:
        """Executed FLOPs by the module whose forward made the node."""
        groups: dict[str, list[Flops]] = {}
        for node, flops in self.by_node.items():
            groups.setdefault(module_path(node), []).append(flops)
        return {name: total(parts).executed for name, parts in groups.items()}


def count_nodes(nodes: Iterable[Node], unknown: Literal["error", "zero"] = "error") -> GraphCount:
    """Count ``nodes``, and for a node that runs another graph, that graph's nodes.

    Args:
        unknown: what an operation without a rule is, an error or 0.

    Raises:
        UnsupportedModelError: operations without a rule; names every one of them.
    """
    by_node: dict[Node, Flops] = {}
    missing: list[Node] = []
    for node in _flat(nodes):
        flops = node_flops(node)
        if flops is None:
            missing.append(node)
        elif flops != (0, 0, 0):
            by_node[node] = flops
    if missing and unknown == "error":
        raise UnsupportedModelError(_missing_text(missing))
    return GraphCount(total(list(by_node.values())), by_node, tuple(missing))


def count_graph(
    graph: Graph, unknown: Literal["error", "zero"] = "error", sites: Sequence[AttentionSite] = ()
) -> GraphCount:
    """Count a whole graph.

    Args:
        unknown: what an operation without a rule is, an error or 0.
        sites: the attention layers found in the graph. They are causal, however their mask is written, so
            the needed FLOPs leave out what their masks remove.

    Raises:
        UnsupportedModelError: operations without a rule; names every one of them.
    """
    count = count_nodes(graph.nodes, unknown)
    if not sites:
        return count
    masked = total([count.flops, *(Flops(masked=_masked(site, count)) for site in sites)])
    return GraphCount(masked, count.by_node, count.unknown)


def count_parameters(graph: Graph) -> Count:
    """Elements of the parameters that ``graph`` reads, each tensor once."""
    seen: dict[int, Count] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            value = value_of(node)
            if isinstance(value, Parameter):
                seen[id(value)] = numel(value)
    return sum(seen.values())


def _masked(site: AttentionSite, count: GraphCount) -> Count:
    """What the causal mask of ``site`` removes, where the count of the node does not say so already."""
    flops = count.by_node.get(site.output)
    if flops is None or flops.masked != 0:
        return 0
    fused = masked_flops(site.output)
    if fused is not None:
        return fused
    query, value = site.attention.query.node, site.attention.value.node
    products = (size(shape_of(query)[-1]) + size(shape_of(value)[-1])) * 2
    # Written out, scale and mask are operations of their own that need not be per pair.
    return masked_pairs(product(shape_of(query)[:-1]), size(site.tokens)) * (products + SOFTMAX_PER_PAIR)


def _flat(nodes: Iterable[Node]) -> Iterator[Node]:
    """``nodes``, with the nodes of the body that a node runs in place of that node, where it is at hand."""
    for node in nodes:
        body = _body(node)
        if body is None:
            yield node
        else:
            yield from _flat(body.graph.nodes)


def _body(node: Node) -> GraphModule | None:
    owner = node.graph.owning_module
    if owner is None or node.op != "call_function":
        return None
    if getattr(node.target, "__name__", "") == "autograd_function_apply":
        forward = node.args[0]  # the second one is the backward
        return ModuleBodies(owner).get(str(forward.target)) if isinstance(forward, Node) else None
    call = read_call(node, ModuleBodies(owner))
    return None if call is None else call.body


def _missing_text(missing: Sequence[Node]) -> str:
    names = sorted({op_name(node) or str(node.target) for node in missing})
    return (
        f"no FLOP rule for {len(names)} operation(s): {', '.join(names)}; the first is "
        f"{describe(missing[0])}. A count that left them out would be wrong. Give the model's config for the "
        "closed form, or add a rule to depthify.cost_model.flops.RULES"
    )

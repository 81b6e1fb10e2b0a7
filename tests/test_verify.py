"""verify() notices what must not happen: each sabotage of a rewritten graph is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import decoder, tokens
from torch.fx import Graph, GraphModule

from depthify import DepthConfig
from depthify.passes import place, plan
from depthify.passes.dataflow import Dataflow
from depthify.passes.mix_values import Mixed, mix_stack
from depthify.passes.subgraphs import Threads
from depthify.passes.verify import snapshot, verify


def _rewritten() -> tuple[Graph, Any, list[dict[int, Mixed]]]:
    """A rewritten graph with its snapshot, not verified yet."""
    found: list[GraphModule] = []
    torch.compile(decoder(), backend=lambda gm, inputs: found.append(gm) or gm.forward, fullgraph=True)(
        tokens()
    )
    graph = found[0].graph
    findings, stacks = plan(graph, DepthConfig(stride=2))
    threads = Threads(findings.flow.calls)
    placements = {layer: place(layer, findings.flow) for stack in stacks for layer in stack.layers}
    before = snapshot([graph])
    return graph, before, [mix_stack(stack, placements, threads) for stack in stacks]


def test_a_rewrite_passes() -> None:
    graph, before, mixed = _rewritten()
    verify(Dataflow(graph), before, mixed, Threads({}))
    assert [sorted(stack) for stack in mixed] == [[0, 1, 2, 3]]


def _call(graph: Graph, name: str) -> Any:
    return next(n for n in graph.nodes if name in str(n.target))


def change_scale(graph: Graph, mixed: dict[int, Mixed]) -> None:
    attention = _call(graph, "scaled_dot_product_attention")
    attention.kwargs = {**attention.kwargs, "scale": 0.1}


def drop_causal(graph: Graph, mixed: dict[int, Mixed]) -> None:
    attention = _call(graph, "scaled_dot_product_attention")
    attention.kwargs = {**attention.kwargs, "is_causal": False}


def swap_key(graph: Graph, mixed: dict[int, Mixed]) -> None:
    attention = mixed[2].layer.site.output
    attention.args = (attention.args[0], mixed[0].layer.site.output.args[1], attention.args[2])


def add_output(graph: Graph, mixed: dict[int, Mixed]) -> None:
    output = next(iter(reversed(graph.nodes)))
    output.args = ((*output.args[0], output.args[0][0]),)


def read_raw_source(graph: Graph, mixed: dict[int, Mixed]) -> None:
    """Layer 3 reads what layer 2's value was before mixing."""
    raw, good = mixed[2].raw, mixed[2].value
    user = next(n for n in good.users if n in mixed[3].inserted)
    with graph.inserting_before(user):
        other = graph.call_method("unflatten", (raw, 2, (2, 8)))
    other.meta = dict(good.meta)
    user.replace_input_with(good, other)


def read_wrong_source(graph: Graph, mixed: dict[int, Mixed]) -> None:
    user = next(n for n in mixed[0].key.users if n in mixed[3].inserted)
    user.replace_input_with(mixed[0].key, mixed[2].key)


def add_a_node(graph: Graph, mixed: dict[int, Mixed]) -> None:
    with graph.inserting_before(mixed[1].layer.site.output):
        graph.call_function(torch.neg, (mixed[1].layer.site.query.node,))


def lose_a_node(graph: Graph, mixed: dict[int, Mixed]) -> None:
    node = next(n for n in reversed(graph.nodes) if n.op == "call_function")
    output = next(iter(reversed(graph.nodes)))
    output.args = ((*(x for x in output.args[0] if x is not node),),)
    graph.erase_node(node)


def change_dtype(graph: Graph, mixed: dict[int, Mixed]) -> None:
    node = mixed[1].layer.site.value.node
    node.meta["example_value"] = node.meta["example_value"].float()


def bypass(graph: Graph, mixed: dict[int, Mixed]) -> None:
    node = mixed[1].layer.site.value.node
    for user in list(node.users):
        user.replace_input_with(node, mixed[1].raw)


@pytest.mark.parametrize(
    "sabotage",
    [change_scale, drop_causal, swap_key, add_output, read_raw_source, read_wrong_source, add_a_node,
     lose_a_node, change_dtype, bypass],
)  # fmt: skip
def test_sabotage_is_noticed(sabotage: Callable[[Graph, dict[int, Mixed]], None]) -> None:
    graph, before, mixed = _rewritten()
    sabotage(graph, mixed[0])
    with pytest.raises(AssertionError):
        verify(Dataflow(graph), before, mixed, Threads({}))

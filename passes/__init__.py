"""The pass, in order: write out what is fused, find the attention sites, order them, place and insert the
mixture, verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..config import DepthConfig
from .dataflow import Dataflow
from .expand import expand
from .find_sites import Findings, find_sites
from .mix_values import Mixed, mix_stack
from .order_layers import Stack, order_layers
from .placement import place
from .restrict import restrict
from .subgraphs import Bodies, Threads, own_bodies
from .verify import snapshot, verify


@dataclass(frozen=True)
class Result:
    """What the pass found and did in one graph."""

    findings: Findings
    stacks: list[Stack]
    mixed: list[dict[int, Mixed]]
    """Sources and mixed layers by depth, one dictionary per stack."""


def find(
    graph: Graph, start: Node | None = None, bodies: Bodies | None = None, blocks: Sequence[str] = ()
) -> Findings:
    """Find all attention after ``start``; changes nothing that is computed.

    Args:
        blocks: paths of the decoder blocks to mix, where the graph holds others as well.
    """
    expand(graph, start, bodies)
    return restrict(find_sites(graph, start, bodies), blocks)


def plan(
    graph: Graph,
    config: DepthConfig,
    start: Node | None = None,
    bodies: Bodies | None = None,
    blocks: Sequence[str] = (),
) -> tuple[Findings, list[Stack]]:
    """Find and order the layers after ``start``; changes nothing that is computed."""
    findings = find(graph, start, bodies, blocks)
    return findings, order_layers(findings, config)


def mix_graph(
    graph: Graph,
    config: DepthConfig,
    start: Node | None = None,
    bodies: Bodies | None = None,
    bias: Node | None = None,
    blocks: Sequence[str] = (),
) -> Result:
    """Rewrite the part of ``graph`` after ``start`` in place.

    All that can be refused is refused before the first value is changed.

    Args:
        bodies: where the bodies of higher-order operations are found; None if the graph has none.
        bias: a scalar to add to every layer's own depth score, computed before all layers.
        blocks: see :func:`find`.

    Raises:
        UnsupportedModelError: see :func:`order_layers` and :func:`place`.
        BudgetError: see :func:`depthify.cost_model.check.check_rewrite`.
    """
    from ..cost_model.check import check_rewrite  # which imports from this package

    if bodies is not None:
        own_bodies(graph, bodies, start)
    findings, stacks = plan(graph, config, start, bodies, blocks)
    placements = {layer: place(layer, findings.flow) for stack in stacks for layer in stack.layers}
    before = snapshot(findings.flow.graphs)
    threads = Threads(findings.flow.calls)
    mixed = [mix_stack(stack, placements, threads, bias) for stack in stacks]
    verify(Dataflow(graph, start, bodies), before, mixed, threads)
    check_rewrite(findings.flow, mixed, config.budget)
    for call in findings.flow.calls.values():
        call.body.recompile()
    return Result(findings, stacks, mixed)

"""The pass, in order: find the attention sites, order them, place and insert the mixture, verify."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from ..config import DepthConfig
from .find_sites import Findings, find_sites
from .mix_values import Mixed, mix_stack
from .order_layers import Stack, order_layers
from .placement import place
from .verify import snapshot, verify


@dataclass(frozen=True)
class Result:
    """What the pass found and did in one graph."""

    findings: Findings
    stacks: list[Stack]
    mixed: list[dict[int, Mixed]]
    """Sources and mixed layers by depth, one dictionary per stack."""


def plan(graph: Graph, config: DepthConfig, start: Node | None = None) -> tuple[Findings, list[Stack]]:
    """Find and order the layers after ``start``; changes nothing."""
    findings = find_sites(graph, start)
    return findings, order_layers(findings, config)


def mix_graph(graph: Graph, config: DepthConfig, start: Node | None = None) -> Result:
    """Rewrite the part of ``graph`` after ``start`` in place.

    All that can be refused is refused before the first change.

    Raises:
        UnsupportedModelError: see :func:`order_layers` and :func:`place`.
        BudgetError: see :func:`depthify.cost_model.check.check_rewrite`.
    """
    from ..cost_model.check import check_rewrite  # which imports from this package

    findings, stacks = plan(graph, config, start)
    placements = {layer: place(layer, findings.flow) for stack in stacks for layer in stack.layers}
    before = snapshot(graph)
    mixed = [mix_stack(graph, stack, placements) for stack in stacks]
    verify(graph, before, mixed, start)
    check_rewrite(graph, mixed, config.budget, start)
    return Result(findings, stacks, mixed)

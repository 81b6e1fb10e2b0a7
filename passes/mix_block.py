"""One decoder block captured on its own: its sources come in as tensors, its key and mixed value go out.

    source keys and values (inputs) -> mix -> value -> attention        key, mixed value -> outputs

Same finders, same mixture, same verification as for a whole graph; only depth is counted by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..config import DepthConfig
from ..errors import UnsupportedModelError
from .choose_scores import Scores, choose_scores
from .dataflow import Dataflow
from .emit import emit
from .expand import expand
from .find_rotary import RotaryFinder
from .find_sites import find_sites
from .mix_values import Mixed, Source, in_order, keep_raw, mix_layer
from .nodes import describe, shape_of, value_of
from .order_layers import Layer, check_supported, features, lanes
from .placement import place
from .sites import AttentionSite
from .subgraphs import Bodies, Threads, own_bodies
from .verify import snapshot, verify


@dataclass(frozen=True)
class Block:
    """What became of one block."""

    mixed: Mixed
    scores: Scores
    key: Node
    value: Node
    """Key and mixed value in the order lanes, tokens, features, in the outermost graph; key factors
    applied."""


def mix_block(
    graph: Graph,
    config: DepthConfig,
    sources: Sequence[tuple[Node, Node]],
    start: Node | None = None,
    bodies: Bodies | None = None,
    bias: Node | None = None,
) -> Block | None:
    """Rewrite the only attention layer after ``start``; None if there is no attention at all.

    Args:
        sources: key and mixed value of each source, as :class:`Block` gives them.
        bias: a scalar to add to the layer's own depth score.

    Raises:
        UnsupportedModelError: the block holds several layers, one that cannot be mixed, or one whose heads
        have
            another shape than the sources'.
    """
    from ..cost_model.check import check_rewrite  # which imports from this package

    if bodies is not None:
        own_bodies(graph, bodies, start)
    expand(graph, start, bodies)
    findings = find_sites(graph, start, bodies)
    check_supported(findings)
    if not findings.sites:
        return None
    if len(findings.sites) > 1:
        raise UnsupportedModelError(
            f"one block holds {len(findings.sites)} attention layers ({describe(findings.sites[0].output)}, "
            f"{describe(findings.sites[1].output)}): with regions='block' each block must hold one. Name "
            "the modules that hold one layer each with blocks=, or use regions='model'"
        )
    site = findings.sites[0]
    scores = choose_scores([site], RotaryFinder(findings.flow, findings.needs))
    layer = Layer(len(sources), site, tuple(range(len(sources))), scores.scores[0])
    plain = tuple(range(len(lanes(site)) + 1))
    known = {i: Source(key, value, plain, 1.0) for i, (key, value) in enumerate(sources)}
    for source in known.values():
        _check_alike(site, source)
    placement = place(layer, findings.flow)
    before = snapshot(findings.flow.graphs)
    threads = Threads(findings.flow.calls)
    if known:
        mixed = mix_layer(layer, placement, known, threads, config.recompute, bias)
    else:
        mixed = keep_raw(layer, placement)
    (key, value), exported = emit(
        placement.anchor.graph,
        placement.anchor,
        lambda k, v: (_scaled(in_order(k, mixed.order), mixed.factor), in_order(v, mixed.order)),
        [mixed.key, mixed.value],
        site.value.node,
        layer.depth,
    )
    threads.inserted += exported
    block = Block(mixed, scores, threads.bring(key, graph), threads.bring(value, graph))
    verify(Dataflow(graph, start, bodies), before, [{**known, layer.depth: mixed}], threads)
    check_rewrite(findings.flow, [{layer.depth: mixed}], config.budget)
    for call in findings.flow.calls.values():
        call.body.recompile()
    return block


def _scaled(key: Node, factor: float) -> Node:
    return key if factor == 1.0 else key * factor  # type: ignore[operator]


def _check_alike(site: AttentionSite, source: Source) -> None:
    key_size, value_size = features(site)
    common = [*(axis.size for axis in lanes(site)), site.tokens]
    for name, node, size in (("key", source.key, key_size), ("value", source.value, value_size)):
        mine, theirs = [*common, size], shape_of(node)
        # Sizes that vary between calls are other symbols in the captures the sources come from. Comparing
        # them makes their equality a guard of this capture, as it has to be.
        if len(mine) != len(theirs) or not all(a == b for a, b in zip(mine, theirs, strict=True)):
            raise UnsupportedModelError(
                f"{describe(site.output)}: the {name} of a source has shape {list(theirs)}, that of this "
                f"layer {mine}, "
                "so one cannot attend over the other. Choose a stride whose sources have the same heads"
            )
    if value_of(source.value).device != value_of(site.value.node).device:
        raise UnsupportedModelError(f"{describe(site.output)}: a source is on another device than this layer")

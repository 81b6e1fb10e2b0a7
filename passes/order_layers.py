"""Sites -> stacks of layers in depth order, each with its sources. Decides what is legal, never edits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import DepthConfig
from ..errors import UnsupportedModelError
from .axes import Axis, AxisRole, flat
from .choose_scores import choose_scores
from .dataflow import Dependencies
from .find_rotary import RotaryFinder
from .find_sites import Findings, refusals_text
from .nodes import Size, describe, same_size, value_of
from .sites import AttentionSite, Score, Verdict


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer in the depth order of its stack."""

    depth: int
    site: AttentionSite
    sources: tuple[int, ...]
    """Depths, in the same stack, of the layers it attends over."""

    score: Score


@dataclass(frozen=True)
class Stack:
    """A sequence of layers, each computed from the one before."""

    config: DepthConfig
    layers: tuple[Layer, ...]
    scored: str
    """Where the depth scores are taken, see :class:`~depthify.passes.choose_scores.Scores`."""

    note: str


def order_layers(findings: Findings, config: DepthConfig) -> list[Stack]:
    """Group the sites into stacks and give each layer its sources.

    Raises:
        UnsupportedModelError: no attention, a single layer, a site that cannot be mixed, layers side by
        side, or
            sources whose heads have another shape.
    """
    check_supported(findings)
    if not findings.sites:
        seen = (
            f" What looks like attention and is not:\n{refusals_text(findings.refusals)}"
            if findings.refusals
            else " No product of a softmax and values, and no scaled_dot_product_attention, is in the "
            "captured graph."
        )
        raise UnsupportedModelError(f"no causal self-attention found, so there is nothing to mix.{seen}")
    finder = RotaryFinder(findings.flow, findings.needs)
    stacks = [
        stack
        for sites in _in_sequence(findings.sites, findings.needs)
        for stack in _stacks(sites, config, finder)
    ]
    if all(len(stack.layers) == 1 for stack in stacks):
        raise UnsupportedModelError(
            f"only one causal self-attention layer found ({describe(findings.sites[0].output)}): mixing "
            "over depth needs at least two, one computed from the other"
        )
    return stacks


def check_supported(findings: Findings) -> None:
    """Raise if there is causal self-attention that cannot be mixed correctly: then nothing is mixed."""
    unsupported = [r for r in findings.refusals if r.verdict is Verdict.UNSUPPORTED]
    if unsupported:
        raise UnsupportedModelError(
            f"{len(unsupported)} of {len(findings.sites) + len(unsupported)} causal self-attention layers "
            "cannot "
            f"be mixed, so none was:\n{refusals_text(unsupported)}"
        )


def _in_sequence(sites: list[AttentionSite], needs: Dependencies) -> list[list[AttentionSite]]:
    stacks: list[list[AttentionSite]] = []
    bit = {site.output: needs.attentions[site.output] & ~needs.attentions[site.query.node] for site in sites}
    for site in sites:
        below = needs.attentions[site.query.node]
        ends = [stack for stack in stacks if bit[stack[-1].output] & below]
        if len(ends) == 1:
            ends[0].append(site)
            continue
        beside = [other for stack in stacks for other in stack if bit[other.output] & below]
        if beside:
            raise UnsupportedModelError(
                f"the layers have no one order: {describe(site.output)} is computed from "
                f"{describe(beside[-1].output)}, but not as the next layer of one stack"
            )
        stacks.append([site])
    return stacks


def _stacks(sites: list[AttentionSite], config: DepthConfig, finder: RotaryFinder) -> list[Stack]:
    """One stack, or one for each shape of keys and values: layers can read only others of their shape."""
    alike: dict[str, list[AttentionSite]] = {}
    for site in sites:
        alike.setdefault(_shape_text(site), []).append(site)
    stacks = [_stack(group, config, finder) for group in alike.values()]
    if len(stacks) == 1:
        return stacks
    shapes = ", ".join(f"{len(group)} of {shape}" for shape, group in alike.items())
    note = (
        f"layers with heads of different shapes are mixed among themselves, as stacks of their own: {shapes}"
    )
    return [replace(stack, note=f"{stack.note}; {note}" if stack.note else note) for stack in stacks]


def _stack(sites: list[AttentionSite], config: DepthConfig, finder: RotaryFinder) -> Stack:
    resolved = config.resolve(len(sites))
    chosen = choose_scores(sites, finder)
    layers = tuple(
        Layer(depth, site, resolved.sources(depth), score)
        for depth, (site, score) in enumerate(zip(sites, chosen.scores, strict=True))
    )
    for layer in layers:
        for source in layer.sources:
            _check_alike(layer, layers[source])
    return Stack(resolved, layers, chosen.place, chosen.note)


def lanes(site: AttentionSite) -> tuple[Axis, ...]:
    """The axes over which mixing is done separately: batch entries and key/value heads, outermost first."""
    axes = site.attention.axes
    query = [axis for axis in axes.leaves(flat(site.attention.query.layout)) if axis.role is AxisRole.LANE]
    wide = set(axes.shared(query))
    return tuple(axis for axis in query if axis not in wide)


def groups(site: AttentionSite) -> tuple[Axis, ...]:
    """The axes of query heads that share one key and value."""
    axes = site.attention.axes
    return axes.shared(axis for axis in flat(site.attention.query.layout) if axis.role is AxisRole.LANE)


def features(site: AttentionSite) -> tuple[Size, Size]:
    """Head sizes of key and value."""
    attention = site.attention
    return tuple(  # type: ignore[return-value]
        next(axis.size for axis in flat(operand.layout) if axis.role is AxisRole.FEATURE)
        for operand in (attention.query, attention.value)
    )


def _check_alike(layer: Layer, source: Layer) -> None:
    mine, theirs = lanes(layer.site), lanes(source.site)
    alike = len(mine) == len(theirs) and all(
        same_size(a.size, b.size) for a, b in zip(mine, theirs, strict=True)
    )
    alike = alike and all(
        same_size(a, b) for a, b in zip(features(layer.site), features(source.site), strict=True)
    )
    if not alike:
        raise UnsupportedModelError(
            f"layers {source.depth} and {layer.depth} have keys or values of different shapes "
            f"({_shape_text(source.site)} and {_shape_text(layer.site)}), so one cannot attend over the "
            f"other: {describe(layer.site.output)}. Choose a stride whose sources have the same heads"
        )
    devices = {value_of(site.value.node).device for site in (layer.site, source.site)}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"layers {source.depth} and {layer.depth} are on different devices "
            f"({', '.join(map(str, devices))}): {describe(layer.site.output)}. Put the model on one device"
        )


def _shape_text(site: AttentionSite) -> str:
    key, value = features(site)
    sizes = "x".join(str(axis.size) for axis in lanes(site))
    return f"{sizes} of {key}" + ("" if same_size(key, value) else f"/{value}")

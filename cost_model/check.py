"""What a rewrite may cost, checked after every one: no parameter, no cache byte, little arithmetic.

Everything is decided for all sizes the graph is valid for, from polynomials in them, not at one point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import sympy
from torch.fx import Node
from torch.nn import Parameter

from ..errors import BudgetError
from ..passes.dataflow import Dataflow
from ..passes.mix_values import Mixed
from ..passes.nodes import describe, value_of
from ..passes.ops import op_name
from ..passes.order_layers import lanes
from .cache import value_cache_bytes
from .count import count_nodes
from .polynomials import Count, atoms_of, counterexample, is_nonnegative, product, size, to_sympy

DEFAULT_BUDGET = Fraction(1, 100)
"""The part of the graph's FLOPs that mixing may add where nothing is said."""

FREE_FLOPS_PER_TOKEN = 100_000
"""What mixing may add in any case, where nothing is said.

The share grows as the width shrinks: a mixture costs about 4 n d FLOPs, a layer 24 d^2. So a model of a test
suite, 64 wide, exceeds 1 % with a handful of sources while it costs next to nothing. A model for which
100 kFLOP per token are more than 1 % has fewer than 5 million weights.
"""


@dataclass(frozen=True)
class RewriteCost:
    """What one rewrite added to a graph. Counts are integers, or polynomials in the sizes of the capture."""

    before: Count
    """FLOPs of the graph without mixing; operations without a rule are left out."""

    extra: Count
    cache_bytes: Count
    """Bytes of the value caches, the same before and after."""

    uncounted: tuple[str, ...]
    """Operations of the model that have no rule. Counting them as 0 can only make the check stricter."""


def check_rewrite(
    flow: Dataflow, mixed: Sequence[dict[int, Mixed]], budget: float | None = None
) -> RewriteCost:
    """Check what was inserted into a graph.

    Args:
        flow: the program as it was before the rewrite.
        mixed: what :func:`depthify.passes.mix_values.mix_stack` returned, per stack.
        budget: the largest allowed part of the program's FLOPs, for all batch sizes and numbers of tokens of
            at least 1 and any cache length. None: :data:`DEFAULT_BUDGET`, or :data:`FREE_FLOPS_PER_TOKEN`
            where that is more.

    Raises:
        BudgetError: mixing adds more arithmetic than allowed, or whether it does cannot be decided.
        AssertionError: a parameter or a cache byte was added, or an inserted operation has no FLOP rule;
            a fault of depthify.
    """
    layers = [layer for stack in mixed for layer in stack.values()]
    raw = {layer.layer.site.value.node: layer.raw for layer in layers if layer.raw is not None}
    new = {node: None for layer in layers for node in layer.inserted if node is not layer.raw}
    new |= dict.fromkeys(raw)
    _no_parameters(new, flow)
    cached = _same_cache(layers)
    added = count_nodes(new)
    calls = {call.node for call in flow.calls.values()}  # their bodies are in flow.nodes
    own = count_nodes((raw.get(node, node) for node in flow.nodes if node not in calls), unknown="zero")
    names = sorted({op_name(node) or str(node.target) for node in own.unknown})
    cost = RewriteCost(own.flops.executed, added.flops.executed, cached, tuple(names))
    tokens = sum(_tokens(next(iter(stack.values()))) for stack in mixed if stack)
    _within(cost, tokens, budget, list(added.by_node))
    return cost


def _no_parameters(new: Iterable[Node], flow: Dataflow) -> None:
    for node in new:
        # A source that enters the body of a checkpoint is a placeholder there; the program's own inputs stay.
        given = node.op == "placeholder" and node.graph is flow.graph
        if given or node.op == "get_attr" or isinstance(value_of(node), Parameter):
            raise AssertionError(f"mixing added {node.op} {node.name}: {value_of(node)}")


def _same_cache(layers: Iterable[Mixed]) -> Count:
    after: Count = 0
    for layer in layers:
        if layer.raw is None:
            continue
        site = layer.layer.site
        value = site.value.node
        old, now = (value_cache_bytes(site, {value: node}) for node in (layer.raw, value))
        if old != now:
            raise AssertionError(
                f"mixing changed the cache of {describe(site.output)} from {old} to {now} bytes"
            )
        after = after + now
    return after


def _tokens(layer: Mixed) -> Count:
    """Batch entries times tokens: every lane but the heads, which are the last of several."""
    site = layer.layer.site
    axes = lanes(site)
    return product(axis.size for axis in (axes[:-1] if len(axes) > 1 else axes)) * size(site.tokens)


def _within(cost: RewriteCost, tokens: Count, budget: float | None, nodes: Sequence[Node]) -> None:
    part = DEFAULT_BUDGET if budget is None else budget
    if part == float("inf"):
        return
    exact = Fraction(str(part)) if isinstance(part, float) else Fraction(part)
    rest = cost.before * exact - cost.extra
    # The mixture reads batch and tokens, which are at least 1; a cache may be empty.
    lowest = dict.fromkeys(atoms_of(cost.extra), 1)
    if is_nonnegative(rest, lowest):
        return
    if budget is None and is_nonnegative(tokens * FREE_FLOPS_PER_TOKEN - cost.extra, lowest):
        return
    raise BudgetError(_text(cost, rest, lowest, exact, nodes, budget is None))


def _text(
    cost: RewriteCost,
    rest: Count,
    lowest: dict[sympy.Expr, int],
    part: Fraction,
    nodes: Sequence[Node],
    default: bool,
) -> str:
    extra, before = to_sympy(cost.extra), to_sympy(cost.before)
    point = counterexample(rest, lowest)
    if point is None:
        verdict = "it cannot be decided whether mixing stays within"
        where = ""
    else:
        verdict = "mixing adds more arithmetic than"
        share = float((extra / before).subs(point)) if before.subs(point) != 0 else float("inf")
        sizes = ", ".join(f"{atom} = {value}" for atom, value in point.items())
        where = f", {share:.3%} of it" + (f" at {sizes}" if sizes else "")
    names = ", ".join(node.name for node in nodes[:6]) + (", ..." if len(nodes) > 6 else "")
    free = f" and {FREE_FLOPS_PER_TOKEN:,} FLOPs per token" if default else ""
    text = (
        f"{verdict} budget={float(part):g}{free}: {extra} FLOPs on top of {before}{where}. Added by "
        f"{len(nodes)} nodes ({names}). Choose a larger stride or a smaller recent_window, or allow more "
        "with budget="
    )
    if cost.uncounted:
        text += f". Operations of the model without a FLOP rule count as 0 here: {', '.join(cost.uncounted)}"
    return text

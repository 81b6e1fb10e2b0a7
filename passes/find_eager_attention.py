"""Attention written out as two products around a softmax -> :class:`Attention`. Finds, never edits.

    query . key -> [scale] -> [soft-cap] -> [mask] -> [cast] -> softmax -> [dropout, cast] -> . value

The anchor is the second product. From its probabilities the search walks back to a softmax, and on to the
first product. The products may be ``matmul``, ``@``, ``bmm``, ``baddbmm`` or ``einsum``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from .axes import Axes, Axis, AxisRole, Layout, step_back
from .dataflow import Dataflow, Dependencies
from .nodes import Size, describe, dimension, is_tensor, same_size, shape_of, value_of
from .ops import Op, Role, arguments, has_role, numbers, op_of
from .products import Product, read_product
from .sites import Attention, Operand, Refusal, Scale, Verdict


@dataclass(frozen=True)
class _Walk:
    """Where the walk back from the probabilities stands, and what it passed."""

    node: Node
    layout: Layout
    scale: Scale = field(default_factory=Scale)
    masks: tuple[Node, ...] = ()
    uneven: Node | None = None
    """What scales scores, and not all of them alike."""


def find_eager_attention(node: Node, flow: Dataflow, needs: Dependencies) -> Attention | Refusal | None:
    """Read ``node`` as the product of attention probabilities and values; None where it is none."""
    product = read_product(node)
    if product is None:
        return None
    for probabilities, value, p_labels, v_labels in (
        (product.left, product.right, product.left_labels, product.right_labels),
        (product.right, product.left, product.right_labels, product.left_labels),
    ):
        summed = [x for x in p_labels if x in v_labels and x not in product.labels]
        if len(summed) != 1 or not needs.activation(probabilities):
            continue
        axes = Axes()
        names = {x: Axis(AxisRole.LANE, n) for x, n in zip(p_labels, shape_of(probabilities), strict=True)}
        length = names[summed[0]]
        length.role = AxisRole.TOKEN
        start = _Walk(_changed(probabilities, node, flow), tuple((names[x],) for x in p_labels))
        walk = _to_softmax(start, axes, length, flow)
        exponent = walk
        scores = _to_scores(walk, axes, flow, needs) if walk is not None else []
        if not scores:
            continue
        if len(scores) > 1:
            return Refusal(
                node,
                scores[1][0].node,
                "its scores add up several products of activations, so there is no one query and key",
                Verdict.UNSUPPORTED,
            )
        first, walk = scores[0]
        side = _value_layout(value, v_labels, product.labels, names, axes)
        found = _attention(node, first, walk, axes, length, value, side)
        if isinstance(found, Refusal):
            return found
        return replace(found, scores=first.node, exponent=Operand(exponent.node, exponent.layout))
    return None


def _changed(node: Node, reader: Node, flow: Dataflow) -> Node:
    """The last operation that changed ``node`` in place before ``reader`` reads it; else ``node`` itself."""
    writes = [w for w in flow.writes(node, flow.position[reader]) if flow.position[w] > flow.position[node]]
    return writes[-1] if writes else node


def _to_softmax(walk: _Walk, axes: Axes, length: Axis, flow: Dataflow) -> _Walk | None:
    """Walk from the probabilities back through the softmax; the result stands at its input."""
    while True:
        node, op = walk.node, op_of(walk.node)
        if op is None:
            return None
        softmax = _read_softmax(node, op)
        if softmax is not None:
            exponent, dim = softmax
            over = axes.leaves(walk.layout[dimension(dim, len(walk.layout))])
            exponent = _changed(exponent, node, flow)
            return replace(walk, node=exponent) if over == axes.leaves((length,)) else None
        if op.role in (Role.MULTIPLY, Role.DIVIDE, Role.ADD, Role.MASK, Role.DROPOUT):
            bound = arguments(node)
            data = bound.get("input")
            if op.role is Role.MASK and isinstance(data, Node) and has_role(data, Role.CREATE):
                data = bound.get("other")  # rows without any key, set to 0
            if not isinstance(data, Node) or not is_tensor(data) or len(shape_of(data)) != len(walk.layout):
                return None
            walk = replace(walk, node=_changed(data, node, flow))
            continue
        step = step_back(node, walk.layout, axes)
        if step is None or step.cut - {AxisRole.TOKEN}:
            return None
        walk = replace(walk, node=_changed(step.node, node, flow), layout=step.layout)


def _read_softmax(node: Node, op: Op) -> tuple[Node, int] | None:
    """The input and the dimension of a softmax, also of ``exp(x) / exp(x).sum(dim, keepdim=True)``."""
    bound = arguments(node)
    if op.role is Role.SOFTMAX:
        exponent, dims = bound.get("input"), numbers(bound.get("dim"))
    elif (
        op.role is Role.DIVIDE
        and has_role(bound.get("input"), Role.EXP)
        and has_role(bound.get("other"), Role.REDUCE)
    ):
        under = arguments(bound["other"])
        if op_of(bound["other"]).name != "sum" or under.get("input") is not bound["input"]:
            return None
        exponent, dims = arguments(bound["input"])["input"], numbers(under.get("dim"))
    else:
        return None
    if not isinstance(exponent, Node) or len(dims) != 1 or not isinstance(dims[0], int):
        return None
    return exponent, dims[0]


def _to_scores(walk: _Walk, axes: Axes, flow: Dataflow, needs: Dependencies) -> list[tuple[Product, _Walk]]:
    """All products of two activations that the softmax's input is made of, each with scale and masks on
    the way."""
    node, op = walk.node, op_of(walk.node)
    if op is None or not is_tensor(node):
        return []
    bound = arguments(node)
    if op.role is Role.CONTRACT:
        product = read_product(node)
        if product is None or not (needs.activation(product.left) and needs.activation(product.right)):
            return []
        if op.name == "baddbmm":
            walk = _scaled(walk, bound.get("alpha", 1), divide=False)
            walk = replace(walk, masks=(*walk.masks, bound["input"]))
        return [(product, walk)]
    compares = op.role is Role.REDUCE and isinstance(bound.get("dim"), Node)  # max(x, y) and min(x, y)
    if compares or op.role in (Role.MULTIPLY, Role.DIVIDE, Role.ADD, Role.SUBTRACT, Role.MASK):
        return _through_elementwise(walk, op, bound, axes, flow, needs)
    if op.role is Role.SQUASH:
        return _to_scores(replace(walk, node=_changed(bound["input"], node, flow)), axes, flow, needs)
    if op.role is Role.NEGATE:
        walk = replace(_scaled(walk, -1, divide=False), node=_changed(bound["input"], node, flow))
        return _to_scores(walk, axes, flow, needs)
    if op.role is Role.JOIN:  # attention sinks: the scores get one more column
        over = walk.layout[dimension(bound.get("dim", 0), len(walk.layout))]
        tensors = bound.get("tensors")
        if not isinstance(tensors, (tuple, list)) or any(axis.role is not AxisRole.TOKEN for axis in over):
            return []
        return [
            hit
            for data in tensors
            if isinstance(data, Node)
            for hit in _try_scores(replace(walk, node=_changed(data, node, flow)), axes, flow, needs)
        ]
    step = step_back(node, walk.layout, axes)
    if step is None or step.cut:
        return []
    walk = replace(walk, node=_changed(step.node, node, flow), layout=step.layout)
    return _to_scores(walk, axes, flow, needs)


def _through_elementwise(
    walk: _Walk, op: Op, bound: dict[str, Any], axes: Axes, flow: Dataflow, needs: Dependencies
) -> list[tuple[Product, _Walk]]:
    """Try each operand that may carry the scores; the others scale or mask them."""
    operands = {name: x for name, x in bound.items() if isinstance(x, (Node, int, float))}
    carriers = ("input",) if op.role is Role.DIVIDE else ("input", "other", "dim")
    found = []
    for name in carriers:
        data = operands.get(name)
        if not isinstance(data, Node) or not is_tensor(data) or len(shape_of(data)) != len(walk.layout):
            continue
        here = replace(walk, node=_changed(data, walk.node, flow))
        rest = [x for key, x in operands.items() if key != name]
        if op.role is Role.SUBTRACT and name == "other":
            here = _scaled(here, -1, divide=False)
        if op.role in (Role.MULTIPLY, Role.DIVIDE) and rest and _is_scalar(rest[0]):
            here = _scaled(here, rest[0], divide=op.role is Role.DIVIDE)
        elif op.role in (Role.MULTIPLY, Role.DIVIDE) and _is_uneven(rest, walk.layout, axes, needs):
            here = replace(here, uneven=rest[0])
        else:
            masks = tuple(x for x in rest if isinstance(x, Node) and is_tensor(x))
            here = replace(here, masks=here.masks + masks)
        found += _try_scores(here, axes, flow, needs)
    return found


def _is_uneven(factors: list[Any], layout: Layout, axes: Axes, needs: Dependencies) -> bool:
    """Whether scores are multiplied with more than a mask: with weights, with activations, or with a tensor
    that is the same for all keys, as a temperature of every head or token is."""
    for factor in factors:
        if not isinstance(factor, Node) or not is_tensor(factor):
            continue
        sizes = dict(zip(range(1, len(layout) + 1), reversed(shape_of(factor)), strict=False))
        keys = [i for i, dim in enumerate(reversed(layout), 1) if _counts_keys(dim, axes)]
        if needs.content[factor] or all(same_size(sizes.get(i, 1), 1) for i in keys):
            return True
    return False


def _counts_keys(dim: Sequence[Axis], axes: Axes) -> bool:
    leaves = axes.leaves(dim)
    wide = not all(same_size(axis.size, 1) for axis in leaves)
    return wide and any(axis.role is AxisRole.TOKEN for axis in leaves)


def _try_scores(walk: _Walk, axes: Axes, flow: Dataflow, needs: Dependencies) -> list[tuple[Product, _Walk]]:
    """One of several operands; what is learned about axes on a way to no scores is forgotten."""
    before = axes.state()
    found = _to_scores(walk, axes, flow, needs)
    if not found:
        axes.back_to(before)
    return found


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Node):
        return value_of(value) is not None and (not is_tensor(value) or value_of(value).numel() == 1)
    return isinstance(value, (int, float))


def _scaled(walk: _Walk, factor: Any, divide: bool) -> _Walk:
    scale = walk.scale
    if isinstance(factor, Node):
        scale = (
            replace(scale, over=(*scale.over, factor))
            if divide
            else replace(scale, times=(*scale.times, factor))
        )
    else:
        scale = replace(scale, number=scale.number / factor if divide else scale.number * factor)
    return replace(walk, scale=scale)


def _value_layout(
    value: Node, labels: tuple[str, ...], out_labels: tuple[str, ...], names: dict[str, Axis], axes: Axes
) -> Layout | None:
    """The axes of the value operand: those of the probabilities, and its own features; None if it has
    others."""
    layout: list[tuple[Axis, ...]] = []
    own = 0
    for label, size in zip(labels, shape_of(value), strict=True):
        if label in names:
            layout.append(() if _broadcast(size, names[label].size) else (names[label],))
        elif label in out_labels:
            own += 1
            layout.append((Axis(AxisRole.FEATURE, size),))
        else:
            return None
    return tuple(layout) if own == 1 else None


def _broadcast(size: Size, wide: Size) -> bool:
    return same_size(size, 1) and not same_size(wide, 1)


def _attention(
    node: Node,
    first: Product,
    walk: _Walk,
    axes: Axes,
    length: Axis,
    value: Node,
    value_layout: Layout | None,
) -> Attention | Refusal:
    """Put the two products together: which operand is the query, which axes tokens, lanes and features
    are."""

    def refuse(reason: str) -> Refusal:
        return Refusal(node, first.node, reason, Verdict.UNSUPPORTED)

    scores = {label: axes.leaves(dim) for label, dim in zip(first.labels, walk.layout, strict=True)}
    length_label = next((x for x, dim in scores.items() if dim == axes.leaves((length,))), None)
    sides = ((first.left, first.left_labels), (first.right, first.right_labels))
    over_keys = [side for side in sides if length_label in side[1]]
    if length_label is None or len(over_keys) != 1:
        return refuse("which of the operands of its scores is the key is not clear")
    key, k_labels = over_keys[0]
    query, q_labels = sides[1] if over_keys[0] is sides[0] else sides[0]
    k_sizes = dict(zip(k_labels, shape_of(key), strict=True))
    q_sizes = dict(zip(q_labels, shape_of(query), strict=True))
    alone = [x for x in q_labels if x in scores and (x not in k_sizes or _broadcast(k_sizes[x], q_sizes[x]))]
    token_label = _token_label(alone, first, q_sizes, k_sizes[length_label])
    inner = [x for x in q_labels if x in k_labels and x not in scores]
    if token_label is None or len(inner) != 1:
        return refuse("which dimension of its query counts tokens, and which features, is not clear")
    if walk.uneven is not None:
        return refuse(
            f"its scores are scaled by {describe(walk.uneven)}, which is not one number for all of them, so "
            "its softmax has no one scale. Scale the query with it instead"
        )
    if value_layout is None:
        return refuse("its value has dimensions that neither its probabilities nor its output have")
    for axis in scores[token_label]:
        axis.role = AxisRole.TOKEN
    for label in alone:
        if label != token_label:
            axes.share(scores[label])
    names = {**scores, inner[0]: (Axis(AxisRole.FEATURE, q_sizes[inner[0]]),)}
    return Attention(
        output=node,
        query=Operand(query, tuple(names[x] for x in q_labels)),
        key=Operand(key, tuple(() if x in alone else names[x] for x in k_labels)),
        value=Operand(value, value_layout),
        axes=axes,
        tokens=q_sizes[token_label],
        length=k_sizes[length_label],
        scale=walk.scale,
        causal=False,
        masks=tuple((mask, -2) for mask in walk.masks),
        value_argument=node,
    )


def _token_label(alone: list[str], first: Product, q_sizes: dict[str, Size], length: Size) -> str | None:
    """Which of the dimensions that only the query has counts tokens."""
    rows = [x for x in alone if x in ("row", "column")]
    if rows:
        return rows[0]
    if len(alone) <= 1:
        return alone[0] if alone else None
    alike = [x for x in alone if same_size(q_sizes[x], length)]
    if len(alike) == 1:
        return alike[0]
    return next((x for x in reversed(first.labels) if x in alone), None)

"""Fused attention operations -> :class:`Attention`. Finds, never edits."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .axes import Axes, Axis, AxisRole, Layout
from .nodes import Size, is_tensor, quotient, same_size, shape_of
from .ops import Role, arguments, has_role
from .sites import Attention, Operand, Refusal, Scale, Verdict


def find_attention(node: Node) -> Attention | Refusal | None:
    """Read one ``scaled_dot_product_attention`` node; None where ``node`` is something else."""
    if not has_role(node, Role.ATTENTION):
        return None
    bound = arguments(node)
    query, key, value = (bound[name] for name in ("query", "key", "value"))
    if not all(isinstance(x, Node) and is_tensor(x) for x in (query, key, value)):
        return Refusal(
            node, node, "its query, key and value are not tensors of the graph", Verdict.NOT_A_LAYER
        )
    axes = Axes()
    lanes = _lanes(shape_of(query), shape_of(key), shape_of(value), bool(bound.get("enable_gqa")), axes)
    if lanes is None:
        return Refusal(
            node,
            node,
            f"heads of query {list(shape_of(query))}, key {list(shape_of(key))} and value "
            f"{list(shape_of(value))} do not correspond",
            Verdict.UNSUPPORTED,
        )
    query_lanes, key_lanes = lanes
    tokens, length = shape_of(query)[-2], shape_of(key)[-2]
    size = shape_of(query)[-1]
    token_axis, length_axis = Axis(AxisRole.TOKEN, tokens), Axis(AxisRole.TOKEN, length)
    key_size, value_size = Axis(AxisRole.FEATURE, size), Axis(AxisRole.FEATURE, shape_of(value)[-1])
    mask = bound.get("attn_mask")
    return Attention(
        output=node,
        query=Operand(query, (*query_lanes, (token_axis,), (key_size,))),
        key=Operand(key, (*key_lanes, (length_axis,), (key_size,))),
        value=Operand(value, (*key_lanes, (length_axis,), (value_size,))),
        axes=axes,
        tokens=tokens,
        length=length,
        scale=_scale(bound.get("scale"), size),
        causal=bound.get("is_causal", False) is not False,
        masks=((mask, -2),) if isinstance(mask, Node) else (),
        value_argument=node,
    )


def _scale(given: Any, size: Size) -> Scale:
    if isinstance(given, Node):
        return Scale(times=(given,))
    return Scale(number=float(size) ** -0.5 if given is None else float(given))


def _lanes(
    query: tuple[Size, ...], key: tuple[Size, ...], value: tuple[Size, ...], grouped: bool, axes: Axes
) -> tuple[Layout, Layout] | None:
    """Axes of the dimensions before tokens and features, for the query and for key and value."""
    if not len(query) == len(key) == len(value):
        return None
    query_lanes, key_lanes = [], []
    last = len(query) - 3
    for i, (q, k, v) in enumerate(zip(query[:-2], key[:-2], value[:-2], strict=True)):
        axis = Axis(AxisRole.LANE, q)
        query_lanes.append((axis,))
        if not same_size(k, v):
            return None
        if same_size(q, k):
            key_lanes.append((axis,))
        elif same_size(k, 1):
            axes.share((axis,))
            key_lanes.append(())
        elif grouped and i == last and (group := quotient(q, k)) is not None:
            heads, copies = axes.split(axis, (k, group))
            axes.share((copies,))
            key_lanes.append((heads,))
        else:
            return None
    return tuple(query_lanes), tuple(key_lanes)

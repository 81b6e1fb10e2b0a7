"""Fused attention operations -> :class:`Attention`. Finds, never edits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .axes import Axes, Axis, AxisRole, Layout
from .dataflow import Dataflow
from .flex import mods_of
from .nodes import Size, is_tensor, quotient, same_size, shape_of
from .ops import Role, arguments, has_role, op_name
from .sites import Attention, Operand, Refusal, Scale, Verdict


@dataclass(frozen=True)
class Fused:
    """How one attention operation is called.

    ``layout`` names the dimensions of query, key and value: B and H lanes (batch entries and heads), T
    tokens, D features.
    """

    query: str = "query"
    key: str = "key"
    value: str = "value"
    scale: str | None = "scale"
    causal: str | bool = "is_causal"
    """The name of a flag, or whether the operation masks the future whatever it is called with."""

    layout: str = "BHTD"
    grouped: bool = True
    """Fewer heads of key and value than of query are shared by groups of queries."""

    by_default: bool = False
    """What the flag is where it is not given."""


def find_attention(node: Node, flow: Dataflow) -> Attention | Refusal | None:
    """Read one fused attention operation; None where ``node`` is something else."""
    if not has_role(node, Role.ATTENTION):
        return None
    bound = arguments(node)
    grouped = bool(bound.get("enable_gqa")) or op_name(node) != "scaled_dot_product_attention"
    how = REGISTERED.get(op_name(node) or "") or Fused(grouped=grouped)
    query, key, value = (bound.get(name) for name in (how.query, how.key, how.value))
    if not all(isinstance(x, Node) and is_tensor(x) for x in (query, key, value)):
        return Refusal(
            node, node, "its query, key and value are not tensors of the graph", Verdict.NOT_A_LAYER
        )
    axes = Axes()
    laid = _layouts(how, *(shape_of(x) for x in (query, key, value)), axes)
    if laid is None:
        return Refusal(
            node,
            node,
            f"heads of query {list(shape_of(query))}, key {list(shape_of(key))} and value "
            f"{list(shape_of(value))} do not correspond",
            Verdict.UNSUPPORTED,
        )
    at = how.layout.index("T") - len(how.layout)
    mask = bound.get("attn_mask")
    causal = how.causal if isinstance(how.causal, bool) else bound.get(how.causal, how.by_default)
    return Attention(
        output=node,
        query=Operand(query, laid[0]),
        key=Operand(key, laid[1]),
        value=Operand(value, laid[2]),
        axes=axes,
        tokens=shape_of(query)[at],
        length=shape_of(key)[at],
        scale=_scale(bound.get(how.scale) if how.scale else None, shape_of(query)[-1]),
        causal=causal is not False,
        masks=((mask, -2),) if isinstance(mask, Node) else (),
        value_argument=node,
        mods=mods_of(bound, flow.bodies) if "score_mod" in bound else None,
    )


REGISTERED: dict[str, Fused] = {}
"""Operations that users named, by their canonical name; see :func:`depthify.register_attention_op`."""


def _layouts(
    how: Fused, query: tuple[Size, ...], key: tuple[Size, ...], value: tuple[Size, ...], axes: Axes
) -> tuple[Layout, Layout, Layout] | None:
    """The layouts of query, key and value; None where their sizes do not correspond."""
    rank = len(how.layout)
    if how.layout == "BHTD":  # any number of lanes
        rank = len(query)
    if not len(query) == len(key) == len(value) == rank or rank < 2:
        return None
    token = (how.layout.index("T") - len(how.layout)) % rank
    dims = [i for i in range(rank - 1) if i != token]
    lanes = _lanes(*([shape[i] for i in dims] for shape in (query, key, value)), how.grouped, axes)
    if lanes is None:
        return None
    length = Axis(AxisRole.TOKEN, key[token])
    features = Axis(AxisRole.FEATURE, query[-1])

    def laid(side: Layout, tokens: Axis, last: Axis) -> Layout:
        held = dict(zip(dims, side, strict=True))
        return (*((tokens,) if i == token else held[i] for i in range(rank - 1)), (last,))

    return (
        laid(lanes[0], Axis(AxisRole.TOKEN, query[token]), features),
        laid(lanes[1], length, features),
        laid(lanes[1], length, Axis(AxisRole.FEATURE, value[-1])),
    )


def _scale(given: Any, size: Size) -> Scale:
    if isinstance(given, Node):
        return Scale(times=(given,))
    return Scale(number=float(size) ** -0.5 if given is None else float(given))


def _lanes(
    query: Sequence[Size], key: Sequence[Size], value: Sequence[Size], grouped: bool, axes: Axes
) -> tuple[Layout, Layout] | None:
    """Axes of the dimensions besides tokens and features, for the query and for key and value."""
    query_lanes, key_lanes = [], []
    last = len(query) - 1
    for i, (q, k, v) in enumerate(zip(query, key, value, strict=True)):
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

"""From an attention operand back to the tensor of the current tokens: through views, head repeats and cache
writes.

    projection -> [views] -> CURRENT -> [cache write] -> [views, repeated heads] -> attention
                                ^ found here

A cache write is a concatenation along the tokens whose other operands are state, or a write into part of a
buffer. A buffer that is written in place and then read by another name (a static cache is a graph input) is
followed by its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from .axes import (
    Axes,
    Axis,
    AxisRole,
    Layout,
    axis_dim,
    index_items,
    step_back,
    step_back_whole,
    step_forward,
    whole,
)
from .dataflow import Dataflow
from .nodes import Size, dimension, dtype_of, is_tensor, same_size, shape_of, value_of
from .ops import Role, arguments, has_role, mutated, op_of
from .sites import Operand

_LAYOUT = (
    Role.PERMUTE,
    Role.RESHAPE,
    Role.EXPAND,
    Role.REPEAT,
    Role.COPY,
    Role.CAST,
    Role.INDEX,
    Role.SLICE,
    Role.PICK,
    Role.ROLL,
)


@dataclass
class Trace:
    """Where the walk ended and what it passed."""

    operand: Operand
    path: list[Operand] = field(default_factory=list)
    """What was passed, from the attention operand on; the operand found is not among it."""

    writes: list[Node] = field(default_factory=list)
    factor: float = 1.0
    cut: bool = False
    """Only part of the tokens is read, and no cache write explains why."""

    problem: str = ""
    """Why the walk could not go on; empty where it simply reached an operation that computes."""


def is_state(node: Any, flow: Dataflow) -> bool:
    """Whether ``node`` is (a view or part of) an input of the region or a fresh buffer, hence holds no
    current token."""
    while isinstance(node, Node):
        node = flow.behind(node)
        if flow.external(node):
            return True
        if has_role(node, Role.CREATE):
            return not flow.writes(node)
        if has_role(node, Role.JOIN):
            return all(is_state(x, flow) for x in arguments(node)["tensors"])
        if not has_role(node, *_LAYOUT) or flow.writes(node, flow.position[node]):
            return False
        node = arguments(node).get("input")
    return True


def trace(operand: Operand, axes: Axes, flow: Dataflow, at: Node, tokens: Size) -> Trace:
    """Walk back from ``operand``, read by the attention at node ``at``, to the tensor of the current
    ``tokens``, in the precision in which it is cached or used."""
    node, layout, time = operand.node, axes.resolve(operand.layout), flow.position[at]
    result = Trace(operand)
    own: tuple[Operand, int, float] | None = (
        None  # below the first factor (or cast) since the last cache write
    )
    while True:
        layout = _resized(node, layout)
        here = result.operand = Operand(node, layout)
        # A view taken after a change holds it already; what matters is a change after the node was made.
        written = [w for w in flow.writes(node, time) if flow.position[w] >= flow.position[node]]
        if written and not has_role(written[-1], Role.WRITE):
            if is_state(flow.root(node), flow):
                result.problem = (
                    f"its cache is changed by an operation that is not known ({written[-1].name})"
                )
            elif written[-1] is not node:
                _stay_below(result, written[-1])
            break
        write = written[-1] if written else node if has_role(node, Role.WRITE) else None
        if write is not None:
            target = mutated(write)[0] if mutated(write) else None
            at_target = (
                layout if target is None else _layout_of_alias(node, layout, target, write, axes, flow)
            )
            source = _through_write(write, at_target) if at_target is not None else None
            if source is None and is_assembled(node, flow):
                break
            if source is None:
                result.problem = f"its cache is written in a way that is not known ({write.name})"
                break
        elif has_role(node, Role.JOIN) and _joins_tokens(node, layout) and not flow.external(node):
            write, source = node, _current(node, layout, flow, tokens)
            if source is None:
                result.problem = f"not exactly one of the tensors joined in {node.name} is computed here"
                break
        if write is not None:
            result.path += [here] if write is node else [here, Operand(write, layout)]
            result.writes.append(write)
            (node, layout), time, own, result.cut = source, flow.position[write], None, False
            continue
        if flow.enters(node):
            result.problem = f"it enters the body of {flow.calls[node.graph].node.name} from outside"
            break
        step = None if flow.external(node) else _next(node, layout, axes)
        if step is None or (step.part and not is_state(step.node, flow)):
            break
        if own is None and (step.factor != 1.0 or _narrows(node, step.node)):
            own = here, len(result.path), result.factor
        result.factor *= step.factor
        result.cut |= step.cut
        result.path.append(here)
        if not op_of(node).aliases:
            time = min(time, flow.position[node])
        node, layout = step.node, step.layout
    if own is not None:
        result.operand, length, result.factor = own
        del result.path[length:]
    return result


def _resized(node: Node, layout: Layout) -> Layout:
    """The layout with token axes as long as they are here: behind a cache there are more tokens than
    before it."""
    return tuple(
        (Axis(AxisRole.TOKEN, size),)
        if len(dim) == 1 and dim[0].role is AxisRole.TOKEN and not same_size(dim[0].size, size)
        else dim
        for dim, size in zip(layout, shape_of(node), strict=True)
    )


def is_assembled(node: Node, flow: Dataflow) -> bool:
    """Whether ``node`` is a buffer made here and filled piece by piece: no cache, but a computed tensor."""
    root = flow.root(node)
    return node is root and has_role(root, Role.CREATE) and not flow.external(root)


@dataclass(frozen=True)
class _Back:
    node: Node
    layout: Layout
    factor: float = 1.0
    cut: bool = False
    part: bool = False
    """Only part of the heads or batch entries is read: of a fused projection, or of a larger cache."""


def _next(node: Node, layout: Layout, axes: Axes) -> _Back | None:
    """One step back through a layout operation or a multiplication by a number."""
    op = op_of(node)
    if op is None:
        return None
    if op.role in (Role.MULTIPLY, Role.DIVIDE):
        bound = arguments(node)
        data, number = bound.get("input"), bound.get("other")
        if op.role is Role.MULTIPLY and isinstance(number, Node):
            data, number = number, data
        if not isinstance(data, Node) or not isinstance(number, (int, float)) or number == 0:
            return None
        return _Back(data, layout, float(number) if op.role is Role.MULTIPLY else 1.0 / number)
    step = step_back_whole(node, layout, axes)
    if step is None or AxisRole.FEATURE in step.cut:
        return None
    return _Back(step.node, step.layout, cut=bool(step.cut), part=AxisRole.LANE in step.cut)


def _narrows(node: Node, source: Node) -> bool:
    """Whether ``node`` is ``source`` in a dtype that does not hold all its values."""
    mine, theirs = dtype_of(node), dtype_of(source)
    return mine != theirs and torch.promote_types(mine, theirs) != mine


def _stay_below(result: Trace, change: Node) -> None:
    """A tensor that arithmetic changes in place cannot be replaced; the view taken of it afterwards can."""
    if result.path and has_role(result.path[-1].node, Role.RESHAPE, Role.PERMUTE, Role.INDEX, Role.SLICE):
        result.operand = result.path.pop()
    else:
        result.problem = f"it is changed in place by {change.name}"


def _joins_tokens(node: Node, layout: Layout) -> bool:
    dim = dimension(arguments(node).get("dim", 0), len(layout))
    return bool(layout[dim]) and all(axis.role is AxisRole.TOKEN for axis in layout[dim])


def _current(node: Node, layout: Layout, flow: Dataflow, tokens: Size) -> tuple[Node, Layout] | None:
    """Of the tensors joined along the tokens, the one that is computed here."""
    tensors = arguments(node).get("tensors")
    if not isinstance(tensors, (tuple, list)):
        return None
    fresh = [x for x in tensors if isinstance(x, Node) and not is_state(x, flow)]
    if len(fresh) > 1:
        dim = axis_dim(layout, AxisRole.TOKEN)
        fresh = [x for x in fresh if dim is not None and same_size(shape_of(x)[dim], tokens)]
    if len(fresh) != 1 or len(shape_of(fresh[0])) != len(layout):
        return None
    return fresh[0], layout


def _layout_of_alias(
    node: Node, layout: Layout, target: Node, write: Node, axes: Axes, flow: Dataflow
) -> Layout | None:
    """The layout of ``target``, which shares memory with ``node``."""
    if node is target or node is write:
        return layout
    root = flow.root(node)
    while node is not root:
        step = step_back(node, layout, axes)
        if step is None:
            if not mutated(node):
                return None
            node = mutated(node)[0]
            continue
        node, layout = step.node, step.layout
    chain = []
    while target is not root:
        chain.append(target)
        source = arguments(target).get("input") if op_of(target) else None
        if not isinstance(source, Node):
            return None
        target = source
    for view in reversed(chain):
        if mutated(view):
            continue
        forward = step_forward(view, layout)
        if forward is None:
            return None
        layout = forward
    return layout


def _through_write(write: Node, layout: Layout) -> tuple[Node, Layout] | None:
    """The tensor that ``write`` puts into a buffer of the given layout, and its own layout."""
    bound = arguments(write)
    source = bound.get("source")
    if not isinstance(source, Node) or not is_tensor(source):
        return None
    name = op_of(write).name
    rank = len(layout)
    if name in ("copy_", "copy"):
        laid: Layout | None = layout
    elif name in ("setitem", "index_put", "index_put_"):
        index = (
            bound["index"]
            if name == "setitem"
            else tuple(slice(None) if item is None else item for item in bound["indices"])
        )
        laid = _written_part(index, layout)
    else:  # one dimension: index_copy, scatter, slice_scatter
        dim = layout[dimension(bound.get("dim", 0), rank)]
        laid = layout if all(axis.role is not AxisRole.FEATURE for axis in dim) else None
    if laid is None or len(laid) != len(shape_of(source)):
        return None
    return source, laid


def _written_part(index: Any, layout: Layout) -> Layout | None:
    """The layout of the source of ``buffer[index] = source``."""
    items = index_items(index, len(layout))
    if items is None or any(item is None for item in items):
        return None
    result: list[tuple[Axis, ...]] = []
    advanced: list[int] = []
    ranks: list[int] = []
    for i, (dim, item) in enumerate(zip(layout, items, strict=True)):
        if not (isinstance(item, slice) and whole(item)) and any(a.role is AxisRole.FEATURE for a in dim):
            return None
        known = value_of(item) if isinstance(item, Node) else item
        if isinstance(item, slice):
            result.append(dim)
        elif isinstance(item, Node) and is_tensor(item) and known.dim() > 0:
            advanced.append(i)
            ranks.append(known.dim())
            result.append(dim)
        elif isinstance(item, (list, tuple)):
            advanced.append(i)
            ranks.append(1)
            result.append(dim)
        # an integer, or a tensor of no dimension, drops the dimension: one token is written
    side_by_side = advanced == list(range(advanced[0], advanced[0] + len(advanced))) if advanced else True
    if not side_by_side or (advanced and max(ranks) != len(advanced)):
        return None
    return tuple(result)

"""Axes: which part of which dimension holds lanes, tokens and features, carried backwards through layout
operations.

The finders start at an attention operand, where the meaning of each dimension is known, and walk back
towards the projection. A :data:`Layout` says, dimension by dimension, which axes a tensor holds, outermost
first; an axis is split when a view upstream shows it to be a product. So ``(B, Hq, S, D)`` behind
``expand`` and ``reshape`` becomes ``(B, H, S, D)`` and the group axis is known to be *shared*: one key or
value vector serves all its query heads.

Batch entries and key/value heads need no distinction, as mixing is done for each on its own; both are lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, TypeAlias

from torch.fx import Node

from .nodes import Size, different_size, dimension, dtype_of, is_tensor, quotient, same_size, shape_of
from .ops import Role, arguments, numbers, op_of, switched_off


class AxisRole(Enum):
    LANE = "lane"
    TOKEN = "token"
    FEATURE = "feature"


class Axis:
    """One axis of an attention operand. Compared by identity."""

    __slots__ = ("role", "size")

    def __init__(self, role: AxisRole, size: Size) -> None:
        self.role = role
        self.size = size

    def __repr__(self) -> str:
        return f"{self.role.value}:{self.size}"


Layout: TypeAlias = tuple[tuple[Axis, ...], ...]


class Axes:
    """The axes of one attention: how they split, and which are shared by a group of query heads."""

    def __init__(self) -> None:
        self._parts: dict[Axis, tuple[Axis, ...]] = {}
        self._shared: set[Axis] = set()

    def split(self, axis: Axis, sizes: Sequence[Size]) -> tuple[Axis, ...]:
        parts = tuple(Axis(axis.role, size) for size in sizes)
        self._parts[axis] = parts
        return parts

    def leaves(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        """The axes with every split one replaced by its parts."""
        out: list[Axis] = []
        for axis in axes:
            parts = self._parts.get(axis)
            out += (axis,) if parts is None else self.leaves(parts)
        return tuple(out)

    def resolve(self, layout: Layout) -> Layout:
        return tuple(self.leaves(dim) for dim in layout)

    def fits(self, layout: Layout, shape: Sequence[Size]) -> bool:
        """Whether the axes of every dimension can have its size: False only where they cannot."""
        for dim, size in zip(layout, shape, strict=True):
            product: Size = 1
            for axis in self.leaves(dim):
                product = product * axis.size
            if different_size(product, size):
                return False
        return True

    def state(self) -> tuple[Any, ...]:
        """What is known by now, for :meth:`back_to` after a search that led nowhere."""
        return dict(self._parts), set(self._shared)

    def back_to(self, state: tuple[Any, ...]) -> None:
        self._parts, self._shared = dict(state[0]), set(state[1])

    def share(self, axes: Iterable[Axis]) -> None:
        self._shared.update(self.leaves(axes))

    def shared(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        """Those leaves of ``axes`` over which keys and values are repeated."""
        wide = set(self.leaves(self._shared))
        return tuple(a for a in self.leaves(axes) if a in wide)

    def distribute(self, axes: Sequence[Axis], shape: Sequence[Size]) -> Layout | None:
        """Lay ``axes``, in order, into the dimensions of ``shape``, splitting where needed; None if they
        do not fit."""
        queue = deque(self.leaves(axes))
        layout: list[tuple[Axis, ...]] = []
        for size in shape:
            dim: list[Axis] = []
            rest = size
            if same_size(size, 1):
                if queue and same_size(queue[0].size, 1):
                    dim.append(queue.popleft())
            while not same_size(rest, 1):
                if not queue:
                    return None
                axis = queue.popleft()
                left = quotient(rest, axis.size)
                if left is not None:
                    dim.append(axis)
                    rest = left
                    continue
                inner = quotient(axis.size, rest)
                if inner is None:
                    return None
                outer, remainder = self.split(axis, (rest, inner))
                dim.append(outer)
                queue.appendleft(remainder)
                rest = 1
            layout.append(tuple(dim))
        return tuple(layout) if all(same_size(axis.size, 1) for axis in queue) else None


def flat(layout: Layout) -> tuple[Axis, ...]:
    return tuple(axis for dim in layout for axis in dim)


def axis_dim(layout: Layout, role: AxisRole) -> int | None:
    """The dimension that holds the (only) axis of ``role``; None if several or none do."""
    dims = [i for i, dim in enumerate(layout) if any(axis.role is role for axis in dim)]
    return dims[0] if len(dims) == 1 else None


def _permutation(name: str, bound: dict[str, Any], rank: int) -> list[int] | None:
    """For each output dimension, the input dimension it shows."""
    order = list(range(rank))
    if name in ("transpose", "swapaxes", "swapdims"):
        a, b = (dimension(bound[key], rank) for key in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
    elif name in ("t", "T"):
        order.reverse()
    elif name in ("mT",):
        order[-2], order[-1] = order[-1], order[-2]
    elif name == "permute":
        order = [dimension(d, rank) for d in numbers(bound.get("dims"))]
    elif name in ("movedim", "moveaxis"):
        source = [dimension(d, rank) for d in numbers(bound["source"])]
        target = [dimension(d, rank) for d in numbers(bound["destination"])]
        rest = iter([d for d in order if d not in source])
        back = dict(zip(target, source, strict=True))
        order = [back[i] if i in back else next(rest) for i in range(rank)]
    else:
        return None
    return order


def _through_expand(
    layout: Layout, shape_in: Sequence[Size], shape_out: Sequence[Size], axes: Axes
) -> Layout:
    """Dimensions of size 1 that were expanded, and new leading ones, hold no axis before the operation."""
    lead = len(shape_out) - len(shape_in)
    for dim in layout[:lead]:
        axes.share(dim)
    result = []
    for i, size in enumerate(shape_in):
        dim = layout[lead + i]
        if same_size(size, 1) and not same_size(shape_out[lead + i], 1):
            axes.share(dim)
            dim = ()
        result.append(dim)
    return tuple(result)


def _through_repeat(
    layout: Layout, repeats: Sequence[Size], shape_in: Sequence[Size], axes: Axes, inner: bool
) -> Layout | None:
    """``repeat`` puts whole copies one after the other, ``repeat_interleave`` repeats each entry."""
    lead = len(repeats) - len(shape_in)
    for dim in layout[:lead]:
        axes.share(dim)
    result = []
    for i, size in enumerate(shape_in):
        dim, times = layout[lead + i], repeats[lead + i]
        if not same_size(times, 1):
            sizes = (size, times) if inner else (times, size)
            halves = axes.distribute(dim, sizes)
            if halves is None:
                return None
            kept, copies = halves if inner else halves[::-1]
            axes.share(copies)
            dim = kept
        result.append(dim)
    return tuple(result)


def index_items(index: Any, rank: int) -> list[Any] | None:
    """``x[index]`` as one entry per written item, the ellipsis replaced by full slices; None if not
    understood."""
    items = list(index) if isinstance(index, (tuple, list)) else [index]
    if sum(item is Ellipsis for item in items) > 1:
        return None
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if any(item is Ellipsis for item in items):
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (rank - taken)
    else:
        items += [slice(None)] * (rank - taken)
    return items


def whole(item: Any) -> bool:
    """Whether an index item takes a whole dimension."""
    return (
        isinstance(item, slice) and item.start in (None, 0) and item.stop is None and item.step in (None, 1)
    )


def _through_index(layout: Layout, index: Any, rank_in: int) -> tuple[Layout, set[AxisRole]] | None:
    items = index_items(index, rank_in)
    if items is None or any(not (item is None or isinstance(item, slice)) for item in items):
        return None
    result: list[tuple[Axis, ...]] = []
    cut: set[AxisRole] = set()
    for dim, item in zip(layout, items, strict=True):
        if item is None:
            continue
        result.append(dim)
        if not whole(item):
            cut |= {axis.role for axis in dim} or {AxisRole.LANE}
    return tuple(result), cut


class Step:
    """One step back: the input node, its layout, and the roles of dimensions of which only a part was
    taken."""

    __slots__ = ("node", "layout", "cut")

    def __init__(self, node: Node, layout: Layout, cut: set[AxisRole] | None = None) -> None:
        self.node = node
        self.layout = layout
        self.cut = cut or set()


def step_back(node: Node, layout: Layout, axes: Axes) -> Step | None:
    """Carry ``layout`` from the result of a layout operation to its input; None where ``node`` is no such
    operation."""
    op = op_of(node)
    if op is None:
        return None
    bound = arguments(node)
    source = bound.get("input")
    if not is_tensor(source) or not isinstance(source, Node):
        return None
    if op.role is Role.RESHAPE and dtype_of(source) != dtype_of(node):
        return None  # view(dtype) shows other numbers
    shape_in = shape_of(source)
    rank = len(shape_in)
    match op.role:
        case Role.COPY | Role.CAST:
            return Step(source, layout)
        case Role.DROPOUT:
            return Step(source, layout) if switched_off(node) else None
        case Role.PERMUTE:
            order = _permutation(op.name, bound, rank)
            if order is None:
                return None
            result: list[tuple[Axis, ...]] = [()] * rank
            for out, into in enumerate(order):
                result[into] = layout[out]
            return Step(source, tuple(result))
        case Role.RESHAPE:
            laid = axes.distribute(flat(layout), shape_in)
            return Step(source, laid) if laid is not None else None
        case Role.EXPAND:
            return Step(source, _through_expand(layout, shape_in, shape_of(node), axes))
        case Role.REPEAT:
            if op.name == "repeat_interleave":
                times, dim = bound.get("repeats"), bound.get("dim")
                if dim is None or isinstance(times, Node) or times is None:
                    return None
                repeats: list[Size] = [1] * rank
                repeats[dimension(dim, rank)] = times
                laid = _through_repeat(layout, repeats, shape_in, axes, inner=True)
            else:
                counts = numbers(bound.get("repeats"))
                if any(isinstance(n, Node) for n in counts):
                    return None
                laid = _through_repeat(layout, counts, shape_in, axes, inner=False)
            return Step(source, laid) if laid is not None else None
        case Role.INDEX:
            through = _through_index(layout, bound["index"], rank)
            return Step(source, *through) if through is not None else None
        case Role.SLICE:
            dim = layout[dimension(bound.get("dim", 0), rank)]
            return Step(source, layout, {axis.role for axis in dim} or {AxisRole.LANE})
        case Role.ROLL:
            dims = numbers(bound.get("dims"))
            if not dims:
                return None
            return Step(source, layout, {axis.role for d in dims for axis in layout[dimension(d, rank)]})
        case _:
            return None


def step_back_whole(node: Node, layout: Layout, axes: Axes) -> Step | None:
    """:func:`step_back`, but not to where a vector is spread over several dimensions."""

    def spread(laid: Layout) -> int:
        return sum(axis.role is AxisRole.FEATURE for axis in axes.leaves(flat(laid)))

    before, old = axes.state(), spread(layout)  # counted now, as the step may split an axis of the layout
    step = step_back(node, layout, axes)
    if step is not None and spread(step.layout) > max(old, 1):
        axes.back_to(before)
        return None
    return step


def step_forward(node: Node, layout: Layout) -> Layout | None:
    """Carry ``layout`` from the input of a view to its result, for the views a cache is written through.

    None where the view shows only some of the features: what is written there is no whole vector.
    """
    op = op_of(node)
    if op is None:
        return None
    bound = arguments(node)
    match op.role:
        case Role.PERMUTE:
            order = _permutation(op.name, bound, len(layout))
            return tuple(layout[i] for i in order) if order is not None else None
        case Role.COPY:
            return layout
        case Role.SLICE:
            dim = layout[dimension(bound.get("dim", 0), len(layout))]
            return layout if all(axis.role is not AxisRole.FEATURE for axis in dim) else None
        case Role.INDEX:
            through = _through_index(layout, bound["index"], len(layout))
            return layout if through is not None and AxisRole.FEATURE not in through[1] else None
    return None

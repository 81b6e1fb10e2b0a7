"""Rotary embeddings, recognised by what they compute -> the query and key before the rotation. Finds, never
edits.

Query and key of one token are rotated by the same angles, so their product is the same before and after. A
source's key from a layer with other angles (local and global bases, layers without rotation) is comparable
only before. Scoring before also lets the rotation's backward stay in the kernel where it is.

No spelling is matched. The operations between a tensor and its rotated form are cut out of the graph and
run on random vectors with random angles; they are a rotation if every product of a query and a key keeps
its value, up to one factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from ..torch_internals import real_value
from .axes import Axes, AxisRole, Layout, axis_dim, flat, step_back, step_back_whole
from .dataflow import Dataflow, Dependencies
from .nodes import hint, is_number, is_tensor, quotient, same_size, shape_of, value_of
from .ops import Role, arguments, has_role, mutated, op_name, op_of
from .sites import AttentionSite, Factor, Operand, Score

_LAYOUT = (Role.PERMUTE, Role.RESHAPE, Role.COPY, Role.CAST)
_INSIDE = frozenset(Role) - {
    Role.ATTENTION, Role.CONTRACT, Role.SOFTMAX, Role.WRITE, Role.MASK, Role.SQUASH, Role.REDUCE, Role.EXP,
    Role.REPEAT, Role.PROJECT, Role.CREATE, Role.RANDOM, Role.DROPOUT,
}  # fmt: skip
"""Linear operations, elementwise and structural."""

_FILLS = frozenset("zeros ones empty full zeros_like ones_like new_zeros new_ones new_empty new_full".split())
_ANGLES = ("cos", "sin", "cos_", "sin_", "polar")
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Rotation:
    """Query and key before a common rotation."""

    score: Score
    angles: frozenset[Node]
    """The nodes that hold the angles, or what they are computed from."""


@dataclass(frozen=True)
class NoRotation:
    """Positions have no part in query and key after their projection, but for scaling whole vectors."""

    score: Score


@dataclass(frozen=True)
class UnknownRotation:
    """Positions take part in a way that is not recognised as a rotation."""

    reason: str
    node: Node
    angles: frozenset[Node] = frozenset()


@dataclass(frozen=True)
class _Peeled:
    """A query or key below some of the factors that scale it token by token."""

    operand: Operand
    factors: tuple[Factor, ...] = ()


@dataclass
class _Region:
    """The operations from ``entry`` (before) to ``end`` (after), in program order."""

    entry: Operand
    end: Operand
    nodes: list[Node]
    positions: list[Node] = field(default_factory=list)
    """Nodes outside that the region reads and that depend on positions alone."""


class RotaryFinder:
    """Looks for rotations in one graph; equal regions of different layers are run once."""

    def __init__(self, flow: Dataflow, needs: Dependencies) -> None:
        self._flow = flow
        self._needs = needs
        self._known: dict[Any, tuple[float, float] | None] = {}
        self._tables: dict[tuple[Node, ...], list[Node]] = {}
        self._constant: set[Node] = set()

    def find(self, site: AttentionSite) -> Rotation | NoRotation | UnknownRotation:
        """How ``site`` uses positions in its query and key."""
        first: UnknownRotation | None = None
        one_per_head = narrowed(site.key, site.attention.axes)
        for query in self._peeled(site.query):
            for key in self._peeled(one_per_head):
                found = self._pair(query, key)
                if not isinstance(found, UnknownRotation):
                    return found
                first = first or found
        if first is None:
            raise AssertionError(f"{site.output.name} has neither query nor key")
        read = [*self._positions_below(site.query), *self._positions_below(site.key)]
        return replace(first, angles=frozenset(self._angles(read)))

    def _peeled(self, operand: Operand) -> Iterator[_Peeled]:
        """The operand, and what is left of it without the factors that scale its whole vectors: the norm of
        a vector after its rotation is such a factor, or a temperature that depends on the position."""
        yield (peeled := _Peeled(operand))
        node, layout = operand.node, operand.layout
        while not mutated(node) and not self._flow.external(node):
            if has_role(node, Role.MULTIPLY, Role.DIVIDE):
                split = _vectors_and_factor(node, layout)
                if split is None:
                    return
                node, factor = split
                peeled = _Peeled(Operand(node, layout), (*peeled.factors, factor))
                yield peeled
                continue
            step = step_back(node, layout, _NoSplit()) if has_role(node, *_LAYOUT) else None
            if step is None or has_role(node, Role.RESHAPE):
                return
            node, layout = step.node, step.layout

    def _pair(self, q: _Peeled, k: _Peeled) -> Rotation | NoRotation | UnknownRotation:
        regions = [self._region(side.operand) for side in (q, k)]
        for side, region in zip((q, k), regions, strict=True):
            if region is None and (node := self._position_below(side.operand)) is not None:
                return UnknownRotation("positions take part in another way than by a rotation", node)
        query, key = regions
        if query is None and key is None:
            return NoRotation(Score(q.operand, k.operand, 1.0, 1.0, q.factors, k.factors))
        if query is None or key is None:
            alone = query or key
            return UnknownRotation("positions take part in only one of query and key", alone.end.node)
        for region in (query, key):
            if (node := self._position_below(region.entry)) is not None:
                return UnknownRotation("positions take part more than once", node)
        numbers = self._numbers(query, key)
        if numbers is None:
            return UnknownRotation(
                "what is done with positions does not keep products of query and key", query.end.node
            )
        angles = self._angles([*query.positions, *key.positions])
        return Rotation(Score(query.entry, key.entry, *numbers, q.factors, k.factors), frozenset(angles))

    def _region(self, operand: Operand) -> _Region | None:
        """Cut at the first node above which everything flows through one tensor and positions have been
        used."""
        node, layout = operand.node, operand.layout
        while has_role(node, *_LAYOUT) and not mutated(node) and not self._flow.external(node):
            step = step_back(node, layout, _NoSplit())
            if step is None or has_role(node, Role.RESHAPE):
                break
            node, layout = step.node, step.layout
        end = Operand(node, layout)
        frontier, nodes, positions = {node}, [], []
        position = self._flow.position
        while True:
            latest = max(frontier, key=position.__getitem__)
            if len(frontier) == 1 and positions and self._alike(latest, end.node):
                nodes.sort(key=position.__getitem__)
                return _Region(Operand(latest, layout), end, nodes, positions)
            if not has_role(latest, *_INSIDE) or mutated(latest) or self._flow.external(latest):
                return None
            frontier.discard(latest)
            nodes.append(latest)
            for read in self._flow.reads(latest):
                if is_number(read):
                    continue
                if self._needs.content[read]:
                    frontier.add(read)
                elif read not in positions and self._is_position(read):
                    positions.append(read)
            if not frontier:
                return None

    @staticmethod
    def _alike(node: Node, end: Node) -> bool:
        return (
            is_tensor(node)
            and not value_of(node).is_complex()
            and len(shape_of(node)) == len(shape_of(end))
            and all(a is b or str(a) == str(b) for a, b in zip(shape_of(node), shape_of(end), strict=True))
        )

    def _position_below(self, operand: Operand) -> Node | None:
        """A tensor of positions that enters between the projection and ``operand``."""
        return next(self._positions_below(operand), None)

    def _positions_below(self, operand: Operand) -> Iterator[Node]:
        node, features = operand.node, axis_dim(operand.layout, AxisRole.FEATURE)
        size = None if features is None else shape_of(node)[features]
        seen, todo = set(), [node]
        while todo:
            node = todo.pop()
            if node in seen or has_role(node, Role.PROJECT, Role.CONTRACT) or self._flow.external(node):
                continue
            seen.add(node)
            for read in self._flow.reads(node):
                if is_number(read):
                    continue
                if self._needs.content[read]:
                    todo.append(read)
                elif self._is_position(read) and not _scales_vectors(node, read, size):
                    yield read

    def _is_position(self, node: Node) -> bool:
        """Whether a tensor that depends on no token holds positions, or may; fills of one value do not."""
        if not is_tensor(node) or value_of(node).numel() == 1:
            return False
        if node not in self._constant:
            seen, todo = set(), [node]
            while todo:
                read = todo.pop()
                if read in seen or is_number(read) or op_name(read) in _FILLS:
                    continue
                seen.add(read)
                if self._flow.external(read) and self._flow.writes(read):
                    continue  # state of earlier tokens: a cache
                if self._flow.external(read) or not (reads := self._flow.reads(read)):
                    break
                todo += reads
            else:
                self._constant.add(node)
        return node not in self._constant

    def _angles(self, positions: Iterable[Node]) -> set[Node]:
        """Where sine and cosine are taken; the tables themselves where they are inputs."""
        found: set[Node] = set()
        seen, todo = set(), list(positions)
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if op_name(node) in _ANGLES:
                found.add(node.all_input_nodes[-1])
            elif self._flow.external(node) or not self._flow.reads(node):
                found.add(node)
            else:
                todo += self._flow.reads(node)
        return found

    def _numbers(self, query: _Region, key: _Region) -> tuple[float, float] | None:
        """The numbers that query and key are scaled with; None if their products do not all grow alike."""
        local: dict[Node, int] = {}
        names = [self._signature(region, local) for region in (query, key)]
        if (signature := tuple(names)) not in self._known:
            try:
                self._known[signature] = _measure(query, key, self._flow)
            except (RuntimeError, TypeError, ValueError, KeyError, NotImplementedError):
                self._known[signature] = None  # an operation that does not run on its own: not recognised
        return self._known[signature]

    def _signature(self, region: _Region, local: dict[Node, int]) -> Any:
        """The region with its nodes numbered, so that equal regions have equal signatures."""

        def number(node: Node) -> Any:
            return _Name(local.setdefault(self._flow.behind(node), len(local)))

        nodes = [*self._above(region.positions), *region.nodes]
        rows = [(n.target, map_arg((n.args, n.kwargs), number), _sizes(n)) for n in nodes]
        return str((rows, number(region.entry.node), _sizes(region.entry.node)))

    def _above(self, positions: list[Node]) -> list[Node]:
        key = tuple(positions)
        if key not in self._tables:
            self._tables[key] = _above(positions, self._flow)
        return self._tables[key]


def _sizes(node: Node) -> Any:
    known = value_of(node)
    return tuple(known.shape) if is_tensor(node) else type(known)


class _Name:
    def __init__(self, name: Any) -> None:
        self.name = name

    def __repr__(self) -> str:
        return str(self.name)


def _scales_vectors(node: Node, read: Node, features: Any) -> bool:
    """Whether ``node`` multiplies whole vectors with the numbers of ``read``, as a padding mask does."""
    if not has_role(node, Role.MULTIPLY) or features is None or not same_size(shape_of(read)[-1], 1):
        return False
    return quotient(shape_of(node)[-1], features) is not None


def narrowed(operand: Operand, axes: Axes) -> Operand:
    """A key before its heads are repeated for queries that share them, as far as layout operations lead."""
    node, layout = operand.node, operand.layout
    if not axes.shared(flat(layout)):
        return operand
    while axes.shared(flat(layout)) or () in layout:  # up to where the dimension to repeat was made
        step = None if mutated(node) else step_back_whole(node, layout, axes)
        if step is None or step.cut:
            break
        node, layout = step.node, step.layout
    return operand if node is operand.node else Operand(node, axes.resolve(layout))


def _vectors_and_factor(node: Node, layout: Layout) -> tuple[Node, Factor] | None:
    """The two operands of a product or quotient, if one of them is the same for all features."""
    bound = arguments(node)
    first, second = bound.get("input"), bound.get("other")
    divides = has_role(node, Role.DIVIDE)
    features = axis_dim(layout, AxisRole.FEATURE)
    for data, factor in ((first, second),) if divides else ((first, second), (second, first)):
        if not all(isinstance(x, Node) and is_tensor(x) for x in (data, factor)):
            continue
        shape, size = shape_of(factor), shape_of(data)
        lead = len(layout) - len(shape)
        if len(size) != len(layout) or lead < 0 or features is None:
            continue
        if any(same_size(n, 1) and not same_size(m, 1) for n, m in zip(size, shape_of(node), strict=True)):
            continue
        if features >= lead and not same_size(shape[features - lead], 1):
            continue
        dims = tuple(
            () if same_size(n, 1) and not same_size(size[lead + i], 1) else layout[lead + i]
            for i, n in enumerate(shape)
        )
        dims = tuple(() if lead + i == features else dim for i, dim in enumerate(dims))
        return data, Factor(Operand(factor, dims), divides)
    return None


class _NoSplit:
    """Stands in for Axes where no dimension is split."""

    def distribute(self, axes: Any, shape: Any) -> None:
        return None


def _above(positions: Iterable[Node], flow: Dataflow) -> list[Node]:
    """The position-only operations down to sine and cosine and the layout of their angles, in program
    order."""
    seen: set[Node] = set()
    todo = list(positions)
    while todo:
        node = todo.pop()
        if node not in seen and is_tensor(node):
            seen.add(node)
            todo += flow.reads(node) if not flow.external(node) else []
    return sorted((n for n in seen if flow.behind(n) is n), key=flow.position.__getitem__)


def _shape(node: Node) -> list[int]:
    return [int(hint(n)) for n in shape_of(node)]


def _measure(query: _Region, key: _Region, flow: Dataflow) -> tuple[float, float] | None:
    """Run both regions on random vectors, the same for every head, with the same random angles."""
    source = _Source(flow)
    before, after = [], []
    for region in (query, key):
        shape = _shape(region.entry.node)
        kept = [axis_dim(region.entry.layout, role) for role in (AxisRole.TOKEN, AxisRole.FEATURE)]
        if kept[1] is None:
            return None
        vectors = source.random([n if i in kept else 1 for i, n in enumerate(shape)]).expand(shape)
        values: dict[Node, Any] = {region.entry.node: vectors}
        for node in region.positions:
            values[node] = source.position(node)
        for node in region.nodes:
            values[node] = _run(node, values.__getitem__)
        before.append(_rows(vectors, region.entry.layout))
        after.append(_rows(values[region.end.node], region.end.layout))
    plain, rotated = ((x[0] * x[1]).sum(-1).flatten() for x in (before, after))
    factor = float((plain @ rotated) / (plain @ plain))
    wrong = float((rotated - factor * plain).abs().max() / rotated.abs().max())
    if not factor > 0 or not wrong < source.tolerance:
        return None
    if abs(factor - 1) >= source.tolerance >= 1e-4:
        return None  # a factor known to two digits is not known
    sides = [float(b.norm() / a.norm()) for a, b in zip(before, after, strict=True)]
    if abs(sides[0] * sides[1] / factor - 1) > source.tolerance:
        return None
    one, other = (1.0 if abs(side - 1) < source.tolerance else side for side in sides)
    return one, other


def _rows(x: Tensor, layout: Layout) -> Tensor:
    """One head of one batch entry: (tokens, features)."""
    roles = [next((axis.role for axis in dim), AxisRole.LANE) for dim in layout]
    for dim in reversed(range(x.dim())):
        if roles[dim] is AxisRole.LANE:
            x = x.select(dim, 0)
    left = [role for role in roles if role is not AxisRole.LANE]
    if left == [AxisRole.FEATURE]:
        return x[None]
    return x if left[-1] is AxisRole.FEATURE else x.transpose(-1, -2)


class _Source:
    """Random vectors, and position tensors made from random angles."""

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        self._generator = torch.Generator().manual_seed(0)
        self._values: dict[Node, Any] = {}
        self._angles: dict[Node, Tensor] = {}
        self.tolerance = _TOLERANCE
        """Tables in float32 or less are rotations up to their own rounding only."""

    def random(self, shape: list[int]) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.double, device="cpu")

    def position(self, node: Node) -> Any:
        """Value of a position tensor; sine and cosine of one angle belong together."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Node) -> Any:
        origin = self._flow.behind(node)
        if origin is not node:
            return self.position(origin)
        name = op_name(node)
        if name == "polar":
            radius, angle = arguments(node)["abs"], self.angle(arguments(node)["angle"])
            return torch.polar(
                torch.ones_like(angle) if has_role(radius, Role.CREATE) else self.position(radius), angle
            )
        if name in _ANGLES:
            angle = self.angle(node.all_input_nodes[0])
            return angle.cos() if name.startswith("cos") else angle.sin()
        if node.op == "placeholder":
            return self._table(node)
        if has_role(node, Role.CREATE) and not node.all_input_nodes and node.op == "call_function":
            kwargs = {name: x for name, x in node.kwargs.items() if name != "device"}
            return node.target(*tree_map(hint, node.args), **tree_map(hint, kwargs))  # type: ignore[operator]
        if not node.all_input_nodes:
            raise ValueError(f"the values of {node.name} are not known")
        return _run(node, self.position)

    def _table(self, node: Node) -> Tensor:
        """A table of sines and cosines that is an input: the values it has in the call that is captured."""
        real = real_value(node)
        if real is None or list(real.shape) != _shape(node):
            raise ValueError(f"the values of {node.name} are not known")
        if not (real.is_floating_point() or real.is_complex()):
            return real.detach().cpu()
        # However it is stored, a table is computed in float32.
        self.tolerance = max(self.tolerance, *(16 * torch.finfo(x).eps for x in (real.dtype, torch.float32)))
        return real.detach().cpu().to(torch.complex128 if real.is_complex() else torch.double)

    def angle(self, node: Node) -> Tensor:
        """Random angles; where they are laid out from others (joined with themselves, say), so are the
        values."""
        node = self._flow.behind(node)
        if node not in self._angles:
            if has_role(node, *_LAYOUT, Role.JOIN, Role.STACK, Role.INDEX, Role.EXPAND, Role.REPEAT):
                self._angles[node] = _run(node, self.angle)
            else:
                self._angles[node] = self.random(_shape(node))
        return self._angles[node]


def _run(node: Node, value: Callable[[Node], Any]) -> Any:
    """Execute one node on real tensors in double precision; casts and device moves change nothing."""

    def known(n: Node) -> Any:
        return value(n) if is_tensor(n) or isinstance(value_of(n), (tuple, list)) else hint(value_of(n))

    op = op_of(node)
    if op is not None and op.role in (Role.CAST, Role.COPY):
        return known(node.all_input_nodes[0])
    args, kwargs = map_arg(node.args, known), map_arg(node.kwargs, known)
    args = tree_map(hint, args)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)

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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from ..torch_internals import real_value
from .axes import AxisRole, Layout, axis_dim, step_back
from .dataflow import Dataflow, Dependencies
from .nodes import is_number, is_tensor, shape_of, value_of
from .ops import Role, arguments, has_role, mutated, op_name, op_of
from .sites import AttentionSite, Operand

_LAYOUT = (Role.PERMUTE, Role.RESHAPE, Role.COPY, Role.CAST)
_INSIDE = frozenset(Role) - {
    Role.ATTENTION, Role.CONTRACT, Role.SOFTMAX, Role.WRITE, Role.MASK, Role.SQUASH, Role.REDUCE, Role.EXP,
    Role.REPEAT, Role.PROJECT, Role.CREATE, Role.RANDOM, Role.DROPOUT,
}  # fmt: skip
"""Linear operations, elementwise and structural."""

_ANGLES = ("cos", "sin", "cos_", "sin_", "polar")
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Rotation:
    """Query and key before a common rotation, and the factor it multiplies their product with."""

    query: Operand
    key: Operand
    factor: float
    angles: frozenset[Node]
    """The nodes that hold the angles, or what they are computed from."""


@dataclass(frozen=True)
class NoRotation:
    """Positions have no part in query and key after their projection."""


@dataclass(frozen=True)
class UnknownRotation:
    """Positions take part in a way that is not recognised as a rotation."""

    reason: str
    node: Node


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
        self._known: dict[Any, float | None] = {}
        self._tables: dict[tuple[Node, ...], list[Node]] = {}

    def find(self, site: AttentionSite) -> Rotation | NoRotation | UnknownRotation:
        """How ``site`` uses positions in its query and key."""
        regions = [self._region(operand) for operand in (site.query, site.key)]
        for operand, region in zip((site.query, site.key), regions, strict=True):
            if region is None and (node := self._position_below(operand.node)) is not None:
                return UnknownRotation("positions take part in another way than by a rotation", node)
        query, key = regions
        if query is None and key is None:
            return NoRotation()
        if query is None or key is None:
            return UnknownRotation("positions take part in only one of query and key", site.output)
        for region in (query, key):
            if (node := self._position_below(region.entry.node)) is not None:
                return UnknownRotation("positions take part more than once", node)
        factor = self._factor(query, key)
        if factor is None:
            return UnknownRotation(
                "what is done with positions does not keep products of query and key", query.end.node
            )
        angles = self._angles([*query.positions, *key.positions])
        return Rotation(query.entry, key.entry, factor, frozenset(angles))

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
                elif is_tensor(read) and read not in positions and value_of(read).numel() != 1:
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

    def _position_below(self, node: Node) -> Node | None:
        """A tensor of positions that enters between the projection and ``node``."""
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
                elif is_tensor(read) and value_of(read).numel() != 1:
                    return read
        return None

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

    def _factor(self, query: _Region, key: _Region) -> float | None:
        """The factor by which products of query and key grow; None if they do not all grow alike."""
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


def _hint(value: Any) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.hint if value.node.has_hint() else 2
    return value


def _shape(node: Node) -> list[int]:
    return [int(_hint(n)) for n in shape_of(node)]


def _measure(query: _Region, key: _Region, flow: Dataflow) -> float | None:
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
    if abs(factor - 1) < source.tolerance:
        return 1.0
    return factor if source.tolerance < 1e-4 else None  # a factor known to two digits is not known


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
        return torch.randn(shape, generator=self._generator, dtype=torch.double)

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
            return node.target(*tree_map(_hint, node.args), **tree_map(_hint, kwargs))  # type: ignore[operator]
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
        return value(n) if is_tensor(n) or isinstance(value_of(n), (tuple, list)) else _hint(value_of(n))

    op = op_of(node)
    if op is not None and op.role in (Role.CAST, Role.COPY):
        return known(node.all_input_nodes[0])
    args, kwargs = map_arg(node.args, known), map_arg(node.kwargs, known)
    args = tree_map(_hint, args)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)

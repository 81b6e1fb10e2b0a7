"""Where in the program a layer's mixture can be computed. Decides, never edits.

The mixture needs the layer's query, key and raw value, and must come before anything reads the value:
before the cache is written and before attention. Views of the value may wait; a query that is computed
later must be brought forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ..errors import UnsupportedModelError
from .dataflow import Dataflow
from .nodes import describe, is_number
from .ops import Role, arguments, has_role, pure
from .order_layers import Layer
from .sites import AttentionSite
from .trace_values import is_assembled

_VIEWS = (
    Role.PERMUTE,
    Role.RESHAPE,
    Role.EXPAND,
    Role.REPEAT,
    Role.COPY,
    Role.DROPOUT,
    Role.CAST,
    Role.INDEX,
    Role.SLICE,
    Role.PICK,
    Role.PIECES,
    Role.ROLL,
)


@dataclass(frozen=True)
class Placement:
    """The point of one layer's mixture, and what has to move there."""

    anchor: Node
    """The mixture goes directly in front of this node, the first that uses the value."""

    wait: tuple[Node, ...]
    """The value and views of it that stand before the anchor: they move behind the mixture, in this order."""

    forward: tuple[Node, ...]
    """What query, key and scale need and is computed after the anchor: moves in front of the mixture."""


def place(layer: Layer, flow: Dataflow) -> Placement:
    """Find the place; raises UnsupportedModelError where there is none."""
    site = layer.site
    views, uses = _readers(site, flow)
    anchor = min(uses, key=flow.position.__getitem__)
    at = flow.position[anchor]
    wait = tuple(sorted((n for n in views if flow.position[n] < at), key=flow.position.__getitem__))
    late = _late(layer, at, flow)
    blocked = set(views) | set(uses)
    for node in late:
        if node in blocked or not pure(node):
            raise UnsupportedModelError(
                f"{describe(site.output)}: its query or key is computed after its value is used by "
                f"{describe(anchor)}, and {describe(node)} in between cannot be moved"
            )
    _check_memory(layer, wait, late, at, flow)
    return Placement(anchor, wait, tuple(late))


def _readers(site: AttentionSite, flow: Dataflow) -> tuple[list[Node], list[Node]]:
    """The value with all views and sizes of it, and what uses them: cache writes, the attention, the
    output."""
    value = site.value.node
    views: dict[Node, None] = {value: None}
    uses: dict[Node, None] = {}
    sized: dict[Node, None] = {}
    todo = [value]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user in views or user in uses:
                continue
            if is_number(user):
                views[user] = None
                todo.append(user)
            elif is_number(node):
                sized[user] = None  # does not see the value, but has to stay behind the size
            elif user in (site.attention.value_argument, *site.shared_by) or user.op == "output":
                uses[user] = None
            elif has_role(user, Role.WRITE) and arguments(user).get("source") is node:
                uses[user] = None
            elif user in site.cache_writes or (has_role(user, Role.JOIN) and user in site.value_path):
                uses[user] = None
            elif has_role(user, *_VIEWS) and pure(user):
                views[user] = None
                todo.append(user)
            else:
                raise UnsupportedModelError(
                    f"{describe(site.output)}: its value is also read by {describe(user)}, which is "
                    "neither the "
                    "cache nor this attention, so it is not clear whether that is to see the mixed value"
                )
    return list(views), [*uses, *(user for user in sized if user not in views)]


def _late(layer: Layer, at: int, flow: Dataflow) -> list[Node]:
    """What the mixture needs and is computed at or after position ``at``, in program order."""
    seen: set[Node] = set()
    scale = layer.site.attention.scale
    todo = [*layer.score.nodes, *scale.times, *scale.over]
    while todo:
        node = todo.pop()
        if node not in seen and flow.position[node] >= at:
            seen.add(node)
            todo += flow.reads(node)
    return sorted(seen, key=flow.position.__getitem__)


def _ready(node: Node, site: AttentionSite, at: int, flow: Dataflow) -> int:
    """The position after which ``node`` holds what attention reads."""
    filled = flow.writes(node, flow.position[site.output]) if is_assembled(node, flow) else []
    if filled and flow.position[filled[-1]] >= at:
        raise UnsupportedModelError(
            f"{describe(site.output)}: {describe(node)} is filled by {describe(filled[-1])}, after its value "
            "is used"
        )
    return flow.position[filled[-1]] if filled else flow.position[node]


def _check_memory(layer: Layer, wait: tuple[Node, ...], late: list[Node], at: int, flow: Dataflow) -> None:
    """No tensor that the mixture or a moved node reads may be changed in place between then and now."""
    position = flow.position
    moves = [(node, position[node], at) for node in wait] + [(node, at, position[node]) for node in late]
    moves += [(node, _ready(node, layer.site, at, flow), at) for node in layer.score.nodes]
    for node, begin, end in moves:
        for read in (node, *(node.all_input_nodes if node in wait or node in late else ())):
            for change in flow.writes(read, end):
                if position[change] > begin:
                    raise UnsupportedModelError(
                        f"{describe(layer.site.output)}: {describe(change)} changes in place what "
                        f"{describe(node)} reads, between its value and the first use of it"
                    )

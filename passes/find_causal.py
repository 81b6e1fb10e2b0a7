"""Whether a mask hides the future: told by what it computes, not by how it is spelled.

A mask that differs between queries is not yet a causal one: encoders add a relative position bias, or let
every token see a window to both sides. So the operations that compute the mask are run, on small sizes: on
the positions they make themselves, on the values of buffers, and on stand-ins for everything else. For
attention that is written out, they are run from scores that are all 0 up to the softmax, so that every way
of masking counts alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from ..torch_internals import real_value
from .axes import AxisRole
from .dataflow import Dataflow, Dependencies
from .flex import Mods, slope, visible
from .nodes import dtype_of, hint, is_number, is_tensor, shape_of, value_of
from .ops import Role, has_role, mutated
from .sites import Attention

_LEAVES = (Role.PROJECT, Role.CONTRACT, Role.ATTENTION)
_MOST_NODES, _MOST_ELEMENTS, _LONG, _SHORT = 1000, 1 << 24, 64, 16
_HIDDEN = 1e3
"""A score this much below the largest of its row has no weight."""

_FILLS: tuple[Any, ...] = (1, None, 0)
"""What graph inputs of whole numbers or truth values are tried with: all kept, as in this call, none."""


class CausalityFinder:
    """Looks at the masks of one graph; what several layers share is run once."""

    def __init__(self, flow: Dataflow, needs: Dependencies) -> None:
        self._flow = flow
        self._needs = needs
        self._known: dict[Node, bool | None] = {}
        self._values: dict[tuple[Any, ...], dict[Node, Any]] = {}

    def hides_future(self, attention: Attention) -> bool | None:
        """Whether late queries see their own and earlier keys and no later ones; None where that is not
        known."""
        mods = attention.mods
        if mods is not None:
            return self._look(attention, lambda fill: self._seen_by(mods, attention, fill), mods.blocks)
        if attention.exponent is not None:
            return self._look_at(attention, attention.exponent.node, attention.scores)
        masks = [mask for mask, _ in attention.masks]
        if len(masks) != 1:
            return None
        if masks[0] not in self._known:
            self._known[masks[0]] = self._look_at(attention, masks[0], None)
        return self._known[masks[0]]

    def _look_at(self, attention: Attention, node: Node, scores: Node | None) -> bool | None:
        return self._look(
            attention,
            lambda fill: _rows_and_columns(self._run(node, scores, fill, attention.tokens), attention),
        )

    def _look(
        self, attention: Attention, seen_with: Callable[[Any], Tensor], may_leave_out: bool = False
    ) -> bool | None:
        """``seen_with(fill)`` tells which key each query sees; ``may_leave_out``: keys it shows may be left
        out by what it does not show."""
        seen = False
        past = hint(attention.length) - hint(attention.tokens)
        if past and hint(attention.tokens) > _LONG:
            return None
        for fill in _FILLS:
            try:
                sees = seen_with(fill)
                hidden = _hides(sees, past)
            except Exception:  # whatever an operation of the model may raise on stand-ins
                continue
            if hidden:
                return True
            if may_leave_out and bool(sees.all()):
                return None  # nothing is masked, but blocks may be left out
            seen = seen or hidden is False
        return False if seen else None

    def _seen_by(self, mods: Mods, attention: Attention, fill: Any) -> Tensor:
        values = [self._buffers(reads, fill, attention) for reads in (mods.score_reads, mods.mask_reads)]
        return visible(mods, *values, self._counts(attention))

    def slope(self, attention: Attention) -> float | None:
        """What the scores of a ``flex_attention`` are multiplied with; None where that is no known number."""
        mods, found = attention.mods, None
        if mods is None or mods.score is None:
            return 1.0
        for fill in _FILLS:
            try:
                values = self._buffers(mods.score_reads, fill, attention)
                found = slope(mods, values, self._counts(attention))
                learned = [
                    x * 1.5 + 0.25 if isinstance(x, Tensor) and x.is_floating_point() and real is None else x
                    for x, real in zip(values, map(real_value, mods.score_reads), strict=True)
                ]
                again = slope(mods, learned, self._counts(attention))
            except Exception:  # as above
                continue
            return found if found is not None and again == found else None
        return None

    def _buffers(self, reads: tuple[Node, ...], fill: Any, attention: Attention) -> list[Any]:
        return [self._run(node, None, fill, attention.tokens) for node in reads]

    @staticmethod
    def _counts(attention: Attention) -> tuple[int, int, int]:
        rows, columns = hint(attention.tokens), hint(attention.length)
        short = {rows: _SHORT} if rows > _LONG else {}
        query = shape_of(attention.query.node)
        return int(hint(query[-3])), _shortened(rows, short), _shortened(columns, short)

    def _run(self, target: Node, scores: Node | None, fill: Any, tokens: Any) -> Tensor:
        size = hint(tokens)
        short = {size: _SHORT} if size > _LONG else {}
        known = dict(self._values.setdefault((fill, size), {}))
        below: set[Node] = {scores} if scores is not None else set()
        for node in self._needed(target, scores, known):
            if node is scores:
                known[node] = torch.zeros(_sizes(node, short))
                continue
            known[node] = self._value(node, known, fill, short)
            if any(read in below for read in self._flow.reads(node)):
                below.add(node)
            else:
                self._values[fill, size][node] = known[node]
        return known[target]

    def _needed(self, target: Node, scores: Node | None, known: dict[Node, Any]) -> list[Node]:
        """What ``target`` is computed from, changes in place included, in program order."""
        position = self._flow.position
        before = min(position[reader] for reader in target.users) if target.users else None
        seen: set[Node] = set()
        todo = [target]
        while todo:
            node = todo.pop()
            if node in seen or node in known or is_number(node):
                continue
            seen.add(node)
            if len(seen) > _MOST_NODES:
                raise NotImplementedError("a mask that takes too long to compute")
            if self._is_leaf(node) and node is not scores:
                continue
            todo += self._flow.reads(node) if node is not scores else []
            todo += self._flow.writes(node, before) if is_tensor(node) else []
        return sorted(seen, key=position.__getitem__)

    def _is_leaf(self, node: Node) -> bool:
        return self._flow.external(node) or (has_role(node, *_LEAVES) and self._needs.content[node])

    def _value(self, node: Node, known: dict[Node, Any], fill: Any, short: dict[int, int]) -> Any:
        origin = self._flow.behind(node)
        if origin is not node:
            return known[origin]
        if self._is_leaf(node):
            return self._leaf(node, fill, short)
        if has_role(node, Role.RANDOM):
            raise NotImplementedError("a mask drawn by chance")

        def read(n: Node) -> Any:
            return _shortened(hint(value_of(n)), short) if is_number(n) else known[n]

        if has_role(node, Role.CAST) and not mutated(node):
            return known[node.all_input_nodes[0]].to(dtype_of(node))
        plain = tree_map(lambda x: _shortened(hint(x), short), (node.args, node.kwargs))
        args, kwargs = map_arg(plain, read)
        kwargs = {name: x for name, x in kwargs.items() if name != "device"}
        if node.op == "call_method":
            value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif node.op == "call_function":
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        else:
            raise NotImplementedError(f"{node.op} in a mask")
        if isinstance(value, Tensor) and value.numel() > _MOST_ELEMENTS:
            raise NotImplementedError("a mask that is too large to compute")
        return value

    def _leaf(self, node: Node, fill: Any, short: dict[int, int]) -> Any:
        if not is_tensor(node):
            raise NotImplementedError(f"the value of {node.name} is not known")
        dtype, sizes = dtype_of(node), _sizes(node, short)
        if self._needs.content[node] or dtype.is_floating_point:
            real = real_value(node) if not self._needs.content[node] else None
            if real is not None and list(real.shape) == sizes:
                return real.detach().cpu()
            if not self._needs.content[node] and not isinstance(value_of(node), torch.nn.Parameter):
                raise NotImplementedError(f"the values of {node.name} are not known")
            generator = torch.Generator().manual_seed(0)
            return torch.rand(sizes, generator=generator).to(dtype)
        real = real_value(node)
        is_table = len(sizes) not in (1, 2)
        if real is not None and list(real.shape) == sizes and (fill is None or is_table):
            return real.detach().cpu().clone()
        if fill is None or is_table:
            raise NotImplementedError(f"the values of {node.name} are not known")
        return torch.full(sizes, fill, dtype=dtype)


def _shortened(value: Any, short: dict[int, int]) -> Any:
    return short.get(value, value) if type(value) is int else value


def _sizes(node: Node, short: dict[int, int]) -> list[int]:
    return [_shortened(int(hint(n)), short) for n in shape_of(node)]


def _rows_and_columns(mask: Tensor, attention: Attention) -> Tensor:
    """Which key (last dimension) each query (the one before) sees, in any batch entry and head."""
    if attention.exponent is None:
        visible = mask if mask.dtype == torch.bool else _unhidden(mask)
    else:
        query, key = _token_dims(attention)
        visible = _unhidden(mask.movedim((query, key), (-2, -1)))
    return visible.reshape(-1, *visible.shape[-2:]).any(0)


def _token_dims(attention: Attention) -> tuple[int, int]:
    """The dimensions of the softmax's input that count queries and keys."""
    operand = attention.exponent
    if operand is None:
        raise AssertionError("only a written-out softmax has an input")
    axes = attention.axes
    keys = set(axes.leaves(axis for dim in attention.key.layout for axis in dim)) | set(
        axes.leaves(axis for dim in attention.value.layout for axis in dim)
    )
    query = key = None
    for i, dim in enumerate(operand.layout):
        leaves = axes.leaves(dim)
        if leaves and all(axis.role is AxisRole.TOKEN for axis in leaves):
            if any(axis in keys for axis in leaves):
                key = i
            else:
                query = i
    if query is None or key is None:
        raise NotImplementedError("which dimensions of the softmax count queries and keys is not clear")
    return query, key


def _unhidden(scores: Tensor) -> Tensor:
    top = scores.amax(-1, keepdim=True)
    return (scores > top - _HIDDEN) & torch.isfinite(top)


def _hides(visible: Tensor, past: int) -> bool | None:
    """Whether the later half of the rows sees something of what comes before, and nothing behind; None if it
    sees nothing, or every token itself alone."""
    rows, columns = visible.shape
    if rows == 1 or columns - rows - past not in (0, 1):  # one more is an attention sink
        return None
    half = range(rows // 2, rows)
    if any(bool(visible[i, past + i + 1 : past + rows].any()) for i in half):
        return False
    return True if any(bool(visible[i, : past + i].any()) for i in half) else None

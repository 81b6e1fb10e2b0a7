"""Products of two tensors in one form: an operand each, and a label per dimension, as in einsum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .nodes import is_tensor, shape_of
from .ops import Role, arguments, op_of


@dataclass(frozen=True)
class Product:
    """A product of two tensors; equal labels are the same dimension, as in einsum."""

    node: Node
    left: Node
    right: Node
    left_labels: tuple[str, ...]
    right_labels: tuple[str, ...]
    labels: tuple[str, ...]


def read_product(node: Node) -> Product | None:
    """The operands of ``node`` with a label per dimension; None where it is no product of two matrices."""
    op = op_of(node)
    if op is None or op.role is not Role.CONTRACT or not is_tensor(node):
        return None
    bound = arguments(node)
    if op.name == "einsum":
        return _read_einsum(node, bound)
    left, right = (
        (bound["batch1"], bound["batch2"]) if op.name == "baddbmm" else (bound["input"], bound["other"])
    )
    if not (isinstance(left, Node) and isinstance(right, Node)):
        return None
    ranks = len(shape_of(left)), len(shape_of(right))
    if min(ranks) < 2:
        return None
    lanes = [f"lane{i}" for i in range(max(ranks) - 2)]
    first = (*lanes[len(lanes) - ranks[0] + 2 :], "row", "inner")
    second = (*lanes[len(lanes) - ranks[1] + 2 :], "inner", "column")
    return Product(node, left, right, first, second, (*lanes, "row", "column"))


def _read_einsum(node: Node, bound: dict[str, Any]) -> Product | None:
    operands = bound.get("operands", ())
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    equation = bound.get("equation")
    if len(operands) != 2 or not isinstance(equation, str) or not all(isinstance(o, Node) for o in operands):
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2:
        return None
    free = max(len(shape_of(o)) - len(t.replace("...", "")) for o, t in zip(operands, terms, strict=True))
    rest = [f"lane{i}" for i in range(max(free, 0))]

    def labels(term: str, rank: int | None) -> tuple[str, ...]:
        before, dots, after = term.partition("...")
        count = 0 if not dots else len(rest) if rank is None else rank - len(before) - len(after)
        return (*before, *rest[len(rest) - count :], *after)

    left, right = (labels(t, len(shape_of(o))) for t, o in zip(terms, operands, strict=True))
    if any(len(set(x)) != len(x) for x in (left, right)):
        return None
    return Product(node, *operands, left, right, labels(output, None))

"""Attention that no finder understood. Finds, never edits.

A layer that is overlooked would be left out without a word. So every softmax over products of activations
that weighs other activations has to belong to an attention that was found, or that was refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Node

from .dataflow import Dataflow, Dependencies
from .nodes import is_number
from .ops import Role, has_role
from .sites import Refusal, Verdict

_ENDS = (Role.PROJECT, Role.ATTENTION, Role.CONTRACT)


def find_missed(flow: Dataflow, needs: Dependencies, outputs: set[Node]) -> list[Refusal]:
    """A refusal for every attention but those that end in ``outputs``."""
    missed = []
    for node in flow.nodes:
        if not has_role(node, Role.SOFTMAX) or not needs.activation(node):
            continue
        product = _first_product(flow.reads(node), flow.reads, flow, needs)
        if product is None:
            continue
        ends = [_first_product([user], lambda n: n.users, flow, needs) for user in node.users]
        ends = [end for end in ends if end is not None]
        if ends and not any(end in outputs for end in ends):
            missed.append(
                Refusal(
                    ends[0],
                    node,
                    "a softmax over products of activations weighs other activations, in a way that is not "
                    "understood",
                    Verdict.UNSUPPORTED,
                )
            )
    return missed


def _first_product(
    start: Iterable[Node], onward: Callable[[Node], Iterable[Node]], flow: Dataflow, needs: Dependencies
) -> Node | None:
    """The next product of two activations, with no weights applied on the way."""
    seen: set[Node] = set()
    todo = list(start)
    while todo:
        node = todo.pop()
        if node in seen or is_number(node) or flow.external(node):
            continue
        seen.add(node)
        if has_role(node, *_ENDS):
            operands = [read for read in flow.reads(node) if needs.activation(read)]
            if has_role(node, Role.CONTRACT) and len(set(operands)) > 1:
                return node
            continue
        todo += onward(node)
    return None

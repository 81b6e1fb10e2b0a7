"""Attention that no finder understood. Finds, never edits.

A layer that is overlooked would be left out without a word. So every softmax, or exponential, of products of
activations that weighs other activations has to belong to an attention that was found, or that was refused;
and so does every operation that cannot be looked into and may be attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Node

from .dataflow import Dataflow, Dependencies
from .nodes import is_number, is_tensor, same_size, shape_of, value_of
from .ops import Role, arguments, has_role, op_name, op_of, opaque_name
from .sites import Refusal, Verdict

_PRODUCTS = (Role.CONTRACT, Role.PAIR)
_ENDS = (Role.PROJECT, Role.ATTENTION, *_PRODUCTS)


def find_missed(flow: Dataflow, needs: Dependencies, outputs: set[Node]) -> list[Refusal]:
    """A refusal for every attention but those that end in ``outputs``."""
    missed = []
    for node in flow.nodes:
        if not _exponential(node) or not needs.activation(node):
            continue
        product = _first_product(flow.reads(node), flow.reads, flow, needs)
        if product is None:
            continue
        ends = [_first_product([user], lambda n: n.users, flow, needs) for user in node.users]
        ends = [end for end in ends if end is not None]
        if ends and not any(end in outputs for end in ends):
            softmax = has_role(node, Role.SOFTMAX) or op_name(node) == "softmin"
            what = "a softmax over" if softmax else "an exponential of"
            missed.append(
                Refusal(
                    ends[0],
                    node,
                    f"{what} products of activations weighs other activations, in a way that is not "
                    "understood",
                    Verdict.UNSUPPORTED,
                )
            )
    return missed + [refusal for node in flow.nodes if (refusal := _opaque(node, needs)) is not None]


def _exponential(node: Node) -> bool:
    """Whether ``node`` may be the softmax of an attention, or the exponential in it."""
    if op_name(node) in ("pow", "float_power"):  # of a number, to the power of a tensor
        base, *exponent = node.args
        return is_number(base) and any(isinstance(x, Node) and is_tensor(x) for x in exponent)
    return has_role(node, Role.SOFTMAX, Role.EXP, Role.EXP_LIKE)


def _opaque(node: Node, needs: Dependencies) -> Refusal | None:
    """A refusal if ``node`` is one operation that may compute attention out of sight."""
    own = op_name(node) or ""
    if op_of(node) is None and ("attention" in own or "encoder_layer" in own) and "::" not in own:
        name, remedy = own, "Write the attention with scaled_dot_product_attention"
    elif (name := opaque_name(node)) is not None:
        remedy = (
            f"Name its query, key and value: depthify.register_attention_op({name!r}, q=..., k=..., "
            "v=..., layout=...), after wrapping it in torch.library.custom_op if it is no operation of "
            "torch.library; or, if it is no softmax attention, register_attention_op(..., attention=False)"
        )
    else:
        return None
    operands = [x for x in node.all_input_nodes if is_tensor(x) and needs.activation(x)]
    named = "attn" in name or "attention" in name or "encoder_layer" in name
    if not operands or not (named or _like_query_key_value(operands)):
        return None
    return Refusal(
        node, node, f"{name} may be attention, and cannot be looked into", Verdict.UNSUPPORTED, remedy
    )


def _like_query_key_value(operands: list[Node]) -> bool:
    """Whether three of the operands have the rank and the last size of queries, keys and values."""
    floats = [x for x in operands if value_of(x).dtype.is_floating_point and len(shape_of(x)) >= 3]
    return any(
        sum(
            len(shape_of(x)) == len(shape_of(y)) and same_size(shape_of(x)[-1], shape_of(y)[-1])
            for y in floats
        )
        >= 3
        for x in floats
    )


def _first_product(
    start: Iterable[Node], onward: Callable[[Node], Iterable[Node]], flow: Dataflow, needs: Dependencies
) -> Node | None:
    """The next product of two activations, with no weights applied on the way, other than to scores."""
    seen: set[Node] = set()
    todo = list(start)
    while todo:
        node = todo.pop()
        if node in seen or is_number(node) or flow.external(node):
            continue
        seen.add(node)
        if has_role(node, *_ENDS):
            if _multiplies(node, flow, needs):
                return node
            if not _of_all_pairs(node):
                continue
        if has_role(node, Role.REDUCE) and any(_all_pairs(read, needs) for read in node.all_input_nodes):
            return node
        todo += onward(node)
    return None


def _multiplies(node: Node, flow: Dataflow, needs: Dependencies) -> bool:
    """Whether ``node`` is a product of two activations."""
    reads = flow.reads(node)
    if has_role(node, Role.PROJECT):  # linear(query, key)
        bound = arguments(node)
        reads = [x for x in (bound.get("input"), bound.get("weight")) if isinstance(x, Node)]
    elif not has_role(node, *_PRODUCTS):
        return False
    return len({read for read in reads if needs.activation(read)}) > 1


def _of_all_pairs(node: Node) -> bool:
    """Whether ``node`` has the shape of scores, (..., heads, T, T) in any order: weights that are applied to
    such mix heads."""
    sizes = shape_of(node)[-3:] if is_tensor(node) and len(shape_of(node)) >= 4 else ()
    return any(same_size(a, b) and not same_size(a, 1) for i, a in enumerate(sizes) for b in sizes[i + 1 :])


def _all_pairs(node: Node, needs: Dependencies) -> bool:
    """Whether ``node`` multiplies every entry of one activation with every entry of another: each is repeated
    along a dimension of the other. Summed, that is a product of matrices without its name."""
    if not has_role(node, Role.MULTIPLY):
        return False
    shapes = [shape_of(x) for x in node.all_input_nodes if is_tensor(x) and needs.activation(x)]
    if len(shapes) != 2 or len(shapes[0]) != len(shapes[1]):
        return False
    repeated = [(same_size(n, 1), same_size(m, 1)) for n, m in zip(*shapes, strict=True)]
    return (True, False) in repeated and (False, True) in repeated

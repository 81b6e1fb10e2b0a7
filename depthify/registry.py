"""Attention that is one opaque operation: users say which of its arguments are query, key and value."""

from __future__ import annotations

from typing import Any

import torch

from .errors import OptionError

LAYOUTS = ("BHTD", "BTHD", "THD")


def register_attention_op(
    op: Any,
    q: str | int | None = None,
    k: str | int | None = None,
    v: str | int | None = None,
    scale: str | int | None = None,
    layout: str = "BHTD",
    *,
    causal: str | int | bool | None = None,
    attention: bool = True,
) -> None:
    """Tell depthify what an operation computes that no compiler can look into (flash-attn, vLLM, a kernel of
    your own): softmax attention over the given query, key and value.

    The operation may keep a cache of its own and write ``k`` and ``v`` into it: they are of the current
    tokens, and the mixed value is in place before it is called. It may also mask, cap or quantise as it
    likes. Registering an operation again replaces what was said of it.

    Args:
        op: an operation of ``torch.library``: ``torch.ops.name.op``, one of its overloads, what
            ``torch.library.custom_op`` returns, or the name ``"name::op"``.
        q, k, v: the name or position of each argument.
        scale: the argument with the softmax scale; None, or None at the call, for 1 / sqrt(head size).
        layout: the dimensions of query, key and value: batch (B), heads (H), tokens (T), head size (D). In
            "THD" the tokens of all sequences lie one behind the other, which is no difference to a mixture of
            each token's own values.
        causal: the flag that masks the future, or True for an operation that always does. Default: the
            argument ``causal`` or ``is_causal``.
        attention: False declares an operation that looks like attention to depthify, and is none that is to
            be mixed (linear attention, a state-space scan): it is then left as it is.

    Raises:
        OptionError: there is no such operation or argument, or an argument is changed in place.
    """
    from .passes.find_attention import REGISTERED, Fused
    from .passes.ops import ignore_op, register_fused

    schema = _schema(op)
    name = schema.name
    if not attention:
        ignore_op(name)
        return
    if layout not in LAYOUTS:
        raise OptionError(f"layout={layout!r}: layout must be one of {', '.join(map(repr, LAYOUTS))}")
    if causal is None:
        causal = next((x.name for x in schema.arguments if x.name in ("causal", "is_causal")), None)
        if causal is None:
            raise OptionError(
                f"causal=None: {name} has no argument 'causal' or 'is_causal'. Give the argument that masks "
                "the future, or causal=True if the operation always does"
            )
    if causal is False:
        raise OptionError(
            "causal=False: only causal self-attention is mixed, so there is nothing to register"
        )
    given = {"q": q, "k": k, "v": v}
    tensors = {what: _argument(schema, what, value) for what, value in given.items()}
    for what, argument in tensors.items():
        if "Tensor" not in str(argument.type) or "[]" in str(argument.type):
            raise OptionError(
                f"{what}={given[what]!r}: argument {argument.name!r} of {name} is no tensor but "
                f"{argument.type}"
            )
        if argument.alias_info is not None and argument.alias_info.is_write:
            raise OptionError(
                f"{what}={given[what]!r}: {name} changes its argument {argument.name!r} in place"
            )
    if len({argument.name for argument in tensors.values()}) < 3:
        raise OptionError(
            f"q={q!r}, k={k!r}, v={v!r}: query, key and value must be three arguments of {name}"
        )
    flag = True if causal is True else _argument(schema, "causal", causal)
    factor = None if scale is None else _argument(schema, "scale", scale)
    canonical = register_fused(name, [argument.name for argument in schema.arguments])
    by_default = flag is not True and flag.has_default_value() and bool(flag.default_value)
    REGISTERED[name] = Fused(
        query=canonical[tensors["q"].name],
        key=canonical[tensors["k"].name],
        value=canonical[tensors["v"].name],
        scale=None if factor is None else canonical[factor.name],
        causal=True if flag is True else canonical[flag.name],
        layout=layout,
        by_default=by_default,
    )


def _schema(op: Any) -> Any:
    """The schema of an operation's only, or default, overload."""
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        packet = getattr(getattr(torch.ops, namespace, None), name, None) if namespace and name else None
        if packet is None:
            raise OptionError(f"op={op!r}: no operation of that name, written 'name::op', is known to torch")
        op = packet
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, torch._ops.OpOverloadPacket):
        names = op.overloads()
        op = getattr(op, "default" if "default" in names else names[0])
    if not isinstance(op, torch._ops.OpOverload):
        raise OptionError(
            f"op={op!r}: op must be an operation of torch.library, or its name. A Python function is traced "
            "through and needs no registration; one that cannot be traced needs torch.library.custom_op "
            "around it"
        )
    if op.namespace in ("aten", "prims"):
        raise OptionError(f"op={op}: operations of PyTorch itself are known already")
    return op._schema


def _argument(schema: Any, what: str, given: str | int | None) -> Any:
    arguments = schema.arguments
    if isinstance(given, str):
        found = next((x for x in arguments if x.name == given), None)
    elif isinstance(given, int) and not isinstance(given, bool):
        found = arguments[given] if 0 <= given < len(arguments) else None
    else:
        found = None
    if found is None:
        names = ", ".join(f"{i} {x.name!r}" for i, x in enumerate(arguments))
        raise OptionError(f"{what}={given!r}: no argument of {schema.name}; it has {names}")
    return found

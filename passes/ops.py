"""Operations by role: the one place where a spelling of an operation is known.

A node of a Dynamo graph calls ``torch.transpose``, the method ``"transpose"`` or ``operator.getitem``; a
node of a ``torch.export`` graph calls ``aten.transpose.int``. Each has a canonical name here, and each name
one role. The finders ask for roles only, so that a new spelling is a row in a table and an unknown
operation is what it should be: opaque.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch.fx import Node

from .nodes import is_number


class Role(Enum):
    """What an operation does to the tensor that flows through it."""

    ATTENTION = auto()  # query, key, value -> output, softmax inside
    CONTRACT = auto()  # product of two tensors, summed over a dimension
    PAIR = auto()  # other products of two tensors, which no finder follows
    SOFTMAX = auto()
    PERMUTE = auto()  # reorders dimensions
    RESHAPE = auto()  # splits, merges, inserts or removes dimensions; same elements in the same order
    EXPAND = auto()  # repeats along dimensions of size 1
    REPEAT = auto()  # copies along a dimension
    COPY = auto()  # same values, same shape, same dtype
    DROPOUT = auto()  # a copy where it is switched off
    CAST = auto()  # same values in another dtype, device or layout
    INDEX = auto()  # x[...]
    SLICE = auto()  # part of one dimension
    PICK = auto()  # one entry of one dimension
    PIECES = auto()  # several parts of one dimension
    JOIN = auto()  # concatenation
    STACK = auto()
    WRITE = auto()  # puts a source into part of a buffer
    ROLL = auto()
    MULTIPLY = auto()
    DIVIDE = auto()
    ADD = auto()
    SUBTRACT = auto()
    NEGATE = auto()
    MASK = auto()  # replaces elements
    SQUASH = auto()  # elementwise, keeps order: tanh, clamp
    REDUCE = auto()  # sum, mean, max over dimensions
    EXP = auto()
    EXP_LIKE = auto()  # other ways to write a softmax or an exponential, which no finder follows
    COMPLEX = auto()  # pairs of reals <-> complex numbers
    PROJECT = auto()  # applies weights: linear, embedding, convolution
    CREATE = auto()  # makes a tensor from sizes and numbers only
    RANDOM = auto()


@dataclass(frozen=True)
class Op:
    """One operation: canonical name, role, names of its arguments in order.

    A last argument written ``*name`` takes all further positional arguments. ``aliases`` tells that the
    result shares memory with the first argument.
    """

    name: str
    role: Role
    params: tuple[str, ...]
    aliases: bool = False


_TABLE: dict[str, Op] = {}


def _rows(role: Role, *rows: str, aliases: bool = False) -> None:
    for row in rows:
        names, *params = row.split()
        for name in names.split("|"):
            _TABLE[name] = Op(name, role, tuple(params), aliases)


_rows(
    Role.ATTENTION,
    "scaled_dot_product_attention query key value attn_mask dropout_p is_causal scale enable_gqa",
    "_scaled_dot_product_flash_attention query key value dropout_p is_causal return_debug_mask scale",
    "_scaled_dot_product_flash_attention_for_cpu query key value dropout_p is_causal attn_mask scale",
    "_scaled_dot_product_efficient_attention query key value attn_mask compute_log_sumexp dropout_p "
    "is_causal scale",
    "_scaled_dot_product_cudnn_attention query key value attn_mask compute_log_sumexp dropout_p is_causal "
    "return_debug_mask scale",
    "flex_attention query key value score_mod block_mask scale kernel_options score_reads mask_reads",
)
_rows(
    Role.CONTRACT,
    "matmul|bmm|mm|__matmul__ input other",
    "baddbmm input batch1 batch2",
    "einsum equation *operands",
)
_rows(Role.PAIR, "inner|tensordot|dot|vdot|vecdot|linalg_vecdot|cdist|_cdist_forward input other")
_rows(Role.SOFTMAX, "softmax|_softmax|_safe_softmax input dim")
_rows(
    Role.PERMUTE,
    "transpose|swapaxes|swapdims input dim0 dim1",
    "permute input *dims",
    "movedim|moveaxis input source destination",
    "t|T|mT|H|mH|adjoint input",
    aliases=True,
)
_rows(
    Role.RESHAPE,
    "view|reshape|view_as|reshape_as|_unsafe_view input *shape",
    "flatten input start_dim end_dim",
    "unflatten input dim sizes",
    "squeeze input *dim",
    "unsqueeze input dim",
    aliases=True,
)
_rows(Role.EXPAND, "expand|expand_as|broadcast_to input *sizes", aliases=True)
_rows(Role.REPEAT, "repeat_interleave input repeats dim", "repeat|tile input *repeats")
_rows(Role.COPY, "detach|alias|lift_fresh|view_as_real_copy|requires_grad_ input", aliases=True)
_rows(Role.COPY, "contiguous|clone input")
_rows(Role.DROPOUT, "dropout|dropout_|native_dropout|alpha_dropout|feature_dropout input p training")
_rows(
    Role.CAST,
    "to|type|_to_copy|convert_element_type input *target",
    "type_as input other",
    "float|double|half|bfloat16|cpu|cuda input",
    "_autocast_to_full_precision|_autocast_to_reduced_precision input",
)
_rows(Role.INDEX, "getitem input index", aliases=True)
_rows(Role.SLICE, "slice input dim start end step", "narrow|narrow_copy input dim start length", aliases=True)
_rows(Role.PICK, "select input dim index", aliases=True)
_rows(
    Role.PIECES,
    "split|split_with_sizes|chunk|tensor_split|unsafe_split|unsafe_chunk input size dim",
    "unbind input dim",
    aliases=True,
)
_rows(Role.JOIN, "cat|concat|concatenate tensors dim")
_rows(Role.STACK, "stack tensors dim")
_rows(
    Role.WRITE,
    "index_copy|index_copy_ input dim index source",
    "copy_|copy input source",
    "setitem input index source",
    "slice_scatter input source dim start end step",
    "index_put|index_put_ input indices source",
    "scatter|scatter_ input dim index source",
)
_rows(Role.ROLL, "roll input shifts dims")
_rows(Role.MULTIPLY, "mul|multiply|mul_|multiply_ input other")
_rows(Role.DIVIDE, "div|divide|true_divide|div_|divide_|true_divide_ input other")
_rows(Role.ADD, "add|add_ input other")
_rows(Role.SUBTRACT, "sub|subtract|sub_|subtract_ input other")
_rows(Role.NEGATE, "neg|negative input")
_rows(
    Role.MASK,
    "masked_fill|masked_fill_ input mask value",
    "where condition input other",
    "maximum|minimum|fmax|fmin input other",
)
_rows(Role.SQUASH, "tanh|tanh_|clamp|clamp_|clamp_min|clamp_max|clip|nan_to_num|nan_to_num_|softplus input")
_rows(Role.REDUCE, "sum|mean|amax|amin|max|min|logsumexp|var|std input dim")
_rows(Role.EXP, "exp|exp_ input")
_rows(Role.EXP_LIKE, "softmin input dim", "exp2|exp2_|expm1|expm1_ input", "pow|float_power input exponent")
_rows(Role.COMPLEX, "view_as_complex|view_as_real input", aliases=True)
_rows(Role.COMPLEX, "polar|complex abs angle")
_rows(
    Role.PROJECT,
    "linear input weight bias",
    "addmm bias input weight",
    "embedding|embedding_bag input weight",
    "conv1d|conv2d|conv3d|conv_transpose1d|convolution input weight bias",
    "bilinear input1 input2 weight",
)
_rows(
    Role.CREATE,
    "zeros|ones|empty|full|tensor|scalar_tensor|arange|linspace|zeros_like|ones_like|empty_like|full_like|"
    "new_zeros|new_ones|new_empty|new_full|new_tensor|as_tensor|eye|tril_indices|triu_indices *sizes",
)
_rows(
    Role.RANDOM,
    "rand|randn|randint|bernoulli|multinomial|normal|rand_like|randn_like|bernoulli_|normal_|uniform_ *sizes",
)


def register_fused(name: str, params: list[str]) -> dict[str, str]:
    """Add an attention operation; returns its arguments' names as :func:`arguments` gives them."""
    canonical = {param: _PARAM_NAMES.get(param, param) for param in params}
    _TABLE[name] = Op(name, Role.ATTENTION, tuple(canonical.values()))
    _IGNORED.discard(name)
    return canonical


def ignore_op(name: str) -> None:
    """Leave an opaque operation as it is, whatever it looks like."""
    _TABLE.pop(name, None)
    _IGNORED.add(name)


_IGNORED: set[str] = set()


def opaque_name(node: Node) -> str | None:
    """The name of an operation that nothing is known of: neither in the table, nor PyTorch's own, nor a
    function around graphs; None for all others."""
    if node.op != "call_function" or op_of(node) is not None:
        return None
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) and not isinstance(target, torch._ops.OpOverload):
        named = target.name() if callable(getattr(target, "name", None)) else str(target)
        return None if any(n.op == "get_attr" for n in node.all_input_nodes) else str(named)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = _target_name(target)
        return name if name is not None and "::" in name and name not in _IGNORED else None
    root = (getattr(target, "__module__", None) or "").split(".")[0]
    if root in ("torch", "_operator", "operator", "builtins", "math", "depthify", "numpy", ""):
        return None
    return getattr(target, "__name__", str(target))


_OPERATORS = {"truediv": "div", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_"}
_IN_PLACE_OPERATORS = frozenset(
    f"i{name}" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
)
_PARAM_NAMES = {
    "self": "input",
    "src": "source",
    "axis": "dim",
    "values": "source",
    "query_": "query",
    "size": "sizes",
    "attn_bias": "attn_mask",
}
_ATTRIBUTES = frozenset({"T", "mT", "H", "mH"})


def _torch_function_name(target: Any) -> str | None:
    module = getattr(target, "__module__", None) or ""
    if module.split(".")[0] in ("torch", "_operator", "operator", "builtins", ""):
        return getattr(target, "__name__", None)
    return None


@functools.cache
def _target_name(target: Any) -> str | None:
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace in ("aten", "prims") else f"{namespace}::{name}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return name if namespace in ("aten", "prims") else f"{namespace}::{name}"
    name = _torch_function_name(target)
    return _OPERATORS.get(name, name) if name else None


def op_name(node: Node) -> str | None:
    """Canonical name of what ``node`` calls; None for graph inputs, outputs and calls of unknown kind."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return None
    if node.target is getattr:
        return node.args[1] if node.args[1] in _ATTRIBUTES else None
    return _target_name(node.target)


def op_of(node: Any) -> Op | None:
    """The table's row for ``node``; None when the operation is not in the table."""
    if not isinstance(node, Node):
        return None
    name = op_name(node)
    return _TABLE.get(name) if name else None


def has_role(node: Any, *roles: Role) -> bool:
    op = op_of(node)
    return op is not None and op.role in roles


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of ``node`` by the names of the table, whichever way they were passed."""
    op = op_of(node)
    if op is None:
        raise AssertionError(f"{node.format_node()} has no row in the table")
    args = node.args[:1] if node.target is getattr else node.args
    bound: dict[str, Any] = {}
    params = op.params
    for i, param in enumerate(params):
        if param.startswith("*"):
            rest = tuple(args[i:])
            if rest:
                bound[param[1:]] = rest
        elif i < len(args):
            bound[param] = args[i]
    for name, value in node.kwargs.items():
        name = _PARAM_NAMES.get(name, name)
        if f"*{name}" in params and not isinstance(value, (tuple, list)):
            value = (value,)
        bound[name] = value
    return bound


def first_tensor(node: Node) -> Node | None:
    """The tensor that flows through ``node``: its first tensor argument, or the first of a list."""
    op = op_of(node)
    if op is None:
        return None
    bound = arguments(node)
    for param in op.params:
        value = bound.get(param.lstrip("*"))
        if isinstance(value, Node):
            return value
    return None


def numbers(values: Any) -> tuple[Any, ...]:
    """Variadic sizes or dimensions: ``f(x, 1, 2)`` and ``f(x, (1, 2))`` alike."""
    if values is None:
        return ()
    if isinstance(values, (tuple, list)) and len(values) == 1 and isinstance(values[0], (tuple, list)):
        values = values[0]
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


_NOT_IN_PLACE = ("requires_grad_", "retain_grad_")


@functools.cache
def _name_mutates(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in _NOT_IN_PLACE


@functools.cache
def _target_mutates(target: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that a function changes in place."""
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch._ops.OpOverload):
        return tuple(
            (i, argument.name)
            for i, argument in enumerate(target._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    name = _torch_function_name(target) or ""
    in_place = target is operator.setitem or name in _IN_PLACE_OPERATORS or _name_mutates(name)
    return ((0, "input"),) if in_place else ()


def mutated(node: Node) -> tuple[Node, ...]:
    """The tensors that ``node`` changes in place."""
    if node.op == "call_method":
        found = [node.args[0]] if _name_mutates(str(node.target)) or node.target == "__setitem__" else []
    elif node.op == "call_function":
        found = []
        for i, name in _target_mutates(node.target):
            value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
            found += value if isinstance(value, (tuple, list)) else [value]
        if node.kwargs:
            if node.kwargs.get("inplace") is True and node.args:
                found.append(node.args[0])
            out = node.kwargs.get("out")
            found += out if isinstance(out, (tuple, list)) else [out]
    else:
        return ()
    return tuple(x for x in found if isinstance(x, Node)) if found else ()


def switched_off(node: Node) -> bool:
    """Whether a dropout changes nothing: evaluation, or probability 0."""
    bound = arguments(node)
    return bound.get("training", True) is False or bound.get("p", 0.5) == 0


_NUMBERS = ("item", "_local_scalar_dense")
"""Read a number out of a tensor. Python numbers that vary between calls come as tensors, so that even the
softmax scale can be one."""


def pure(node: Node) -> bool:
    """Whether moving ``node`` past unrelated operations changes nothing: no mutation, no randomness, no
    side effect."""
    if node.op == "get_attr":
        return True
    if op_name(node) in _NUMBERS:
        return True
    if is_number(node) and not mutated(node):
        return True
    op = op_of(node)
    if op is None or op.role is Role.RANDOM or mutated(node):
        return False
    if op.role is Role.DROPOUT:
        return switched_off(node)
    if op.role is Role.ATTENTION:
        return arguments(node).get("dropout_p", 0.0) == 0
    return True

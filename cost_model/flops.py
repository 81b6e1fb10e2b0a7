"""FLOPs of one graph node, by the convention of :mod:`.symbols`, from the sizes in its metadata.

One rule per operation. An operation without a rule has no count: the caller decides whether that is an
error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ..passes.nodes import value_of
from ..passes.ops import Role, arguments, op_name, op_of, pure
from ..passes.products import read_product
from .polynomials import Count, halve, numel, product, size


class Flops(NamedTuple):
    """What one operation, or a whole graph, computes."""

    matmul: Count = 0
    """Products of matrices, convolutions and the two products inside an attention."""

    other: Count = 0
    """Elementwise operations and reductions."""

    masked: Count = 0
    """The part of the two that a causal mask makes needless."""

    @property
    def executed(self) -> Count:
        return self.matmul + self.other

    @property
    def needed(self) -> Count:
        return self.matmul + self.other - self.masked

    def plus(self, more: Flops) -> Flops:
        return Flops(self.matmul + more.matmul, self.other + more.other, self.masked + more.masked)


Rule = Callable[[Node], "Flops | None"]
RULES: dict[str, Rule] = {}
"""The rule of every operation that has one, by its canonical name (:func:`depthify.passes.ops.op_name`)."""

NOTHING = Flops()

_MOVES = frozenset(
    (
        Role.PERMUTE,
        Role.RESHAPE,
        Role.EXPAND,
        Role.REPEAT,
        Role.CAST,
        Role.INDEX,
        Role.SLICE,
        Role.PICK,
        Role.PIECES,
        Role.JOIN,
        Role.STACK,
        Role.WRITE,
        Role.ROLL,
        Role.CREATE,
        Role.RANDOM,
    )
)


def node_flops(node: Node) -> Flops | None:
    """The FLOPs of ``node``; None where its operation has no rule."""
    if node.op in ("placeholder", "get_attr", "output"):
        return NOTHING
    name = op_name(node)
    rule = RULES.get(name) if name is not None else None
    if rule is not None:
        return rule(node)
    op = op_of(node)
    if op is not None and op.role in _MOVES:
        return NOTHING
    known = "example_value" in node.meta or "val" in node.meta
    if known and not _tensors(value_of(node)):
        return NOTHING  # arithmetic on sizes, context managers, assertions: no tensor comes out
    return None


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in " ".join(names).split():
            if name in RULES:
                raise AssertionError(f"two FLOP rules for {name}")
            RULES[name] = rule
        return rule

    return register


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def _result(node: Node) -> torch.Tensor:
    return _tensors(value_of(node))[0]


def _input(node: Node, position: int = 0, *names: str) -> Any:
    """The value of an argument, by position or by one of its names."""
    if position < len(node.args):
        return value_of(node.args[position])
    for name in names:
        if name in node.kwargs:
            return value_of(node.kwargs[name])
    return None


def _is_float(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _each(node: Node, per_element: int = 1) -> Flops:
    result = _result(node) if _tensors(value_of(node)) else None
    if result is None or not _is_float(result):
        return NOTHING
    return Flops(other=numel(result) * per_element)


@_rule(
    "add add_ sub sub_ subtract rsub div div_ divide true_divide mod fmod remainder",
    "neg negative abs abs_ sign exp exp_ expm1 exp2 log log_ log2 log10 log1p sqrt sqrt_ rsqrt rsqrt_",
    "reciprocal square pow float_power sin cos tan asin acos atan atan2 sinh cosh tanh tanh_ sigmoid",
    "sigmoid_ erf erfc erfinv floor floor_ ceil round trunc frac floordiv floor_divide clamp clamp_",
    "clamp_min",
    "clamp_max clip maximum minimum fmax fmin relu relu_ relu6 leaky_relu elu celu selu gelu silu silu_",
    "swish mish softplus softsign logsigmoid hardtanh hardswish hardsigmoid threshold tanhshrink",
    "softshrink prelu",
    "where masked_fill masked_fill_ nan_to_num nan_to_num_ triu tril ldexp heaviside log_sigmoid",
    "logaddexp xlogy copysign diff silu_backward gelu_backward threshold_backward sigmoid_backward",
    "tanh_backward log_sigmoid_forward log_sigmoid_backward",
)
def _elementwise(node: Node) -> Flops:
    """1 per element of the result; a complex one is two numbers."""
    result = _result(node) if _tensors(value_of(node)) else None
    return _each(node, 2 if result is not None and result.dtype.is_complex else 1)


@_rule(
    "eq ne lt le gt ge equal isnan isinf isfinite isin isclose all any logical_and logical_or logical_not",
    "logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor and_ or_ xor invert __and__ __or__",
    "__invert__ not_ signbit bitwise_left_shift bitwise_right_shift lshift rshift bool int long",
)
def _logic(node: Node) -> Flops:
    """The result is a truth value or an integer."""
    return NOTHING


@_rule("mul mul_ multiply multiply_")
def _multiply(node: Node) -> Flops:
    """1 per element; the product of two complex numbers is 4 multiplications and 2 additions."""
    result = _result(node) if _tensors(value_of(node)) else None
    return _each(node, 6 if result is not None and result.dtype.is_complex else 1)


@_rule("addcmul addcdiv addcmul_ addcdiv_ lerp lerp_")
def _fused(node: Node) -> Flops:
    """Three operations in one: a + value * b * c, or a + weight * (b - a)."""
    return _each(node, 3)


@_rule("polar complex")
def _polar(node: Node) -> Flops:
    """Cosine, sine and two multiplications."""
    return _each(node, 4 if op_name(node) == "polar" else 0)


@_rule("glu")
def _gated(node: Node) -> Flops:
    """A sigmoid and a multiplication per result."""
    return _each(node, 2)


@_rule(
    "detach alias lift_fresh requires_grad_ contiguous clone view_as_complex view_as_real conj resolve_conj",
    "embedding embedding_bag one_hot gather take_along_dim index_select index masked_select take nonzero",
    "flip pad constant_pad_nd diagonal unfold as_strided zero_ fill_ fill meshgrid block_diag rot90",
    "broadcast_tensors searchsorted bucketize unique unique_consecutive bincount histc index_fill",
    "index_fill_",
    "masked_scatter masked_scatter_ unsqueeze_ squeeze_ transpose_ t_ view_as_real_copy",
    "item tolist size stride dim sym_size sym_numel sym_stride is_floating_point is_complex getattr",
    "slice_backward select_backward embedding_dense_backward",
    "_enter_autocast _exit_autocast _set_grad_enabled _log_api_usage_once _assert_async _assert_scalar",
    "_assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size _check _check_is_size",
    "_vmap_increment_nesting _vmap_decrement_nesting _add_batch_dim _remove_batch_dim",
    "lazy_load_decompositions _saved_tensors_hooks_disable _saved_tensors_hooks_enable",
)
def _moves(node: Node) -> Flops:
    """Only moves data, or asks for sizes."""
    return NOTHING


@_rule("dropout dropout_ native_dropout alpha_dropout feature_dropout")
def _dropout(node: Node) -> Flops:
    """A mask and a factor per element; nothing when it is off."""
    return NOTHING if pure(node) else _each(node, 2)


def _reduce(node: Node, per_element: int = 1, per_result: int = 0) -> Flops:
    source = _input(node, 0, "input", "self")
    dtype = node.kwargs.get("dtype")
    if not _is_float(source) or (isinstance(dtype, torch.dtype) and not dtype.is_floating_point):
        return NOTHING
    results = numel(_result(node)) * per_result if per_result else 0
    return Flops(other=numel(source) * per_element + results)


@_rule("sum mean amax amin max min prod nansum cumsum cumsum_ cumprod aminmax")
@_rule("argmax argmin topk sort argsort msort kthvalue median mode")
def _reduction(node: Node) -> Flops:
    """1 per element that is read; choosing and sorting are counted as one comparison per element."""
    if op_name(node) in ("max", "min") and isinstance(_input(node, 1, "other"), torch.Tensor):
        return _each(node)
    return _reduce(node)


@_rule("index_add index_add_ scatter_add scatter_add_ scatter_reduce scatter_reduce_")
def _add_at(node: Node) -> Flops:
    """An addition per element that is added."""
    source = _input(node, 3, "source", "src")
    return Flops(other=numel(source)) if _is_float(source) else NOTHING


@_rule("logsumexp logcumsumexp")
def _logsumexp(node: Node) -> Flops:
    """Maximum, difference, exponential, sum; a logarithm and an addition per result."""
    return _reduce(node, 4, 2)


@_rule("var std var_mean std_mean")
def _variance(node: Node) -> Flops:
    """Mean, difference, square, mean; a root per result."""
    return _reduce(node, 4, 1)


@_rule("norm vector_norm linalg_vector_norm")
def _norm(node: Node) -> Flops:
    """Square and sum; a root per result."""
    return _reduce(node, 2, 1)


@_rule("softmax _softmax _safe_softmax")
def _softmax(node: Node) -> Flops:
    """Maximum, difference, exponential, sum, quotient."""
    return _reduce(node, 5)


@_rule("log_softmax _log_softmax")
def _log_softmax(node: Node) -> Flops:
    """Maximum, difference, exponential, sum, difference; the logarithm of one sum per row is left out."""
    return _reduce(node, 5)


@_rule("cross_entropy cross_entropy_loss")
def _cross_entropy(node: Node) -> Flops:
    """A logarithmic softmax; picking and averaging one number per row is left out."""
    return _reduce(node, 5)


@_rule("nll_loss nll_loss_nd nll_loss_forward")
def _pick_loss(node: Node) -> Flops:
    """One number per row."""
    target = _input(node, 1, "target")
    return Flops(other=numel(target))


def _rows(tensor: torch.Tensor, normalized: Any) -> Count:
    width = len(normalized) if isinstance(normalized, (tuple, list, torch.Size)) else 1
    return product(tensor.shape[:-width])


@_rule("layer_norm native_layer_norm group_norm native_group_norm batch_norm instance_norm")
def _layer_norm(node: Node) -> Flops:
    """Mean, difference, square, mean, product; epsilon and root per row; weight and bias where given."""
    source = _input(node, 0, "input")
    affine = sum(
        isinstance(value_of(x), torch.Tensor)
        for x in (*node.args[1:], *node.kwargs.values())
        if x is not None
    )
    rows = _rows(source, _input(node, 1, "normalized_shape")) if "layer" in str(op_name(node)) else 0
    return Flops(other=numel(source) * (5 + min(affine, 2)) + rows * 2)


@_rule("rms_norm _fused_rms_norm")
def _rms_norm(node: Node) -> Flops:
    """Square, mean, product; epsilon and root per row; weight where given."""
    source = _input(node, 0, "input")
    weighted = isinstance(_input(node, 2, "weight"), torch.Tensor)
    rows = _rows(source, _input(node, 1, "normalized_shape"))
    return Flops(other=numel(source) * (3 + weighted) + rows * 2)


@_rule("linear")
def _linear(node: Node) -> Flops:
    bound = arguments(node)
    biased = bound.get("bias") is not None
    result = _result(node)
    inner = size(value_of(bound["weight"]).shape[-1])
    return Flops(numel(result) * inner * 2, numel(result) if biased else 0)


@_rule("addmm")
def _addmm(node: Node) -> Flops:
    result = _result(node)
    return Flops(numel(result) * size(_input(node, 1, "mat1").shape[-1]) * 2, numel(result))


@_rule("baddbmm")
def _baddbmm(node: Node) -> Flops:
    result = _result(node)
    return Flops(numel(result) * size(_input(node, 1, "batch1").shape[-1]) * 2, numel(result))


@_rule("matmul __matmul__ __rmatmul__ mm bmm mv dot")
def _matmul(node: Node) -> Flops:
    left = _input(node, 0, "input", "self")
    return Flops(numel(_result(node)) * size(left.shape[-1]) * 2)


@_rule("linalg_solve_triangular triangular_solve")
def _triangular_solve(node: Node) -> Flops:
    """Substitution of an (n, n) triangle into n rows: half of the matrix's 2 n per result."""
    result = _result(node)
    return Flops(numel(result) * size(result.shape[-2]))


@_rule("outer ger")
def _outer(node: Node) -> Flops:
    return _each(node)


@_rule("einsum")
def _einsum(node: Node) -> Flops | None:
    """Of two operands: 2 per combination of labels."""
    found = read_product(node)
    if found is None:
        return None
    sizes: dict[str, Any] = {}
    for operand, labels in ((found.left, found.left_labels), (found.right, found.right_labels)):
        for label, length in zip(labels, value_of(operand).shape, strict=True):
            if label not in sizes or sizes[label] == 1:
                sizes[label] = size(length)
    return Flops(product(sizes.values()) * 2)


@_rule("_grouped_mm grouped_mm transformers.grouped_mm_fallback transformers::grouped_mm_fallback")
def _grouped_matmul(node: Node) -> Flops:
    """Rows (m, k) sorted by expert, weights (experts, k, n): every row meets one matrix."""
    return Flops(numel(_result(node)) * size(_input(node, 0, "input", "mat_a").shape[-1]) * 2)


@_rule("conv1d conv2d conv3d convolution")
def _convolution(node: Node) -> Flops:
    """2 per result and element of a filter; a bias where given."""
    weight = _input(node, 1, "weight")
    biased = isinstance(_input(node, 2, "bias"), torch.Tensor)
    result = numel(_result(node))
    return Flops(result * product(weight.shape[1:]) * 2, result if biased else 0)


def masked_pairs(rows: Count, tokens: Count) -> Count:
    """Pairs that a causal mask removes: token t of T, after any number of cached ones, does not see the
    T - 1 - t tokens behind it. ``rows`` is T times the number of heads."""
    return halve(rows * (tokens - 1))


SOFTMAX_PER_PAIR = 5
"""Maximum, difference, exponential, sum, quotient."""


def _attention_arguments(node: Node) -> dict[str, Any]:
    if op_of(node) is not None:
        return arguments(node)
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


class _Attention(NamedTuple):
    rows: Count
    """Queries of all heads and batch entries."""

    tokens: Count
    pairs: Count
    products: Count
    """FLOPs of the two products per pair of a query and a key."""

    rest: int
    """The scale, a mask where given, the softmax, dropout."""

    causal: bool


def _read_attention(node: Node) -> _Attention:
    bound = _attention_arguments(node)
    query, key, value = (value_of(bound[name]) for name in ("query", "key", "value"))
    rows = product(query.shape[:-1])
    mask, dropout = bound.get("attn_mask", bound.get("attn_bias")), bound.get("dropout_p", 0.0)
    drops = isinstance(dropout, (int, float)) and dropout > 0
    return _Attention(
        rows,
        size(query.shape[-2]),
        rows * size(key.shape[-2]),
        (size(query.shape[-1]) + size(value.shape[-1])) * 2,
        1 + SOFTMAX_PER_PAIR + (mask is not None) + 2 * drops,
        bound.get("is_causal") is True,
    )


_FUSED_ATTENTION = (
    "scaled_dot_product_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention"
)


@_rule(_FUSED_ATTENTION)
def _attention(node: Node) -> Flops:
    """Per pair of a query and a key: two products, the scale, a mask where given, the softmax."""
    found = _read_attention(node)
    masked = _masked(found) if found.causal else 0
    return Flops(found.pairs * found.products, found.pairs * found.rest, masked)


def _masked(attention: _Attention) -> Count:
    return masked_pairs(attention.rows, attention.tokens) * (attention.products + attention.rest)


def masked_flops(node: Node) -> Count | None:
    """What a causal mask makes needless of the attention ``node``; None where it is no fused attention."""
    if op_name(node) not in _FUSED_ATTENTION.split():
        return None
    return _masked(_read_attention(node))


def total(parts: list[Flops]) -> Flops:
    """The sum of many; whole numbers are added first, which is most of them in a static graph."""
    sums = []
    for field in zip(*parts, strict=True) if parts else ((), (), ()):
        plain = sum(x for x in field if isinstance(x, int))
        rest = [x for x in field if not isinstance(x, int)]
        sums.append(functools.reduce(lambda a, b: a + b, rest, plain))
    return Flops(*sums)

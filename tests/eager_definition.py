"""Depth-Attention by its definition, on any eager model: every attention is seen as it is computed.

A torch function mode watches a plain eager forward. It sees ``scaled_dot_product_attention`` calls, and
products whose left operand is a softmax of another product; at each it mixes the value with
:func:`depthify.reference.depth_mix` and lets the model go on. Nothing is captured, and no operation between
projection and attention is looked at: which query heads share a key is told by comparing keys, and query and
key before the rotary embedding come from a second copy of every sequence, all of whose tokens are at
position 0.

Full forwards only: cached decoding is checked against something that has no cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from depthify import DepthConfig
from depthify.reference import depth_mix

_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")
_TIMES = ("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__")
_OVER = ("div", "div_", "true_divide", "__truediv__", "__itruediv__", "__div__")


@dataclass(frozen=True)
class Scores:
    """What a tensor of attention scores or probabilities was computed from."""

    query: Tensor
    key: Tensor
    """(..., tokens, features), as the query."""

    scale: float = 1.0
    uneven: bool = False
    """Scaled by a tensor."""

    probabilities: bool = False


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Of every query with the key of the same token, in the first half of the batch."""
    query = query.reshape(*key.shape[:2], -1, *key.shape[2:])
    return (query * key[:, :, None]).sum(-1)[: query.shape[0] // 2].double()


class TwinDiffers(NotImplementedError):
    """The copy at position 0 is not the sequence itself, but for the rotation."""


@dataclass
class Seen:
    """One attention of the forward."""

    module: str
    causal: bool
    mixed: bool


@dataclass
class DepthAttention(TorchFunctionMode):
    """Mixes the value of every causal self-attention of an eager forward.

    Args:
        stack: only attention in modules below this path is a layer.
        unrotated: the second half of the batch is the first half once more, at position 0.
    """

    config: DepthConfig
    batch: int
    module: Callable[[], str] = str
    stack: str = ""
    unrotated: bool = False
    exact: bool = False
    """Casts to float32 inside the model are casts to float64, so that nothing is rounded to less."""

    seen: list[Seen] = field(default_factory=list)
    sources: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Keys and mixed values of the layers so far, by the shape of their heads."""

    raw: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Key, value and mixed value of the layers so far, as the model has them."""
    _scores: dict[int, tuple[Tensor, Scores]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self.exact:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args, kwargs = widened((args, kwargs))
        if name == "scaled_dot_product_attention":
            return self._fused(func, args, kwargs)
        if name == "multi_head_attention_forward":
            with self:
                return _multi_head(*args, **kwargs)
        if name in _PRODUCTS:
            return self._product(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            self._follow(name, args, kwargs, result)
        return result

    def _fused(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = given["query"], given["key"], given["value"]
        scale = given.get("scale")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        mask = given.get("attn_mask")
        causal = bool(given.get("is_causal")) or (mask is not None and _hides_the_future(mask))
        given["value"] = self._mixed(query, key, value, scale, causal)
        return self._both(func(**given))

    def _product(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
        operands, perms = _operands(name, args, kwargs)
        if operands is None:
            return func(*args, **kwargs)
        left, right = operands
        known = self._scores.get(id(left))
        if known is not None and known[1].probabilities:
            scores = known[1]
            causal = _hides_the_future(known[0] != 0)
            value = self._mixed(scores.query, scores.key, perms.value(right), scores.scale, causal)
            return self._both(func(*_replaced(name, args, perms.value_back(value)), **kwargs))
        result = func(*args, **kwargs)
        if min(left.dim(), right.dim()) >= 3 and not isinstance(right, nn.Parameter):
            scale = float(kwargs.get("alpha", 1.0)) if name == "baddbmm" else 1.0
            self._keep(result, Scores(perms.query(left), perms.key(right), scale))
        return result

    def _follow(self, name: str, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        """Scores stay scores through everything elementwise, through views, slices and joins."""
        first = args[0] if args and isinstance(args[0], (tuple, list)) else args
        known = next((self._scores[id(x)] for x in first if id(x) in self._scores), None)
        if known is None or name in ("linear", "sum", "mean", "amax", "argmax"):
            return
        data, scores = known
        if name in ("softmax", "_safe_softmax"):
            if scores.uneven:
                raise NotImplementedError("scores that are scaled by a tensor: not defined")
            scores = replace(scores, probabilities=True)
        if name in _TIMES + _OVER and not scores.probabilities:
            other = next((x for x in args if x is not data), kwargs.get("other"))
            if not isinstance(other, Tensor) or other.numel() == 1:
                factor = float(other)
                scores = replace(scores, scale=scores.scale * (factor if name in _TIMES else 1 / factor))
            elif not ((other == 0) | (other == 1)).all():  # no mask
                scores = replace(scores, uneven=True)
        self._keep(result, scores)

    def _keep(self, tensor: Tensor, scores: Scores) -> None:
        self._scores[id(tensor)] = (tensor, scores)  # kept alive, so that the id stays its own

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
        """The mixed value, in the shape of ``value``."""
        layer = causal and key.shape[-2] == query.shape[-2]
        layer = layer and self.module().startswith(self.stack)
        for k, v, mixed in self.raw:  # a layer that reuses the key and value of another
            if layer and k.shape == key.shape and torch.equal(k, key) and torch.equal(v, value):
                self.seen.append(Seen(self.module(), causal, False))
                return mixed
        self.seen.append(Seen(self.module(), causal, layer))
        if not layer:
            return value
        mixed = self._mix(query, key, value, scale)
        self.raw.append((key, value, mixed))
        return mixed

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        shape = value.shape
        query, key, value = (x.reshape(self.batch, -1, *x.shape[-2:]) for x in (query, key, value))
        heads = query.shape[1]
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
        groups = _groups(key, value)
        order = [head for group in groups for head in group]
        q, k = query[:, order], key[:, [group[0] for group in groups]]
        v = value[:, [group[0] for group in groups]]
        if self.unrotated:
            if not torch.allclose(*v.chunk(2), rtol=1e-4, atol=1e-6):
                raise TwinDiffers("positions change more than queries and keys")
            rotated = _products(q, k)
            q, k = (self._before_rotation(x) for x in (q, k))
            if not torch.allclose(
                _products(q, k), rotated, rtol=1e-4, atol=1e-4 * float(rotated.abs().max())
            ):
                raise TwinDiffers("query and key are not only rotated by positions")
        stack = self.sources.setdefault((k.shape[1], k.shape[-1], v.shape[-1]), [])
        chosen = [stack[j] for j in self.config.sources(len(stack))]
        if chosen:
            v = depth_mix(q, [k for k, _ in chosen] + [k], [v for _, v in chosen] + [v], scale)
        stack.append((k, v))
        place = {head: i for i, group in enumerate(groups) for head in group}
        wide = v[:, [place[head] for head in range(heads)]]
        kept = shape[-3] * shape[0] // self.batch if len(shape) > 3 else shape[0] // self.batch
        return wide[:, :: heads // kept].reshape(shape)

    def _before_rotation(self, x: Tensor) -> Tensor:
        """The vectors of the copy at position 0, as long as those at their own positions: a rotation keeps
        lengths, and what else depends on the position, a temperature, belongs to the vectors."""
        half = self.batch // 2
        long = torch.linalg.vector_norm(x[:half].double(), dim=-1, keepdim=True)
        short = torch.linalg.vector_norm(x[half:].double(), dim=-1, keepdim=True)
        ratio = long / short
        ratio = torch.where((ratio - 1).abs() < 1e-5, 1.0, ratio)  # sines and cosines in float32
        twin = (x[half:].double() * ratio).to(x.dtype)
        return torch.cat([twin, twin])

    def _both(self, out: Tensor) -> Tensor:
        """The copy at position 0 goes on as the sequence itself does."""
        if not self.unrotated:
            return out
        half = out[: out.shape[0] // 2]
        return torch.cat([half, half])


def _multi_head(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    """``F.multi_head_attention_forward`` by its definition; (T, B, E). No dropout, no padding."""
    heads, weight, bias = args[1:4]
    out_weight, out_bias = args[8:10]
    q, k, v = (
        (x @ w.T + b).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        for x, w, b in zip((query, key, value), weight.chunk(3), bias.chunk(3), strict=True)
    )
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        mask = ~mask  # here True hides
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.permute(2, 0, 1, 3).flatten(2) @ out_weight.T + out_bias, None


def widened(values: Any) -> Any:
    """Arguments of an operation with float64 in the place of float32."""
    return torch.utils._pytree.tree_map_only(
        torch.dtype, lambda dtype: torch.float64 if dtype == torch.float32 else dtype, values
    )


def exact_backend(graph_module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A torch.compile backend that runs the graph as it is, but for casts to float32: they are to float64."""
    for node in graph_module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            node.args, node.kwargs = widened((node.args, node.kwargs))
            if node.target in ("float", torch.Tensor.float):
                node.target = "double" if node.op == "call_method" else torch.Tensor.double
    graph_module.recompile()
    return graph_module.forward


def _groups(key: Tensor, value: Tensor) -> list[list[int]]:
    """Heads that share one key and value, in the order of their first."""
    groups: list[list[int]] = []
    for head in range(key.shape[1]):
        for group in groups:
            same = (
                torch.equal(key[:, head], key[:, group[0]]),
                torch.equal(value[:, head], value[:, group[0]]),
            )
            if all(same):
                group.append(head)
                break
            if any(same):
                raise NotImplementedError("heads that share a value but not a key: not defined")
        else:
            groups.append([head])
    if len({len(group) for group in groups}) != 1:
        raise NotImplementedError("groups of heads of different sizes: not defined")
    return groups


def _hides_the_future(mask: Tensor) -> bool:
    """Whether no query may see a later key: of a bool or additive mask, or of probabilities (not 0)."""
    if mask.dtype != torch.bool:
        mask = mask > -1e4
    rows, columns = mask.shape[-2:]
    if rows == 1:
        return False
    later = torch.ones(rows, columns, dtype=torch.bool).triu(1 + columns - rows)
    return not bool((mask & later)[..., -3:, :].any())  # a prefix may see all of itself


@dataclass(frozen=True)
class _Permutations:
    """How the operands of a product are brought to (..., tokens, features), and a value back."""

    query: Callable[[Tensor], Tensor] = lambda x: x
    key: Callable[[Tensor], Tensor] = lambda x: x.transpose(-1, -2)
    value: Callable[[Tensor], Tensor] = lambda x: x
    value_back: Callable[[Tensor], Tensor] = lambda x: x


def _operands(
    name: str, args: Any, kwargs: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor] | None, _Permutations]:
    plain = _Permutations()
    if name == "einsum":
        equation, operands = args[0], args[1:]
        if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
            operands = operands[0]
        if len(operands) != 2 or "..." in equation:
            return None, plain
        terms, _, out = equation.replace(" ", "").partition("->")
        return tuple(operands), _einsum(*terms.split(","), out)
    if name == "baddbmm":
        left, right = (*args[1:], *(kwargs[k] for k in ("batch1", "batch2") if k in kwargs))
    else:
        left, right = (*args, *(kwargs[k] for k in ("other", "mat2") if k in kwargs))
    return ((left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else None), plain


def _einsum(left: str, right: str, out: str) -> _Permutations:
    lanes = [x for x in out if x in left and x in right]
    rows = [x for x in out if x in left and x not in right]
    columns = [x for x in out if x in right and x not in left]
    inner = [x for x in left if x in right and x not in out]

    def mover(term: str, order: list[str]) -> Callable[[Tensor], Tensor]:
        return lambda x: x.permute([term.index(label) for label in order])

    value = [*lanes, *inner, *columns]
    return _Permutations(
        query=mover(left, [*lanes, *rows, *inner]),
        key=mover(right, [*lanes, *columns, *inner]),
        value=mover(right, value),
        value_back=lambda x: x.permute([value.index(label) for label in right]),
    )


def _replaced(name: str, args: Any, value: Tensor) -> Any:
    if name == "einsum" and len(args) == 2:
        return args[0], (args[1][0], value)
    return (*args[:-1], value)


@contextlib.contextmanager
def module_paths(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Tells which module is running."""
    names = {module: name for name, module in model.named_modules()}
    running: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        if module in names:
            running.append(names[module])

    def leave(module: nn.Module, *_: Any) -> None:
        if module in names:
            running.pop()

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield lambda: running[-1] if running else ""
    finally:
        for hook in hooks:
            hook.remove()


def by_definition(
    model: nn.Module,
    ids: Tensor,
    stride: int | None = None,
    recent_window: int = 0,
    layers: int | None = None,
    stack: str = "",
    unrotated: bool = False,
    exact: bool = False,
    **options: Any,
) -> tuple[Tensor, list[Seen]]:
    """Logits of one full eager forward of ``model`` with mixing, and all attention there was."""
    batch = ids.shape[0]
    if unrotated:
        here = torch.arange(ids.shape[1]).expand_as(ids)
        options = {name: torch.cat([x, x]) if isinstance(x, Tensor) else x for name, x in options.items()}
        options["position_ids"] = torch.cat([here, torch.zeros_like(here)])
        options.setdefault("attention_mask", torch.ones_like(options["position_ids"]))
        ids = torch.cat([ids, ids])
    if layers is None:  # the default stride depends on how many there are
        _, seen = by_definition(
            model, ids[:batch], 1, layers=1, stack=stack, **_half(options, batch, unrotated)
        )
        layers = sum(x.mixed for x in seen)
    config = DepthConfig(stride=stride, recent_window=recent_window).resolve(max(1, layers))
    with module_paths(model) as module, torch.no_grad():
        mode = DepthAttention(config, ids.shape[0], module, stack, unrotated, exact)
        with mode:
            logits = model(ids, **options)
    logits = getattr(logits, "logits", logits)
    return logits[:batch], mode.seen


def _half(options: dict[str, Any], batch: int, unrotated: bool) -> dict[str, Any]:
    if not unrotated:
        return options
    return {name: x[:batch] if isinstance(x, Tensor) else x for name, x in options.items()}

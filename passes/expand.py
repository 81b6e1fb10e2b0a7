"""Multi-head attention that PyTorch offers as one function -> the operations it stands for, in place.

Dynamo keeps ``F.multi_head_attention_forward``, and in inference the fused kernels behind
``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``, as one call each: projections, attention and
all. No value can be reached in there, so the call is written out before the finders look.

    query, key, value, weights -> [multi_head_attention_forward] -> output
    query, key, value, weights -> linear x 3 -> scaled_dot_product_attention -> linear -> output
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from .emit import TAG, emit, turn_into
from .nodes import is_tensor, shape_of, value_of
from .ops import op_name
from .subgraphs import Bodies, ModuleBodies, read_call

Arguments = dict[str, Any]

_MHA = (
    "query key value embed_dim num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p "
    "out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask use_separate_proj_weight "
    "q_proj_weight k_proj_weight v_proj_weight static_k static_v average_attn_weights is_causal"
).split()
_NATIVE_MHA = (
    "query key value embed_dim num_heads in_proj_weight in_proj_bias out_proj_weight out_proj_bias mask "
    "need_weights average_attn_weights mask_type"
).split()
_NATIVE_LAYER = (
    "src embed_dim num_heads in_proj_weight in_proj_bias out_proj_weight out_proj_bias use_gelu norm_first "
    "eps norm1_weight norm1_bias norm2_weight norm2_bias up_weight up_bias down_weight down_bias mask "
    "mask_type"
).split()


def expand(graph: Graph, start: Node | None = None, bodies: Bodies | None = None) -> None:
    """Write out every such call after ``start``, also in the bodies of calls.

    One that is asked for what is not known here, such as learned extra keys, stays as it is.
    """
    after = start is None
    for node in list(graph.nodes):
        if after:
            call = read_call(node, bodies)
            if call is not None:
                expand(call.body.graph, None, ModuleBodies(call.body))
            elif (known := _KNOWN.get(op_name(node) or "")) is not None:
                _expand(graph, node, *known)
        after = after or node is start


def _expand(
    graph: Graph,
    node: Node,
    names: list[str],
    write_out: Callable[[Arguments], Callable[[Arguments], Any] | None],
) -> None:
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    given["embed_dim"] = given.pop("embed_dim_to_check", given.pop("num_head", None)) or given.get(
        "embed_dim"
    )
    body = write_out(given)
    single = is_tensor(node)
    picks = [] if single else list(node.users)
    if body is None or not all(user.target is operator.getitem for user in picks):
        return
    tensors = [name for name, value in given.items() if isinstance(value, Node) and is_tensor(value)]
    key = "example_value" if "example_value" in node.meta else "val"
    like = node if single else next(iter(picks), node)

    def run(*values: Any) -> Any:
        return body({**given, **dict(zip(tensors, values, strict=True))})

    papers = {name: entry for name, entry in like.meta.items() if name != key}
    like.meta = {**node.meta, **papers, key: like.meta[key]}
    results, new = emit(graph, node, run, [given[name] for name in tensors], like, -1)
    for made in new:
        made.meta.pop(TAG, None)
    for user in picks:
        turn_into(user, results[user.args[1]])
        user.meta.pop(TAG, None)
    if single:
        turn_into(node, results[0])
        node.meta.pop(TAG, None)
    else:
        graph.erase_node(node)


def _function(given: Arguments) -> Callable[[Arguments], Any] | None:
    """``F.multi_head_attention_forward``: (T, B, E) in and out."""
    unknown = any(given.get(name) is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    if unknown or given.get("add_zero_attn") or len(shape_of(given["query"])) != 3:
        return None
    heads, training = given["num_heads"], given.get("training", True)
    dropout = given.get("dropout_p", 0.0) if training else 0.0
    weights = given.get("need_weights", True)
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    # With is_causal the mask is a hint only, and PyTorch does not look at it.
    causal = bool(given.get("is_causal", False)) and padding is None and not weights
    separate = given.get("use_separate_proj_weight", False)
    one = given["query"] is given["key"] and given["key"] is given["value"]
    if mask is not None and not isinstance(mask, Node):
        return None

    def body(x: Arguments) -> Any:
        if separate:
            parts = [x["q_proj_weight"], x["k_proj_weight"], x["v_proj_weight"]]
        else:
            parts = [x["in_proj_weight"]] if one else _thirds(x["in_proj_weight"], 0)
        bias = x.get("in_proj_bias")
        pieces = len(parts)
        biases = [None] * pieces if bias is None else [bias] if pieces == 1 else _thirds(bias, 0)
        if pieces == 1:
            projected = _thirds(F.linear(x["query"], parts[0], biases[0]), -1)
        else:
            streams = (x["query"], x["key"], x["value"])
            projected = [F.linear(s, w, b) for s, w, b in zip(streams, parts, biases, strict=True)]
        q, k, v = (t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for t in projected)  # (B, H, T, D)
        masks = [] if causal else _masks(x, given, mask, padding, heads)
        size = int(shape_of(given["query"])[-1]) // heads
        out, seen = _attend(q, k, v, masks, causal, dropout, weights, size)
        out = F.linear(out.permute(2, 0, 1, 3).flatten(2), x["out_proj_weight"], x.get("out_proj_bias"))
        if seen is not None:
            seen = seen.mean(1) if given.get("average_attn_weights", True) else seen.clone()
        return out, seen

    return body


def _masks(x: Arguments, given: Arguments, mask: Any, padding: Any, heads: int) -> list[Any]:
    """The masks as numbers to add, each (B or 1, H or 1, T or 1, S)."""
    found = []
    dtype = value_of(given["query"]).dtype
    if mask is not None:
        shaped = x["attn_mask"]
        shaped = shaped.unflatten(0, (-1, heads)) if len(shape_of(mask)) == 3 else shaped[None, None]
        found.append(_additive(shaped, value_of(mask).dtype, dtype))
    if padding is not None:
        found.append(_additive(x["key_padding_mask"][:, None, None], value_of(padding).dtype, dtype))
    return found


def _thirds(tensor: Any, dim: int) -> list[Any]:
    pieces = tensor.chunk(3, dim)
    return [pieces[i] for i in range(3)]  # a proxy has no length


def _additive(mask: Any, dtype: torch.dtype, wanted: torch.dtype) -> Any:
    if dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=wanted).masked_fill(mask, -math.inf)


def _attend(
    q: Any, k: Any, v: Any, masks: list[Any], causal: bool, dropout: float, weights: bool, size: int
) -> tuple[Any, Any]:
    """Output and, if asked for, probabilities of attention over (B, H, T, D)."""
    mask = masks[0] if masks else None
    for other in masks[1:]:
        mask = mask + other
    if not weights:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return out, None
    scores = torch.matmul(q * size**-0.5, k.transpose(-2, -1))
    seen = torch.softmax(scores if mask is None else scores + mask, -1)
    if dropout:
        seen = F.dropout(seen, dropout)
    return torch.matmul(seen, v), seen


def _native(given: Arguments) -> Callable[[Arguments], Any] | None:
    """The fused kernel of ``nn.MultiheadAttention`` in inference: (B, T, E) in and out."""
    if not (given["query"] is given["key"] and given["key"] is given["value"]):
        return None
    return _inference(given, "query")


def _inference(given: Arguments, name: str) -> Callable[[Arguments], Any] | None:
    heads, weights = given["num_heads"], given.get("need_weights", name == "query")
    kind, mask = given.get("mask_type"), given.get("mask")
    if len(shape_of(given[name])) != 3 or kind not in (None, 0, 1, 2) or value_of(given[name]).is_nested:
        return None
    size = int(shape_of(given[name])[-1]) // heads
    dtype = value_of(given[name]).dtype

    def body(x: Arguments) -> Any:
        projected = _thirds(F.linear(x[name], x["in_proj_weight"], x["in_proj_bias"]), -1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in projected)
        masks = []
        if mask is not None:
            hidden = x["mask"].to(torch.bool)  # as the kernel does: what is not 0 is hidden
            rank = len(shape_of(mask))
            if kind == 1 and rank == 2:
                hidden = hidden[:, None, None]
            masks = [_additive(hidden, torch.bool, dtype)]
        out, seen = _attend(q, k, v, masks, False, 0.0, weights, size)
        out = F.linear(out.transpose(1, 2).flatten(2), x["out_proj_weight"], x["out_proj_bias"])
        if seen is not None:
            seen = seen.mean(1) if given.get("average_attn_weights", True) else seen.clone()
        return out, seen

    return body


def _native_layer(given: Arguments) -> Callable[[Arguments], Any] | None:
    """The fused kernel of ``nn.TransformerEncoderLayer`` in inference."""
    attend = _inference(given, "src")
    if attend is None:
        return None
    sizes = [shape_of(given["src"])[-1]]

    def norm(x: Arguments, data: Any, which: str) -> Any:
        return F.layer_norm(data, sizes, x[f"{which}_weight"], x[f"{which}_bias"], given["eps"])

    def feed(x: Arguments, data: Any) -> Any:
        hidden = F.linear(data, x["up_weight"], x["up_bias"])
        hidden = F.gelu(hidden) if given["use_gelu"] else F.relu(hidden)
        return F.linear(hidden, x["down_weight"], x["down_bias"])

    def body(x: Arguments) -> Any:
        src = x["src"]
        if given["norm_first"]:
            src = src + attend({**x, "src": norm(x, src, "norm1")})[0]
            return (src + feed(x, norm(x, src, "norm2")),)
        src = norm(x, src + attend(x)[0], "norm1")
        return (norm(x, src + feed(x, src), "norm2"),)

    return body


_KNOWN: dict[str, tuple[list[str], Callable[[Arguments], Callable[[Arguments], Any] | None]]] = {
    "multi_head_attention_forward": (_MHA, _function),
    "_native_multi_head_attention": (_NATIVE_MHA, _native),
    "_transformer_encoder_layer_fwd": (_NATIVE_LAYER, _native_layer),
}

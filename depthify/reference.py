"""Depth-Attention in eager PyTorch: the definition that every rewrite is held to.

Source: Zeng et al., "Depth-Attention: Cross-Layer Value Mixing for Language Models", arXiv 2606.05014.
Shapes: B batch, T current tokens, Hq query heads, H key/value heads, D head size of keys, E of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def depth_weights(query: Tensor, keys: Sequence[Tensor], scale: float, self_bias: float = 0.0) -> Tensor:
    """Softmax weights over the sources and the layer itself.

    Args:
        query: the layer's query, (B, Hq, T, D).
        keys: the sources' keys in depth order and last the layer's own, each (B, H, T, D).
        scale: the softmax scale of the layer's own attention.
        self_bias: is added to the layer's own score; 0 in the paper.

    Returns:
        (B, H, T, len(keys)), in float32 or float64, summing to 1 over the last dimension.
    """
    batch, heads, tokens, size = keys[-1].shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    mean_query = query.reshape(batch, heads, -1, tokens, size).to(dtype).mean(2)
    scores = torch.stack([(mean_query * key.to(dtype)).sum(-1) for key in keys], dim=-1) * scale
    scores[..., -1] += self_bias
    return torch.softmax(scores, dim=-1)


def depth_mix(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, self_bias: float = 0.0
) -> Tensor:
    """The mixed value of one layer, (B, H, T, E), in the dtype of the layer's own value.

    Args:
        query: the layer's query, (B, Hq, T, D), as its attention uses it for the current tokens.
        keys: the sources' keys in depth order and last the layer's own, each (B, H, T, D).
        values: the sources' already mixed values and last the layer's own raw value, each (B, H, T, E).
        scale: the softmax scale of the layer's own attention.
        self_bias: is added to the layer's own score; 0 in the paper.
    """
    weights = depth_weights(query, keys, scale, self_bias)
    mixed = sum(weights[..., i, None] * value.to(weights.dtype) for i, value in enumerate(values))
    return mixed.to(values[-1].dtype)

"""``scaled_dot_product_attention`` keeps one fused call.

The choice between the cuDNN, flash, memory-efficient and math kernels is made in C++ from the properties of
a real device, and falls back to math without one: a dozen matmuls and pointwise operations. Here the same
choice is made in Python, and the same ATen operation called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .device import DeviceSpec

aten = torch.ops.aten


def choose(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, spec: DeviceSpec
) -> str:
    """What ``sdp_utils.cpp`` picks with CUDA 13 wheels: cuDNN first on sm_90 and sm_100, flash, efficient."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    size, value_size, queries, keys = q.shape[-1], v.shape[-1], q.shape[-2], k.shape[-2]
    allowed = torch.backends.cuda
    if (
        allowed.cudnn_sdp_enabled()
        and spec.capability[0] in (9, 10)
        and half
        and q.dim() == 4
        and max(size, value_size) <= 128
        and size % 8 == value_size % 8 == 0
        and keys != 1
        and dropout == 0.0
        and not (mask is not None and mask.requires_grad)
        and not torch.are_deterministic_algorithms_enabled()
    ):
        return "cudnn"
    if (
        allowed.flash_sdp_enabled()
        and half
        and mask is None
        and size == value_size <= 256
        and (not causal or queries == keys)
    ):
        return "flash"
    if allowed.mem_efficient_sdp_enabled() and size % (8 if half else 4) == 0:
        return "efficient"
    return "math"


def _additive(mask: Tensor | None, q: Tensor, lowest: float) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, lowest).to(q.dtype)


def _override(kind: str, spec: DeviceSpec) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        chosen = choose(q, k, v, attn_mask, dropout_p, is_causal, spec) if kind == "auto" else kind
        logsumexp = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if chosen == "flash" and attn_mask is None and q.shape[-1] % 8 == 0:
            return aten._scaled_dot_product_flash_attention(
                q, k, v, dropout_p, is_causal, False, scale=scale
            )[0]
        if chosen == "cudnn":
            mask = _additive(attn_mask, q, torch.finfo(torch.float16).min)
            return aten._scaled_dot_product_cudnn_attention(
                q, k, v, mask, logsumexp, dropout_p, is_causal, False, scale=scale
            )[0]
        mask = _additive(attn_mask, q, float("-inf"))
        if chosen in ("efficient", "flash"):
            if mask is not None:
                mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
            return aten._scaled_dot_product_efficient_attention(
                q, k, v, mask, logsumexp, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    return scaled_dot_product_attention


@contextlib.contextmanager
def fused_attention(kind: str, spec: DeviceSpec) -> Iterator[None]:
    """Override the composite in the dispatcher (for C++ callers) and its decomposition in Python.

    Args:
        kind: "auto", or "cudnn", "flash", "efficient" or "math" for all calls.
    """
    function: Any = _override(kind, spec)
    op, key = aten.scaled_dot_product_attention.default, torch._C.DispatchKey.CompositeImplicitAutograd
    previous = op.py_kernels.pop(key, None)
    library = torch.library.Library("aten", "IMPL")
    try:
        for backend in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", function, backend)
        op.py_kernels[key] = function
        op._dispatch_cache.clear()
        yield
    finally:
        library._destroy()
        op.py_kernels.pop(key, None)
        if previous is not None:
            op.py_kernels[key] = previous
        op._dispatch_cache.clear()

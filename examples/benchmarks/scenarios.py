"""Training step, prefill and decode of one model and its mixed twin, as calls to measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bench import Setting, pair
from torch import Tensor

CAUSAL = {"full_attention": None}
"""A mask of this form makes transformers rely on ``is_causal`` instead of building a mask."""

Calls = dict[str, Callable[[], Any]]


def _models(model: Any, chosen: Setting) -> dict[str, Any]:
    return pair(model, chosen.stride)


def training(model: Any, chosen: Setting, batch: int, length: int) -> Calls:
    """Forward and backward; no optimizer, whose time is the same for both."""
    ids = chosen.tokens(batch, length)

    def loss(model: Any, ids: Tensor) -> Tensor:
        return model(ids, attention_mask=CAUSAL, labels=ids, use_cache=False).loss

    def step(model: Any) -> Callable[[], Any]:
        compiled = chosen.compiled(loss)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            compiled(model, ids).backward()

        return run

    return {name: step(one.train()) for name, one in _models(model, chosen).items()}


def prefill(model: Any, chosen: Setting, batch: int, length: int) -> Calls:
    """One forward over ``length`` tokens, logits of the last."""
    ids = chosen.tokens(batch, length)

    def forward(model: Any, ids: Tensor) -> Tensor:
        return model(ids, attention_mask=CAUSAL, use_cache=False, logits_to_keep=1).logits

    def call(model: Any) -> Callable[[], Any]:
        compiled = chosen.compiled(forward)

        def run() -> Any:
            with torch.no_grad():
                return compiled(model, ids)

        return run

    return {name: call(one.eval()) for name, one in _models(model, chosen).items()}


def decode(model: Any, chosen: Setting, batch: int, length: int) -> Calls:
    """One token behind ``length`` cached ones, in a static cache; the same position every time."""
    from transformers import StaticCache

    ids = chosen.tokens(batch, 1)
    positions = torch.full((batch, 1), length, device=chosen.device)
    zero = torch.zeros((), dtype=torch.long, device=chosen.device)

    def forward(model: Any, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        return model(ids, position_ids=positions, cache=cache, use_cache=True).logits

    def call(model: Any) -> Callable[[], Any]:
        cache = StaticCache(config=model.config, max_cache_len=length + 8)
        cache.early_initialization(
            batch_size=batch,
            num_heads=chosen.shape.kv_heads,
            head_dim=chosen.shape.key_size,
            dtype=chosen.dtype,
            device=chosen.device,
        )
        counters = [layer.cumulative_length for layer in cache.layers]
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        compiled = chosen.compiled(forward)

        def run() -> Any:
            with torch.no_grad():
                for counter in counters:
                    counter.copy_(zero).add_(length)
                return compiled(model, ids, positions, cache)

        return run

    return {name: call(one.eval()) for name, one in _models(model, chosen).items()}

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
"""What to call for "vanilla" and for "mixed"."""

Scenario = Callable[[int, int], Calls]
"""Batch and length -> calls; both variants are compiled once for all sizes they can be."""


def training(model: Any, chosen: Setting) -> Scenario:
    """Forward and backward; no optimizer, whose time is the same for both."""

    def loss(model: Any, ids: Tensor) -> Tensor:
        return model(ids, attention_mask=CAUSAL, labels=ids, use_cache=False).loss

    models, compiled = pair(model.train(), chosen.stride), chosen.compiled(loss)

    def calls(batch: int, length: int) -> Calls:
        ids = chosen.varies(chosen.tokens(batch, length), 1)

        def run(model: Any) -> None:
            model.zero_grad(set_to_none=True)
            compiled(model, ids).backward()

        return {name: lambda one=one: run(one) for name, one in models.items()}

    return calls


def prefill(model: Any, chosen: Setting) -> Scenario:
    """One forward, logits of the last token."""

    def forward(model: Any, ids: Tensor) -> Tensor:
        return model(ids, attention_mask=CAUSAL, use_cache=False, logits_to_keep=1).logits

    models, compiled = pair(model.eval(), chosen.stride), chosen.compiled(forward)

    def calls(batch: int, length: int) -> Calls:
        ids = chosen.varies(chosen.tokens(batch, length), 1)

        def run(model: Any) -> Tensor:
            with torch.no_grad():
                return compiled(model, ids)

        return {name: lambda one=one: run(one) for name, one in models.items()}

    return calls


def decode(model: Any, chosen: Setting) -> Scenario:
    """One token behind ``length`` cached ones, in a static cache; the same position every time."""
    from transformers import StaticCache

    def forward(model: Any, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        return model(ids, position_ids=positions, cache=cache, use_cache=True).logits

    models, compiled = pair(model.eval(), chosen.stride), chosen.compiled(forward)

    def calls(batch: int, length: int) -> Calls:
        ids = chosen.varies(chosen.tokens(batch, 1), 0)
        positions = chosen.varies(torch.full((batch, 1), length, device=chosen.device), 0)

        def of(model: Any) -> Callable[[], Tensor]:
            cache = StaticCache(config=model.config, max_cache_len=length + 8)
            cache.early_initialization(
                batch_size=batch,
                num_heads=chosen.shape.kv_heads,
                head_dim=chosen.shape.key_size,
                dtype=chosen.dtype,
                device=chosen.device,
            )
            for layer in cache.layers:
                chosen.varies(layer.keys.normal_(), 0)
                chosen.varies(layer.values.normal_(), 0)

            def run() -> Tensor:
                with torch.no_grad():
                    for layer in cache.layers:
                        layer.cumulative_length.fill_(length)
                    return compiled(model, ids, positions, cache)

            return run

        return {name: of(one) for name, one in models.items()}

    return calls

"""Cached decoding equals the full forward, and caches hold what they held: same tensors, shapes, dtypes
and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from definition import logits_by_definition, relative
from tiny import tiny, tokens
from torch import Tensor, nn

from depthify import depthify

CHUNKS = {"token by token": [1] * 10, "prefill, then tokens": [6, 1, 1, 1, 1], "chunks": [4, 3, 1, 2]}


def _cache(kind: str, model: nn.Module) -> Any:
    from transformers import DynamicCache, StaticCache

    if kind == "dynamic":
        return DynamicCache()
    if kind == "dynamic by config":  # sliding layers keep a window
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=16)


def _decode(model: nn.Module, ids: Tensor, chunks: list[int], cache: Any) -> Tensor:
    logits, start = [], 0
    with torch.no_grad():
        for length in chunks:
            logits.append(model(ids[:, start : start + length], cache=cache, use_cache=True).logits)
            start += length
    return torch.cat(logits, 1)


def _tensors(cache: Any) -> list[tuple[tuple[int, ...], torch.dtype, int]]:
    return [
        (tuple(x.shape), x.dtype, x.numel() * x.element_size())
        for layer in cache.layers
        for x in (layer.keys, layer.values)
    ]


CASES = [
    # model, attention, cache, chunks, in every run
    ("qwen3", "sdpa", "dynamic", "token by token", True),
    ("qwen3", "sdpa", "dynamic", "chunks", True),
    ("qwen3", "sdpa", "static", "prefill, then tokens", True),
    ("qwen3", "eager", "dynamic", "prefill, then tokens", True),
    ("gpt2", "eager", "static", "token by token", True),
    ("mistral", "sdpa", "dynamic by config", "chunks", True),
    ("gemma3_text", "sdpa", "static", "prefill, then tokens", True),
    ("gemma2", "eager", "dynamic by config", "prefill, then tokens", True),
    ("gpt_neox", "sdpa", "dynamic", "chunks", False),
    ("phi3", "sdpa", "static", "token by token", False),
    ("llama", "sdpa", "static", "chunks", False),
    ("olmo2", "eager", "dynamic", "token by token", False),
    ("mistral", "sdpa", "static", "token by token", False),
    ("gemma3_text", "eager", "dynamic by config", "token by token", False),
    ("qwen3_moe", "sdpa", "dynamic", "prefill, then tokens", False),
]


@pytest.mark.parametrize(
    ("kind", "attention", "cache", "chunks"),
    [pytest.param(*case[:4], marks=[] if case[4] else [pytest.mark.slow]) for case in CASES],
)
def test_cached_decoding_equals_the_full_forward(kind: str, attention: str, cache: str, chunks: str) -> None:
    dtype = torch.float32 if kind == "qwen3_moe" else torch.float64
    model = tiny(kind, dtype, attention)
    ids = tokens(10)
    vanilla_cache = _cache(cache, model)
    # Norms and softmax of some models are float32 whatever the dtype, and round differently in chunks of
    # another length; the mixed model may deviate as the vanilla model does from itself, and not more.
    with torch.no_grad():
        own = relative(_decode(model, ids, CHUNKS[chunks], vanilla_cache), model(ids, use_cache=False).logits)
    expected = logits_by_definition(model, ids, stride=2, attention=attention)
    depthify(model, 2)
    mixed_cache = _cache(cache, model)
    logits = _decode(model, ids, CHUNKS[chunks], mixed_cache)
    assert own < 1e-6
    assert relative(logits, expected) < (max(1e-10, 10 * own) if dtype == torch.float64 else 1e-4)
    assert _tensors(mixed_cache) == _tensors(vanilla_cache)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_cached_decoding_is_exact_where_the_model_is(chunks: str) -> None:
    """GPT-2 computes everything in float64, so there is no rounding to hide behind."""
    model = tiny("gpt2", torch.float64)
    ids = tokens(10)
    expected = logits_by_definition(model, ids, stride=1)
    logits = _decode(depthify(model, 1), ids, CHUNKS[chunks], _cache("dynamic", model))
    assert relative(logits, expected) < 1e-12


def test_the_cache_holds_the_mixed_values() -> None:
    """Not only equal logits: the slot of the value holds the mixture, the slot of the key what it held."""
    from transformers import DynamicCache

    model = tiny("llama", torch.float64)
    ids = tokens()
    plain, mixed = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(ids, cache=plain)
        depthify(model, 1)(ids, cache=mixed)
    assert torch.equal(plain.layers[0].values, mixed.layers[0].values), "layer 0 has no source"
    assert torch.equal(plain.layers[0].keys, mixed.layers[0].keys)
    assert relative(plain.layers[1].values, mixed.layers[1].values) > 1e-2


def _count_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from depthify.module import State

    seen: list[int] = []
    original = State.rewrite

    def counted(self: Any, *args: Any) -> None:
        seen.append(1)
        original(self, *args)

    monkeypatch.setattr(State, "rewrite", counted)
    return seen


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decoding_stops_recompiling(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = _count_captures(monkeypatch)
    model = depthify(tiny("qwen3", num_hidden_layers=2, max_position_embeddings=256), 1)
    from transformers import DynamicCache, StaticCache

    store = DynamicCache() if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=128)
    ids = tokens(90)
    with torch.no_grad():
        model(ids[:, :16], cache=store)
        assert len(captures) == 1
        for i in range(16, 20):
            model(ids[:, i : i + 1], cache=store)
        settled = len(captures)
        assert settled <= 3, "prefill, first decode and further decode may compile once each"
        for i in range(20, 84):
            model(ids[:, i : i + 1], cache=store)
    assert len(captures) == settled


def test_more_shapes_than_the_recompile_limit_keep_mixing(monkeypatch: pytest.MonkeyPatch) -> None:
    import depthify.module as module

    monkeypatch.setattr(module, "_RECOMPILE_LIMIT", 2)
    model = tiny("qwen3", torch.float64, num_hidden_layers=2)
    shapes = [tokens(length, batch) for length, batch in ((4, 1), (5, 2), (1, 3), (1, 1), (7, 1), (3, 4))]
    expected = [logits_by_definition(model, ids, stride=1) for ids in shapes]
    depthify(model, 1, dynamic=False)
    for ids, logits in zip(shapes, expected, strict=True):
        with torch.no_grad():
            assert relative(model(ids, use_cache=False).logits, logits) < 1e-10

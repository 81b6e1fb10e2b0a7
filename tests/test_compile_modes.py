"""Modes and options of torch.compile: mixing is kept in each, with the numbers of the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import Decoder, decoder, definition, tokens
from torch import Tensor

from depthify import depthify

IDS = tokens()
STRIDE = 2


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def attached(model: Decoder, **options: Any) -> Any:
    return depthify(model, STRIDE, **options)


def outside(model: Decoder, **options: Any) -> Any:
    return torch.compile(depthify(model, STRIDE), fullgraph=True, **options)


def plugged_in(model: Decoder, **options: Any) -> Any:
    inner = {name: options.pop(name) for name in ("backend", "options", "mode") if name in options}
    return torch.compile(model, backend="depthify", options={"stride": STRIDE, **inner}, **options)


ways = pytest.mark.parametrize("way", [attached, outside, plugged_in])


@ways
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_dynamic(way: Any, dynamic: bool | None) -> None:
    model = decoder()
    compiled = way(model, backend="aot_eager", dynamic=dynamic)
    for length, batch in ((6, 2), (5, 2), (7, 3)):
        ids = tokens(length, batch)
        expected = definition(decoder(), ids, STRIDE)
        torch.testing.assert_close(compiled(ids)[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dynamic", [False, True])
def test_decoding_with_a_static_cache(dynamic: bool) -> None:
    """With dynamic=True even the softmax scale is a number that varies."""
    transformers = pytest.importorskip("transformers")
    import definition as by_definition
    import tiny

    model, ids = tiny.tiny("qwen3", torch.float64), tiny.tokens()
    expected = by_definition.logits_by_definition(model, ids, stride=STRIDE)
    mixed = depthify(model, STRIDE, dynamic=dynamic)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        for i in range(4):
            positions = torch.full((2, 1), i)
            logits = mixed(ids[:, i : i + 1], position_ids=positions, cache=cache, use_cache=True).logits
            torch.testing.assert_close(logits[:, 0], expected[:, i], rtol=1e-9, atol=1e-9)


@ways
def test_autocast(way: Any) -> None:
    model = decoder(torch.float32)
    compiled = way(model, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = compiled(IDS)[0]
        expected = definition(decoder(torch.float32), IDS, STRIDE)
    close(found.float(), expected.float(), 3e-2)
    assert (found.float() - decoder(torch.float32)(IDS)[0]).abs().max() > 0.3 * expected.abs().max()


@ways
def test_recompute_gives_the_same_gradients(way: Any) -> None:
    gradients = []
    for recompute in (False, True):
        model = decoder()
        if way is plugged_in:
            options = {"stride": STRIDE, "backend": "aot_eager_decomp_partition", "recompute": recompute}
            compiled = torch.compile(model, backend="depthify", options=options)
        else:
            mixed = depthify(model, STRIDE, recompute=recompute)
            compiled = torch.compile(mixed, backend="aot_eager_decomp_partition")
        compiled(IDS)[0].pow(2).mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_recompute_saves_less() -> None:
    def saved(recompute: bool) -> int:
        model = depthify(decoder(torch.bfloat16), STRIDE, recompute=recompute)
        compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            compiled(tokens(64))[0]
        return sum(kept.values())

    assert saved(True) < saved(False)


INDUCTOR: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
    "freezing": {"options": {"freezing": True}},
    "static": {"dynamic": False},
    "dynamic": {"dynamic": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", INDUCTOR)
@ways
def test_inductor(way: Any, how: str) -> None:
    model = decoder(torch.float32, layers=3)
    expected = definition(decoder(torch.float32, layers=3), IDS, STRIDE)
    compiled = way(model, backend="inductor", **INDUCTOR[how])
    with torch.no_grad():
        for _ in range(2):
            close(compiled(IDS)[0], expected)


@pytest.mark.slow
@ways
def test_inductor_with_autocast_trains(way: Any) -> None:
    gradients = []
    for compiled in (way(decoder(torch.float32, layers=3), backend="inductor"), None):
        model = decoder(torch.float32, layers=3)
        with torch.autocast("cpu", torch.bfloat16):
            logits = definition(model, IDS, STRIDE) if compiled is None else compiled(IDS)[0]
            logits.float().pow(2).mean().backward()
        model = model if compiled is None else getattr(compiled, "_orig_mod", compiled)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    found, expected = gradients
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.99

"""Whole decoders over heads, groups, sizes, layers, strides and windows: full forward, cache and
gradients."""

from __future__ import annotations

import torch
import torch._dynamo
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from plain import Decoder, decoder, definition, tokens

from depthify import depthify, explain


@st.composite
def models(draw: st.DrawFn) -> tuple[Decoder, dict[str, int]]:
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 3))
    size = draw(st.sampled_from([1, 2, 5, 8]))
    layers = draw(st.integers(2, 6))
    mixing = {"stride": draw(st.integers(1, layers + 1)), "recent_window": draw(st.integers(0, layers))}
    width = kv_heads * group * size
    return decoder(layers=layers, width=width, heads=kv_heads * group, kv_heads=kv_heads), mixing


@given(model=models(), batch=st.integers(1, 3), length=st.integers(1, 6))
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # a capture takes a second, so shrinking would take minutes
)
def test_decoder(model: tuple[Decoder, dict[str, int]], batch: int, length: int) -> None:
    torch._dynamo.reset()
    vanilla, mixing = model
    ids = tokens(length + 2, batch)
    expected = definition(vanilla, ids, **mixing)
    expected.sum().backward()
    gradients = {name: p.grad.clone() for name, p in vanilla.named_parameters()}
    vanilla.zero_grad()
    mixed = depthify(vanilla, **mixing, budget=1.0)
    logits, present = mixed(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    logits.sum().backward()
    for name, p in mixed.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-7, atol=1e-7, msg=name)
    with torch.no_grad():
        parts, past = mixed(ids[:, :length])
        parts = [parts]
        for i in range(length, length + 2):
            part, past = mixed(ids[:, i : i + 1], past)
            parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)
    for (a, b), (c, d) in zip(past, present, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(b, d, rtol=1e-9, atol=1e-9)
    layers = explain(mixed).layers
    window, stride = mixing["recent_window"], mixing["stride"]
    for layer in layers:
        wanted = {j for j in range(layer.depth) if j % stride == 0 or j >= layer.depth - window}
        assert set(layer.sources) == wanted

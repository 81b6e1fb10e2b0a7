"""Closed forms of the methods against plain sums and against straightforward implementations, counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from depthify import DepthConfig
from depthify.cost_model import methods
from depthify.cost_model import symbols as S
from depthify.cost_model.count import count_graph
from depthify.cost_model.decoder import Cost, vanilla
from depthify.cost_model.shapes import PRESETS

D = 12
"""Width in the small implementations."""


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 45), st.integers(0, 45))
def test_number_of_sources(layers: int, stride: int, window: int) -> None:
    config = DepthConfig(stride=stride, recent_window=window)
    counts = [len(config.sources(layer)) for layer in range(layers)]
    values = {S.L: layers, S.s: stride, S.w: window}
    assert S.at(methods.sources_in_all(), values) == sum(counts)
    assert S.at(methods.layers_with_one_source(), values) == counts.count(1)
    assert [S.at(methods.sources_of_layer(sympy.Integer(i)), values) for i in range(layers)] == counts


def counted(function: Callable[..., object], *args: object) -> int:
    """FLOPs of ``function(*args)``, traced to ATen operations."""
    count = count_graph(make_fx(function, tracing_mode="fake")(*args).graph)
    return int(count.flops.executed)


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return y if weight is None else y * weight


def per_token(cost: Cost, layers: int, **setting: int) -> tuple[int, int]:
    """FLOPs of one token and parameters."""
    values = {S.L: layers, S.d: D, S.B: 1, S.T: 1, S.C: 0}
    values |= {getattr(S, name): value for name, value in setting.items()}
    return int(cost.executed.subs(values).doit()), int(cost.parameters.subs(values).doit())


@pytest.mark.parametrize("layers", [3, 6, 12])
@pytest.mark.parametrize("dilation, period", [(1, 1), (2, 1), (4, 5), (3, 2), (2, 3)])
def test_denseformer(layers: int, dilation: int, period: int) -> None:
    used = [[j for j in range(i + 1) if (i - j) % dilation == 0] for i in range(period, layers + 1, period)]

    def average(outputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        return [sum(w[n] * outputs[j] for n, j in enumerate(js)) for js, w in zip(used, weights, strict=True)]

    outputs = [torch.randn(D) for _ in range(layers + 1)]
    weights = [torch.randn(len(js)) for js in used]
    # Python's sum starts with 0 + ..., an addition that is not meant.
    flops = counted(average, outputs, weights) - len(used) * D
    assert (flops, sum(map(len, used))) == per_token(
        methods.denseformer(), layers, dilation=dilation, period=period
    )


def aggregate(sources: list[Tensor], query: Tensor, weight: Tensor) -> Tensor:
    values = torch.stack(sources)
    scores = norm(values, weight) @ query[:, None]
    return (torch.softmax(scores, 0).transpose(0, 1) @ values).squeeze(0)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_attention_residuals(layers: int) -> None:
    def run(embedding: Tensor, outputs: list[Tensor], own: list[Tensor]) -> list[Tensor]:
        known = [embedding]
        read = []
        for i in range(2 * layers):
            if i > 0:
                read.append(aggregate(known, *own[2 * (i - 1) : 2 * i]))
            known.append(outputs[i])
        return [*read, aggregate(known, *own[-2:])]

    own = [torch.randn(D) for _ in range(4 * layers)]
    flops = counted(run, torch.randn(D), [torch.randn(D) for _ in range(2 * layers)], own)
    residuals = 2 * layers * D
    assert (flops - residuals, len(own) * D) == per_token(methods.attention_residuals(), layers)


@pytest.mark.parametrize("layers, blocks", [(4, 2), (6, 3), (6, 4), (4, 8)])
def test_block_attention_residuals(layers: int, blocks: int) -> None:
    size = 2 * layers // blocks

    def run(embedding: Tensor, outputs: list[Tensor], own: list[Tensor]) -> list[Tensor]:
        sums, partial, read = [embedding], None, []
        for i in range(2 * layers):
            if i % size == 0 and partial is not None:
                sums, partial = [*sums, partial], None
            if i > 0:
                sources = sums if partial is None else [*sums, partial]
                read.append(aggregate(sources, *own[2 * (i - 1) : 2 * i]))
            partial = outputs[i] if partial is None else partial + outputs[i]
        return [*read, aggregate([*sums, partial], *own[-2:])]

    own = [torch.randn(D) for _ in range(4 * layers)]
    flops = counted(run, torch.randn(D), [torch.randn(D) for _ in range(2 * layers)], own)
    residuals = 2 * layers * D
    found = per_token(methods.block_attention_residuals(), layers, N=blocks)
    assert (flops - residuals, len(own) * D) == found


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_hyper_connections(streams: int) -> None:
    layers = 3

    def run(h: Tensor, outputs: list[Tensor], own: list[list[Tensor]]) -> list[Tensor]:
        read = []
        for out, (weight, wide, deep, alpha, beta, scales) in zip(outputs, own, strict=True):
            x = norm(h, weight)
            a = torch.tanh(x @ wide) * scales[0] + alpha
            b = torch.tanh(x @ deep) * scales[1] + beta
            mixed = a.transpose(0, 1) @ h
            read.append(mixed[0])
            h = mixed[1:] + b * out
        return [*read, h.sum(0)]

    shapes = [(D,), (D, streams + 1), (D, 1), (streams, streams + 1), (streams, 1), (2,)]
    own = [[torch.randn(shape) for shape in shapes] for _ in range(2 * layers)]
    flops = counted(run, torch.randn(streams, D), [torch.randn(D) for _ in range(2 * layers)], own)
    parameters = sum(x.numel() for xs in own for x in xs)
    found = per_token(methods.hyper_connections(), layers, n=streams)
    assert (flops - 2 * layers * D, parameters) == found


@pytest.mark.parametrize("streams, rounds", [(2, 3), (4, 20)])
def test_manifold_hyper_connections(streams: int, rounds: int) -> None:
    layers = 2

    def run(h: Tensor, outputs: list[Tensor], own: list[list[Tensor]]) -> list[Tensor]:
        read = []
        for out, (phi, bias, scales) in zip(outputs, own, strict=True):
            raw = norm(h.flatten()[None], None) @ phi
            parts = raw.split([streams, streams, streams**2], -1)
            biases = bias.split([streams, streams, streams**2])
            pre, post, mix = (part * s + b for part, s, b in zip(parts, scales, biases, strict=True))
            mix = torch.exp(mix).view(streams, streams)
            for _ in range(rounds):
                mix = mix / mix.sum(1, keepdim=True)
                mix = mix / mix.sum(0, keepdim=True)
            read.append((torch.sigmoid(pre) @ h)[0])
            h = mix @ h + (2 * torch.sigmoid(post)).transpose(0, 1) * out
        return [*read, h.sum(0)]

    columns = streams**2 + 2 * streams
    own = [
        [torch.randn(streams * D, columns), torch.randn(columns), torch.randn(3)] for _ in range(2 * layers)
    ]
    flops = counted(run, torch.randn(streams, D), [torch.randn(D) for _ in range(2 * layers)], own)
    parameters = sum(x.numel() for xs in own for x in xs)
    found = per_token(methods.manifold_hyper_connections(rounds), layers, n=streams)
    assert (flops - 2 * layers * D, parameters) == found


def test_shorthand_differs_by_its_factors() -> None:
    shape = PRESETS["paper-3b"]
    found = methods.shorthand_factors(shape, 24)
    product = found["sources"] * found["two products"] * found["heads"] * found["rest"]
    exact = methods.depth_attention(shape).executed.subs(
        {**shape.values(), S.B: 1, S.T: 100, S.s: 24, S.w: 0}
    )
    claim = methods.shorthand().subs({S.T: 100, S.d: 2048, S.s: 24})
    assert product == found["product"] == exact / shape.layers / claim


def test_no_method_keeps_state_between_calls() -> None:
    for cost, _ in methods.all_methods(PRESETS["paper-3b"]):
        assert cost.state == 0 and cost.source.startswith("arXiv")


def test_decoding_is_prefill_of_one_token() -> None:
    shape = PRESETS["paper-410m"]
    cost = vanilla(shape)
    values = {**shape.values(), S.B: 1}
    whole = cost.needed.subs({**values, S.T: 50, S.C: 0})
    steps = sum(cost.needed.subs({**values, S.T: 1, S.C: i}) for i in range(50))
    assert sympy.simplify(whole - steps) == 0


def test_training_of_the_mixture_is_at_most_three_forwards() -> None:
    """The convention of 3, against a count of the traced forward and backward: on the safe side."""
    from depthify.passes.mix_values import Scaling, combined, scored

    heads, group, size = 2, 3, 64
    query = torch.randn(1, 5, heads, group, size)
    keys, values = ([torch.randn(1, 5, heads, size) for _ in range(3)] for _ in range(2))

    def forward(query: Tensor, *rest: Tensor) -> Tensor:
        return combined(scored(query, rest[:3], Scaling(0.125), [3], [group]), rest[3:])

    def both(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
        return torch.autograd.grad(forward(*inputs), inputs, grad)

    once = counted(forward, query, *keys, *values)
    twice = counted(both, torch.randn(1, 5, heads, size), query, *keys, *values)
    assert 2 < twice / once <= 3, (once, twice)

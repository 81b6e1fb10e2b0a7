"""The closed form of Depth-Attention is the count of the rewritten graph: as expressions, for all sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import sympy
from cost_decoder import Decoder, captured, named

from depthify import DepthConfig
from depthify.cost_model import methods
from depthify.cost_model import symbols as S
from depthify.cost_model.cache import cache_bytes
from depthify.cost_model.count import count_graph, count_parameters
from depthify.cost_model.methods import depth_attention
from depthify.passes import mix_graph, plan

SHAPES = [
    # layers, width, heads, kv_heads, key_size, value_size, stride, window
    (4, 24, 6, 3, 4, 4, 2, 0),
    (2, 24, 4, 4, 8, 8, 1, 0),
    (5, 24, 4, 4, 8, 8, 2, 0),
    (6, 24, 4, 4, 6, 6, 3, 2),
    (4, 32, 8, 2, 8, 8, 1, 0),
    (6, 24, 4, 2, 8, 8, 5, 1),
    (5, 24, 4, 2, 8, 12, 2, 0),
    (4, 24, 4, 4, 10, 6, 1, 0),
    (4, 24, 4, 1, 8, 8, 1, 0),
    (5, 24, 4, 1, 8, 8, 2, 2),
    (6, 24, 3, 1, 8, 4, 3, 0),
    (7, 16, 2, 1, 4, 4, 7, 3),
    (4, 16, 8, 1, 4, 4, 2, 0),
    (3, 24, 24, 1, 4, 4, 1, 0),
    (3, 22, 22, 2, 4, 4, 1, 0),
    (5, 16, 2, 2, 4, 4, 9, 9),
]


@functools.cache
def added(shape: tuple[int, ...]) -> tuple[sympy.Expr, Decoder]:
    """after - before, counted, as an expression in B and T."""
    *sizes, stride, window = shape
    model = Decoder(*sizes)
    module, names = captured(model)
    before = count_graph(module.graph).flops
    mix_graph(module.graph, DepthConfig(stride=stride, recent_window=window, budget=float("inf")))
    after = count_graph(module.graph).flops
    assert after.matmul == before.matmul and after.masked == before.masked
    return named(after.executed - before.executed, names), model


def closed_form(model: Decoder, stride: int, window: int) -> sympy.Expr:
    values = {**model.shape.values(), S.s: stride, S.w: window}
    return depth_attention(model.shape).executed.subs(values)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_count_is_closed_form(shape: tuple[int, ...]) -> None:
    counted, model = added(shape)
    closed = closed_form(model, *shape[-2:])
    assert counted.free_symbols == {S.B, S.T}
    assert sympy.expand(counted - closed) == 0, f"counted {counted}, closed form {closed}"


def _without_own_score(sources: sympy.Expr, grouped: bool, one: bool) -> sympy.Expr:
    return methods_mixture(sources, grouped, one) - 2 * S.dk


def _without_mean(sources: sympy.Expr, grouped: bool, one: bool) -> sympy.Expr:
    return methods_mixture(sources, False, one)


def _softmax_for_one(sources: sympy.Expr, grouped: bool, one: bool) -> sympy.Expr:
    return methods_mixture(sources, grouped, False)


methods_mixture = methods.mixture_flops


@pytest.mark.parametrize("wrong", [_without_own_score, _without_mean, _softmax_for_one])
def test_wrong_formula_is_noticed(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., sympy.Expr]) -> None:
    shape = (4, 24, 6, 3, 4, 4, 2, 0)
    counted, model = added(shape)
    monkeypatch.setattr(methods, "mixture_flops", wrong)
    assert sympy.expand(counted - closed_form(model, 2, 0)) != 0


def test_wrong_source_count_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (6, 24, 4, 4, 6, 6, 3, 2)
    counted, model = added(shape)
    monkeypatch.setattr(methods, "sources_in_all", lambda: (S.L - 1) * S.L / (2 * S.s))
    assert sympy.expand(counted - closed_form(model, 3, 2)) != 0


def test_parameters_and_cache_of_the_graph_stay() -> None:
    module, names = captured(Decoder())
    findings, _ = plan(module.graph, DepthConfig(stride=1))
    before = count_parameters(module.graph), cache_bytes(module.graph, findings)
    result = mix_graph(module.graph, DepthConfig(stride=1))
    assert (count_parameters(module.graph), cache_bytes(module.graph, result.findings)) == before
    assert before == (sum(p.numel() for p in Decoder().parameters()), 0)


def test_live_is_what_the_last_layer_reads() -> None:
    model = Decoder(6)
    live = depth_attention(model.shape).live
    for stride in (1, 2, 5):
        for window in (0, 1, 3):
            sources = DepthConfig(stride=stride, recent_window=window).sources(5)
            values = {**model.shape.values(), S.s: stride, S.w: window}
            assert live.subs(values) == len(sources) * 2 * (8 + 8)


def test_shape_rejects_uneven_groups() -> None:
    with pytest.raises(ValueError, match="query_heads=4, kv_heads=3"):
        dataclasses.replace(Decoder().shape, kv_heads=3)

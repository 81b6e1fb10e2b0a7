"""The check in every rewrite: what it refuses, for which sizes it decides, and what it costs."""

from __future__ import annotations

import dataclasses
import time
from fractions import Fraction

import pytest
import sympy
import torch
import torch.utils.checkpoint
from cost_decoder import Decoder, captured, named
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule

from depthify import DepthConfig, depthify
from depthify.cost_model import symbols as S
from depthify.cost_model.check import FREE_FLOPS_PER_TOKEN, check_rewrite
from depthify.cost_model.count import count_graph
from depthify.cost_model.polynomials import (
    Polynomial,
    counterexample,
    evaluate,
    is_nonnegative,
    of_expression,
    to_sympy,
)
from depthify.errors import BudgetError, OptionError, UnsupportedModelError
from depthify.passes import mix_graph

A, Z = sympy.symbols("a z", integer=True)


def grab(model: nn.Module, *args: torch.Tensor, dynamic: bool | None = False) -> GraphModule:
    """The graph Dynamo captures of ``model(*args)``."""
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, inputs: object) -> object:
        graphs.append(module)
        return module.forward

    torch.compile(model, backend=keep, fullgraph=True, dynamic=dynamic)(*args)
    return graphs[0]


def test_cost_of_a_rewrite_is_the_difference_of_counts() -> None:
    module, names = captured(Decoder())
    before = count_graph(module.graph).flops.executed
    result = mix_graph(module.graph, DepthConfig(stride=1, budget=float("inf")))
    after = count_graph(module.graph).flops.executed
    cost = check_rewrite(result.findings.flow, result.mixed, float("inf"))
    assert named(cost.before, names).expand() == named(before, names).expand()
    assert named(cost.extra, names).expand() == named(after - before, names).expand()
    assert cost.extra != 0 and cost.uncounted == ()


def test_decided_for_all_sizes_not_at_one() -> None:
    """Attention grows with the length and the mixture's share falls: it is largest for one token."""
    module, names = captured(Decoder(), length=300)
    result = mix_graph(module.graph, DepthConfig(stride=1, budget=float("inf")))
    cost = check_rewrite(result.findings.flow, result.mixed, float("inf"))
    share = named(cost.extra, names) / named(cost.before, names)
    long, short = (float(share.subs({S.B: 2, S.T: t})) for t in (300, 1))
    assert long < short / 2
    budget = (long + short) / 2
    with pytest.raises(BudgetError, match="mixing adds more arithmetic") as caught:
        check_rewrite(result.findings.flow, result.mixed, budget)
    text = str(caught.value)
    symbols = {str(value): str(key) for key, value in names.items()}
    assert f"{symbols['T']} = 1" in text and "on top of" in text
    assert str(to_sympy(cost.extra)) in text and str(to_sympy(cost.before)) in text
    assert any(node.name in text for node in module.graph.nodes if node.meta.get("depthify") is not None)
    check_rewrite(result.findings.flow, result.mixed, short * 1.001)

    fixed = grab(Decoder(), torch.zeros(2, 300, dtype=torch.long))
    mix_graph(fixed.graph, DepthConfig(stride=1, budget=budget))  # this graph is for 300 tokens only


def test_default_budget_leaves_small_models_alone() -> None:
    """1 % is exceeded, but by far less than 100 kFLOP per token."""
    module, _ = captured(Decoder())
    result = mix_graph(module.graph, DepthConfig(stride=1))
    with pytest.raises(BudgetError):
        check_rewrite(result.findings.flow, result.mixed, 0.01)


def test_default_budget_refuses_what_costs() -> None:
    """Many narrow layers that all read each other: above 1 % and above 100 kFLOP per token."""
    layers = 24
    model = Decoder(layers, width=8, heads=8, kv_heads=8, key_size=16, value_size=16)
    with pytest.raises(BudgetError, match=f"budget=0.01 and {FREE_FLOPS_PER_TOKEN:,} FLOPs per token"):
        depthify(model.eval(), stride=1)(torch.zeros(1, 3, dtype=torch.long))


def test_budget_is_an_option_everywhere() -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    model = Decoder().eval()
    with pytest.raises(BudgetError, match="budget=0.0001:"):
        depthify(model, stride=1, budget=1e-4)(ids)
    with pytest.raises(BudgetError, match="budget=0.0001:"):
        torch.compile(
            Decoder().eval(),
            backend="depthify",
            fullgraph=True,
            options={"stride": 1, "budget": 1e-4, "backend": "eager"},
        )(ids)
    depthify(Decoder().eval(), stride=1, budget=0.5)(ids)


@pytest.mark.parametrize("budget", [0, -0.1, float("nan"), "1", True])
def test_budget_must_be_a_positive_number(budget: object) -> None:
    with pytest.raises(OptionError, match="budget="):
        DepthConfig(budget=budget)  # type: ignore[arg-type]


class Checkpointed(Decoder):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def test_checkpointed_layers_cost_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []

    def keep(*args: object) -> None:
        costs.append(check_rewrite(*args))  # type: ignore[arg-type]

    monkeypatch.setattr("depthify.cost_model.check.check_rewrite", keep)
    for kind in (Decoder, Checkpointed):
        depthify(kind(), stride=1)(torch.zeros(2, 5, dtype=torch.long))
    assert costs[0] == costs[1] and costs[0].extra > 0


@torch.library.custom_op("depthify_tests::halve", mutates_args=())
def _halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@_halve.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class WithUnknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Decoder()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return _halve(self.inner(ids))


def test_unknown_operation_is_an_error_in_a_count_and_not_in_a_rewrite() -> None:
    module = grab(WithUnknown(), torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(UnsupportedModelError, match="no FLOP rule for 1 operation.*halve"):
        count_graph(module.graph)
    partial = count_graph(module.graph, unknown="zero")
    assert [str(node.target) for node in partial.unknown] == ["depthify_tests.halve.default"]
    result = mix_graph(module.graph, DepthConfig(stride=1))
    cost = check_rewrite(result.findings.flow, result.mixed, float("inf"))
    assert cost.before == partial.flops.executed
    assert any("halve" in name for name in cost.uncounted)
    with pytest.raises(BudgetError, match="without a FLOP rule count as 0 here: .*halve"):
        check_rewrite(result.findings.flow, result.mixed, 1e-6)


def test_a_new_parameter_is_noticed() -> None:
    module = grab(Decoder(), torch.zeros(2, 5, dtype=torch.long))
    result = mix_graph(module.graph, DepthConfig(stride=1))
    weight = next(node for node in module.graph.nodes if node.op == "placeholder")
    layer = result.mixed[0][1]
    result.mixed[0][1] = dataclasses.replace(layer, inserted=(*layer.inserted, weight))
    with pytest.raises(AssertionError, match="mixing added placeholder"):
        check_rewrite(result.findings.flow, result.mixed, float("inf"))


class Cached(nn.Module):
    """One decoder layer after another, each with a cache that is joined and returned."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in "qkvo"}) for _ in range(layers)
        )

    def forward(
        self, x: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        present = []
        for part, (old_k, old_v) in zip(self.parts, past, strict=True):
            q, k, v = (part[name](x).unflatten(-1, (2, 8)).transpose(1, 2) for name in "qkv")
            k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
            present.append((k, v))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + part["o"](y.transpose(1, 2).flatten(2))
        return x, present


def test_a_cache_byte_is_noticed() -> None:
    past = [(torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 8)) for _ in range(3)]
    module = grab(Cached(), torch.zeros(2, 1, 16), past)
    result = mix_graph(module.graph, DepthConfig(stride=1))
    cost = check_rewrite(result.findings.flow, result.mixed)
    assert cost.cache_bytes == 2 * (2 * 2 * (4 + 1) * 8 * 4)  # the values of two mixed layers
    value = result.mixed[0][1].layer.site.value.node
    key = "example_value"
    value.meta[key] = value.meta[key].double()
    with pytest.raises(AssertionError, match="mixing changed the cache of .* from 640 to 768 bytes"):
        check_rewrite(result.findings.flow, result.mixed)


def test_a_check_costs_little() -> None:
    """Far below Dynamo's own time, which is about half a second per layer of a real decoder."""
    layers = 12
    module, _ = captured(Decoder(layers))
    result = mix_graph(module.graph, DepthConfig(stride=4))
    best = min(_seconds(module, result) for _ in range(5))
    assert best / layers < 0.01, f"{1000 * best / layers:.2f} ms per layer"


def _seconds(module: GraphModule, result: object) -> float:
    start = time.process_time()
    check_rewrite(result.findings.flow, result.mixed)  # type: ignore[attr-defined]
    return time.process_time() - start


def polynomials() -> st.SearchStrategy[sympy.Expr]:
    term = st.tuples(st.integers(-6, 6), st.integers(0, 2), st.integers(0, 2))
    return st.lists(term, max_size=5).map(lambda ts: sympy.Add(*(c * A**i * Z**j for c, i, j in ts)))


@settings(max_examples=60, deadline=None)
@given(polynomials(), polynomials())
def test_polynomials_compute_like_sympy(p: sympy.Expr, q: sympy.Expr) -> None:
    a, b = of_expression(p), of_expression(q)
    assert sympy.expand(to_sympy(a + b) - (p + q)) == 0
    assert sympy.expand(to_sympy(a - b) - (p - q)) == 0
    assert sympy.expand(to_sympy(a * b) - p * q) == 0
    assert (a == b) == (sympy.expand(p - q) == 0)
    assert evaluate(a, {A: 3, Z: 5}) == Fraction(int(p.subs({A: 3, Z: 5})))


@settings(max_examples=100, deadline=None)
@given(polynomials(), st.integers(0, 1), st.integers(0, 1))
def test_nonnegative_is_never_claimed_wrongly(p: sympy.Expr, low_a: int, low_z: int) -> None:
    lowest = {A: low_a, Z: low_z}
    count = of_expression(p)
    if is_nonnegative(count, lowest):
        for a in (low_a, low_a + 1, 7, 1000):
            for z in (low_z, low_z + 1, 7, 1000):
                assert p.subs({A: a, Z: z}) >= 0
    point = counterexample(count, lowest)
    if point is not None:
        assert p.subs(point) < 0


def test_nonnegative_uses_the_least_sizes() -> None:
    count = of_expression(3 * A * Z - A - Z)  # 1 at (1, 1), 0 at (0, 0), negative at (0, 1)
    assert is_nonnegative(count, {A: 1, Z: 1})
    assert not is_nonnegative(count, {A: 1})
    assert counterexample(count, {A: 1}) == {A: 1, Z: 0}


def test_a_size_that_is_no_polynomial_is_an_atom() -> None:
    half = sympy.floor(A / 2)
    count = of_expression(half * 4 + A)
    assert isinstance(count, Polynomial) and to_sympy(count) == 4 * half + A
    assert is_nonnegative(count, {})

"""Bad input: one clear error that names the argument, its value and what is allowed; the model stays as it
was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain import Attention, Decoder, decoder, definition, tokens
from torch import Tensor, nn

from depthify import DepthConfig, DepthifyError, depthify, explain, restore
from depthify.errors import OptionError, UnsupportedModelError
from depthify.module import Depthified

IDS = tokens()


def _state(model: nn.Module) -> tuple[Any, ...]:
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    return type(model), sorted(vars(model)), hooks, {k: v.clone() for k, v in model.state_dict().items()}


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[:3] == b[:3] and a[3].keys() == b[3].keys() and all(torch.equal(a[3][k], b[3][k]) for k in a[3])


@pytest.mark.parametrize("stride", [0, -1, 1.5, 2.0, True, "2", [2]])
def test_bad_stride(stride: Any) -> None:
    model = decoder()
    before = _state(model)
    with pytest.raises(OptionError, match="stride=.*whole number of at least 1"):
        depthify(model, stride)
    assert _same(before, _state(model))


@pytest.mark.parametrize("window", [-1, 0.5, True, "1", None])
def test_bad_window(window: Any) -> None:
    with pytest.raises(OptionError, match="recent_window=.*whole number of at least 0"):
        depthify(decoder(), 2, recent_window=window)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(backend="nonsense"), "backend='nonsense'.*allowed are.*inductor"),
        (dict(backend="depthify"), "backend='depthify'"),
        (dict(backend=3), "backend=3"),
        (dict(dynamic="yes"), "dynamic='yes'"),
        (dict(mode=1, backend="inductor"), "mode=1"),
        (dict(options=["x"], backend="inductor"), "options=.*dict"),
        (dict(mode="max-autotune", options={"x": 1}, backend="inductor"), "not both"),
        (dict(mode="max-autotune"), "does not compile"),
        (dict(backend="inductor", mode="nonsense"), "mode='nonsense'"),
        (dict(backend="inductor", options={"nonsense": 1}), "nonsense"),
    ],
)
def test_bad_compile_options(options: dict[str, Any], text: str) -> None:
    model = decoder()
    before = _state(model)
    with pytest.raises(OptionError, match=text):
        depthify(model, 2, **options)
    assert _same(before, _state(model))


@pytest.mark.parametrize("thing", [None, 3, "model", Decoder, lambda x: x, torch.zeros(2)])
def test_not_a_module(thing: Any) -> None:
    for call in (depthify, restore, explain):
        with pytest.raises(OptionError, match="model="):
            call(thing)


def test_numpy_integers_are_whole_numbers() -> None:
    assert DepthConfig(stride=np.int64(3)) == DepthConfig(stride=3)


def test_mixed_twice_compiled_before_and_not_mixed() -> None:
    model = depthify(decoder(), 2)
    for again in (model, nn.Sequential(model)):
        with pytest.raises(OptionError, match="mixed already"):
            depthify(again, 2)
    restore(model)
    with pytest.raises(OptionError, match="not mixed"):
        restore(model)
    with pytest.raises(OptionError, match="compiled already"):
        depthify(torch.compile(model), 2)
    model.blocks[1].compile()
    with pytest.raises(OptionError, match="blocks.1 is compiled already"):
        depthify(model, 2)


class Router(nn.Module):
    """A mixture-of-experts gate: softmax(x @ w) @ v, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 4))
        self.v = nn.Parameter(torch.randn(4, 32))
        self.embed = nn.Embedding(50, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = x + torch.softmax(x @ self.w, -1) @ self.v
        return x


class Bidirectional(Attention):
    mask: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        mask = None
        if self.mask is not None:
            mask = self.mask[:, None, None, :].expand(-1, 1, q.shape[2], -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


def _encoder(padded: bool) -> Decoder:
    model = decoder(torch.float32)
    for block in model.blocks:
        block.attention.__class__ = Bidirectional
        if padded:
            block.attention.mask = torch.ones(2, 6, dtype=torch.bool)
    return model


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (Router, "no causal self-attention found"),
        (NoAttention, "no causal self-attention found"),
        (lambda: _encoder(False), "not causal"),
        (lambda: _encoder(True), "not causal"),
        (lambda: decoder(torch.float32, layers=1), "only one causal self-attention layer"),
    ],
    ids=["router", "no attention", "encoder", "encoder with padding mask", "one layer"],
)
def test_what_is_no_decoder_is_refused(build: Any, text: str) -> None:
    model = build()
    before = _state(model)
    expected = model(IDS)
    depthify(model, 2)
    for _ in range(2):  # the second call is no less refused than the first
        with pytest.raises(UnsupportedModelError, match=text):
            model(IDS)
    restore(model)
    assert _same(before, _state(model))
    torch.testing.assert_close(model(IDS), expected)


def test_a_refused_call_leaves_the_cache_alone() -> None:
    from tiny import tiny
    from tiny import tokens as ids
    from transformers import DynamicCache

    model = depthify(tiny("qwen3", num_hidden_layers=1))
    cache = DynamicCache()
    with pytest.raises(UnsupportedModelError):
        model(ids(), cache=cache)
    assert cache.get_seq_length() == 0


def test_dry_run_changes_nothing() -> None:
    model = decoder()
    before = _state(model)
    report = explain(model, IDS)
    assert _same(before, _state(model)) and not isinstance(model, Depthified)
    assert [x.sources for x in report.layers] == [(), (0,), (0,), (0, 2)] and report.mixed == 3
    assert [x.module for x in report.layers] == [f"blocks.{i}.attention" for i in range(4)]
    assert {(x.query_heads, x.kv_heads, x.key_size, x.cached) for x in report.layers} == {(4, 2, 8, False)}
    with pytest.raises(OptionError, match="without inputs"):
        explain(model)
    depthify(model, 1)
    assert [len(x.sources) for x in explain(model, IDS).layers] == [0, 1, 2, 3]
    with torch.no_grad():
        torch.testing.assert_close(model(IDS)[0], definition(decoder(), IDS, 1), rtol=1e-10, atol=1e-10)
    assert explain(model).to_dict()["mixed"] == 3
    assert "4 attention layers, 3 mixed" in str(explain(model))


def test_explain_shows_why() -> None:
    with pytest.raises(
        UnsupportedModelError, match="not causal.*scaled_dot_product_attention|scaled_dot.*not causal"
    ):
        explain(_encoder(False), IDS)


def test_errors_are_value_errors() -> None:
    assert issubclass(DepthifyError, ValueError) and issubclass(OptionError, DepthifyError)

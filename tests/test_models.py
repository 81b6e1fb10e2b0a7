"""Logits of mixed transformers models against the eager definition, masked and unmasked, over strides and
dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch
from definition import logits_by_definition, relative
from tiny import CONFIGS, LAYERS, tiny, tokens

from depthify import depthify, explain

BOUND = {torch.float64: 1e-10, torch.float32: 1e-4}
EAGER_ONLY = {"gemma2"}  # transformers refuses sdpa for it: the soft-cap
FLOAT32_ONLY = {"qwen3_moe"}  # grouped_mm has no float64


def _cases() -> list:
    cases = []
    strides = (1, 2, LAYERS)  # L // 2 is 2
    for kind, attention, dtype, stride, masked in itertools.product(
        CONFIGS, ("sdpa", "eager"), BOUND, strides, (False, True)
    ):
        if (kind in EAGER_ONLY and attention == "sdpa") or (kind in FLOAT32_ONLY and dtype == torch.float64):
            continue
        main = dtype == torch.float64 or kind in FLOAT32_ONLY
        # The sample of every run: each model in each spelling once, masked or not in turn; two models with
        # all strides.
        sample = main and (
            (stride == 2 and masked == (attention == "eager"))
            or (kind in ("qwen3", "gpt2") and attention == "sdpa" and not masked)
        )
        marks = [] if sample else [pytest.mark.slow]
        name = f"{kind}-{attention}-{str(dtype)[6:]}-s{stride}-{'masked' if masked else 'plain'}"
        cases.append(pytest.param(kind, attention, dtype, stride, masked, id=name, marks=marks))
    return cases


def _padding(ids: torch.Tensor, attention: str) -> torch.Tensor:
    """Left padding; right padding for eager attention, where transformers makes NaN of a query that sees
    nothing."""
    mask = torch.ones_like(ids)
    mask[0, slice(3) if attention == "sdpa" else slice(-3, None)] = 0
    return mask


@pytest.mark.parametrize(("kind", "attention", "dtype", "stride", "masked"), _cases())
def test_logits_equal_the_definition(
    kind: str, attention: str, dtype: torch.dtype, stride: int, masked: bool
) -> None:
    model = tiny(kind, dtype, attention)
    ids = tokens()
    mask = _padding(ids, attention) if masked else torch.ones_like(ids)
    inputs = {"attention_mask": mask} if masked else {}
    with torch.no_grad():
        vanilla = model(ids, use_cache=False, **inputs).logits
        expected = logits_by_definition(model, ids, stride=stride, attention=attention, **inputs)
        logits = depthify(model, stride)(ids, use_cache=False, **inputs).logits
    seen = mask.bool()
    assert relative(logits[seen], expected[seen]) < BOUND[dtype]
    assert relative(vanilla[seen], expected[seen]) > 1e-2, (
        "mixing has to matter for this test to mean anything"
    )
    assert len(explain(model).layers) == LAYERS


@pytest.mark.parametrize("layers", [2, 3, 6])
def test_sites_are_counted_exactly(layers: int) -> None:
    model = tiny("qwen3", num_hidden_layers=layers)
    depthify(model)(tokens())
    report = explain(model)
    assert [layer.depth for layer in report.layers] == list(range(layers))
    assert report.stride == layers // 2 and report.mixed == layers - 1


def test_recent_window() -> None:
    model = tiny("llama", torch.float64)
    ids = tokens()
    expected = logits_by_definition(model, ids, stride=3, recent_window=2)
    with torch.no_grad():
        logits = depthify(model, 3, recent_window=2)(ids, use_cache=False).logits
    assert relative(logits, expected) < 1e-10
    assert [layer.sources for layer in explain(model).layers] == [(), (0,), (0, 1), (0, 1, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_the_definition(dtype: torch.dtype) -> None:
    model = tiny("qwen3")
    ids = tokens()
    exact = logits_by_definition(model, ids, stride=2)
    model = model.to(dtype)
    expected = logits_by_definition(model, ids, stride=2)
    with torch.no_grad():
        logits = depthify(model, 2)(ids, use_cache=False).logits
    assert logits.dtype == dtype
    # No further from the exact result than the eager definition in the same precision, but for one rounding.
    assert relative(logits, exact) < 1.5 * relative(expected, exact) + 1e-3


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi3"])
def test_scores_do_not_depend_on_absolute_positions(kind: str) -> None:
    model = tiny(kind)
    ids = tokens()
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)

    def moved_by(shift: int) -> torch.Tensor:
        with torch.no_grad():
            return model(ids, position_ids=positions + shift, use_cache=False).logits

    assert relative(moved_by(9), moved_by(0)) < 1e-5, "the vanilla model itself"
    depthify(model, 1)
    assert relative(moved_by(9), moved_by(0)) < 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_gradients_equal_autograd_through_the_definition(kind: str) -> None:
    from definition import defined

    model = (
        tiny(kind, torch.float64, attn_dropout=0.0)
        if kind == "qwen3"
        else tiny(kind, torch.float64, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    )
    model.train()
    ids = tokens()

    def gradients(which: torch.nn.Module) -> dict[str, torch.Tensor]:
        which.zero_grad()
        which(ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in which.named_parameters()}

    with defined(model, stride=1) as twin:
        expected = gradients(twin)
    found = gradients(depthify(model, 1))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(found[name], gradient) < 1e-7, name

"""Decoders that are written like other code bases: mixing and caches equal the definition in each style."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import styles
import torch
from definition import relative
from eager_definition import by_definition
from torch import Tensor, nn

from depthify import depthify, explain
from depthify.errors import UnsupportedModelError

STYLES: dict[str, Callable[[], nn.Module]] = {
    "fused split": lambda: styles.Decoder(styles.FusedSplit, learned_positions=True),
    "fused split, written out": lambda: styles.Decoder(
        lambda: styles.FusedSplit(by_hand=True), learned_positions=True
    ),
    "interleaved groups": styles.InterleavedGroupsDecoder,
    "complex rotary": styles.ComplexRotaryDecoder,
    "slot cache": styles.SlotCachedDecoder,
    "larger cache": styles.LargerCacheDecoder,
    "einsums": lambda: styles.Decoder(styles.Einsums),
    "einsums and einops": lambda: styles.Decoder(lambda: styles.Einsums(rearranged=True)),
    "module of torch": lambda: styles.Decoder(styles.TorchAttention),
    "module of torch, weights returned": lambda: styles.Decoder(lambda: styles.TorchAttention(weights=True)),
    "encoder with a causal mask": styles.TorchDecoder,
    "encoder, norms last": lambda: styles.TorchDecoder(norm_first=False),
    "encoder, tokens first": lambda: styles.TorchDecoder(batch_first=False),
    "decoder over a memory": lambda: styles.TorchDecoder(memory=True),
}
CROSS = {"decoder over a memory": styles.LAYERS}


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("style", STYLES)
def test_logits_equal_the_definition(style: str, stride: int) -> None:
    if style == "einsums and einops":
        pytest.importorskip("einops")
    model = styles.decoder(STYLES[style])
    ids = styles.tokens()
    with torch.no_grad():
        vanilla = model(ids)
    expected, seen = by_definition(model, ids, stride)
    assert [x.mixed for x in seen].count(True) == styles.LAYERS
    depthify(model, stride, budget=float("inf"))
    with torch.no_grad():
        logits = model(ids)
    report = explain(model)
    assert len(report.layers) == styles.LAYERS
    assert len(report.refusals) == CROSS.get(style, 0)
    assert relative(logits, expected) < 1e-10
    assert relative(vanilla, expected) > 1e-2, "mixing has to matter for this test to mean anything"


@pytest.mark.parametrize("style", ["encoder with a causal mask", "module of torch, weights returned"])
def test_what_is_one_function_in_torch_is_written_out_with_gradients_too(style: str) -> None:
    """In inference PyTorch takes a fused kernel; with gradients it takes another function."""
    model = styles.decoder(STYLES[style])
    ids = styles.tokens()
    expected, _ = by_definition(model, ids, 2)
    logits = depthify(model, 2, budget=float("inf"))(ids)
    assert relative(logits, expected) < 1e-10
    logits.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())


def _decode(model: nn.Module, ids: Tensor, chunks: list[int], as_number: bool) -> Tensor:
    logits, start = [], 0
    with torch.no_grad():
        for length in chunks:
            at = start if as_number else torch.arange(start, start + length)
            logits.append(model(ids[:, start : start + length], at))
            start += length
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([1] * 9, id="token by token", marks=pytest.mark.slow),
        pytest.param([4, 1, 3, 1], id="chunks"),
    ],
)
@pytest.mark.parametrize("style", ["interleaved groups", "slot cache", "larger cache"])
def test_cached_decoding_equals_the_full_forward(style: str, chunks: list[int]) -> None:
    model = styles.decoder(STYLES[style])
    ids = styles.tokens()
    expected, _ = by_definition(model, ids, 2)
    if hasattr(model, "allocate"):
        model.allocate(ids.shape[0])
    depthify(model, 2, budget=float("inf"))
    logits = _decode(model, ids, chunks, as_number=style == "larger cache")
    assert all(layer.cached for layer in explain(model).layers)
    assert relative(logits, expected) < 1e-10
    if style == "larger cache":
        assert model.blocks[1].attention.values[2:].abs().max() == 0, "only the sequences in use are written"


FLEX = {
    "causal mask_mod": dict(mask=lambda b, h, q, k: q >= k),
    "window": dict(mask=lambda b, h, q, k: (q >= k) & (q - k < 4)),
    "causal score_mod": dict(score=lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf"))),
    "soft-cap and positions": dict(
        mask=lambda b, h, q, k: q >= k, score=lambda s, b, h, q, k: 5 * torch.tanh(s / 5) - 0.1 * (q - k)
    ),
    "scale inside": dict(mask=lambda b, h, q, k: q >= k, score=lambda s, b, h, q, k: 0.5 * s),
}


OFTEN = ("causal score_mod", "soft-cap and positions")


@pytest.mark.parametrize("kind", [k if k in OFTEN else pytest.param(k, marks=pytest.mark.slow) for k in FLEX])
def test_flex_attention_is_causal_if_its_functions_are(kind: str) -> None:
    made = FLEX[kind]
    model = styles.decoder(
        lambda: styles.Decoder(lambda: styles.Flex(9, made.get("mask"), made.get("score")))
    )
    ids = styles.tokens()
    for block in model.blocks:
        block.attention.plain = True
    expected, seen = by_definition(model, ids, 2)
    assert all(x.mixed for x in seen)
    for block in model.blocks:
        block.attention.plain = False
    depthify(model, 2, budget=float("inf"))
    with torch.no_grad():
        logits = model(ids)
    assert [layer.written_as for layer in explain(model).layers] == ["flex_attention"] * styles.LAYERS
    assert relative(logits, expected) < 1e-10


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        pytest.param(dict(mask=lambda b, h, q, k: q - k < 4), "it is not causal", marks=pytest.mark.slow),
        pytest.param(
            dict(score=lambda s, b, h, q, k: s - (q - k).abs()), "it is not causal", marks=pytest.mark.slow
        ),
        (dict(mask=lambda b, h, q, k: q >= k, score=lambda s, b, h, q, k: s * (h + 1)), "no one scale"),
    ],
    ids=["both sides", "no mask", "a scale for each head"],
)
def test_flex_attention_of_another_kind_is_refused(made: dict[str, Any], reason: str) -> None:
    model = styles.decoder(
        lambda: styles.Decoder(lambda: styles.Flex(9, made.get("mask"), made.get("score")))
    )
    depthify(model, 2)
    with pytest.raises(UnsupportedModelError, match=reason), torch.no_grad():
        model(styles.tokens())


def test_scores_are_taken_before_every_kind_of_rotation() -> None:
    for style in ("interleaved groups", "complex rotary", "slot cache"):
        model = depthify(styles.decoder(STYLES[style]), 2, budget=float("inf"))
        with torch.no_grad():
            model(styles.tokens())
        assert explain(model).scored == "before rotation", style


def test_scores_that_heads_exchange_are_refused() -> None:
    """Talking heads: a projection over heads between scores and softmax; no head has a query of its own."""

    class Talking(styles.FusedSplit):
        def __init__(self) -> None:
            super().__init__(by_hand=True)
            self.talk = nn.Linear(styles.HEADS, styles.HEADS, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, width = x.shape
            q, k, v = self.qkv(x).split(width, dim=2)
            q, k, v = (t.view(batch, length, styles.HEADS, styles.SIZE).transpose(1, 2) for t in (q, k, v))
            scores = self.talk((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            scores = scores.masked_fill(self.allowed[:, :, :length, :length] == 0, float("-inf"))
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    model = depthify(styles.decoder(lambda: styles.Decoder(Talking)), 2)
    with pytest.raises(UnsupportedModelError):
        model(styles.tokens())

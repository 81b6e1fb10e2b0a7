"""depth_weights() against the formula, and what it must leave alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from definition import Definition, defined
from plain import Decoder, decoder, tokens
from tiny import tiny
from tiny import tokens as tiny_tokens
from torch import Tensor, nn

from depthify import DepthConfig, DepthWeights, depth_weights, depthify, explain, set_self_bias
from depthify.cli import main
from depthify.errors import DepthifyError, OptionError
from depthify.reference import depth_mix
from depthify.reference import depth_weights as weights_by_formula

IDS = tokens()


def _expected(
    model: Decoder, ids: Tensor, stride: int | None = None, window: int = 0, bias: float = 0.0
) -> dict[int, Tensor]:
    """By depth: (sources + 1, B, H, T), from the weights of ``model`` and the formula alone."""
    config = DepthConfig(stride=stride, recent_window=window).resolve(len(model.blocks))
    x, keys, values, found = model.embed(ids), [], [], {}
    for depth, block in enumerate(model.blocks):
        q, k, v = block.attention.project(block.norm(x))
        sources = config.sources(depth)
        if sources:
            scale = block.attention.size**-0.5
            read = [keys[j] for j in sources] + [k]
            found[depth] = weights_by_formula(q, read, scale, bias).movedim(-1, 0)
            v = depth_mix(q, read, [values[j] for j in sources] + [v], scale, bias)
        keys.append(k)
        values.append(v)
        x = x + block.attention.attend(q, k, v)
        x = x + block.mlp(x)
    return found


def _same(found: DepthWeights, expected: dict[int, Tensor]) -> None:
    assert [layer.depth for layer in found.layers] == sorted(expected)
    for layer in found.layers:
        assert layer.weights.shape == expected[layer.depth].shape
        torch.testing.assert_close(layer.weights, expected[layer.depth], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(layer.weights.sum(0), torch.ones_like(layer.weights[0]))


@pytest.mark.parametrize("regions", ["model", "block"])
@pytest.mark.parametrize(("stride", "window"), [(2, 0), (1, 0), (3, 2), (4, 1)])
def test_against_the_formula(stride: int, window: int, regions: str) -> None:
    model = decoder(layers=5)
    expected = _expected(model, IDS, stride, window)
    with torch.no_grad():
        found = depth_weights(depthify(model, stride, recent_window=window, regions=regions, budget=1.0), IDS)
    _same(found, expected)
    sources = DepthConfig(stride=stride, recent_window=window).sources
    assert [layer.sources for layer in found.layers] == [sources(layer.depth) for layer in found.layers]
    assert (found.depths, found.stride, found.recent_window) == (5, stride, window)


def test_a_model_that_is_not_mixed_is_looked_at_as_if_it_were() -> None:
    model = decoder()
    before = (type(model), sorted(vars(model)), [type(m) for m in model.modules()])
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    plain = model(IDS)[0]
    _same(depth_weights(model, IDS), _expected(model, IDS))
    assert before == (type(model), sorted(vars(model)), [type(m) for m in model.modules()])
    assert hooks == [len(m._forward_pre_hooks) for m in model.modules()]
    assert torch.equal(model(IDS)[0], plain)
    with pytest.raises(DepthifyError):
        explain(model)


@pytest.mark.parametrize("regions", ["model", "block"])
def test_a_mixed_model_stays_as_it_is(regions: str) -> None:
    graphs = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    model = depthify(decoder(), 2, regions=regions, backend=backend)
    out = model(IDS)[0]
    state, count, report = model._depthify, len(graphs), explain(model)
    hooks = [dict(m._forward_pre_hooks) for m in model.modules()]
    depth_weights(model, IDS)
    assert model._depthify is state and explain(model) == report
    assert hooks == [dict(m._forward_pre_hooks) for m in model.modules()]
    assert torch.equal(model(IDS)[0], out)
    assert len(graphs) == count, "the model was captured again"


def test_it_changes_nothing_when_the_call_fails() -> None:
    model = decoder()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(Exception):  # noqa: B017
        depth_weights(model, torch.zeros(2, 2))
    assert kinds == [type(m) for m in model.modules()] and "_depthify" not in vars(model)
    with pytest.raises(OptionError, match="depth_weights takes an nn.Module"):
        depth_weights(3)  # type: ignore[arg-type]


def test_compiled_models() -> None:
    expected = _expected(decoder(), IDS, 2)
    model = depthify(decoder(), 2)
    _same(depth_weights(torch.compile(model, backend="aot_eager"), IDS), expected)
    model.compile(backend="aot_eager")
    _same(depth_weights(model, IDS), expected)
    assert model._compiled_call_impl is not None


def test_the_self_bias_is_part_of_the_weights() -> None:
    model = depthify(decoder(), 2, self_bias=1.5)
    _same(depth_weights(model, IDS), _expected(decoder(), IDS, 2, bias=1.5))
    set_self_bias(model, float("inf"))
    assert torch.equal(depth_weights(model, IDS).self_weight(), torch.ones(4, dtype=torch.float64))


class _Checkpointed(nn.Module):
    def __init__(self, inner: Decoder) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = inner.embed, inner.blocks, inner.head

    def forward(self, ids: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.embed(ids)
        for block in self.blocks:
            x, _ = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_layers_inside_checkpoints() -> None:
    model = decoder()
    _same(
        depth_weights(depthify(_Checkpointed(copy.deepcopy(model)), 1, budget=1.0), IDS),
        _expected(model, IDS, 1),
    )


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_transformers_models(kind: str) -> None:
    model = tiny(kind, torch.float64)
    ids = tiny_tokens()
    seen: list[Tensor] = []
    original = Definition.value

    def value(self: Definition, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        rotated = self.unrotated
        chosen = [self.sources[j] for j in self.config.sources(len(self.sources))]
        if chosen:
            q, k = rotated if rotated is not None else (query, key)
            seen.append(weights_by_formula(q, [k for k, _ in chosen] + [k], scale).movedim(-1, 0))
        return original(self, query, key, value, scale)

    with pytest.MonkeyPatch.context() as patch, defined(model, 2) as twin, torch.no_grad():
        patch.setattr(Definition, "value", value)
        twin(ids, use_cache=False)
    config = copy.deepcopy(vars(model.config))
    found = depth_weights(depthify(model, 2), ids, use_cache=False)
    for layer, expected in zip(found.layers, seen, strict=True):
        torch.testing.assert_close(layer.weights, expected, rtol=1e-9, atol=1e-12)
    plain = tiny(kind, torch.float64)
    assert len(depth_weights(plain, ids, use_cache=False).layers) == 3
    assert vars(plain.config).keys() == config.keys()


def test_cached_calls_show_the_tokens_they_read() -> None:
    from transformers import DynamicCache

    model = depthify(tiny("qwen3", torch.float64), 2)
    ids = tiny_tokens(8)
    whole = depth_weights(model, ids, use_cache=False)
    cache = DynamicCache()
    parts = [depth_weights(model, part, cache=cache) for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:])]
    assert cache.get_seq_length() == 8
    for i, layer in enumerate(whole.layers):
        joined = torch.cat([part.layers[i].weights for part in parts], -1)
        torch.testing.assert_close(joined, layer.weights, rtol=1e-9, atol=1e-12)


def test_averages() -> None:
    model = decoder(layers=5)
    expected = _expected(model, IDS, 2)
    found = depth_weights(depthify(model, 2), IDS)
    mean, heads, own, entropy = found.mean(), found.mean(per_head=True), found.self_weight(), found.entropy()
    assert mean.shape == (5, 5) and heads.shape == (5, 5, 2)
    assert own[0] == 1 and entropy[0] == 0
    for depth, weights in expected.items():
        sources = [*found[depth].sources, depth]
        torch.testing.assert_close(mean[depth, sources], weights.mean((1, 2, 3)))
        torch.testing.assert_close(heads[depth, sources], weights.mean((1, 3)))
        torch.testing.assert_close(own[depth], weights[-1].mean())
        torch.testing.assert_close(entropy[depth], -(weights * weights.log()).sum(0).mean())
        assert mean[depth].isnan().sum() == 5 - len(sources)
    assert f"{own[4]:.3f}" in str(found) and "4 mixed (stride 2" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["mixed"][3]["sources"] == [0, 2]
    with pytest.raises(OptionError, match=r"depth=0.*allowed are \[1, 2, 3, 4\]"):
        found[0]


def test_padding_does_not_count() -> None:
    model = depthify(tiny("qwen3", torch.float64), 2)
    ids = tiny_tokens(6, batch=1)
    alone = depth_weights(model, ids, use_cache=False)
    padded = torch.cat([torch.zeros(1, 3, dtype=ids.dtype), ids], 1)
    mask = torch.tensor([[0] * 3 + [1] * 6])
    positions = torch.tensor([[0] * 3 + list(range(6))])
    found = depth_weights(model, padded, attention_mask=mask, position_ids=positions, use_cache=False)
    torch.testing.assert_close(found.mean(), alone.mean(), equal_nan=True)
    torch.testing.assert_close(found.entropy(), alone.entropy())


@pytest.mark.parametrize(("layers", "stride"), [(4, 2), (6, 1), (2, 1)])
def test_plot(tmp_path: Path, layers: int, stride: int) -> None:
    pytest.importorskip("matplotlib")
    found = depth_weights(depthify(decoder(layers=layers), stride, budget=1.0), IDS)
    found.plot(tmp_path / "weights.png", "a small model")
    assert (tmp_path / "weights.png").stat().st_size > 5000
    with pytest.raises(OptionError, match="plot=.*png"):
        found.plot(tmp_path / "weights.doc")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(96)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0").save_pretrained(tmp_path / "model")
    model = tiny("qwen3")
    model.save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i}" for i in range(3, 40)))
    folder = str(tmp_path / "model")
    assert main(["weights", folder, "--text", str(text), "--max-tokens", "16", "--stride", "1"]) == 0
    assert "3 mixed (stride 1" in capsys.readouterr().out
    assert main(["weights", folder, "--text", str(text), "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    ids = torch.arange(3, 40)[None]
    own = depth_weights(depthify(model, 2), ids, use_cache=False).self_weight()
    assert answer["tokens"] == 37 and answer["stride"] == 2
    for row in answer["mixed"]:
        assert row["self_weight"] == pytest.approx(own[row["depth"]].item(), abs=1e-5)
    assert main(["weights", folder, "--text", str(tmp_path / "nothing")]) == 1
    assert "cannot be read" in capsys.readouterr().err

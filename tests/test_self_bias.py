"""self_bias: from the vanilla model to the mixed one, without a new capture and without state."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import Decoder, decoder, tokens
from tiny import tiny
from tiny import tokens as tiny_tokens
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from depthify import DepthConfig, WarmStart, depthify, restore, set_self_bias
from depthify.errors import OptionError
from depthify.reference import depth_mix

IDS = tokens()


def _definition(model: Decoder, ids: Tensor, stride: int, bias: float, window: int = 0) -> Tensor:
    config = DepthConfig(stride=stride, recent_window=window)
    x, keys, values = model.embed(ids), [], []
    for depth, block in enumerate(model.blocks):
        q, k, v = block.attention.project(block.norm(x))
        sources = config.sources(depth)
        if sources:
            read = [keys[j] for j in sources] + [k]
            v = depth_mix(q, read, [values[j] for j in sources] + [v], block.attention.size**-0.5, bias)
        keys.append(k)
        values.append(v)
        x = x + block.attention.attend(q, k, v)
        x = x + block.mlp(x)
    return model.head(x)


def _gradients(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    out = run()
    out.square().mean().backward()
    return out.detach(), [p.grad.clone() for p in model.parameters()]


def _counting() -> tuple[list[GraphModule], Callable[..., Any]]:
    graphs: list[GraphModule] = []

    def backend(graph_module: GraphModule, inputs: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    return graphs, backend


@pytest.mark.parametrize("regions", ["model", "block"])
@pytest.mark.parametrize(("stride", "window"), [(2, 0), (4, 0), (1, 0), (3, 2)])
def test_values_and_gradients_without_a_new_capture(stride: int, window: int, regions: str) -> None:
    twin = decoder()
    graphs, backend = _counting()
    model = depthify(
        decoder(), stride, recent_window=window, budget=1.0, self_bias=3.0, regions=regions, backend=backend
    )
    for bias in (3.0, 0.75, -1.5, 0.0):
        set_self_bias(model, bias)
        found = _gradients(model, lambda: model(IDS)[0])
        expected = _gradients(twin, lambda b=bias: _definition(twin, IDS, stride, b, window))
        torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-7, atol=1e-9)
    assert len(graphs) == (1 if regions == "model" else len({len(g.graph.nodes) for g in graphs}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 4])
def test_infinity_is_exactly_the_vanilla_model(stride: int, dtype: torch.dtype) -> None:
    vanilla = decoder(dtype=dtype)
    model = depthify(decoder(dtype=dtype), stride, budget=1.0, self_bias=math.inf)
    expected = _gradients(vanilla, lambda: vanilla(IDS)[0])
    found = _gradients(model, lambda: model(IDS)[0])
    assert torch.equal(found[0], expected[0])
    if dtype != torch.bfloat16:  # eager sums the same numbers in another order
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-6)
    set_self_bias(model, 1e6)
    assert torch.equal(model(IDS)[0], expected[0])


def test_nothing_is_inserted_unless_asked_for() -> None:
    def count(**options: Any) -> int:
        graphs, backend = _counting()
        depthify(decoder(), 2, backend=backend, **options)(IDS)
        return len(graphs[0].graph.nodes)

    assert count() == count(self_bias=None) == count(self_bias=0) == count(self_bias=0.0)
    assert count(self_bias=1) == count() + 5  # the scalar, its place in this graph, one sum per mixed layer


def test_the_place_comes_and_goes() -> None:
    graphs, backend = _counting()
    model = depthify(decoder(), 2, backend=backend)
    mixed = model(IDS)[0]
    set_self_bias(model, 2)
    torch.testing.assert_close(model(IDS)[0], _definition(decoder(), IDS, 2, 2.0))
    set_self_bias(model, None)
    assert torch.equal(model(IDS)[0], mixed)
    assert len(graphs) == 2, "the first capture is kept"
    restore(model)
    with pytest.raises(OptionError, match="not mixed"):
        set_self_bias(model, 1.0)


def test_no_state(tmp_path: Path) -> None:
    model = depthify(tiny("qwen3"), 2, self_bias=4.0)
    twin = tiny("qwen3")
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in twin.named_buffers()]
    assert model.state_dict().keys() == twin.state_dict().keys()
    model.save_pretrained(tmp_path)
    assert "bias" not in {k for k in vars(model.config) if k not in vars(twin.config)}
    from transformers import AutoModelForCausalLM

    ids = tiny_tokens()
    reloaded = depthify(AutoModelForCausalLM.from_pretrained(tmp_path))
    set_self_bias(model, 0.0)
    torch.testing.assert_close(reloaded(ids).logits, model(ids).logits)


def test_copies_have_a_bias_of_their_own() -> None:
    model = depthify(decoder(), 2, self_bias=2.0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    set_self_bias(model, 0.0)
    for twin in twins:
        torch.testing.assert_close(twin(IDS)[0], _definition(decoder(), IDS, 2, 2.0))
    torch.testing.assert_close(model(IDS)[0], _definition(decoder(), IDS, 2, 0.0))


@pytest.mark.parametrize("fullgraph", [True, False])
def test_under_an_outer_compile(fullgraph: bool) -> None:
    graphs, backend = _counting()
    model = depthify(decoder(), 2, self_bias=2.0)

    @torch.compile(backend=backend, fullgraph=fullgraph)
    def loss(ids: Tensor) -> Tensor:
        return model(ids)[0].square().mean()

    for bias in (2.0, 0.5, 0.0):
        set_self_bias(model, bias)
        torch.testing.assert_close(loss(IDS), _definition(decoder(), IDS, 2, bias).square().mean())
    assert len(graphs) == 1


class _Checkpointed(nn.Module):
    def __init__(self, inner: Decoder) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = inner.embed, inner.blocks, inner.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x, _ = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("whole", [False, True])
def test_checkpointing(whole: bool) -> None:
    """Of each block, and of the whole mixed model inside an outer compile."""
    twin = decoder()
    model = depthify(decoder() if whole else _Checkpointed(decoder()), 2, self_bias=1.25)

    def run(ids: Tensor) -> Tensor:
        return checkpoint(lambda x: model(x)[0], ids, use_reentrant=False) if whole else model(ids)

    found = _gradients(model, lambda: torch.compile(run, backend="aot_eager", fullgraph=True)(IDS))
    expected = _gradients(twin, lambda: _definition(twin, IDS, 2, 1.25))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_inference_mode_in_between() -> None:
    model = decoder()
    with torch.inference_mode():
        depthify(model, 2, self_bias=2.0)
        model(IDS)
        set_self_bias(model, 1.0)
    set_self_bias(model, 0.5)
    torch.testing.assert_close(model(IDS)[0], _definition(decoder(), IDS, 2, 0.5))


def test_cached_decoding() -> None:
    model = depthify(tiny("qwen3", torch.float64), 2, self_bias=1.0)
    ids = tiny_tokens(7)
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        parts = [
            model(part, cache=cache).logits for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:6], ids[:, 6:])
        ]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", ["1", math.nan, [1.0], True, torch.zeros(())])
def test_bad_values(bias: Any) -> None:
    with pytest.raises(OptionError, match="self_bias=.*must be a number"):
        depthify(decoder(), 2, self_bias=bias)
    model = depthify(decoder(), 2)
    with pytest.raises(OptionError, match="self_bias=.*must be a number"):
        set_self_bias(model, bias)


def test_only_modules_have_one() -> None:
    program = torch.export.export(decoder(), (IDS,))
    with pytest.raises(OptionError, match="self_bias=1.0: only an nn.Module"):
        depthify(program, 2, self_bias=1.0)


def test_schedules() -> None:
    linear, cosine = WarmStart(steps=4, start=8.0), WarmStart(steps=4, start=8.0, shape="cosine")
    assert [linear(i) for i in (0, 1, 2, 4, 9)] == [8.0, 6.0, 4.0, 0.0, 0.0]
    assert cosine(0) == 8.0 and cosine(2) == pytest.approx(4.0) and cosine(4) == pytest.approx(0.0)
    model = depthify(decoder(), 2, self_bias=linear)
    torch.testing.assert_close(model(IDS)[0], _definition(decoder(), IDS, 2, 8.0))
    for wrong, text in (
        (dict(steps=0), "steps=0"),
        (dict(steps=1.5), "steps=1.5"),
        (dict(steps=2, start=0), "start=0"),
        (dict(steps=2, start=math.inf), "start=inf"),
        (dict(steps=2, shape="steep"), "shape='steep'"),
    ):
        with pytest.raises(OptionError, match=text):
            WarmStart(**wrong)


def test_the_trainer_callback(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from depthify.trainer import SelfBiasCallback

    graphs, backend = _counting()
    schedule = WarmStart(steps=3, start=6.0)
    model = depthify(tiny("llama"), 2, self_bias=schedule, backend=backend).train()
    ids = tiny_tokens(8, batch=1)[0]
    seen: list[float] = []

    class Watch(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(model.model._depthify.bias_value)
            return super().compute_loss(model, inputs, *args, **kwargs)

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=5, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": ids, "labels": ids}] * 16
    Watch(model=model, args=arguments, train_dataset=data, callbacks=[SelfBiasCallback(schedule)]).train()
    assert seen == [6.0, 6.0, 4.0, 4.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    assert model.model._depthify.bias_value == 0.0
    assert len(graphs) == 1

"""Block regions: each block captured on its own, sources carried between them as ordinary tensors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from definition import defined, logits_by_definition, relative
from plain import Decoder, decoder, definition
from plain import tokens as plain_tokens
from tiny import tiny, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from depthify import DepthifyError, depthify, explain, restore
from depthify.errors import NotMixedError, OptionError, UnsupportedModelError

IDS = plain_tokens()


def _mixed(stride: int = 2, layers: int = 4, **options: Any) -> Decoder:
    return depthify(decoder(layers=layers), stride, regions="block", **options)


def _gradients(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = run()
    out.square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def _same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-10)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("stride", "window"), [(2, 0), (1, 0), (3, 2), (4, 1)])
def test_values_and_gradients(stride: int, window: int, backend: str) -> None:
    twin = decoder()
    expected = _gradients(twin, lambda: definition(twin, IDS, stride, window))
    model = _mixed(stride, recent_window=window, backend=backend, budget=1.0)
    _same(_gradients(model, lambda: model(IDS)[0]), expected)
    report = explain(model)
    assert [x.sources for x in report.layers] == [
        tuple(j for j in range(i) if j % stride == 0 or j >= i - window) for i in range(4)
    ]
    assert "captured block by block" in report.notes[0]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gpt2"])
def test_transformers_models(kind: str) -> None:
    model = tiny(kind, torch.float64)
    ids = tokens()
    expected = logits_by_definition(model, ids, stride=2)
    with torch.no_grad():
        assert relative(depthify(model, 2, regions="block")(ids, use_cache=False).logits, expected) < 1e-10


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_cached_decoding(cache: str) -> None:
    from transformers import DynamicCache, StaticCache

    model = tiny("gpt2", torch.float64)
    ids = tokens(8)
    expected = logits_by_definition(model, ids, stride=2)
    depthify(model, 2, regions="block")
    store = DynamicCache() if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=16)
    parts = []
    with torch.no_grad():
        for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:7], ids[:, 7:]):
            parts.append(model(part, cache=store).logits)
    assert relative(torch.cat(parts, 1), expected) < 1e-10


def _captures(layers: int) -> int:
    torch._dynamo.reset()
    count: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        count.append(1)
        return gm.forward

    _mixed(layers // 2, layers, backend=backend)(IDS)
    return len(count)


def test_identical_blocks_share_a_capture() -> None:
    assert _captures(6) == _captures(12) <= 5


def test_several_forwards_in_flight() -> None:
    twin, model = decoder(), _mixed()
    one, two = plain_tokens(seed=1), plain_tokens(seed=2)

    def both(run: Callable[[Tensor], Tensor]) -> Tensor:
        first, second = run(one), run(two)
        return first.square() + second

    expected = _gradients(twin, lambda: both(lambda ids: definition(twin, ids, 2)))
    _same(_gradients(model, lambda: both(lambda ids: model(ids)[0])), expected)


class Checkpointed(Decoder):
    reentrant = False

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: b(y)[0], x, use_reentrant=self.reentrant)
        return self.head(x), []


def _checkpointed(**options: Any) -> Decoder:
    model = decoder()
    model.__class__ = Checkpointed
    return depthify(model, 2, regions="block", **options)


@pytest.mark.parametrize("compiled_first", [False, True])
def test_checkpoint_around_each_block(compiled_first: bool) -> None:
    twin, model = decoder(), _checkpointed(backend="aot_eager")
    expected = _gradients(twin, lambda: definition(twin, IDS, 2))
    if compiled_first:
        with torch.no_grad():
            model(IDS)
    _same(_gradients(model, lambda: model(IDS)[0]), expected)


def test_replay_after_another_forward() -> None:
    twin, model = decoder(), _checkpointed()
    other = plain_tokens(seed=9)

    def run(forward: Callable[[Tensor], Tensor]) -> Tensor:
        out = forward(IDS)
        with torch.no_grad():
            forward(other)
        forward(other)
        return out

    expected = _gradients(twin, lambda: run(lambda ids: definition(twin, ids, 2)))
    _same(_gradients(model, lambda: run(lambda ids: model(ids)[0])), expected)


def test_forwards_without_backward_leave_nothing_behind() -> None:
    model = _mixed(1)
    kept = []
    for seed in range(4):
        out = model(plain_tokens(seed=seed))[0]
        kept.append(len(model._depthify._replays))
        del out
    assert kept == [kept[0]] * 4
    model._depthify._forget()
    assert not model._depthify._replays


def test_reentrant_checkpointing_is_refused() -> None:
    model = _checkpointed()
    model.reentrant = True
    with pytest.raises(NotMixedError, match="use_reentrant=False"):
        model(IDS)[0].sum().backward()


@pytest.mark.parametrize("reentrant", [None, False])
def test_gradient_checkpointing_of_transformers(reentrant: bool | None) -> None:
    model = tiny("qwen3", torch.float64).train()
    ids = tokens()
    with defined(model, 2) as twin:
        twin(ids, labels=ids, use_cache=False).loss.backward()
        expected = {name: p.grad.clone() for name, p in twin.named_parameters()}
    model.gradient_checkpointing_enable(*([] if reentrant is None else [{"use_reentrant": reentrant}]))
    depthify(model, 2, regions="block")
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, p in model.named_parameters():
        assert relative(p.grad, expected[name]) < 1e-7, name


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
def test_outer_compile(fullgraph: bool, breaks: bool) -> None:
    if breaks and fullgraph:
        pytest.skip("a graph break contradicts fullgraph")
    twin, model = decoder(), decoder()
    if breaks:

        class Breaking(Decoder):
            def forward(self, ids: Tensor, past: Any = None) -> Any:
                x = self.embed(ids)
                for block in self.blocks:
                    torch._dynamo.graph_break()
                    x, _ = block(x)
                return self.head(x), []

        model.__class__ = Breaking
    depthify(model, 2, regions="block")
    run = torch.compile(lambda ids: model(ids)[0] + 0.0, backend="aot_eager", fullgraph=fullgraph)
    expected = _gradients(twin, lambda: definition(twin, IDS, 2))
    for _ in range(2):
        _same(_gradients(model, lambda: run(IDS)), expected)


class Passive(nn.Module):
    """A layer without attention, as a state-space layer is in a hybrid."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def forward(self, x: Tensor, past: Any = None) -> Any:
        return x + self.mix(x), None


def _hybrid() -> Decoder:
    model = decoder(layers=4)
    torch.manual_seed(3)
    blocks = list(model.blocks)
    model.blocks = nn.ModuleList([Passive(), blocks[0], blocks[1], Passive(), blocks[2], blocks[3]]).double()
    return model


def test_blocks_without_attention_do_not_count() -> None:
    whole, model = depthify(_hybrid(), 2), depthify(_hybrid(), 2, regions="block")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(IDS)[0], whole(IDS)[0], rtol=1e-10, atol=1e-10)
    assert [x.module for x in explain(model).layers] == [f"blocks.{i}" for i in (1, 2, 4, 5)]
    with pytest.raises(UnsupportedModelError, match="give stride=2"):
        depthify(_hybrid(), regions="block")(IDS)


class Looped(Decoder):
    def forward(self, ids: Tensor, past: Any = None) -> Any:
        x = self.embed(ids)
        for _ in range(3):
            for block in self.blocks:
                x, _ = block(x)
        return self.head(x), []


def test_looped_blocks_count_once_per_execution() -> None:
    whole, model = decoder(layers=2), decoder(layers=2)
    whole.__class__ = model.__class__ = Looped
    depthify(whole, 3, budget=1.0)
    depthify(model, 3, regions="block", budget=1.0)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS)[0], whole(IDS)[0], rtol=1e-10, atol=1e-10)
    assert len(explain(model).layers) == 6


class Unlisted(nn.Module):
    """Blocks that are attributes, in no list."""

    def __init__(self) -> None:
        super().__init__()
        inner = decoder(layers=3)
        self.embed, self.head = inner.embed, inner.head
        self.first, self.second, self.third = inner.blocks

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in (self.first, self.second, self.third):
            x, _ = block(x)
        return self.head(x)


def test_blocks_can_be_named() -> None:
    model = Unlisted()
    with pytest.raises(OptionError, match="regions='block'.*blocks="):
        depthify(model, 1, regions="block")
    for wrong in ([], [model.first], [model.first, nn.Linear(2, 2)], "blocks", 3):
        with pytest.raises(OptionError, match="blocks="):
            depthify(model, 1, regions="block", blocks=wrong)
    depthify(model, 1, regions="block", blocks=[model.first, model.second, model.third])
    with torch.no_grad():
        expected = definition(decoder(layers=3), IDS, 1)
        torch.testing.assert_close(model(IDS), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("regions", ["blocks", None, 1, "whole"])
def test_bad_regions(regions: Any) -> None:
    with pytest.raises(OptionError, match="regions="):
        depthify(decoder(), 2, regions=regions)


def test_copies_pickles_and_restores() -> None:
    model = _mixed()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.1)
        changed = restore(copy.deepcopy(twin))
        torch.testing.assert_close(twin(IDS)[0], definition(changed, IDS, 2), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(model(IDS)[0], definition(decoder(), IDS, 2), rtol=1e-10, atol=1e-10)
        again = pickle.loads(pickle.dumps(model))
        torch.testing.assert_close(again(IDS)[0], definition(decoder(), IDS, 2), rtol=1e-10, atol=1e-10)
        assert twin.blocks[0]._depthify.regions is twin._depthify is not model._depthify
        restore(model)
        torch.testing.assert_close(model(IDS)[0], decoder()(IDS)[0])
    assert [type(m).__mro__ for m in model.modules()] == [type(m).__mro__ for m in decoder().modules()]


def test_a_block_on_its_own_raises() -> None:
    model = _mixed()
    for run in (model.blocks[1], torch.compile(model.blocks[1], backend="eager")):
        with pytest.raises(NotMixedError, match="on its own"):
            run(torch.randn(2, 6, 32, dtype=torch.float64))


def test_eager_stance_and_breaks_inside_a_block_raise() -> None:
    model = _mixed()
    torch.compiler.set_stance("force_eager")
    try:
        with pytest.raises(NotMixedError, match="without being captured"):
            model(IDS)
    finally:
        torch.compiler.set_stance("default")

    class Breaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x

    broken = decoder()
    broken.blocks[2].mlp = Breaking()
    depthify(broken, 2, regions="block")
    with pytest.raises(NotMixedError, match="one graph"):
        broken(IDS)


def test_hooks_that_cut_the_graph_choose_block_regions() -> None:
    model = decoder()
    seen: list[int] = []
    hook = torch.compiler.disable(lambda module, args: seen.append(1))
    for block in model.blocks:
        block.register_forward_pre_hook(hook)
    depthify(model, 2)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS)[0], definition(decoder(), IDS, 2), rtol=1e-10, atol=1e-10)
    assert len(seen) == 4 and "hooks" in explain(model).notes[0]
    with pytest.raises(DepthifyError):
        depthify(restore(model), 2, regions="model")(IDS)


def test_hooks_added_later_switch_to_block_regions() -> None:
    model = depthify(decoder(), 2)
    for block in model.blocks:
        block.register_forward_pre_hook(torch.compiler.disable(lambda module, args: None))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS)[0], definition(decoder(), IDS, 2), rtol=1e-10, atol=1e-10)
    assert "captured block by block" in explain(model).notes[0]


def _hidden_from_dynamo(module: nn.Module, args: Any, output: Any) -> None:
    """A hook that no capture goes through."""


def test_transformers_models_switch_and_record_what_lies_between_blocks() -> None:
    """Transformers has hooks of its own inside the blocks, which do nothing unless they are asked to."""
    ids, bound = tokens(), 1e-6  # its own softmax is in float32
    model = tiny("qwen3", torch.float64, attention="eager")
    expected = logits_by_definition(model, ids, stride=2)
    depthify(model, 2)
    for layer in model.model.layers:
        layer.register_forward_hook(torch.compiler.disable(_hidden_from_dynamo))
    with torch.no_grad():
        assert relative(model(ids).logits, expected) < bound
        found = model(ids, output_hidden_states=True)
        assert "captured block by block" in explain(model).notes[0]
        assert relative(found.logits, expected) < bound and len(found.hidden_states) == 5
        with pytest.raises(NotMixedError, match="output_attentions was asked for.*regions='model'"):
            model(ids, output_attentions=True)
        with pytest.raises(NotMixedError, match="output_attentions was asked for"):
            copy.deepcopy(model)(ids, output_attentions=True)
        restore(model)
        assert len(model(ids, output_attentions=True).attentions) == 4


def test_what_cannot_be_captured_either_way_leaves_the_model_as_it_was() -> None:
    ids = tokens()
    model = tiny("qwen3", torch.float64)
    expected = logits_by_definition(model, ids, stride=2)
    depthify(model, 2)
    hooks = [
        layer.mlp.register_forward_hook(torch.compiler.disable(_hidden_from_dynamo))
        for layer in model.model.layers
    ]
    with pytest.raises(NotMixedError, match="nor block by block"):
        model(ids)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        assert relative(model(ids).logits, expected) < 1e-10
        assert not explain(model).notes
        assert len(model(ids, output_hidden_states=True).hidden_states) == 5
    with pytest.raises(NotMixedError, match="on its own"):
        model.model.layers[0](torch.zeros(1, 2, 64, dtype=torch.float64))


def test_flex_attention_of_transformers() -> None:
    """Dynamo does not capture how it makes its mask."""
    ids = tokens()
    expected = logits_by_definition(tiny("qwen3", torch.float64), ids, stride=2)
    model = depthify(tiny("qwen3", attention="flex_attention"), 2)
    with torch.no_grad():
        assert relative(model(ids).logits, expected) < 1e-5
    assert {x.written_as for x in explain(model).layers} == {"flex_attention"}

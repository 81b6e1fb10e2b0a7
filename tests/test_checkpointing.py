"""Layers in graphs of their own: activation checkpointing and compile regions. Sources cross from body to
body."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from definition import defined, relative
from plain import Decoder, decoder, definition
from plain import tokens as plain_tokens
from tiny import tiny, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from depthify import depthify, explain
from depthify.errors import UnsupportedModelError

IDS = plain_tokens()


class Checkpointed(Decoder):
    """A decoder whose forward runs each block through ``around``."""

    around: Callable[..., Any]

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.around(block, x)
        return self.head(x), []


def _decoder(around: Callable[..., Any], layers: int = 4) -> Decoder:
    model = decoder(layers=layers)
    model.__class__ = type("Checkpointed", (Checkpointed,), {"around": staticmethod(around)})
    return model


def _plain(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: block(y)[0], x, use_reentrant=False)


def _nested(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: _plain(block, y), x, use_reentrant=False)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(block: nn.Module, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(lambda y: block(y)[0], x, use_reentrant=False, context_fn=contexts)


@torch.compiler.nested_compile_region
def _region(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)[0]


def _every_other(block: nn.Module, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    return _plain(block, x) if block.checkpointed else block(x)[0]


class Pairs(Decoder):
    """Two layers per checkpoint."""

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        x = self.embed(ids)
        for i in range(0, len(self.blocks), 2):
            one, two = self.blocks[i], self.blocks[i + 1]
            x = checkpoint(lambda y, one=one, two=two: two(one(y)[0])[0], x, use_reentrant=False)
        return self.head(x), []


def _gradients(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = run()
    out.square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def _check(model: Decoder, stride: int, backend: str, **options: Any) -> None:
    expected, wanted = _gradients(model, lambda: definition(model, IDS, stride))
    depthify(model, stride, backend=backend, **options)
    found, gradients = _gradients(model, lambda: model(IDS)[0])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("around", [_plain, _nested, _selective, _region])
def test_gradients_across_bodies(around: Callable[..., Any], backend: str) -> None:
    _check(_decoder(around), 2, backend)


@pytest.mark.parametrize("stride", [1, 3])
def test_strides(stride: int) -> None:
    _check(_decoder(_plain, layers=5), stride, "aot_eager", budget=1.0)


def test_mixed_with_layers_outside() -> None:
    model = _decoder(_every_other, layers=5)
    for i, block in enumerate(model.blocks):
        block.checkpointed = i % 2 == 0
    _check(model, 1, "aot_eager", budget=1.0)


def test_several_layers_in_one_body() -> None:
    model = decoder(layers=6)
    model.__class__ = Pairs
    _check(model, 2, "aot_eager", budget=1.0)


def test_checkpoint_around_the_whole_model() -> None:
    model = decoder()
    expected, wanted = _gradients(model, lambda: definition(model, IDS, 2))
    depthify(model, 2)
    for run in (
        lambda: checkpoint(lambda ids: model(ids)[0], IDS, use_reentrant=False),
        torch.compile(
            lambda: checkpoint(lambda ids: model(ids)[0], IDS, use_reentrant=False), backend="aot_eager"
        ),
    ):
        found, gradients = _gradients(model, run)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_gradient_checkpointing_of_transformers(reentrant: bool | None, outer: bool) -> None:
    model = tiny("qwen3", torch.float64).train()
    ids = tokens()

    def step(which: nn.Module) -> Tensor:
        return which(ids, labels=ids, use_cache=False).loss

    with defined(model, 2) as twin:
        wanted = step(twin)
        wanted.backward()
        expected = {name: p.grad.clone() for name, p in twin.named_parameters()}
    model.gradient_checkpointing_enable(*([] if reentrant is None else [{"use_reentrant": reentrant}]))
    depthify(model, 2)
    loss = torch.compile(step, backend="aot_eager")(model) if outer else step(model)
    loss.backward()
    assert relative(loss, wanted) < 1e-12
    for name, p in model.named_parameters():
        assert relative(p.grad, expected[name]) < 1e-7, name
    assert len(explain(model).layers) == 4
    model.zero_grad()
    model.gradient_checkpointing_disable()
    step(model).backward()
    for name, p in model.named_parameters():
        assert relative(p.grad, expected[name]) < 1e-7, name


def _saved_bytes(run: Callable[[], Tensor], weights: set[int]) -> int:
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(seen.values())


def test_checkpointing_still_saves_memory() -> None:
    """At most 5 % more than vanilla, plus keys and values of the sources."""
    ids = plain_tokens(64, 4)

    def measure(mixed: bool, around: Callable[..., Any]) -> int:
        torch._dynamo.reset()
        model = _decoder(around, layers=8)
        run = (
            torch.compile(model, backend="aot_eager")
            if not mixed
            else depthify(model, 4, backend="aot_eager")
        )
        run(ids)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return _saved_bytes(lambda: run(ids)[0], weights)

    vanilla, mixed = measure(False, _plain), measure(True, _plain)
    full = measure(True, lambda block, x: block(x)[0])
    sources = 2 * 2 * (4 * 64 * 2 * 8) * 8  # layers 0 and 4: key and value, (B, T, heads, size) of float64
    assert mixed <= 1.05 * vanilla + sources, (vanilla, mixed, sources)
    assert mixed < 0.5 * full, (mixed, full)


class Conditional(Decoder):
    def forward(self, ids: Tensor, past: Any = None) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.cond(x.sum() > 0, lambda y, b=block: b(y)[0], lambda y: y.clone(), (x,))
        return self.head(x), []


def test_layers_that_run_on_a_condition_are_refused() -> None:
    model = decoder(layers=2)
    model.__class__ = Conditional
    depthify(model, 1)
    with pytest.raises(UnsupportedModelError, match="cond"):
        model(IDS)

"""Mixing is kept or an error is raised: every known way to lose it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain import Decoder, decoder, definition, tokens
from torch import Tensor, nn

from depthify import DepthifyError, depthify, explain, restore
from depthify.errors import NotMixedError

IDS = tokens()


def _mixed(stride: int = 2) -> tuple[Decoder, Tensor, Tensor]:
    """A mixed model, its logits by definition, and those of the vanilla model."""
    model = decoder()
    with torch.no_grad():
        expected, vanilla = definition(model, IDS, stride), model(IDS)[0]
    assert not torch.allclose(expected, vanilla, atol=1e-3)
    return depthify(model, stride), expected, vanilla


def _compile(target: object, fullgraph: bool) -> Callable:
    return torch.compile(target, backend="aot_eager", fullgraph=fullgraph)


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, ids: Tensor) -> Tensor:
        return self.child(ids)[0] * 1.0


def _first(function: Callable) -> Callable:
    return lambda ids: function(ids)[0]


OUTER: dict[str, Callable[[nn.Module, bool], Callable[[Tensor], Tensor]]] = {
    "none": lambda m, full: lambda ids: m(ids)[0],
    "torch.compile(model)": lambda m, full: _first(_compile(m, full)),
    "parent module": lambda m, full: _compile(Parent(m), full),
    "function": lambda m, full: _compile(lambda ids: m(ids)[0] + 0.0, full),
    "function around forward": lambda m, full: _compile(lambda ids: m.forward(ids)[0], full),
    "nested compile": lambda m, full: _compile(_first(_compile(m, full)), full),
    "no_grad inside": lambda m, full: _compile(torch.no_grad()(lambda ids: m(ids)[0]), full),
}


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("outer", OUTER)
def test_outer_compile_keeps_mixing(outer: str, fullgraph: bool) -> None:
    model, expected, _ = _mixed()
    run = OUTER[outer](model, fullgraph)
    torch.testing.assert_close(run(IDS), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_module_compile_keeps_mixing(fullgraph: bool) -> None:
    model, expected, _ = _mixed()
    model.compile(backend="aot_eager", fullgraph=fullgraph)
    torch.testing.assert_close(model(IDS)[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_train_step_keeps_mixing(fullgraph: bool) -> None:
    model, expected, _ = _mixed()

    def step(ids: Tensor) -> Tensor:
        logits = model(ids)[0]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    loss = _compile(step, fullgraph)(IDS)
    loss.backward()
    wanted = nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-10, atol=1e-10)
    twin = decoder()
    nn.functional.cross_entropy(
        definition(twin, IDS, 2)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()
    ).backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-9, msg=name)


def test_graph_break_around_the_model_keeps_mixing() -> None:
    model, expected, _ = _mixed()

    def step(ids: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        logits = model(ids)[0]
        torch._dynamo.graph_break()
        return logits + 0.0

    torch.testing.assert_close(_compile(step, False)(IDS), expected, rtol=1e-10, atol=1e-10)


def test_two_mixed_models_and_a_plain_one_in_one_graph() -> None:
    one, two, plain = decoder(seed=0), decoder(seed=1), decoder(seed=2)
    with torch.no_grad():
        expected = definition(one, IDS, 1) + definition(two, IDS, 3) + plain(IDS)[0]
    depthify(one, 1)
    depthify(two, 3)
    run = _compile(lambda ids: one(ids)[0] + two(ids)[0] + plain(ids)[0], True)
    torch.testing.assert_close(run(IDS), expected, rtol=1e-10, atol=1e-10)


def test_several_decoding_steps_in_one_graph() -> None:
    model, expected, _ = _mixed()

    def steps(ids: Tensor) -> Tensor:
        logits, past = model(ids[:, :4])
        parts = [logits]
        for i in (4, 5):
            logits, past = model(ids[:, i : i + 1], past)
            parts.append(logits)
        return torch.cat(parts, 1)

    torch.testing.assert_close(_compile(steps, True)(IDS), expected, rtol=1e-10, atol=1e-10)


def test_compiler_disable_around_keeps_mixing() -> None:
    model, expected, _ = _mixed()
    run = torch.compiler.disable(lambda ids: model(ids)[0])
    torch.testing.assert_close(run(IDS), expected, rtol=1e-10, atol=1e-10)
    run = _compile(lambda ids: torch.compiler.disable(model)(ids)[0], False)
    torch.testing.assert_close(run(IDS), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_eager_stance_raises(stance: str) -> None:
    model, _, _ = _mixed()
    torch.compiler.set_stance(stance)
    try:
        if stance == "eager_on_recompile":  # nothing is compiled yet, so everything would run eagerly
            with pytest.raises(NotMixedError):
                model(IDS)
        else:
            with pytest.raises(NotMixedError, match="without being captured.*force_eager"):
                model(IDS)
    finally:
        torch.compiler.set_stance("default")


def test_dynamo_disabled_by_environment_raises() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from plain import decoder, tokens\nfrom depthify import depthify\n"
        "try: depthify(decoder(), 2)(tokens())\n"
        "except ValueError as error: print(type(error).__name__, 'TORCHDYNAMO_DISABLE' in str(error))\n"
        "else: print('silent')\n"
    )
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["NotMixedError", "True"]


def test_dynamo_config_disable_raises() -> None:
    model, _, _ = _mixed()
    with torch._dynamo.config.patch(disable=True), pytest.raises(NotMixedError):
        model(IDS)


class Breaking(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: object) -> object:
        torch._dynamo.graph_break()
        return self.inner(*args)


class Disabled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.compiler.disable
    def forward(self, *args: object) -> object:
        return self.inner(*args)


@pytest.mark.parametrize("where", ["mlp", "attention", "block"])
@pytest.mark.parametrize("wrapper", [Breaking, Disabled])
def test_graph_break_inside_raises(where: str, wrapper: type[nn.Module]) -> None:
    model = decoder()
    if where == "block":
        model.blocks[2] = wrapper(model.blocks[2])
    else:
        setattr(model.blocks[2], where, wrapper(getattr(model.blocks[2], where)))
    depthify(model, 2)
    with pytest.raises(NotMixedError, match="one graph"):
        model(IDS)
    with pytest.raises(NotMixedError):
        _compile(model, False)(IDS)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        _compile(model, True)(IDS)


def test_outer_recompile_limit_keeps_mixing() -> None:
    model, _, _ = _mixed()
    run = torch.compile(lambda ids: model(ids)[0] + 0.0, backend="aot_eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in (2, 3, 4, 5):
            ids = tokens(length)
            with torch.no_grad():
                torch.testing.assert_close(run(ids), definition(decoder(), ids, 2), rtol=1e-10, atol=1e-10)


def test_own_capture_ignores_suppressed_errors() -> None:
    model = decoder()
    model.blocks[1].mlp = Breaking(model.blocks[1].mlp)
    depthify(model, 2)
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(DepthifyError):
        model(IDS)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_on_its_own_raises(compiled: bool) -> None:
    model, _, _ = _mixed()
    block = _compile(model.blocks[1], False) if compiled else model.blocks[1]
    with pytest.raises(NotMixedError, match="on its own"):
        block(torch.randn(2, 6, 32, dtype=torch.float64))
    restore(model)
    torch._dynamo.reset()
    block(torch.randn(2, 6, 32, dtype=torch.float64))


def test_blocks_run_by_hand_raise() -> None:
    """What pipeline splitters and probes do: the blocks one by one, without the model's forward."""
    model, _, _ = _mixed()

    def by_hand(ids: Tensor) -> Tensor:
        x = model.embed(ids)
        for block in model.blocks:
            x, _ = block(x)
        return model.head(x)

    for run in (by_hand, _compile(by_hand, False), _compile(by_hand, True)):
        with pytest.raises(NotMixedError, match="on its own"):
            run(IDS)


def test_functional_call_keeps_mixing_with_its_own_weights() -> None:
    model, _, _ = _mixed()
    other = decoder(seed=7)
    with torch.no_grad():
        logits, _ = torch.func.functional_call(model, dict(other.named_parameters()), (IDS,))
        torch.testing.assert_close(logits, definition(other, IDS, 2), rtol=1e-10, atol=1e-10)


def test_transforms_of_the_whole_model_keep_mixing() -> None:
    """Gradients of every sample, by torch.func."""
    model, _, _ = _mixed()
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (ids[None],))[0].pow(2).mean()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    with pytest.raises(NotMixedError, match="Compile the transform as a whole"):
        gradients(weights, IDS)
    found = torch.compile(gradients, backend="eager", fullgraph=True)(weights, IDS)
    for i, ids in enumerate(IDS):
        expected = torch.autograd.grad(definition(model, ids[None], 2).pow(2).mean(), [*weights.values()])
        for name, gradient in zip(weights, expected, strict=True):
            torch.testing.assert_close(found[name][i], gradient, rtol=1e-9, atol=1e-11)


def test_forward_hidden_by_an_instance_attribute_is_refused() -> None:
    model = decoder()
    model.forward = model.forward  # as accelerate's hooks do
    with pytest.raises(DepthifyError, match="forward of its own"):
        depthify(model, 2)


def test_captures_that_mix_differently_are_refused() -> None:
    class Sometimes(Decoder):
        def forward(self, ids: Tensor, past: object = None) -> object:
            blocks = self.blocks if ids.shape[1] > 2 else self.blocks[:-1]
            x = self.embed(ids)
            for block in blocks:
                x, _ = block(x)
            return self.head(x), []

    torch.manual_seed(0)
    model = depthify(Sometimes().double(), 2)
    model(IDS)
    with pytest.raises(NotMixedError, match="3 attention layers, and before with 4"):
        model(IDS[:, :2])
    assert len(explain(model).layers) == 4


@pytest.mark.parametrize("tracer", ["jit.trace", "export", "export strict"])
def test_other_tracers_mix_or_raise(tracer: str) -> None:
    model, expected, _ = _mixed()
    try:
        if tracer == "jit.trace":
            program = torch.jit.trace(model, (IDS,))
            logits = program(IDS)[0]
        else:
            exported = torch.export.export(model, (IDS,), strict=tracer.endswith("strict"))
            logits = exported.module()(IDS)[0]
    except Exception as error:
        assert "dynamo" in str(error).lower() or isinstance(error, DepthifyError), error
    else:
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_a_stage_of_a_pipeline_is_refused() -> None:
    """Stages are cut out of copies of a model; mixing over the layers of one stage alone would be wrong."""
    import copy

    model, expected, _ = _mixed()
    stage = copy.deepcopy(model)
    stage.blocks = stage.blocks[:2]
    with pytest.raises(NotMixedError, match="lost 2 of its 4 decoder blocks.*pipeline"):
        stage(IDS)
    torch.testing.assert_close(model(IDS)[0], expected, rtol=1e-10, atol=1e-10)

"""Rewriting captured programs: torch.export, caches, decompositions, files, AOTInductor, ONNX."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from plain import Cache, Decoder, decoder, definition, tokens
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from depthify import depthify
from depthify.errors import NotMixedError, OptionError, UnsupportedModelError

IDS = tokens()
LENGTHS = (6, 4)
EXACT = dict(rtol=1e-10, atol=1e-10)
STRIDE = 2


class Logits(nn.Module):
    """The decoder without its cache."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)[0]


def exported(
    strict: bool, dynamic: bool, dtype: torch.dtype = torch.float64
) -> tuple[Decoder, ExportedProgram]:
    model = decoder(dtype)
    shapes = ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=2, max=64)},) if dynamic else None
    return model, torch.export.export(Logits(model), (IDS,), strict=strict, dynamic_shapes=shapes)


both = pytest.mark.parametrize("strict", [True, False])


@both
@pytest.mark.parametrize("dynamic", [False, True])
def test_program_is_mixed(strict: bool, dynamic: bool) -> None:
    model, program = exported(strict, dynamic)
    mixed = depthify(program, STRIDE)
    assert type(mixed) is ExportedProgram and mixed is not program
    mixed.validate()
    for length, batch in ((6, 2), (4, 2), (9, 3)) if dynamic else ((6, 2),):
        ids = tokens(length, batch)
        torch.testing.assert_close(mixed.module()(ids), definition(model, ids, STRIDE), **EXACT)


@both
def test_given_program_is_untouched(strict: bool) -> None:
    model, program = exported(strict, False)
    before = str(program.graph), copy.deepcopy(program.graph_signature), list(program.state_dict)
    depthify(program, STRIDE)
    assert (str(program.graph), program.graph_signature, list(program.state_dict)) == before
    torch.testing.assert_close(program.module()(IDS), model(IDS)[0], **EXACT)


@both
def test_names_and_weights_stay(strict: bool) -> None:
    _, program = exported(strict, False)
    mixed = depthify(program, STRIDE)
    assert mixed.graph_signature == program.graph_signature
    assert list(mixed.state_dict) == list(program.state_dict)
    assert all(mixed.state_dict[name] is weight for name, weight in program.state_dict.items())
    flat = {name for name, _ in torch.export.unflatten(mixed).named_parameters()}
    assert flat == set(program.state_dict)


@both
def test_decomposed_before_and_after(strict: bool) -> None:
    model, program = exported(strict, True)
    expected = definition(model, IDS, STRIDE)
    for mixed in (
        depthify(program.run_decompositions({}), STRIDE),
        depthify(program, STRIDE).run_decompositions({}),
        depthify(program, STRIDE).run_decompositions(),
    ):
        torch.testing.assert_close(mixed.module()(IDS), expected, **EXACT)


def test_core_aten_program_is_mixed_or_refused() -> None:
    """The default decompositions write the attention out, with half of the scale in query and in key."""
    model, program = exported(False, False)
    try:
        mixed = depthify(program.run_decompositions(), STRIDE)
    except UnsupportedModelError:
        return  # the documentation says: rewrite first, then decompose
    torch.testing.assert_close(mixed.module()(IDS), definition(model, IDS, STRIDE), **EXACT)


@both
def test_saved_and_loaded(strict: bool) -> None:
    model, program = exported(strict, True)
    file = io.BytesIO()
    torch.export.save(depthify(program, STRIDE), file)
    file.seek(0)
    loaded = torch.export.load(file)
    torch.testing.assert_close(loaded.module()(IDS), definition(model, IDS, STRIDE), **EXACT)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    mixed = depthify(torch.export.load(file), STRIDE)
    torch.testing.assert_close(mixed.module()(IDS), definition(model, IDS, STRIDE), **EXACT)


@both
def test_gradients(strict: bool) -> None:
    model, program = exported(strict, False)
    mixed = depthify(program, STRIDE).module()
    mixed(IDS).pow(2).mean().backward()
    twin = decoder()
    definition(twin, IDS, STRIDE).pow(2).mean().backward()
    expected = {f"model.{name}": p.grad for name, p in twin.named_parameters()}
    for name, parameter in mixed.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-8, atol=1e-8)


def test_recompute_tags_do_not_change_the_program() -> None:
    model, program = exported(True, False)
    mixed = depthify(program, STRIDE, recompute=True)
    torch.testing.assert_close(mixed.module()(IDS), definition(model, IDS, STRIDE), **EXACT)


@pytest.mark.parametrize("decompose", [False, True])
def test_cache_in_and_out(decompose: bool) -> None:
    """Prompt and single tokens through two programs that share a cache: the logits of one full forward."""
    model = decoder()
    prompt = torch.export.export(model, (IDS[:, :3],))
    past: Cache = model(IDS[:, :3])[1]
    room = Dim("past", min=1, max=64)
    shapes = (None, [({2: room}, {2: room})] * len(past))
    step = torch.export.export(model, (IDS[:, 3:4], past), dynamic_shapes=shapes)
    if decompose:
        prompt, step = prompt.run_decompositions({}), step.run_decompositions({})
    first, later = (depthify(program, STRIDE).module() for program in (prompt, step))
    logits, past = first(IDS[:, :3])
    parts = [logits]
    for i in range(3, 6):
        logits, past = later(IDS[:, i : i + 1], past)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), definition(model, IDS, STRIDE), **EXACT)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mixed_model_exports_strictly(dynamic: bool) -> None:
    model = depthify(decoder(), STRIDE)
    shapes = ({1: Dim("length", min=2, max=64)},) if dynamic else None
    program = torch.export.export(Logits(model), (IDS,), strict=True, dynamic_shapes=shapes)
    plain = decoder()
    assert set(program.state_dict) == {f"model.{name}" for name in plain.state_dict()}
    for length in LENGTHS if dynamic else LENGTHS[:1]:
        ids = tokens(length)
        torch.testing.assert_close(program.module()(ids), definition(plain, ids, STRIDE), **EXACT)


def test_a_mixed_model_does_not_export_without_dynamo() -> None:
    model = depthify(decoder(), STRIDE)
    with pytest.raises(NotMixedError, match="strict=True"):
        torch.export.export(model, (IDS,), strict=False)


def test_a_mixed_program_is_not_mixed_again() -> None:
    _, program = exported(True, False)
    with pytest.raises(UnsupportedModelError, match="its value is also read by"):
        depthify(depthify(program, STRIDE), STRIDE)


def test_graph_modules() -> None:
    model, graphs = decoder(), []
    torch.compile(model, backend=lambda graph, inputs: (graphs.append(graph), graph.forward)[1])(IDS)
    mixed = depthify(graphs[0], STRIDE)
    assert isinstance(mixed, GraphModule) and mixed is not graphs[0]
    inputs = [n.meta["example_value"] for n in mixed.graph.nodes if n.op == "placeholder"]
    weights = {id(x): x for x in (*model.parameters(), IDS)}
    assert len(inputs) == len(weights)
    with pytest.raises(UnsupportedModelError, match="no shapes"):
        depthify(torch.fx.symbolic_trace(nn.Linear(2, 2)), STRIDE)


@pytest.mark.parametrize("argument", [{"backend": "inductor"}, {"mode": "default"}, {"dynamic": True}])
def test_programs_are_not_compiled_here(argument: dict[str, Any]) -> None:
    _, program = exported(True, False)
    with pytest.raises(OptionError, match="compile the result yourself"):
        depthify(program, STRIDE, **argument)


@both
def test_transformers_model(strict: bool) -> None:
    pytest.importorskip("transformers")
    import definition as by_definition
    import tiny

    model, ids = tiny.tiny("qwen3", torch.float64), tiny.tokens()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, use_cache=False).logits

    length = Dim("length", min=2, max=64)
    program = torch.export.export(Whole(), (ids,), strict=strict, dynamic_shapes=({1: length},))
    mixed = depthify(program, STRIDE)
    for n in (8, 5):
        expected = by_definition.logits_by_definition(model, ids[:, :n], stride=STRIDE)
        torch.testing.assert_close(mixed.module()(ids[:, :n]), expected, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_ahead_of_time(dynamic: bool, tmp_path: Any) -> None:
    model, program = exported(False, dynamic, torch.float32)
    path = str(tmp_path / "mixed.pt2")
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(depthify(program, STRIDE), package_path=path)
        runner = torch._inductor.aoti_load_package(path)
        for length in LENGTHS if dynamic else LENGTHS[:1]:
            ids = tokens(length)
            expected = definition(model, ids, STRIDE)
            assert (runner(ids) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_onnx(tmp_path: Any) -> None:
    pytest.importorskip("onnxscript", reason="torch's ONNX exporter needs it")
    reference = pytest.importorskip("onnx.reference")
    model, program = exported(False, True, torch.float32)
    path = tmp_path / "mixed.onnx"
    torch.onnx.export(depthify(program, STRIDE), (IDS,), path, dynamo=True)
    session = reference.ReferenceEvaluator(str(path))
    for length, batch in ((6, 2), (9, 3)):
        ids = tokens(length, batch)
        (logits,) = session.run(None, {session.input_names[0]: ids.numpy()})
        expected = definition(model, ids, STRIDE)
        assert (torch.from_numpy(logits) - expected).abs().max() <= 1e-4 * expected.abs().max()

"""Each private touch of torch does what it is for, on the version installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.comptime import comptime
from torch._subclasses.fake_tensor import FakeTensorMode

from depthify import torch_internals
from depthify.errors import DepthifyError, NotMixedError, OptionError


def test_fake_mode_is_that_of_the_values() -> None:
    mode = FakeTensorMode()
    with mode:
        fake = torch.empty(2)
    assert torch_internals.fake_mode_of([None, [fake]]) is mode
    assert torch_internals.fake_mode_of([torch.empty(1)]) is None


def test_propagation_is_invisible_to_saved_tensor_hooks() -> None:
    seen: list[Any] = []
    mode = FakeTensorMode()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x),
        torch.no_grad(),
    ):
        with torch_internals.propagating(mode):
            x = torch.empty(2, requires_grad=True)
            y = x.exp()
            assert y.requires_grad
    assert seen == []


@pytest.mark.parametrize("kind", [NotMixedError, OptionError])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_an_error_crosses_a_trace_as_it_is(kind: type[DepthifyError], fullgraph: bool) -> None:
    def fail(context: Any) -> None:
        raise torch_internals.refusal_during_trace(ERRORS[0])

    ERRORS[:] = [kind("what happened")]
    globals()["_fail"] = fail

    def f(x: torch.Tensor) -> torch.Tensor:
        comptime(_fail)  # noqa: F821
        return x + 1

    with pytest.raises(kind, match="what happened"):
        torch.compile(f, backend="eager", fullgraph=fullgraph)(torch.zeros(1))


ERRORS: list[DepthifyError] = []
GRAPHS: list[int] = []


def _depth_of_graphs(context: Any) -> None:
    graphs = torch_internals.traced_graphs(context)
    assert graphs[0] is context.graph()
    GRAPHS.append(len(graphs))


def test_what_vmap_leaves_behind_is_told_from_what_it_works_on() -> None:
    seen: list[torch.Tensor] = []

    def one(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        assert not torch_internals.has_escaped(x)
        torch.vmap(lambda y: seen.append(y) or y)(x)
        assert torch_internals.has_escaped(seen[1])
        return x

    torch.vmap(one)(torch.zeros(2, 3))
    assert [torch_internals.has_escaped(x) for x in seen] == [True, True]
    assert not torch_internals.has_escaped(torch.zeros(2))


def test_graphs_under_construction_are_seen_from_inside_a_checkpoint() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        comptime(_depth_of_graphs)
        return x.sin()

    def f(x: torch.Tensor) -> torch.Tensor:
        comptime(_depth_of_graphs)
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)

    GRAPHS.clear()
    torch.compile(f, backend="eager", fullgraph=True)(torch.randn(2, requires_grad=True))
    assert 1 in GRAPHS and max(GRAPHS) == 2


def test_every_model_has_a_recompile_budget_of_its_own() -> None:
    captures: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        captures.append(1)
        return gm.forward

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for _ in range(12):  # more than the default limit of 8
        compiled = torch.compile(
            torch_internals.own_code(f),
            backend=backend,
            fullgraph=True,
            **torch_internals.compile_keywords(64),
        )
        compiled(torch.zeros(2))
    assert len(captures) == 12


def test_whole_captures_are_told_from_parts() -> None:
    seen: list[bool] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(torch_internals.is_whole_capture())
        return gm.forward

    class Model(torch.nn.Module):
        def __init__(self, breaks: bool) -> None:
            super().__init__()
            self.breaks = breaks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            if self.breaks:
                torch._dynamo.graph_break()
            return x.cos()

    for target in (lambda x: x + 1, torch.no_grad()(lambda x: x + 1), Model(False)):
        torch.compile(target, backend=backend)(torch.zeros(2))
    assert seen == [True] * 3
    seen.clear()
    torch.compile(Model(True), backend=backend)(torch.zeros(2))
    assert seen == [False, False]

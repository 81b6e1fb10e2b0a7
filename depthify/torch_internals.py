"""Every private touch of torch, in one place; ``tests/test_torch_internals.py`` checks each on the
installed version."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from .errors import DepthifyError

TIMESTAMP = "creation_timestamp"
"""Dynamo forgets nodes by this entry of their metadata when it takes back a part of a trace."""

RECOMPUTE_TAGS = {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 1 << 30}
"""Metadata by which AOTAutograd's partitioner computes an operation again in backward. The number names the
checkpointed region: what one region reads of another with a smaller number is saved, so all mixtures are one
region, behind every other."""


def fake_mode_of(values: Any) -> FakeTensorMode | None:
    """The mode that made the fake tensors in ``values``.

    While a backend runs, ``TracingContext.fake_mode`` is another one; mixing two is an error.
    """
    return next((x.fake_mode for x in tree_leaves(values) if isinstance(x, FakeTensor)), None)


def is_transformed(value: Any) -> bool:
    """Whether a tensor stands for another in a transform of ``torch.func``, and has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(value)


def in_transform() -> bool:
    """Whether this runs inside ``torch.vmap`` or another transform of ``torch.func``."""
    return bool(torch._C._functorch.get_interpreter_stack())


def has_escaped(value: Any) -> bool:
    """Whether a tensor belongs to a ``torch.vmap``, or another transform of ``torch.func``, that is over:
    nothing can be computed with it any more."""
    functorch = torch._C._functorch
    alive = {interpreter.level() for interpreter in functorch.get_interpreter_stack() or ()}
    while isinstance(value, Tensor) and functorch.is_functorch_wrapped_tensor(value):
        if functorch.maybe_get_level(value) not in alive:
            return True
        value = functorch.get_unwrapped(value)
    return False


@contextlib.contextmanager
def propagating(mode: FakeTensorMode | None) -> Iterator[None]:
    """Run operations on fake tensors as Dynamo would.

    Gradients are enabled, so that metadata does not depend on the caller. Saved-tensor hooks are off: a
    checkpoint around the captured frame would count the fakes as saved activations.
    """
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_disable_saved_tensors_hooks_during_tracing())
        yield


def refusal_during_trace(error: DepthifyError) -> DepthifyError:
    """The same error in a class that Dynamo lets through as it is, instead of rewrapping it as an internal
    error."""
    from torch._dynamo.exc import ShortenTraceback

    base = type(error)
    name = f"Traced{base.__name__}"
    kind = _TRACED.get(name)
    if kind is None:
        kind = _TRACED[name] = type(
            name,
            (base, ShortenTraceback),
            {"__module__": base.__module__, "__init__": _init, "remove_dynamo_frames": lambda self: self},
        )
        kind.__name__ = kind.__qualname__ = base.__name__
    return kind(str(error))


_TRACED: dict[str, type] = {}


def _init(self: Any, message: str) -> None:
    RuntimeError.__init__(self, message)
    self.first_useful_frame = None
    self.msg = message


class TracedBodies:
    """The bodies of higher-order operations that Dynamo has traced so far; a
    :class:`~.passes.subgraphs.Bodies`."""

    def __init__(self, context: Any) -> None:
        self._output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output

    def get(self, name: str) -> torch.fx.GraphModule | None:
        found = self._output.nn_modules.get(name)
        return found if isinstance(found, torch.fx.GraphModule) else None

    def add(self, name: str, body: torch.fx.GraphModule) -> str:
        return self._output.install_subgraph(name, body)


def compile_keywords(recompile_limit: int) -> dict[str, Any]:
    """Keywords of ``torch.compile`` that keep one model's captures apart from every other's, where it has
    them."""
    accepted = inspect.signature(torch.compile).parameters
    wanted = {"recompile_limit": recompile_limit, "isolate_recompiles": True}
    return {name: value for name, value in wanted.items() if name in accepted}


def own_code(function: Any) -> Any:
    """A copy of ``function`` with a code object of its own: Dynamo counts recompiles per code object."""
    import types

    code = function.__code__.replace(co_name=function.__code__.co_name)
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def is_whole_capture() -> bool:
    """Called by a backend: whether Dynamo compiles the very function given to ``torch.compile``, in one
    piece.

    False in the frames Dynamo falls back to after a graph break, and in what it resumes with behind one.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator = InstructionTranslator.current_tx()
    reason = getattr(translator.output, "compile_subgraph_reason", None)
    if getattr(translator, "is_tracing_resume_prologue", False) or reason is None or reason.graph_break:
        return False
    if translator.f_code.co_name.startswith("torch_dynamo_resume"):
        return False
    # Between the backend and the call of the compiled function there may be torch's own frames only. A user's
    # frame in between runs as Python: Dynamo gave up on it and compiles what it calls piece by piece.
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "torch._dynamo.eval_frame":
            return True
        if name.split(".")[0] not in ("torch", "depthify", "contextlib", "functools"):
            return False
        frame = frame.f_back
    return False


def traced_graphs(context: Any) -> list[Graph]:
    """The graphs under construction, innermost first: a higher-order operation has one of its own."""
    tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.current_tracer
    graphs = []
    while tracer is not None:
        graphs.append(tracer.graph)
        tracer = tracer.parent
    return graphs


def in_backward() -> bool:
    """Whether the autograd engine is running: a forward inside it is a checkpoint that recomputes."""
    return torch._C._current_graph_task_id() != -1


def hides_from_dynamo(hook: Any) -> bool:
    """Whether a hook is kept out of traces, so that no capture can go through the module it is on."""
    function = getattr(hook, "__func__", hook)
    return bool(getattr(function, "_torchdynamo_disable", False))


def real_value(node: Any) -> Tensor | None:
    """The tensor a graph input stands for in the call that Dynamo is tracing; None where there is none."""
    argument = node.meta.get("grapharg")
    found = getattr(argument, "example", None) if argument is not None else None
    return found if isinstance(found, Tensor) and not isinstance(found, FakeTensor) else None

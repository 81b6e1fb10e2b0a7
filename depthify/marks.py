"""Marks around a forward: the graph between them is rewritten while Dynamo traces it.

``comptime(at_compile_time, at_run_time)`` runs its first argument when Dynamo traces the call, and its
second when the call is executed as Python. So the second one is the proof that the forward was not
captured, and raises. Imported only when a model is attached, as it loads Dynamo.
"""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.fx import Graph, Node

from .errors import DepthifyError, NotMixedError
from .torch_internals import TracedBodies, refusal_during_trace, traced_graphs

_begun: weakref.WeakKeyDictionary[Graph, list[Node | None]] = weakref.WeakKeyDictionary()
_made: weakref.WeakKeyDictionary[Graph, tuple[Node, Node]] = weakref.WeakKeyDictionary()
_rewriters: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register(key: str, state: Any) -> None:
    """Name the object whose ``rewrite(graph, start, bodies)`` runs at the end mark; only strings pass
    through a
    trace."""
    _rewriters[key] = state


def _begin(context: ComptimeContext) -> None:
    graph = context.graph()
    _begun.setdefault(graph, []).append(next(iter(reversed(graph.nodes)), None))


def _state_and_start(context: ComptimeContext) -> tuple[Any, Node | None]:
    """The state whose region ends here and the node after which it began.

    In what Dynamo resumes with behind a graph break, there is no beginning, and locals may be gone.
    """
    starts = _begun.get(context.graph())
    if not starts:
        raise NotMixedError(_cut_text())
    return _rewriters[context.get_local("key").as_python_constant()], starts.pop()


def _bias(context: ComptimeContext) -> Node | None:
    found = context.get_local("self_bias")
    return None if found.is_python_constant() else found.as_proxy().node


def _end(context: ComptimeContext) -> None:
    try:
        state, start = _state_and_start(context)
        state.rewrite(context.graph(), start, TracedBodies(context), _bias(context))
    except DepthifyError as error:
        raise refusal_during_trace(error) from None


def _end_of_block(context: ComptimeContext) -> None:
    try:
        state, start = _state_and_start(context)
        inputs = [proxy.node for proxy in context.get_local("sources").as_proxy()]
        pairs = list(zip(inputs[::2], inputs[1::2], strict=True))
        graph = context.graph()
        _made[graph] = state.rewrite_block(graph, start, TracedBodies(context), pairs, _bias(context))
    except DepthifyError as error:
        raise refusal_during_trace(error) from None


def _export(context: ComptimeContext) -> None:
    """Let the two placeholders stand for the block's key and mixed value."""
    made = _made.pop(context.graph())
    for name, node in zip(("source_key", "source_value"), made, strict=True):
        stand_in = context.get_local(name).as_proxy().node
        stand_in.target, stand_in.args, stand_in.kwargs = operator.getitem, ((node,), 0), {}
        stand_in.meta["example_value"] = node.meta["example_value"]


def _inside(context: ComptimeContext) -> None:
    """A guard in a decoder block: its trace must lie between the marks."""
    if not any(_begun.get(graph) for graph in traced_graphs(context)):
        name = context.get_local("name").as_python_constant()
        raise refusal_during_trace(NotMixedError(_outside_text(name)))


def _cut_text() -> str:
    return (
        "the forward of a mixed model was cut by a graph break, so its layers are not in one graph and "
        "nothing was mixed. Run with TORCH_LOGS=graph_breaks to see where, or compile with fullgraph=True"
    )


def _outside_text(name: str) -> str:
    return (
        f"a decoder block of {name} was run on its own, outside the forward that depthify captures, so it "
        "would run without depth mixing. Call the model itself; where hooks between the blocks cut the graph "
        "(FSDP2), use regions='block'; or restore(model) first"
    )


def run_marked(
    module: Any, key: str, name: str, args: tuple, kwargs: dict[str, Any], self_bias: torch.Tensor | None
) -> Any:
    """Run the original forward of ``module`` between the marks.

    Must be traced; run as Python it raises NotMixedError before any layer runs.
    """
    comptime(_begin, lambda: _not_captured(name))
    if self_bias is not None:
        self_bias = self_bias.detach()  # a node in this very graph, whatever graph the tensor comes from
    result = module._original_forward(*args, **kwargs)
    comptime(_end, lambda: _not_captured(name))
    _read_by_marks(key, self_bias)
    return result


def run_marked_block(
    module: Any,
    key: str,
    name: str,
    sources: list[Any],
    exports: bool,
    args: tuple,
    kwargs: dict[str, Any],
    self_bias: torch.Tensor | None,
) -> Any:
    """Run the original forward of a decoder block between the marks.

    Args:
        sources: key and mixed value of each source, flat: k0, v0, k1, v1, ...
        exports: whether later blocks read this one.

    Returns:
        The block's own result, and its key and mixed value (None, None unless ``exports``).
    """
    comptime(_begin, lambda: _not_captured(name))
    if self_bias is not None:
        self_bias = self_bias.detach()
    result = module._original_forward(*args, **kwargs)
    comptime(_end_of_block, lambda: _not_captured(name))
    _read_by_marks(key, sources, self_bias)
    if not exports:
        return result, None, None
    source_key, source_value = torch.zeros(0), torch.zeros(0)
    comptime(_export, lambda: _not_captured(name))
    return result, source_key, source_value


def _read_by_marks(*values: Any) -> None:
    """Called behind a mark with the locals it looks up: Dynamo forgets those that nothing reads any more."""


def check_inside(name: str) -> None:
    """Raise unless the caller is being traced between the marks."""
    comptime(_inside, lambda: _ran_outside(name))


def _not_captured(name: str) -> None:
    raise NotMixedError(
        f"{name} ran without being captured by Dynamo, so nothing would be mixed. Dynamo is off "
        "(TORCHDYNAMO_DISABLE, torch.compiler.disable, set_stance('force_eager'), "
        "torch.export.export(strict=False)), or a graph break lies in this forward. Turn it on (export with "
        "strict=True, or export the model first and call depthify on the program), remove the break, or "
        "restore(model)"
    )


def _ran_outside(name: str) -> None:
    raise NotMixedError(_outside_text(name))

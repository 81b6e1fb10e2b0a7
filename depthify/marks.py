"""Marks around a forward: the graph between them is rewritten while Dynamo traces it.

``comptime(at_compile_time, at_run_time)`` runs its first argument when Dynamo traces the call, and its
second when the call is executed as Python. So the second one is the proof that the forward was not
captured, and raises. Imported only when a model is attached, as it loads Dynamo.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch._dynamo.comptime import ComptimeContext, comptime
from torch.fx import Graph, Node

from .errors import DepthifyError, NotMixedError
from .torch_internals import TracedBodies, refusal_during_trace, traced_graphs

_begun: weakref.WeakKeyDictionary[Graph, list[Node | None]] = weakref.WeakKeyDictionary()
_rewriters: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register(key: str, state: Any) -> None:
    """Name the object whose ``rewrite(graph, start, bodies)`` runs at the end mark; only strings pass
    through a
    trace."""
    _rewriters[key] = state


def _begin(context: ComptimeContext) -> None:
    graph = context.graph()
    _begun.setdefault(graph, []).append(next(iter(reversed(graph.nodes)), None))


def _end(context: ComptimeContext) -> None:
    graph = context.graph()
    starts = _begun.get(graph)
    key = context.get_local("key").as_python_constant()
    try:
        if not starts:
            raise NotMixedError(_cut_text(_rewriters[key].name))
        _rewriters[key].rewrite(graph, starts.pop(), TracedBodies(context))
    except DepthifyError as error:
        raise refusal_during_trace(error) from None


def _inside(context: ComptimeContext) -> None:
    """A guard in a decoder block: its trace must lie between the marks."""
    if not any(_begun.get(graph) for graph in traced_graphs(context)):
        name = context.get_local("name").as_python_constant()
        raise refusal_during_trace(NotMixedError(_outside_text(name)))


def _cut_text(name: str) -> str:
    return (
        f"the forward of {name} was cut by a graph break, so its layers are not in one graph and nothing "
        "was mixed. "
        "Run with TORCH_LOGS=graph_breaks to see where, or compile with fullgraph=True"
    )


def _outside_text(name: str) -> str:
    return (
        f"a decoder block of {name} was run on its own, outside the forward that depthify captures, so it "
        "would run "
        "without depth mixing. Call the model itself, or restore(model) first"
    )


def run_marked(module: Any, key: str, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the original forward of ``module`` between the marks.

    Must be traced; run as Python it raises NotMixedError before any layer runs.
    """
    comptime(_begin, lambda: _not_captured(name))
    result = module._original_forward(*args, **kwargs)
    comptime(_end, lambda: _not_captured(name))
    return result


def check_inside(name: str) -> None:
    """Raise unless the caller is being traced between the marks."""
    comptime(_inside, lambda: _ran_outside(name))


def _not_captured(name: str) -> None:
    raise NotMixedError(
        f"{name} ran without being captured by Dynamo, so nothing would be mixed. Dynamo is off "
        "(TORCHDYNAMO_DISABLE, torch.compiler.disable, set_stance('force_eager')), or a graph break lies "
        "in this "
        "forward. Turn it on, remove the break, or restore(model)"
    )


def _ran_outside(name: str) -> None:
    raise NotMixedError(_outside_text(name))

"""The ``torch.compile`` plug-in: ``torch.compile(model, backend="depthify", options={"stride": 14})``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .config import DepthConfig
from .errors import DepthifyError, NotMixedError, OptionError
from .torch_internals import is_whole_capture, refusal_during_trace

_OPTIONS = ("stride", "recent_window", "budget", "recompute", "backend", "options", "mode")


def depthify_backend(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Rewrite the graph Dynamo captured, then hand it to an inner backend.

    Options: ``stride``, ``recent_window``, ``budget`` and ``recompute`` as in :func:`depthify.depthify`;
    ``backend`` (default "inductor") with its own ``options`` or ``mode``.

    Raises:
        OptionError: an unknown or unusable option.
        NotMixedError: the capture is cut by a graph break, so the graph may hold a part of the layers only.
        UnsupportedModelError: the graph holds no attention that can be mixed correctly.
    """
    try:
        config, inner = _read_options(dict(options or {}), mode)
        from .passes import mix_graph
        from .passes.subgraphs import ModuleBodies

        if not is_whole_capture():
            raise NotMixedError(
                "backend='depthify' was given a part of the program only: a graph break cut the capture, "
                "and layers in other parts cannot be reached. Compile with fullgraph=True to see where it "
                "breaks, compile a smaller function, or use depthify(model), which captures the model on "
                "its own"
            )
        mix_graph(graph_module.graph, config, bodies=ModuleBodies(graph_module))
    except DepthifyError as error:
        raise refusal_during_trace(error) from None
    graph_module.recompile()
    return inner(graph_module, example_inputs)


def _read_options(options: dict[str, Any], mode: str | None) -> tuple[DepthConfig, Callable[..., Any]]:
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        raise OptionError(
            f"options={unknown}: unknown to backend='depthify'; allowed are {', '.join(_OPTIONS)}"
        )
    config = DepthConfig(
        stride=options.get("stride"),
        recent_window=options.get("recent_window", 0),
        budget=options.get("budget"),
        recompute=options.get("recompute", False),
    )
    backend = options.get("backend", "inductor")
    inner_mode = options.get("mode", mode)
    keywords = {"options": options.get("options"), "mode": inner_mode}
    keywords = {name: value for name, value in keywords.items() if value is not None}
    if backend == "depthify":
        raise OptionError("options={'backend': 'depthify'}: the inner backend cannot be depthify itself")
    if backend == "inductor":
        return config, torch._TorchCompileInductorWrapper(inner_mode, keywords.get("options"), None)
    from torch._dynamo import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        found = lookup_backend(backend)
    except InvalidBackend as error:
        raise OptionError(f"options={{'backend': {backend!r}}}: {error}") from None
    if keywords and backend == "eager":
        raise OptionError(f"options={keywords}: the inner backend 'eager' takes neither options nor mode")
    return config, functools.partial(found, **keywords)

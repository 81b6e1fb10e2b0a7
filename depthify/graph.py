"""Rewrite graphs that exist already: ``torch.fx.GraphModule`` and ``torch.export.ExportedProgram``."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule

from .config import DepthConfig
from .errors import UnsupportedModelError


def rewrite(program: Any, config: DepthConfig) -> Any:
    """Mix a captured program; returns a new object of the same kind, the given one is left as it is.

    Weights are shared, not copied.

    Raises:
        UnsupportedModelError: the graph carries no shapes, or holds no attention that can be mixed correctly.
    """
    if isinstance(program, GraphModule):
        return _rewritten(program, config)
    module = _rewritten(program.graph_module, config, program.graph_signature.inputs_to_parameters)
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=program.state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _rewritten(module: GraphModule, config: DepthConfig, weights: Collection[str] = ()) -> GraphModule:
    """``weights``: names of the graph's inputs that are parameters."""
    from .passes import mix_graph
    from .passes.dataflow import WEIGHT
    from .passes.subgraphs import ModuleBodies

    if not any("example_value" in node.meta or "val" in node.meta for node in module.graph.nodes):
        raise UnsupportedModelError(
            "the graph carries no shapes. Capture it with torch.compile or torch.export, or run "
            "torch.fx.passes.fake_tensor_prop.FakeTensorProp over it"
        )
    result = GraphModule(module, copy.deepcopy(module.graph), type(module).__name__)
    result.meta = copy.copy(module.meta)
    _own_bodies(result)
    inputs = [node for node in result.graph.nodes if node.op == "placeholder" and node.name in weights]
    for node in inputs:
        node.meta[WEIGHT] = True
    mix_graph(result.graph, config, bodies=ModuleBodies(result))
    for node in inputs:
        del node.meta[WEIGHT]
    result.recompile()
    return result


def _own_bodies(module: GraphModule) -> None:
    """Copy the bodies of higher-order operations, so that the given program keeps its own."""
    for name, child in list(module.named_children()):
        if isinstance(child, GraphModule):
            body = GraphModule(child, copy.deepcopy(child.graph), type(child).__name__)
            body.meta = copy.copy(child.meta)
            setattr(module, name, body)
            _own_bodies(body)

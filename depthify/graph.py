"""Rewrite graphs that exist already: ``torch.fx.GraphModule`` and ``torch.export.ExportedProgram``."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch.fx import GraphModule

from .config import DepthConfig
from .errors import UnsupportedModelError

Program = TypeVar("Program")


def rewrite(program: Program, config: DepthConfig) -> Program:
    """Mix a captured program; returns a new object of the same kind, the given one is left as it is.

    Raises:
        UnsupportedModelError: the graph carries no shapes, or holds no attention that can be mixed correctly.
    """
    from .passes import mix_graph

    # A copy, so that a refusal half way cannot leave the caller's program half rewritten.
    result = copy.deepcopy(program)
    module = result if isinstance(result, GraphModule) else result.graph_module
    if not any("example_value" in node.meta or "val" in node.meta for node in module.graph.nodes):
        raise UnsupportedModelError(
            "the graph carries no shapes. Capture it with torch.compile or torch.export, or run "
            "torch.fx.passes.fake_tensor_prop.FakeTensorProp over it"
        )
    mix_graph(module.graph, config)
    module.recompile()
    if isinstance(result, torch.export.ExportedProgram):
        result.validate()
    return result

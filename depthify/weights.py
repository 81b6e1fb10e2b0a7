"""depth_weights(): run one forward and look at what every layer's softmax over depth gave to its sources.

The model is captured once more, with a backend that lets the weights leave each graph as extra results. So
what is returned is what the rewritten graph computes, not a second computation of it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from . import huggingface
from .config import DepthConfig
from .errors import NotMixedError, OptionError
from .module import State, attach, attached_modules
from .regions import BlockState, Regions

if TYPE_CHECKING:
    from .passes.mix_values import Mixed

_TAG = "depthify_weight"
"""Metadata entry of a node that holds a weight: stack, depth, place among the sources, order of its axes."""


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The softmax over depth of one mixed layer."""

    depth: int
    module: str
    sources: tuple[int, ...]
    weights: Tensor
    """(sources + 1, B, H_kv, T); the layer's own share is the last. Sums to 1 over the first dimension."""

    stack: int = 0


@dataclass(frozen=True, eq=False)
class DepthWeights:
    """The depth weights of one forward.

    The methods average over batch and tokens, padding left out where the call had an ``attention_mask``.
    """

    layers: tuple[LayerWeights, ...]
    """The mixed layers, in depth order."""

    depths: int
    """Number of attention layers, those without sources included."""

    stride: int | None
    recent_window: int
    mask: Tensor | None = None
    """(B, T), True for tokens that count; None: all do."""

    def __getitem__(self, depth: int) -> LayerWeights:
        for layer in self.layers:
            if layer.depth == depth:
                return layer
        allowed = sorted({layer.depth for layer in self.layers})
        raise OptionError(f"depth={depth!r}: this layer has no sources; allowed are {allowed}")

    @property
    def kv_heads(self) -> int:
        return max(layer.weights.shape[2] for layer in self.layers)

    def mean(self, *, per_head: bool = False) -> Tensor:
        """(L, L), or (L, L, H_kv): the share of source j in layer l at ``[l, j]``, of its own at ``[l, l]``.

        NaN where l does not read j.
        """
        result = torch.full((self.depths, self.depths, self.kv_heads), math.nan, dtype=torch.float64)
        mixed = {layer.depth for layer in self.layers}
        for depth in set(range(self.depths)) - mixed:
            result[depth, depth] = 1.0
        for layer in self.layers:
            shares = self._average(layer.weights)
            for j, share in zip((*layer.sources, layer.depth), shares, strict=True):
                result[layer.depth, j, : len(share)] = share
        return result if per_head else result.nanmean(-1)

    def self_weight(self, *, per_head: bool = False) -> Tensor:
        """(L,), or (L, H_kv): the share of the layer's own value; 1 where there are no sources."""
        shares = self.mean(per_head=per_head)
        return shares[range(self.depths), range(self.depths)]

    def entropy(self, *, per_head: bool = False) -> Tensor:
        """(L,), or (L, H_kv): entropy of the weights in nats; 0 where one value takes all."""
        result = torch.full((self.depths, self.kv_heads), math.nan, dtype=torch.float64)
        for depth in set(range(self.depths)) - {layer.depth for layer in self.layers}:
            result[depth] = 0.0
        for layer in self.layers:
            each = -torch.special.xlogy(layer.weights, layer.weights).sum(0, keepdim=True)
            found = self._average(each)[0]
            result[layer.depth, : len(found)] = found
        return result if per_head else result.nanmean(-1)

    def _average(self, weights: Tensor) -> Tensor:
        """(n, B, H, T) -> (n, H)"""
        weights = weights.double()
        if self.mask is None:
            return weights.mean((1, 3))
        mask = self.mask.to(weights)[None, :, None, :]
        return (weights * mask).sum((1, 3)) / mask.sum((1, 3))

    def to_dict(self) -> dict[str, Any]:
        """Averages as plain numbers, to be written as JSON."""
        own, entropy, heads = self.self_weight(), self.entropy(), self.mean(per_head=True)
        return {
            "layers": self.depths,
            "stride": self.stride,
            "recent_window": self.recent_window,
            "mixed": [
                {
                    "depth": layer.depth,
                    "module": layer.module,
                    "sources": list(layer.sources),
                    "self_weight": own[layer.depth].item(),
                    "entropy": entropy[layer.depth].item(),
                    "per_head": [
                        heads[layer.depth, j, : layer.weights.shape[2]].tolist()
                        for j in (*layer.sources, layer.depth)
                    ],
                }
                for layer in self.layers
            ],
        }

    def __str__(self) -> str:
        mean, own, entropy = self.mean(), self.self_weight(), self.entropy()
        heads = self.self_weight(per_head=True)
        lines = [
            f"{self.depths} attention layers, {len(self.layers)} mixed "
            f"(stride {self.stride}, recent window {self.recent_window})",
            "layer  own    heads          entropy  sources",
        ]
        for layer in self.layers:
            known = heads[layer.depth, : layer.weights.shape[2]]
            shares = " ".join(f"{j}:{mean[layer.depth, j]:.3f}" for j in layer.sources)
            lines.append(
                f"{layer.depth:<5}  {own[layer.depth]:.3f}  {known.min():.3f} - {known.max():.3f}  "
                f"{entropy[layer.depth]:.3f}    {shares}"
            )
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Write a picture to ``path``: mean weights of layers over sources, and own weights per head.

        Raises:
            MissingDependencyError: matplotlib is not installed.
            OptionError: the ending is no format of matplotlib's.
        """
        from .weights_plot import plot_weights

        plot_weights(self, path, title)


def depth_weights(model: nn.Module, *args: Any, **kwargs: Any) -> DepthWeights:
    """Run ``model(*args, **kwargs)`` once and return the depth weights of every mixed layer.

    The model stays as it is. One that is not mixed is looked at as if it were, with the stride in its config
    or the default one. Runs without gradients, uncompiled, in the mode (train or eval) that the model is in;
    a cache among the arguments is written as in any call. Each call captures the model anew.

    Raises:
        OptionError: not an ``nn.Module``, or one that runs its decoder several times in one call.
        UnsupportedModelError, NotMixedError: as for :func:`depthify.depthify`.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model={type(model).__name__}: depth_weights takes an nn.Module")
    model = getattr(model, "_orig_mod", model)  # torch.compile(model) has a compiler of its own
    probe = _Probe()
    with _unchanged(model), torch.no_grad():
        owner = _attach_probe(model, probe)
        model(*args, **kwargs)
        state = owner._depthify
        return _collect(state, probe, _mask_of(kwargs))


def _attach_probe(model: nn.Module, probe: _Probe) -> Any:
    """Have the model captured by ``probe``; returns the module whose state tells what was captured."""
    options = {"backend": probe, "mode": None, "options": None, "dynamic": None}
    attached = attached_modules(model)
    if not attached:
        attach(model, huggingface.with_recorded(model, DepthConfig()), options)
    owners = [m for m in attached_modules(model) if isinstance(m._depthify, (State, Regions))]
    if len(owners) != 1:
        raise OptionError(
            f"model={type(model).__name__}: it holds {len(owners)} mixed models; give one of them"
        )
    owner = owners[0]
    if attached:
        old = owner._depthify
        bias = old.bias_value
        if isinstance(old, State):
            owner.__dict__["_depthify"] = State(
                old.name, old.config, options, old.blocks, bias, only_blocks=old.only_blocks
            )
        else:
            new = Regions(old.name, old.config, options, old.blocks, old.reason, bias)
            owner.__dict__["_depthify"] = new
            for module in attached:
                if isinstance(module._depthify, BlockState):
                    module.__dict__["_depthify"] = BlockState(new, module._depthify.path)
    owner._depthify.on_mixed = probe.tag
    return owner


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Give every module its class, state, hooks and compiled form back, and the model its config keys."""
    modules = list(model.modules())
    before = [(m, m.__class__, m.__dict__.get("_depthify"), dict(m._forward_pre_hooks)) for m in modules]
    compiled = {module: module._compiled_call_impl for module in modules if module._compiled_call_impl}
    config = getattr(huggingface.pretrained(model), "config", None)
    keys = dict(vars(config)) if config is not None else {}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, implementation in compiled.items():
            module._compiled_call_impl = implementation
        for module, kind, state, hooks in before:
            module.__class__ = kind
            module.__dict__.pop("_depthify", None)
            if state is not None:
                module.__dict__["_depthify"] = state
            module._forward_pre_hooks.clear()
            module._forward_pre_hooks.update(hooks)
        for key in (huggingface.USED, huggingface.STRIDE, huggingface.WINDOW) if config is not None else ():
            config.__dict__.pop(key, None)
            if key in keys:
                setattr(config, key, keys[key])


class _Probe:
    """A ``torch.compile`` backend that runs graphs as they are and keeps the weights they compute."""

    def __init__(self) -> None:
        self.runs: list[dict[tuple[int, int], Tensor]] = []
        """Of each graph that was run: by stack and depth, (sources + 1, B, H_kv, T)."""

    def tag(self, mixed: Sequence[dict[int, Mixed]]) -> None:
        for number, stack in enumerate(mixed):
            for depth, layer in stack.items():
                for place, node in enumerate(layer.shares):
                    node.meta[_TAG] = (number, depth, place, layer.order)

    def __call__(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from .passes.dataflow import Dataflow
        from .passes.subgraphs import ModuleBodies, Threads

        graph = graph_module.graph
        flow = Dataflow(graph, bodies=ModuleBodies(graph_module))
        tagged = [node for inner in flow.graphs for node in inner.nodes if _TAG in node.meta]
        if not tagged:
            return graph_module.forward
        tagged.sort(key=lambda node: node.meta[_TAG][:3])
        labels = [node.meta[_TAG] for node in tagged]
        threads = Threads(flow.calls)
        shares = [threads.bring(node, graph) for node in tagged]
        output = next(node for node in reversed(graph.nodes) if node.op == "output")
        count = len(output.args[0])
        output.args = ((*output.args[0], *shares),)
        for call in flow.calls.values():
            call.body.recompile()
        graph_module.recompile()

        def run(*given: Any) -> Any:
            results = graph_module(*given)
            self.runs.append(_grouped(labels, results[count:]))
            return results[:count]

        return run


def _grouped(labels: Sequence[tuple[Any, ...]], shares: Sequence[Tensor]) -> dict[tuple[int, int], Tensor]:
    from .passes.mix_values import in_order

    found: dict[tuple[int, int], list[Tensor]] = {}
    for (stack, depth, _, order), share in zip(labels, shares, strict=True):
        lanes = in_order(share, order).squeeze(-1)  # (lanes, T), heads the last lane
        lanes = lanes.flatten(0, -3) if lanes.dim() > 2 else lanes.reshape(-1, 1, lanes.shape[-1])
        found.setdefault((stack, depth), []).append(lanes)
    return {key: torch.stack(torch.broadcast_tensors(*each)) for key, each in found.items()}


def _collect(state: State | Regions, probe: _Probe, mask: Tensor | None) -> DepthWeights:
    report = state.report
    if report is None or not probe.runs:
        raise NotMixedError(f"{state.name} was not run by this call of the model, so there are no weights")
    mixed = [layer for layer in report.layers if layer.sources]
    if isinstance(state, Regions):  # one run per block; a block counts its depth by its sources
        found = [next(iter(run.values())) for run in probe.runs]
    elif len(probe.runs) == 1:
        found = [probe.runs[0][layer.stack, layer.depth] for layer in mixed]
    else:
        found = []
    if len(found) != len(mixed):
        raise OptionError(
            f"this call runs {state.name} several times: give depth_weights a module that runs it once"
        )
    layers = tuple(
        LayerWeights(layer.depth, layer.module, layer.sources, weights, layer.stack)
        for layer, weights in zip(mixed, found, strict=True)
    )
    depths = 1 + max(layer.depth for layer in report.layers)
    shape = layers[0].weights.shape
    if mask is not None and mask.shape != (shape[1], shape[3]):
        mask = None
    return DepthWeights(layers, depths, report.stride, report.recent_window, mask)


def _mask_of(kwargs: dict[str, Any]) -> Tensor | None:
    mask = kwargs.get("attention_mask")
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

"""Depth-Attention on a transformers model by its definition: eager, without any graph, as independent as
can be.

The model's attention function is replaced by one that mixes the value with
:func:`depthify.reference.depth_mix` first. Query and key before the rotary embedding are seen by wrapping
``apply_rotary_pos_emb`` of the modeling file. Full forwards only: there is no cache here, so that cached
decoding is checked against something that has none.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from depthify import DepthConfig
from depthify.reference import depth_mix

ROTARY = ("apply_rotary_pos_emb", "apply_rotary_emb", "apply_interleaved_rope")


class Definition:
    """The sources seen so far in one forward."""

    def __init__(self, config: DepthConfig, layers: int, inner: Callable[..., Any] | None = None) -> None:
        self.config = config.resolve(layers)
        self.layers = layers
        self.inner = inner
        self.sources: list[tuple[Tensor, Tensor]] = []
        self.unrotated: tuple[Tensor, Tensor] | None = None
        self.weights: list[Tensor] = []

    def value(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The mixed value of the next layer; all tensors are (B, heads, T, size)."""
        if self.unrotated is not None:
            query, key = self.unrotated
            self.unrotated = None
        depth = len(self.sources)
        chosen = [self.sources[j] for j in self.config.sources(depth)]
        if chosen:
            value = depth_mix(query, [k for k, _ in chosen] + [key], [v for _, v in chosen] + [value], scale)
        self.sources.append((key, value))
        if len(self.sources) == self.layers:
            self.sources = []
        return value


def _attention(definition: Definition) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        scale = kwargs.get("scaling")
        value = definition.value(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
        inner = definition.inner
        if inner is None:
            modeling = sys.modules[type(module).__module__]
            inner = getattr(modeling, "eager_attention_forward", None) or ALL_ATTENTION_FUNCTIONS["sdpa"]
        return inner(module, query, key, value, mask, **kwargs)

    return attend


@contextlib.contextmanager
def defined(
    model: nn.Module,
    stride: int | None = None,
    recent_window: int = 0,
    layers: int | None = None,
    attention: str = "sdpa",
) -> Iterator[nn.Module]:
    """A copy of ``model`` that computes the definition; ``attention`` is what runs after the value is
    mixed."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layers = layers if layers is not None else model.config.get_text_config(decoder=True).num_hidden_layers
    inner = ALL_ATTENTION_FUNCTIONS["sdpa"] if attention == "sdpa" else None
    definition = Definition(DepthConfig(stride=stride, recent_window=recent_window), layers, inner)
    AttentionInterface.register("definition", _attention(definition))
    AttentionMaskInterface.register("definition", ALL_MASK_ATTENTION_FUNCTIONS[attention])
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("definition")
    with contextlib.ExitStack() as stack:
        for modeling in {sys.modules[type(m).__module__] for m in twin.modules()}:
            for name in ROTARY:
                original = getattr(modeling, name, None)
                if original is not None:
                    stack.enter_context(mock.patch.object(modeling, name, _recording(definition, original)))
        yield twin


def _recording(definition: Definition, original: Callable[..., Any]) -> Callable[..., Any]:
    def rotate(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        definition.unrotated = (query, key)
        return original(query, key, *args, **kwargs)

    return rotate


def logits_by_definition(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    """Logits of one full forward, no cache, in evaluation mode."""
    keys = ("stride", "recent_window", "layers", "attention")
    with defined(model, **{k: options.pop(k) for k in keys if k in options}) as twin, torch.no_grad():
        return twin(ids, use_cache=False, **options).logits


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry of ``b``."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())

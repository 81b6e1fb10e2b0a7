"""Qwen3 in prefill, decode and training, with and without mixing, compiled for the pretended device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from depthify import depthify

from .run import Result, compile_for_cuda, to_fake_cuda

HEADS = {"gqa": 2, "mha": 8, "mqa": 1}
"""Key and value heads by layout; there are 8 query heads."""

SCENARIOS = ("prefill", "decode", "decode_static", "train")
CAUSAL = {"full_attention": None}
"""A mask of this form makes transformers rely on ``is_causal`` instead of building a mask."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of the call."""

    layers: int = 4
    layout: str = "gqa"
    hidden: int = 256
    heads: int = 8
    head_size: int = 64
    feedforward: int = 512
    vocabulary: int = 1024
    length: int = 4096
    batch: int = 1

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads * HEADS[self.layout] // HEADS["mha"])

    def model(self) -> Any:
        """The model on no device, in bfloat16."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.feedforward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            attn_implementation="sdpa",
        )
        with torch.device("meta"):
            return Qwen3ForCausalLM(config).to(torch.bfloat16)


def prefill(model: Any, ids: Tensor) -> Tensor:
    return model(ids, attention_mask=CAUSAL, use_cache=False, logits_to_keep=1).logits


def loss(model: Any, ids: Tensor) -> Tensor:
    return model(ids, attention_mask=CAUSAL, labels=ids, use_cache=False).loss


def decode(model: Any, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
    return model(ids, position_ids=positions, cache=cache, use_cache=True).logits


def compile_scenario(
    scenario: str,
    shape: Shape | None = None,
    stride: int | None = None,
    recompute: bool = False,
    **options: Any,
) -> Result:
    """Generate the code of one scenario.

    Args:
        stride: distance between sources; None compiles the model as it is.
        recompute: see :func:`depthify.depthify`.
        options: to :func:`.run.compile_for_cuda`.
    """
    shape = shape or Shape()
    mode = FakeTensorMode()
    model = to_fake_cuda(shape.model(), mode)
    if stride is not None:
        depthify(model, stride, recompute=recompute, budget=float("inf"))
    model.train(scenario == "train")

    def tokens(length: int) -> Tensor:
        with mode:
            return torch.zeros(shape.batch, length, dtype=torch.long, device="cuda")

    if scenario == "prefill":
        return compile_for_cuda(prefill, model, tokens(shape.length), **options)
    if scenario == "train":
        return compile_for_cuda(loss, model, tokens(shape.length), train=True, **options)
    with mode:
        cache = _cache(scenario, model.config, shape)
        positions = torch.zeros(shape.batch, 1, dtype=torch.long, device="cuda")
    return compile_for_cuda(decode, model, tokens(1), positions, cache, **options)


def _cache(scenario: str, config: Any, shape: Shape) -> Any:
    """A cache of fake tensors that holds ``length - 1`` tokens."""
    from transformers import DynamicCache, StaticCache

    sizes = dict(num_heads=shape.kv_heads, head_dim=shape.head_size, dtype=torch.bfloat16, device="cuda")
    if scenario == "decode_static":
        cache = StaticCache(config=config, max_cache_len=shape.length)
        cache.early_initialization(batch_size=shape.batch, **sizes)
        for layer in cache.layers:
            layer.cumulative_length = torch.zeros((), dtype=torch.long, device="cuda")
        return cache
    cache = DynamicCache(config=config)
    past = (shape.batch, shape.kv_heads, shape.length - 1, shape.head_size)
    for layer in cache.layers:
        keys, values = (torch.empty(past, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        layer.update(keys, values)
    return cache

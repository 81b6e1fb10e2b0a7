"""Tiny configurations of real decoders: hidden 64, 4 layers, random weights large enough for mixing to
matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LAYERS = 4
VOCABULARY = 96

_COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": dict(_COMMON, head_dim=16),
    "llama": dict(_COMMON),
    "mistral": dict(_COMMON, sliding_window=4),
    "gemma2": dict(_COMMON, head_dim=16, sliding_window=4, query_pre_attn_scalar=16),
    "gemma3_text": dict(
        _COMMON, head_dim=16, sliding_window=4, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": dict(_COMMON),
    "olmo2": dict(_COMMON),
    "gpt2": dict(vocab_size=VOCABULARY, n_embd=64, n_layer=LAYERS, n_head=4, n_positions=128, bos_token_id=1,
                 eos_token_id=2),
    "gpt_neox": dict(_COMMON),
    "qwen3_moe": dict(_COMMON, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
}  # fmt: skip


def tiny(
    kind: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa", seed: int = 0, **changes: Any
) -> nn.Module:
    """A model of ``kind`` in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**CONFIGS[kind], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    return model.to(dtype).eval()


def tokens(length: int = 8, batch: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))

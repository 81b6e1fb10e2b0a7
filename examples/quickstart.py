"""Depth mixing in ten lines, on a small decoder with random weights."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from depthify import depthify, explain

torch.manual_seed(0)
config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(0, config.vocab_size, (1, 12))
vanilla = model(ids).logits
depthify(model, stride=4)
print(f"logits change by up to {(model(ids).logits - vanilla).abs().max():.3f}")
print(explain(model))

"""Two ways to compile a mixed model, and a compiled training step.

``depthify(model)`` rewrites the graph while Dynamo traces it, so whatever compiles the model afterwards gets
a graph that is mixed already. ``backend="depthify"`` is for callers who only choose a backend by name.
"""

import copy
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from depthify import depthify

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    use_cache=False,
)
model = AutoModelForCausalLM.from_config(config)
plain, mixed = copy.deepcopy(model), depthify(model, stride=2)
ids = torch.randint(0, config.vocab_size, (2, 64))


def timed(name, function):
    start = time.perf_counter()
    result = function()
    print(f"{name:45} {time.perf_counter() - start:5.1f} s with compiling", end="   ")
    return result


with torch.no_grad():
    expected = mixed(ids).logits

    compiled = torch.compile(mixed, fullgraph=True)
    logits = timed("depthify(model), then torch.compile", lambda: compiled(ids).logits)
    print(f"to depthify alone: {(logits - expected).abs().max():.1e}")

    plugged = torch.compile(plain, backend="depthify", options={"stride": 2}, fullgraph=True)
    logits = timed('torch.compile(model, backend="depthify")', lambda: plugged(ids).logits)
    print(f"to depthify alone: {(logits - expected).abs().max():.1e}")

mixed.train()
optimizer = torch.optim.AdamW(mixed.parameters(), lr=1e-3)


@torch.compile
def train_step(batch):
    loss = mixed(batch, labels=batch).loss
    loss.backward()
    return loss


first = timed("a training step around the mixed model", lambda: train_step(ids).item())
for _ in range(10):
    optimizer.step()
    optimizer.zero_grad()
    last = train_step(ids).item()
print(f"loss {first:.2f} -> {last:.2f}")

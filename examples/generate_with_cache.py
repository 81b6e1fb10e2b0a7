"""Generate with a KV cache from a mixed model, and check that the cache changes nothing.

The mixed value takes the place of the layer's own value before the cache is written. So the cache has the
tensors it had before, and decoding token by token gives what one forward over the whole sequence gives.
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from depthify import depthify

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
)
model = depthify(AutoModelForCausalLM.from_config(config).eval(), stride=3)
prompt = torch.randint(0, config.vocab_size, (1, 10))


@torch.no_grad()
def compare(cached: str | None) -> None:
    """Generate 20 tokens, then compare the logits of every step with those of one full forward."""
    out = model.generate(
        prompt,
        max_new_tokens=20,
        do_sample=False,
        use_cache=cached is not None,
        cache_implementation=cached,
        return_dict_in_generate=True,
        output_logits=True,
    )
    full = model(out.sequences, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    difference = (torch.stack(out.logits, dim=1) - full).abs().max() / full.abs().max()
    tokens = out.sequences[0, prompt.shape[1] :].tolist()
    print(f"cache: {cached or 'none':8} tokens: {tokens[:8]} ...  to full: {difference:.1e}")


compare(None)
compare("dynamic")

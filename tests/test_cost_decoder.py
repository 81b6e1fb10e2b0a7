"""The closed form of a decoder against the count of real models' graphs, and against torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from cost_decoder import named
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthify import DepthConfig, cost_report
from depthify.cost_model import symbols as S
from depthify.cost_model.cache import cache_bytes
from depthify.cost_model.capture import capture
from depthify.cost_model.count import count_graph
from depthify.cost_model.decoder import vanilla
from depthify.cost_model.shapes import PRESETS, read_shape
from depthify.errors import DepthifyError
from depthify.passes import mix_graph, plan

transformers = pytest.importorskip("transformers")

COMMON = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=101
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(COMMON, num_key_value_heads=2),
    "llama biased, multi-query": dict(
        COMMON, num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": dict(COMMON, num_key_value_heads=2, sliding_window=None),
    "qwen2": dict(COMMON, num_key_value_heads=4),
    "qwen3": dict(COMMON, num_key_value_heads=2, head_dim=16),
    "qwen3_moe": dict(
        COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=24, decoder_sparse_step=2, norm_topk_prob=True,
    ),
    "mixtral": dict(COMMON, num_key_value_heads=2, num_local_experts=4),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, vocab_size=101, bos_token_id=1, eos_token_id=2),
    "deepseek_v3": dict(
        COMMON, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=10, qk_rope_head_dim=8,
        qk_nope_head_dim=6,
        v_head_dim=10, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
        n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1,
    ),
}  # fmt: skip


def build(name: str) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(name.split()[0], **MODELS[name])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", MODELS)
def test_prefill(name: str) -> None:
    """Products, elementwise operations, masked part, parameters and cache: equal as expressions."""
    model = build(name)
    found = capture(model, 2, 8, 0, torch.bfloat16)
    findings, _ = _plan(found.module.graph)
    sites = findings.sites if findings else ()
    flops = count_graph(found.module.graph, sites=sites).flops
    shape = read_shape(model.config)
    closed = vanilla(shape)
    for part in ("matmul", "other", "masked"):
        counted = named(getattr(flops, part), found.names)
        expected = getattr(closed, part).subs({**shape.values(), S.C: 0})
        assert counted.free_symbols >= {S.B, S.T}
        assert sympy.expand(counted - expected) == 0, f"{part}: counted {counted}, closed form {expected}"
    assert closed.parameters.subs(shape.values()) == sum(p.numel() for p in model.parameters())
    if findings:
        stored = named(cache_bytes(found.module.graph, findings), found.names)
        assert stored.expand() == (2 * closed.state).subs({**shape.values(), S.C: 0}).expand()


def _plan(graph: torch.fx.Graph) -> tuple[Any, Any]:
    try:
        return plan(graph, DepthConfig(stride=1))
    except DepthifyError:
        return None, None  # a cache that holds a latent


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_decoding(name: str) -> None:
    model = build(name)
    found = capture(model, 2, 1, 8, torch.bfloat16)
    findings, _ = plan(found.module.graph, DepthConfig(stride=1))
    flops = count_graph(found.module.graph, sites=findings.sites).flops
    shape = read_shape(model.config)
    closed = vanilla(shape)
    for part in ("matmul", "other", "masked"):
        counted = named(getattr(flops, part), found.names)
        expected = getattr(closed, part).subs({**shape.values(), S.T: 1})
        assert sympy.expand(counted - expected) == 0, f"{part}: counted {counted}, closed form {expected}"
    stored = named(cache_bytes(found.module.graph, findings), found.names)
    assert stored.free_symbols == {S.B, S.C}
    assert stored.expand() == (2 * closed.state).subs({**shape.values(), S.T: 1}).expand()


def test_several_tokens_behind_a_cache_add_the_mask() -> None:
    """transformers then passes a mask, one more operation per pair; the closed form leaves it out."""
    model = build("qwen3")
    found = capture(model, 2, 8, 12, torch.bfloat16)
    flops = count_graph(found.module.graph).flops
    shape = read_shape(model.config)
    values = shape.values()
    masks = values[S.L] * values[S.Hq] * S.B * S.T * (S.T + S.C)
    difference = named(flops.executed, found.names) - vanilla(shape).executed.subs(values)
    assert sympy.expand(difference - masks) == 0


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "llama biased, multi-query"])
def test_products_agree_with_torch(name: str) -> None:
    """torch counts products only; attention needs the MATH backend to be seen at all on a CPU."""
    config = transformers.AutoConfig.for_model(name.split()[0], **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(3, 7, dtype=torch.long))
    found = capture(model, 2, 8, 0, torch.float32)
    products = named(count_graph(found.module.graph).flops.matmul, found.names)
    assert products.subs({S.B: 3, S.T: 7}) == counter.get_total_flops()
    before = count_graph(found.module.graph).flops
    mix_graph(found.module.graph, DepthConfig(stride=1, budget=float("inf")))
    assert count_graph(found.module.graph).flops.matmul == before.matmul


def test_paper_sizes() -> None:
    """Hand-computed: embedding and head, projections, three matrices, norms of layer, query and key."""
    shape = PRESETS["paper-3b"]
    layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 6912 + 2 * 2048 + 2 * 64
    assert vanilla(shape).parameters.subs(shape.values()) == 2 * 50304 * 2048 + 48 * layer + 2048


@pytest.mark.slow
def test_paper_3b_counted() -> None:
    """The 48 layers of the paper's 3B shape as a Qwen3, captured and counted, give the closed form's
    numbers."""
    shape = PRESETS["paper-3b"]
    config = transformers.Qwen3Config(
        num_hidden_layers=shape.layers, hidden_size=shape.width, num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.key_size, intermediate_size=shape.ff,
        vocab_size=shape.vocabulary, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    counted = cost_report(model, shape.stride, seq_len=2048)
    closed = cost_report("paper-3b", seq_len=2048)
    for name, expression in closed.expressions.items():
        assert sympy.simplify(counted.expressions[name] - expression.subs(S.C, 0)) == 0, name

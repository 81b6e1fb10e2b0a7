"""Tiny models of every causal language model in transformers, from one table of sizes and one of exceptions.

A configuration is its class's defaults, with every known size made small by the *name of its field*: hidden
size 64,
4 heads of 16, 2 key/value heads. ``EXCEPTIONS`` holds what one architecture needs on top, ``VARIANTS``
further
configurations that are spelled differently (fused heads, other cache layouts, shared keys and values).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 99
DEPTHS = (4, 6)

_SIZES: dict[str, float] = {}


def _size(value: float, names: str) -> None:
    _SIZES.update(dict.fromkeys(names.split(), value))


_size(
    64,
    "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim "
    "input_embedding_size "
    "output_embedding_size dim_model_base lru_width embed_dim backbone_hidden_size router_hidden_size",
)
_size(
    96,
    "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff ffn_hidden_size d_inner "
    "feed_forward_size moe_intermediate_size intermediate_size_mlp shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size expert_ffn_hidden_size dense_intermediate_size "
    "shared_intermediate_size "
    "shared_experts_intermediate_size",
)
_size(
    4,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads attention_heads swa_num_attention_heads "
    "num_experts "
    "num_local_experts n_routed_experts moe_num_experts index_topk linear_num_value_heads linear_num_heads",
)
_size(
    2,
    "num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads num_experts_per_tok "
    "num_experts_per_token moe_k moe_topk top_k_experts index_n_heads o_groups linear_num_key_heads n_groups "
    "type_vocab_size",
)
_size(
    16,
    "head_dim attention_head_dim dim_head d_head kv_channels swa_head_dim swa_v_head_dim attention_head_size "
    "qk_nope_head_dim index_head_dim o_lora_rank linear_key_head_dim linear_value_head_dim linear_head_dim "
    "mamba_d_head mamba_head_dim mamba_headdim",
)
_size(
    1,
    "n_shared_experts num_shared_experts moe_num_shared_experts topk_group first_k_dense_replace "
    "num_dense_layers "
    "num_expert_group n_group",
)
_size(
    8,
    "qk_rope_head_dim mamba_d_state mamba_n_heads mamba_chunk_size chunk_size ssm_state_size mamba_num_heads "
    "mamba_dt_rank state_size time_step_rank hidden_size_per_layer_input rotary_dim",
)
_size(24, "kv_lora_rank qk_head_dim")
_size(20, "q_lora_rank")
_size(12, "v_head_dim")
_size(128, "mamba_d_ssm")
_size(28, "image_size")
_size(14, "patch_size")
_size(
    64,
    "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
    "max_target_positions "
    "max_source_positions",
)
_size(VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size")
_size(
    5,
    "sliding_window sliding_window_size window_size local_attention attention_window_size "
    "attention_chunk_size "
    "local_attention_window_len",
)
_AT_MOST = frozenset(
    "n_group topk_group num_experts_per_tok moe_topk first_k_dense_replace n_shared_experts "
    "num_shared_experts "
    "shared_intermediate_size num_dense_layers".split()
)
_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers encoder_layers".split()
)

EXCEPTIONS: dict[str, dict[str, Any]] = {}
VARIANTS: list[str] = []


def _set(names: str, **fields: Any) -> None:
    """Fields of the configurations ``names``. A function is called with the number of layers."""
    for name in names.split():
        EXCEPTIONS.setdefault(name, {}).update(fields)
        if "@" in name and name not in VARIANTS:
            VARIANTS.append(name)


def _cycle(*kinds: str) -> Callable[[int], list[str]]:
    return lambda layers: [kinds[i % len(kinds)] for i in range(layers)]


_set(
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod reformer bart "
    "bigbird_pegasus blenderbot "
    "blenderbot-small marian mbart mvp pegasus plbart prophetnet whisper trocr musicgen musicgen_melody",
    is_decoder=True,
)
_set(
    "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear "
    "longcat_flash minicpm3 youtu",
    num_key_value_heads=4,
    head_dim=8,
)
_set(
    "dots3_note_text", num_key_value_heads=4, head_dim=24, qk_rope_head_dim=6, qk_nope_head_dim=18,
    swa_num_attention_heads=2, swa_num_key_value_heads=2, swa_q_lora_rank=20, swa_kv_lora_rank=24,
    swa_head_dim=24, swa_qk_nope_head_dim=16, swa_v_head_dim=12,
)  # fmt: skip
_set(
    "longcat_flash",
    ffn_hidden_size=96,
    expert_ffn_hidden_size=32,
    zero_expert_num=2,
    n_routed_experts=4,
    moe_topk=2,
)
_set("bamba", attn_layer_indices=lambda n: list(range(1, n, 2)), mamba_n_heads=8, mamba_d_head=16)
_set("granitemoehybrid", layer_types=_cycle("linear_attention", "full_attention"))
_set("jamba", attn_layer_period=2, attn_layer_offset=1)
_set("recurrent_gemma", block_types=["recurrent", "attention"], attention_hidden_size=64)
_set(
    "blt", vocab_size=260, max_position_embeddings=64, encoder_hash_byte_group_vocab=50,
    **{
        "encoder_config.hidden_size_global": 64, "decoder_config.hidden_size_global": 64,
        "global_config.hidden_size": 64, "encoder_config.vocab_size": 260, "decoder_config.vocab_size": 260,
        "patcher_config.vocab_size": 260,
    },
)  # fmt: skip
_rope = {"rope_type": "default", "rope_theta": 1e4}
_set(
    "cohere_compass_text",
    layer_types=_cycle("full_attention", "sliding_attention"),
    rope_parameters={"full_attention": _rope, "sliding_attention": _rope},
)
_set(
    "dbrx", attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, num_key_value_heads=None,
    ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
)  # fmt: skip
_set(
    "dory", num_hidden_layers=lambda n: 2 * n, n_input_layers=2, n_output_layers=2,
    n_recurrent_layers=lambda n: 2 * n - 4,
    layer_types=lambda n: ["sliding_attention", "mlp", "full_attention", "mlp"] * (n // 2),
)  # fmt: skip
_set("dots1", n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1)
_set(
    "gemma3n_text", num_kv_shared_layers=2, laurel_rank=8, intermediate_size=lambda n: [96] * n,
    activation_sparsity_pattern=lambda n: [0.95, 0.95] + [0.0] * (n - 2),
    layer_types=_cycle("sliding_attention", "full_attention"),
)  # fmt: skip
_set("hunyuan_v1_dense hunyuan_v1_moe ministral", head_dim=16)
_set("ministral", layer_types=_cycle("sliding_attention", "full_attention"))
_set("lfm2_moe", layer_types=_cycle("conv", "full_attention"))
_set("mamba2", num_heads=8, head_dim=16, n_groups=1)
_set("musicgen musicgen_melody", num_codebooks=1)
_set(
    "qwen4_exp_text", layer_types=_cycle("linear_attention", "indexed_attention"), hc_lowrank=8,
    ple_embed_dim=16,
    indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=2,
)  # fmt: skip
_set(
    "reformer", axial_pos_embds_dim=[16, 48], axial_pos_shape=[8, 8], attention_head_size=16,
    attn_layers=_cycle("local", "lsh"), local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_buckets=4,
)  # fmt: skip
_set("xlstm", qk_dim_factor=1.0, num_blocks=lambda n: n)
_set("xmod", languages=["en_XX"], default_language="en_XX")
_set(
    "zamba zamba2", layers_block_type=_cycle("linear_attention", "hybrid"), attention_hidden_size=128,
    attention_head_dim=32, num_key_value_heads=4,
)  # fmt: skip
_set("zamba", n_mamba_heads=2)
_set("zamba2", n_mamba_heads=8)
_set("inkling2_text inkling2_loop_text inkling_text", unpadded_vocab_size=99, rel_extent=16)
_set("deepseek_v2", num_experts_per_tok=2, topk_group=1, n_group=1, topk_method="greedy")
_set(
    "llama4_text", floor_scale=2, attn_scale=0.5
)  # so that the temperature of late queries is not 1 in short texts
_set("lfm3", layer_types=_cycle("conv", "full_attention", "sliding_attention", "full_attention"))
_set("bailing_hybrid kimi_linear", layer_types=_cycle("linear_attention", "full_attention"))
_set(
    "nemotron_h",
    layers_block_type=_cycle("linear_attention", "full_attention", "moe", "full_attention", "mlp"),
)
_set("smollm3", no_rope_layers=lambda n: [int(i % 4 != 3) for i in range(n)])

_set("xlm", causal=True)
_set("xlnet", attn_type="uni")

_set("xlm@bi", causal=False)
_set("xlnet@bi", attn_type="bi")
_pairs = _cycle("sliding_attention", "full_attention")
_set("falcon@new", new_decoder_architecture=True, num_kv_heads=2)
_set("falcon@mha", multi_query=False, num_kv_heads=4)
_set("falcon@alibi", alibi=True)
_set("gpt_bigcode@mha", multi_query=False)
_set(
    "gemma4_text@keqv",
    attention_k_eq_v=True,
    num_global_key_value_heads=1,
    global_head_dim=32,
    layer_types=_pairs,
)
_set("gemma4_text@shared", num_kv_shared_layers=2, layer_types=_pairs)
_set("cohere@qknorm", use_qk_norm=True)
_set("stablelm@qknorm phi@qknorm", qk_layernorm=True)
_set("olmo@clip", clip_qkv=8.0)
_set("big_bird@full", attention_type="original_full")
_set(
    "qwen2@sliding", use_sliding_window=True, max_window_layers=2,
    layer_types=lambda n: ["full_attention"] * 2 + ["sliding_attention"] * (n - 2),
)  # fmt: skip
_set("gpt2@upcast", reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True)
_set("mpt@clip", attn_config={"clip_qkv": 8.0, "qk_ln": False})
_set("bert@cross gpt2@cross", add_cross_attention=True)
_set("bart@cross")
_set("dory@last", recurrent_kv_cache_mode="last_loop")


WHOLE_TEXT = frozenset({"cpmant"})
"""Models that take all tokens again at every step of cached decoding."""


def depths(name: str) -> tuple[int, int]:
    """Two numbers of layers to look at."""
    return (6, 8) if name == "gemma4_text@shared" else DEPTHS


def stack(name: str) -> str:
    """Path of the text decoder where a model has several stacks of layers."""
    return ""


def names() -> list[str]:
    """Every distinct causal-LM class under one name each, and the variants."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MAPPING

    chosen: dict[type, str] = {}
    for name in MAPPING:
        found = model_class(name)
        if found not in chosen or getattr(found.config_class, "model_type", None) == name:
            chosen[found] = name
    return sorted(chosen.values()) + VARIANTS


def model_class(name: str) -> type[nn.Module]:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MAPPING

    return getattr(transformers, MAPPING[name.partition("@")[0]])


def tiny_config(name: str, layers: int = DEPTHS[0]) -> Any:
    """The configuration of ``name`` with ``layers`` layers."""
    from transformers import CONFIG_MAPPING

    base = name.partition("@")[0]
    config_class = getattr(model_class(name), "config_class", None) or CONFIG_MAPPING[base]
    fields = {**EXCEPTIONS.get(base, {}), **EXCEPTIONS.get(name, {})}
    fields = {key: value(layers) if callable(value) else value for key, value in fields.items()}
    return config_class(**_small(config_class, fields, layers))


def _defaults(config_class: type) -> tuple[Any, dict[str, Any]]:
    try:
        config = config_class()
    except Exception:  # some need arguments; then the signature has to do
        parameters = inspect.signature(config_class.__init__).parameters
        return None, {k: p.default for k, p in parameters.items() if p.default is not p.empty}
    return config, config.to_dict()


def _small(config_class: type, fields: dict[str, Any], layers: int) -> dict[str, Any]:
    default, values = _defaults(config_class)
    depth = next((values[key] for key in _LAYERS if isinstance(values.get(key), int)), None)
    depth = depth or getattr(default, "num_hidden_layers", None)
    small = _per_layer(values, depth, layers)
    for key, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key in small:
            continue
        if key in _LAYERS and isinstance(value, int):
            small[key] = layers
        elif key in _SIZES and (number or (value is None and key == "num_key_value_heads")):
            small[key] = min(_SIZES[key], value) if key in _AT_MOST else _SIZES[key]
        elif key.endswith(("_token_id", "_token_index")) and (number or isinstance(value, list)):
            special = {"bos": 1, "eos": 2, "pad": 0}.get(key[:3])
            keep = special is not None and number and value < VOCABULARY
            small[key] = value if keep else 90 if special is None else special
    for key, sub_class in (getattr(config_class, "sub_configs", None) or {}).items():
        sub_default = getattr(default, key, None)
        if key in fields or sub_default is None:
            continue
        inner = {k.partition(".")[2]: v for k, v in fields.items() if k.startswith(f"{key}.")}
        sub_class = type(sub_default)
        small[key] = sub_class(**_small(sub_class, inner, layers))
    small.update({key: value for key, value in fields.items() if "." not in key and value is not None})
    for key, value in fields.items():
        if value is None:
            small.pop(key, None)
    return small


def _per_layer(values: dict[str, Any], depth: int | None, layers: int) -> dict[str, Any]:
    """Lists with an entry per layer: the kinds of layer there are, in turn."""
    lists = {
        k: v for k, v in values.items() if isinstance(v, (list, tuple)) and depth and len(v) == depth > 1
    }
    if not lists:
        return {}
    kinds: dict[str, int] = {}
    for i in range(depth):
        kinds.setdefault(repr([v[i] for v in lists.values()]), i)
    order = [list(kinds.values())[i % len(kinds)] for i in range(layers)]
    return {key: [value[i] for i in order] for key, value in lists.items()}


def tiny_model(
    name: str,
    layers: int = DEPTHS[0],
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    seed: int = 0,
) -> nn.Module:
    """A model of ``name`` in evaluation mode, with weights large enough for mixing to matter."""
    torch.manual_seed(seed)
    config = tiny_config(name, layers)
    options = {"experts_implementation": "batched_mm"} if dtype == torch.float64 else {}
    model = model_class(name)._from_config(
        config, attn_implementation=attention, dtype=torch.float32, **options
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.dim() > 1 else parameter + noise * 0.05)
    return model.to(dtype).eval()


def tokens(length: int = 8, batch: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 80, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What a model of ``name`` needs besides tokens."""
    if name.endswith("@cross"):
        states = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3))
        return {"encoder_hidden_states": states.to(dtype)}
    return {}

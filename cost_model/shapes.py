"""The sizes of a decoder, from a preset or from a transformers config; no weights are needed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import sympy

from ..errors import MissingDependencyError, OptionError, UnsupportedModelError
from . import symbols as S


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """A pre-norm decoder: embedding, layers of attention and feed-forward, final norm, head."""

    name: str = "decoder"
    layers: int
    width: int
    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    ff: int
    vocabulary: int
    tied: bool = False
    """The head shares the embedding's weights."""

    gated: bool = True
    """The feed-forward has a gate: three matrices, not two."""

    activation_flops: int = 1
    """Elementwise operations of the activation, as the model writes it."""

    norm: Literal["rms", "layer"] = "rms"
    qk_norm: bool = False
    """RMSNorm on every head of query and key."""

    qkv_bias: bool = False
    other_bias: bool = False
    """Bias of the output projection and of the feed-forward."""

    rotated: int = 0
    """Rotated part of a head; 0 without rotary embedding."""

    positions: int = 0
    """Rows of a learned table of positions; 0 without."""

    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ff: int = 0
    shared_ff: int = 0
    """Width of the shared experts together; 0 without."""

    normed_choice: bool = True
    """The weights of the chosen experts are divided by their sum."""

    router_groups: int = 0
    """Groups of experts of a router that scores with a sigmoid (DeepSeek-V3); 0 for a softmax over all."""

    query_rank: int = 0
    """Multi-head latent attention: rank of the query; 0 for a full projection."""

    kv_rank: int = 0
    """Multi-head latent attention: rank of the latent that is cached; 0 for ordinary attention."""

    stride: int | None = None
    """Stride the model was published with."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "query_heads", "kv_heads", "key_size", "value_size", "vocabulary"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)!r}: {name} must be at least 1")
        if self.query_heads % self.kv_heads:
            raise OptionError(
                f"query_heads={self.query_heads}, kv_heads={self.kv_heads}: query_heads must be a multiple"
            )
        if self.moe_layers > self.layers:
            raise OptionError(f"moe_layers={self.moe_layers}: there are {self.layers} layers")

    @property
    def latent(self) -> bool:
        return self.kv_rank > 0

    @property
    def grouped(self) -> bool:
        """Several query heads share a key."""
        return self.query_heads > self.kv_heads

    def values(self) -> dict[sympy.Symbol, int]:
        """The size of every symbol of the closed forms; what the shape does not have stands for 1 or 0 in
        terms that are not there."""
        return {
            S.L: self.layers,
            S.d: self.width,
            S.Hq: self.query_heads,
            S.Hkv: self.kv_heads,
            S.dk: self.key_size,
            S.dv: self.value_size,
            S.ff: self.ff,
            S.V: self.vocabulary,
            S.M: self.moe_layers,
            S.E: self.experts,
            S.k: self.experts_per_token,
            S.fe: self.expert_ff,
            S.fs: self.shared_ff,
            S.rq: self.query_rank,
            S.rkv: self.kv_rank,
            S.dr: self.rotated,
            S.dn: self.key_size - self.rotated,
        }


def _paper(
    name: str, layers: int, width: int, heads: tuple[int, int], ff: int, vocab: int, stride: int
) -> DecoderShape:
    return DecoderShape(
        name=name,
        layers=layers,
        width=width,
        query_heads=heads[0],
        kv_heads=heads[1],
        key_size=64,
        value_size=64,
        rotated=64,
        ff=ff,
        vocabulary=vocab,
        qk_norm=True,
        stride=stride,
    )


PRESETS: dict[str, DecoderShape] = {
    shape.name: shape
    for shape in (
        _paper("paper-410m", 32, 1024, (16, 4), 2816, 32000, 16),
        _paper("paper-1.5b", 48, 1536, (24, 6), 4096, 50304, 24),
        _paper("paper-3b", 48, 2048, (32, 8), 6912, 50304, 24),
    )
}
"""Shapes of the public configurations of Depth-Attention (github.com/LUMIA-Group/Depth-Attention)."""

_GELU_NEW = 8
"""0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3))), an operation each."""

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"biases": "attention_bias mlp_bias"},
    "mistral": {},
    "ministral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "mixtral": {},
    "deepseek_v3": {},
    "gpt2": {
        "gated": False,
        "norm": "layer",
        "qkv_bias": True,
        "other_bias": True,
        "rotated": 0,
        "activation_flops": _GELU_NEW,
    },
}
"""What a config does not say, by ``model_type``. Each is compared with the count of its graph in the
tests."""


def read_shape(source: Any) -> DecoderShape:
    """The shape of a preset name, a directory with a ``config.json``, a model id, a config or a dictionary.

    Raises:
        OptionError: there is no such preset, directory or model, or a size is missing.
        UnsupportedModelError: a family without a closed form; count the model itself.
    """
    if isinstance(source, DecoderShape):
        return source
    if isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        if name in PRESETS:
            return PRESETS[name]
        return replace(read_config(load_config(name)), name=os.path.basename(name.rstrip("/")) or name)
    return read_config(source)


def load_config(name: str) -> Any:
    """The config of a directory or a model id; through transformers where it is there, for its defaults."""
    path = os.path.join(name, "config.json")
    known: dict[str, Any] | None = None
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            try:
                known = json.load(file)
            except ValueError as error:
                raise OptionError(f"model={name!r}: its config.json cannot be read: {error}") from error
    elif os.path.isdir(name):
        raise OptionError(f"model={name!r}: the directory holds no config.json")
    try:
        from transformers import AutoConfig
    except ImportError:
        if known is not None:
            return known
        raise MissingDependencyError(
            f"model={name!r}: it is no preset ({', '.join(PRESETS)}) and no directory; to look it up as a "
            "model id, install depthify[hf]"
        ) from None
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # a config class checks its values, with errors of many kinds
        if known is not None and isinstance(error, (OSError, ValueError, KeyError)):
            return known  # a model type that this transformers does not know
        if known is not None:
            raise OptionError(f"model={name!r}: its config.json is not valid: {error}") from error
        raise OptionError(
            f"model={name!r}: no preset ({', '.join(PRESETS)}), no directory with a config.json and no "
            f"model id that can be read: {error}"
        ) from error


def read_config(config: Any) -> DecoderShape:
    """The shape that a transformers config, or the dictionary of its ``config.json``, describes."""
    if not isinstance(config, Mapping) and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    get = (
        config.get
        if isinstance(config, Mapping)
        else lambda name, default=None: getattr(config, name, default)
    )
    kind = get("model_type")
    if kind not in _FAMILIES:
        raise UnsupportedModelError(
            f"model_type={kind!r}: no closed form; there is one for {', '.join(sorted(_FAMILIES))}. Give "
            "the model itself, and its graph is counted"
        )

    def first(*names: str, default: Any = None) -> Any:
        for name in names:
            value = get(name)
            if value is not None:
                return value
        if default is None:
            raise OptionError(f"config: none of {', '.join(names)} is given")
        return default

    width = first("hidden_size", "n_embd")
    heads = first("num_attention_heads", "n_head")
    size = first("head_dim", default=width // heads)
    values: dict[str, Any] = {
        "name": str(first("name_or_path", "_name_or_path", default=kind)) or kind,
        "layers": first("num_hidden_layers", "n_layer"),
        "width": width,
        "query_heads": heads,
        "kv_heads": first("num_key_value_heads", default=heads),
        "key_size": size,
        "value_size": size,
        "ff": first("intermediate_size", "n_inner", default=4 * width),
        "vocabulary": first("vocab_size"),
        "tied": bool(first("tie_word_embeddings", default=kind == "gpt2")),
        "rotated": size,
        "positions": get("n_positions") or 0 if kind == "gpt2" else 0,
    }
    family = dict(_FAMILIES[kind])
    if "biases" in family:
        attention, other = family.pop("biases").split()
        family["qkv_bias"] = bool(get(attention, False))
        if bool(get(attention, False)) != bool(get(other, False)):
            raise UnsupportedModelError(
                f"{attention}={get(attention)!r}, {other}={get(other)!r}: the closed form has both or none"
            )
        family["other_bias"] = bool(get(other, False))
    elif get("attention_bias") and kind != "deepseek_v3":
        raise UnsupportedModelError(f"attention_bias={get('attention_bias')!r}: not in the closed form")
    window = get("sliding_window")
    if window is not None and (kind == "mistral" or get("use_sliding_window")):
        raise UnsupportedModelError(
            f"sliding_window={window!r}: the closed form has full attention in all layers. Give the model "
            "itself"
        )
    values.update(family)
    _read_experts(values, kind, get)
    if kind == "deepseek_v3":
        _read_latent(values, get)
    stride = get("depth_attention_stride")
    if get("use_depth_attention") and stride is not None:
        values["stride"] = stride
    names = {field.name for field in fields(DecoderShape)}
    return DecoderShape(**{name: value for name, value in values.items() if name in names})


def _read_experts(values: dict[str, Any], kind: str, get: Any) -> None:
    layers = values["layers"]
    if kind == "mixtral":
        moe = layers
        expert_ff, shared = values["ff"], 0
    elif kind == "qwen3_moe":
        step, dense = get("decoder_sparse_step") or 1, set(get("mlp_only_layers") or ())
        moe = sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
        expert_ff, shared = get("moe_intermediate_size"), 0
    elif kind == "deepseek_v3":
        moe = max(0, layers - (get("first_k_dense_replace") or 0))
        expert_ff = get("moe_intermediate_size")
        shared = expert_ff * (get("n_shared_experts") or 0)
        values["router_groups"] = get("n_group") or 1
    else:
        return
    values["normed_choice"] = kind == "mixtral" or bool(get("norm_topk_prob"))
    experts = get("num_local_experts") or get("num_experts") or get("n_routed_experts")
    values.update(
        moe_layers=moe,
        experts=experts,
        experts_per_token=get("num_experts_per_tok"),
        expert_ff=expert_ff,
        shared_ff=shared,
    )


def _read_latent(values: dict[str, Any], get: Any) -> None:
    rotated = get("qk_rope_head_dim")
    values.update(
        key_size=get("qk_nope_head_dim") + rotated,
        value_size=get("v_head_dim"),
        kv_heads=values["query_heads"],
        rotated=rotated,
        query_rank=get("q_lora_rank") or 0,
        kv_rank=get("kv_lora_rank"),
    )

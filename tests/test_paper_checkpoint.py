"""The paper's checkpoint format: loaded strictly, mixed as its config says, scored after the key norm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from script import example
from torch import Tensor

from depthify import DepthConfig, depth_weights, explain, restore
from depthify.reference import depth_mix

pytest.importorskip("safetensors")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 80, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "use_qk_norm": True, "use_depth_attention": True,
    "depth_attention_stride": 3, "depth_attention_recent_window": 0,
}  # fmt: skip
IDS = torch.randint(0, 80, (1, 9), generator=torch.Generator().manual_seed(3))


EXAMPLE = example("load_paper_checkpoint")


def _weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Names and shapes as the format has them, written out here once more."""
    width, size = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    inner, vocabulary = config["intermediate_size"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, shape in (
            ("self_attn.q_proj", (queries, width)),
            ("self_attn.k_proj", (keys, width)),
            ("self_attn.v_proj", (keys, width)),
            ("self_attn.o_proj", (width, queries)),
            ("mlp.gate_proj", (inner, width)),
            ("mlp.up_proj", (inner, width)),
            ("mlp.down_proj", (width, inner)),
            ("input_layernorm", (width,)),
            ("post_attention_layernorm", (width,)),
        ):
            shapes[f"{layer}{name}.weight"] = shape
        if config["use_qk_norm"]:
            shapes[f"{layer}self_attn.q_norm.weight"] = shapes[f"{layer}self_attn.k_norm.weight"] = (size,)
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        # Weights of the key norm far from 1, and different in every pair of features that rotates together.
        state[name] = (
            x * 0.2 if len(shape) == 2 else (x.abs() * 1.5 + 0.1 if "k_norm" in name else 1 + 0.3 * x)
        )
    return state


def _folder(path: Path, **changes: Any) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    from safetensors.torch import save_file

    config = {**CONFIG, **changes}
    state = _weights(config)
    (path / "config.json").write_text(json.dumps(config))
    names = list(state)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({n: state[n] for n in part}, path / f"model-0000{i + 1}-of-00002.safetensors")
    return path, config, state


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotated(x: Tensor, base: float) -> Tensor:
    """As complex numbers: feature i and i + D/2 are one, turned by position times base ** (-2i/D)."""
    half = x.shape[-1] // 2
    turn = torch.arange(x.shape[2])[:, None] * base ** -(torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat([z.real, z.imag], -1)


def _formula(
    config: dict[str, Any], state: dict[str, Tensor], ids: Tensor, score_before: bool = False
) -> Tensor:
    """Logits from the weights alone; ``score_before``: with the keys as they are before the rotation."""
    depth = DepthConfig(
        stride=config["depth_attention_stride"], recent_window=config["depth_attention_recent_window"]
    )
    eps, size = config["rms_norm_eps"], config["hidden_size"] // config["num_attention_heads"]
    x, scored, values = state["model.embed_tokens.weight"][ids], [], []
    for i in range(config["num_hidden_layers"]):
        w = {n.split(".", 3)[3]: t for n, t in state.items() if n.startswith(f"model.layers.{i}.")}
        h = _norm(x, w["input_layernorm.weight"], eps)
        q, k, v = (
            (h @ w[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(1, 2) for n in "qkv"
        )
        flat_q, flat_k = _norm(q, w.get("self_attn.q_norm.weight"), eps), k
        q = _rotated(flat_q, config["rope_theta"])
        k = _norm(_rotated(k, config["rope_theta"]), w.get("self_attn.k_norm.weight"), eps)
        if score_before:
            flat_k = _norm(flat_k, w.get("self_attn.k_norm.weight"), eps)
        mine = (flat_q, flat_k) if score_before else (q, k)
        sources = depth.sources(i)
        if sources:
            read = [scored[j] for j in sources] + [mine[1]]
            v = depth_mix(mine[0], read, [values[j] for j in sources] + [v], size**-0.5)
        scored.append(mine[1])
        values.append(v)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + out.transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].T
        h = _norm(x, w["post_attention_layernorm.weight"], eps)
        gate = F.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
        x = x + gate @ w["mlp.down_proj.weight"].T
    head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    return _norm(x, state["model.norm.weight"], eps) @ head.T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(depth_attention_stride=2, depth_attention_recent_window=1, tie_word_embeddings=True),
        dict(use_qk_norm=False, num_key_value_heads=4),
    ],
    ids=["plain", "window, tied", "without norms"],
)
def test_against_the_formula(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder, config, state = _folder(tmp_path, **changes)
    expected = _formula(config, state, IDS)
    model, _ = EXAMPLE.load(folder, torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS)[0], expected, rtol=1e-9, atol=1e-9)
        parts, cache = [], None
        for part in (IDS[:, :4], IDS[:, 4:5], IDS[:, 5:6], IDS[:, 6:7], IDS[:, 7:8], IDS[:, 8:]):
            logits, cache = model(part.clone(), cache)
            parts.append(logits)
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)
    report = explain(model)
    assert report.stride == config["depth_attention_stride"]
    if config["use_qk_norm"]:  # the norm does not commute with the rotation
        assert (_formula(config, state, IDS, score_before=True) - expected).abs().max() > 1e-3
        assert report.scored == "after position embedding"
    else:
        assert report.scored == "before rotation"
        torch.testing.assert_close(_formula(config, state, IDS, score_before=True), expected)
    loss = F.cross_entropy(expected[0, :-1], IDS[0, 1:])
    assert EXAMPLE.perplexity(model, IDS) == pytest.approx(loss.exp().item(), rel=1e-6)


def test_generation_reads_the_cache(tmp_path: Path) -> None:
    folder, config, state = _folder(tmp_path)
    model, _ = EXAMPLE.load(folder, torch.float64)
    found = EXAMPLE.generate(model, IDS[:, :4], 5)
    assert found.shape == (1, 9)
    assert torch.equal(_formula(config, state, found)[0, 3:8].argmax(-1), found[0, 4:])


def test_loading_is_strict(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, _, state = _folder(tmp_path)
    model, _ = EXAMPLE.load(folder, torch.float64)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in state.items())
    file = sorted(folder.glob("*.safetensors"))[0]
    kept = load_file(file)
    save_file({**kept, "model.layers.0.self_attn.extra": torch.zeros(1)}, file)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        EXAMPLE.load(folder)
    kept.popitem()
    save_file(kept, file)
    with pytest.raises(RuntimeError, match="Missing key"):
        EXAMPLE.load(folder)


def test_without_the_key_it_is_not_mixed(tmp_path: Path) -> None:
    folder, config, state = _folder(tmp_path, use_depth_attention=False)
    model, _ = EXAMPLE.load(folder, torch.float64)
    with torch.no_grad():
        plain = model(IDS)[0]
        assert (plain - _formula(config, state, IDS)).abs().max() > 1e-3
        (tmp_path / "mixed").mkdir()
        mixed, _ = EXAMPLE.load(_folder(tmp_path / "mixed")[0], torch.float64)
        assert depth_weights(mixed, IDS)[5].sources == (0, 3)
        assert torch.equal(restore(mixed)(IDS)[0], plain)

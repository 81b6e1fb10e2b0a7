"""``depthify inspect``: sites and refusals from a config alone, as a table and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from depthify.cli import main

SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4
)


def _saved(folder: Path, name: str, **options: Any) -> str:
    import transformers

    getattr(transformers, f"{name}Config")(**{**SIZES, **options}).save_pretrained(folder)
    return str(folder)


def _inspect(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str]:
    code = main(["inspect", *arguments])
    return code, capsys.readouterr().out


def test_json_of_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = _saved(tmp_path, "Llama", num_key_value_heads=2)
    code, out = _inspect(capsys, f"{folder}/config.json", "--json", "--stride", "2", "--recent-window", "1")
    found = json.loads(out)
    assert code == 0 and found["model"] == "LlamaForCausalLM" and found["problem"] == ""
    layers = found["layers"]
    assert [x["sources"] for x in layers] == [[], [0], [0, 1], [0, 2]]
    assert {(x["query_heads"], x["kv_heads"], x["key_size"], x["cached"]) for x in layers} == {
        (4, 2, 16, True)
    }
    assert found["refusals"] == []


def test_table_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, out = _inspect(capsys, _saved(tmp_path, "Llama"))
    assert code == 0 and "LlamaForCausalLM: 4 attention layers, 3 mixed (stride 2" in out
    rows = [line.split() for line in out.splitlines() if "layers.3.self_attn" in line]
    assert rows == [
        ["3", "layers.3.self_attn", "0,", "2", "4", "/", "4", "16", "yes", "scaled_dot_product_attention"]
    ]


@pytest.mark.slow
def test_a_latent_cache_is_read_without_it_and_said_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = _saved(
        tmp_path, "DeepseekV3", kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1,
        moe_intermediate_size=32, first_k_dense_replace=4, num_key_value_heads=4,
    )  # fmt: skip
    code, out = _inspect(capsys, folder, "--json")
    found = json.loads(out)
    assert code == 0 and len(found["layers"]) == 4 and not any(x["cached"] for x in found["layers"])
    assert "only without a cache" in found["notes"][-1]


def test_a_refusal_names_node_rule_and_source_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """An encoder: all its attention is left out, as not causal, so nothing can be mixed."""
    folder = _saved(tmp_path, "Bert", is_decoder=False)
    code, out = _inspect(capsys, folder, "--json")
    found = json.loads(out)
    assert code == 1 and "no causal self-attention found" in found["problem"]
    assert len(found["refusals"]) == 4
    for refusal in found["refusals"]:
        assert "it is not causal" in refusal["reason"] and not refusal["unsupported"]
        assert refusal["node"] and "scaled_dot_product_attention" in refusal["source"]
        assert ".py:" in refusal["source"]


def test_refusals_as_a_table_are_grouped_by_rule(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, out = _inspect(capsys, _saved(tmp_path, "Bert", is_decoder=False))
    assert code == 1 and "not mixed: no causal self-attention found" in out
    assert out.count("it is not causal") == 1 and out.count("nearest miss") == 1
    assert "encoder.layer.0.attention.self, encoder.layer.1.attention.self" in out


def test_what_cannot_be_read_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    assert "no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "inspect", "weights"])
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "JSON|double quotes"),
        (
            '{"model_type": "llama", "num_attention_heads": 3, "hidden_size": 64, "num_hidden_layers": 2}',
            "not a multiple of the number of attention heads",
        ),
    ],
)
def test_a_config_that_is_wrong_is_one_message(
    command: str, config: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert main([command, str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("depthify: error: model=") and re.search(reason, message)
    assert "Traceback" not in message


@pytest.mark.parametrize("command", ["report", "weights"])
def test_a_picture_needs_a_folder(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "paper-3b", "--plot", str(tmp_path / "none" / "x.png")]) == 1
    assert "there is no folder" in capsys.readouterr().err

"""cost_report and `depthify report`: figures, formats, options, and that a config is enough and quick."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import sympy
import torch
from cost_decoder import Decoder

import depthify
from depthify import DepthifyError, cost_report
from depthify.cli_report import add_report_command
from depthify.cost_model import symbols as S
from depthify.cost_model.shapes import PRESETS, DecoderShape
from depthify.cost_model.tables import percent, seconds, short
from depthify.errors import MissingDependencyError, OptionError, UnsupportedModelError

QWEN3 = dict(
    model_type="qwen3", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, intermediate_size=96, vocab_size=101, tie_word_embeddings=False,
)  # fmt: skip


def test_paper_3b() -> None:
    """The mixture by hand: 24 layers with one source, 23 with two, 8 key/value heads of 64, groups of 4."""
    report = cost_report("paper-3b", seq_len=2048)
    one = 4 * 64 + 2 * 2 * 64 + 4 + 3 * 64
    two = 4 * 64 + 3 * 2 * 64 + (3 + 4 + 2 + 1 + 3) + 5 * 64
    assert report.flops_after - report.flops_before == 2048 * 8 * (24 * one + 23 * two) == 645_054_464
    assert report.flops_before == 12_526_188_695_552
    assert 4e-5 < report.flops_overhead < report.needed_overhead < 9e-5
    assert report.flops_overhead == pytest.approx(5.149646709609734e-05, rel=1e-12)
    assert report.cache_bytes_after == report.cache_bytes_before == 2048 * 48 * 2 * 8 * 64 * 2
    assert report.parameters_after == report.parameters_before == 2_747_998_208
    assert (report.stride, report.layers, report.method) == (24, 48, "closed form")


_HUGE = """
import json, time
from depthify import cost_report
from depthify.cost_model.shapes import DecoderShape

shape = DecoderShape(
    name="huge", layers=400, width=32768, query_heads=256, kv_heads=16, key_size=128, value_size=128,
    ff=131072, vocabulary=300000, rotated=128,
)
start = time.process_time()
text = str(cost_report(shape, 7, recent_window=3, batch_size=64, seq_len=1 << 20))
print(json.dumps([time.process_time() - start, text]))
"""


def test_a_config_takes_less_than_a_second() -> None:
    """In a process of its own: the objects of other tests make Python's garbage collection slow."""
    found = subprocess.run([sys.executable, "-c", _HUGE], capture_output=True, text=True, check=True)
    took, text = json.loads(found.stdout)
    assert took < 1
    assert "huge: 400 layers, stride 7, recent window 3; batch 64, 1048576 new tokens" in text


def test_figures_are_the_expressions() -> None:
    report = cost_report("paper-410m", 4, recent_window=1, batch_size=3, seq_len=17, cache_len=5)
    point = {S.B: 3, S.T: 17, S.C: 5}
    for name, expression in report.expressions.items():
        value = getattr(report, name) if name != "flops_extra" else report.flops_after - report.flops_before
        assert float(expression.subs(point)) == pytest.approx(float(value), rel=1e-15)
    assert (
        sympy.expand(report.expressions["needed_after"] - report.expressions["needed_before"])
        == (report.expressions["flops_extra"])
    )


def test_stride_of_preset_argument_and_default() -> None:
    assert cost_report("paper-410m").stride == 16
    assert cost_report("paper-410m", 3).stride == 3
    assert cost_report(QWEN3).stride == 2
    recorded = dict(QWEN3, use_depth_attention=True, depth_attention_stride=3)
    assert cost_report(recorded).stride == 3


def test_model_config_and_directory_agree(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**QWEN3)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    options = dict(stride=1, batch_size=2, seq_len=33)
    counted = cost_report(model, **options)
    assert counted.method == "counted graph"
    for source in (config, QWEN3, tmp_path, str(tmp_path)):
        report = cost_report(source, **options)
        assert report.method == "closed form"
        for name in report.expressions:
            if name != "flops_extra":
                assert getattr(report, name) == getattr(counted, name), name
    assert counted.compare() == cost_report(config, **options).compare()
    assert counted.expressions["flops_before"].free_symbols == {S.B, S.T}


def test_counting_leaves_the_model_alone() -> None:
    model = Decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mode = model.training
    cost_report(model, 1, seq_len=9)
    assert model.training == mode and type(model) is Decoder
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.device.type == "cpu" for value in model.parameters())


def test_mixed_model_is_counted_without_and_with() -> None:
    plain = cost_report(Decoder(), 1, seq_len=9)
    mixed = cost_report(depthify.depthify(Decoder(), stride=1), 1, seq_len=9)
    assert mixed.flops_before == plain.flops_before and mixed.flops_after == plain.flops_after


def test_a_model_without_closed_form_has_no_methods() -> None:
    report = cost_report(Decoder(), 1, seq_len=9)
    assert report.shape is None and len(report.tables()) == 1
    with pytest.raises(UnsupportedModelError, match=r"compare\(\) needs the closed form"):
        report.compare()
    with pytest.raises(UnsupportedModelError, match=r"plot\(\) needs the closed form"):
        report.plot("x.png")


def test_compare_names_every_method() -> None:
    methods = cost_report("paper-3b", seq_len=2048).compare()
    names = [method.name for method in methods]
    assert names == [
        "Depth-Attention",
        "DenseFormer, 1x1",
        "DenseFormer, 4x5",
        "AttnRes, full",
        "AttnRes, blocks (8)",
        "hyper-connections (4 streams)",
        "mHC (4 streams)",
    ]
    own = methods[0]
    assert own.parameters == own.cache_bytes == 0 and own.training_flops == 3 * own.flops
    assert own.live_bytes_per_token == 2 * 2 * 8 * 64 * 2  # two sources, key and value, bfloat16


def test_traffic_is_what_generated_kernels_move() -> None:
    """Bytes per mixed layer of Inductor's kernels for sm_90: 8/2 heads of 64, 4096 tokens, bfloat16, one
    source; read 7.34 MB, written 1.05 MB more than without mixing."""
    shape = DecoderShape(
        layers=2, width=256, query_heads=8, kv_heads=2, key_size=64, value_size=64, ff=512, vocabulary=1024
    )
    found = cost_report(shape, 4, seq_len=4096).roofline()
    assert round(found.read_per_layer / 1e6, 2) == 7.34
    assert round(found.written_per_layer / 1e6, 2) == 1.05
    slow = cost_report(shape, 4, seq_len=4096).roofline(bandwidth=1e9)
    assert slow.mix_seconds == pytest.approx((found.read_per_layer + found.written_per_layer) / 1e9)


def test_formats(tmp_path: Path) -> None:
    report = cost_report("paper-3b", seq_len=2048)
    for text in (str(report), report.to_markdown(), report.to_latex().replace(r"\%", "%")):
        for part in ("645.1 MFLOP (0.00515 %)", "201.3 MB", "Depth-Attention", "mHC (4 streams)", "Roofline"):
            assert part in text
        assert text.isascii()
    assert "| --- | ---: |" in report.to_markdown()
    assert r"\begin{tabular}" in report.to_latex() and r"\Delta F = 314968 B T" in report.to_latex()
    data = json.loads(json.dumps(report.to_dict()))
    assert data["flops_overhead"] == report.flops_overhead and len(data["methods"]) == 7
    assert sympy.sympify(data["expressions"]["flops_extra"]) == sympy.sympify("314968*B*T")


def test_rich_shows_the_tables() -> None:
    console = pytest.importorskip("rich.console").Console(record=True, width=160, file=open("/dev/null", "w"))
    console.print(cost_report("paper-3b", seq_len=2048))
    text = console.export_text()
    assert "0.00515 %" in text and "AttnRes, full" in text


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = cost_report("paper-3b", seq_len=2048)
    report.plot(tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes()[:4] == b"\x89PNG"
    report.plot(tmp_path / "cost.svg")
    assert "Methods" in (tmp_path / "cost.svg").read_text() or (tmp_path / "cost.svg").stat().st_size > 10_000
    with pytest.raises(OptionError, match="the ending must be one of"):
        report.plot(tmp_path / "cost.doc")


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"depthify\[plot\]"):
        cost_report("paper-3b").plot("x.png")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    parser = argparse.ArgumentParser()
    add_report_command(parser.add_subparsers())
    args = parser.parse_args(["report", *arguments])
    assert args.run(args) == 0
    return capsys.readouterr().out


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = cost_report("paper-3b", 12, recent_window=1, batch_size=2, seq_len=128)
    options = ("paper-3b", "--stride", "12", "--recent-window", "1", "--batch-size", "2", "--seq-len", "128")
    assert run(capsys, *options) == str(report) + "\n"
    assert run(capsys, *options, "--format", "markdown") == report.to_markdown() + "\n"
    assert run(capsys, *options, "--format", "latex") == report.to_latex() + "\n"
    data = json.loads(run(capsys, *options, "--format", "json"))
    assert data == json.loads(json.dumps(report.to_dict()))
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert "4 layers, stride 2" in run(capsys, str(tmp_path))
    assert "float32" in run(capsys, str(tmp_path), "--dtype", "float32")
    pytest.importorskip("matplotlib")
    run(capsys, "paper-410m", "--plot", str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "keywords, part",
    [
        ({"stride": 0}, "stride=0"),
        ({"recent_window": -1}, "recent_window=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seq_len": 2.5}, "seq_len=2.5"),
        ({"cache_len": -1}, "cache_len=-1"),
        ({"dtype": torch.int8}, "dtype=torch.int8"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16'"),
    ],
)
def test_options_are_checked(keywords: dict[str, object], part: str) -> None:
    with pytest.raises(OptionError, match=part):
        cost_report("paper-3b", **keywords)  # type: ignore[arg-type]


def test_what_has_no_closed_form_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="model_type='bloom': no closed form"):
        cost_report(dict(QWEN3, model_type="bloom"))
    with pytest.raises(UnsupportedModelError, match="sliding_window=4"):
        cost_report(dict(QWEN3, use_sliding_window=True, sliding_window=4))
    with pytest.raises(OptionError, match="holds no config.json"):
        cost_report(tmp_path)
    missing = {name: value for name, value in QWEN3.items() if name != "vocab_size"}
    with pytest.raises(OptionError, match="none of vocab_size is given"):
        cost_report(missing)
    with pytest.raises(DepthifyError, match="no preset .*paper-3b"):
        cost_report("no/such/model")


def test_latent_attention_says_that_its_cache_cannot_be_mixed() -> None:
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=101,
        intermediate_size=96, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        first_k_dense_replace=1, n_group=2, topk_group=1,
    )  # fmt: skip
    report = cost_report(config, 1, seq_len=64)
    assert report.cache_bytes_before == 64 * 2 * (16 + 8) * 2
    assert "without a cache only" in report.notes[0] and report.notes[0] in str(report)


def test_lazy_import() -> None:
    code = (
        "import sys, depthify; depthify.cost_report; "
        "assert not {'transformers', 'depthify.cost_model', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_presets_are_the_paper_s() -> None:
    sizes = {
        name: (
            shape.layers,
            shape.width,
            shape.query_heads,
            shape.kv_heads,
            shape.ff,
            shape.vocabulary,
            shape.stride,
        )
        for name, shape in PRESETS.items()
    }
    assert sizes == {
        "paper-410m": (32, 1024, 16, 4, 2816, 32000, 16),
        "paper-1.5b": (48, 1536, 24, 6, 4096, 50304, 24),
        "paper-3b": (48, 2048, 32, 8, 6912, 50304, 24),
    }
    assert all(s.key_size == s.value_size == 64 and s.qk_norm and not s.tied for s in PRESETS.values())


def test_numbers_as_text() -> None:
    assert [short(x, "B") for x in (0, 7, 999, 1000, 1234567, 5e12)] == [
        "0 B", "7 B", "999 B", "1 kB", "1.235 MB", "5 TB",
    ]  # fmt: skip
    assert [percent(x) for x in (0, 1, 0.012699, 5.158e-5, 1e-9)] == [
        "0 %", "100.00 %", "1.27 %", "0.00516 %", "0.000000100 %",
    ]  # fmt: skip
    assert [seconds(x) for x in (2, 0.0126, 1.8e-4, 5e-8)] == ["2 s", "12.6 ms", "180 us", "50 ns"]

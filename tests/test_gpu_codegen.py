"""The code Inductor generates for an H200: what mixing adds to the kernels. No GPU is needed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gpu_codegen import KernelReport, Result, build, compile_for_cuda, fake_cuda, unavailable
from torch import Tensor, nn

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("transformers")

from gpu_codegen.scenarios import Shape, compile_scenario

SHAPE = Shape(layers=3)


def compiled(
    scenario: str, layout: str = "gqa", stride: int | None = None, layers: int = 3, recompute: bool = False
) -> Result:
    return _compiled(scenario, layout, stride, layers, recompute)  # one spelling: the cache tells them apart


@functools.cache
def _compiled(scenario: str, layout: str, stride: int | None, layers: int, recompute: bool) -> Result:
    return compile_scenario(scenario, Shape(layers, layout), stride, recompute)


class Attention(nn.Module):
    def __init__(self, width: int = 128, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + out.transpose(1, 2).flatten(2)


def attention() -> tuple[Attention, Tensor]:
    with torch.device("meta"):
        return Attention().to(torch.bfloat16), torch.empty(1, 256, 128, dtype=torch.bfloat16)


class TestHarness:
    """What is counted is what was generated."""

    @pytest.mark.parametrize("kind", ["cudnn", "flash", "efficient"])
    def test_attention_stays_one_call(self, kind: str) -> None:
        result = compile_for_cuda(*attention(), attention=kind)
        calls = [call for call in result.forward.externs if "attention" in call]
        assert calls == [f"aten._scaled_dot_product_{kind}_attention.default"]
        assert [phase.name for phase in result.phases] == ["inference"] and not result.saved

    def test_backward_and_saved_tensors(self) -> None:
        result = compile_for_cuda(lambda m, x: m(x).float().pow(2).sum(), *attention(), train=True)
        assert [phase.name for phase in result.phases] == ["forward", "backward"]
        assert any("attention_backward" in call for call in result.backward.externs)
        assert result.saved_bytes > 0 and any(saved.is_input for saved in result.saved)

    def test_bytes_of_a_pointwise_kernel(self) -> None:
        x = torch.empty(1 << 20, device="meta")
        (launch,) = compile_for_cuda(lambda x, y: (x * 2 + y).relu(), x, x.clone()).forward.launches
        assert (launch.read_bytes, launch.write_bytes) == (8 << 20, 4 << 20)

    def test_launches_are_counted_not_definitions(self) -> None:
        def three(x: Tensor, w: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.relu(x @ w)
            return x

        x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
        phase = compile_for_cuda(three, x, x.clone()).forward
        assert (len(phase.launches), len(phase.externs), len(phase.kernels)) == (3, 3, 1)

    def test_everything_is_undone(self) -> None:
        def state() -> Any:
            return torch.cuda.is_available, torch.cuda.device_count, torch.cuda.get_device_properties

        before = state()
        with fake_cuda():
            assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        assert state() == before
        q = torch.randn(1, 2, 8, 16)
        assert nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape


def added(scenario: str, phase: str, layout: str, stride: int, layers: int = 3) -> int:
    """Launches of the mixed model beyond those of the model as it is."""
    plain, mixed = compiled(scenario, layout, None, layers), compiled(scenario, layout, stride, layers)
    assert len(mixed.phase(phase).externs) == len(plain.phase(phase).externs)
    return len(mixed.phase(phase).launches) - len(plain.phase(phase).launches)


@pytest.mark.parametrize("stride", [3, 1])
@pytest.mark.parametrize("layout", ["gqa", "mha", "mqa"])
def test_prefill_takes_no_more_launches(layout: str, stride: int) -> None:
    assert added("prefill", "inference", layout, stride) <= 0


@pytest.mark.parametrize("scenario", ["decode", "decode_static"])
def test_decode_takes_no_more_launches(scenario: str) -> None:
    assert added(scenario, "inference", "gqa", 1) <= 0


@pytest.mark.parametrize("stride", [3, 1])
def test_training_takes_no_more_launches(stride: int) -> None:
    assert added("train", "forward", "gqa", stride) <= 0
    assert added("train", "backward", "gqa", stride) <= SHAPE.layers - 1


def test_saved_are_the_mixed_value_and_one_weight_per_source() -> None:
    value = SHAPE.length * SHAPE.kv_heads * SHAPE.head_size * 2
    weight = SHAPE.length * SHAPE.kv_heads * 4
    plain = compiled("train").saved_bytes
    assert compiled("train", stride=3).saved_bytes - plain == 2 * (value + weight)
    # Layer 1 has one source; layer 2 has two.
    assert compiled("train", stride=1).saved_bytes - plain <= 2 * value + (1 + 2) * weight


def test_recomputed_values_are_not_saved() -> None:
    value = SHAPE.length * SHAPE.kv_heads * SHAPE.head_size * 2
    plain, mixed = compiled("train"), compiled("train", stride=3, recompute=True)
    assert mixed.saved_bytes - plain.saved_bytes < value / 8
    assert len(mixed.forward.launches) == len(plain.forward.launches)
    assert len(mixed.backward.launches) <= len(plain.backward.launches) + SHAPE.layers - 1


@pytest.mark.parametrize("scenario", ["prefill", "train"])
def test_kernels_build_for_sm_90_and_do_not_spill(scenario: str) -> None:
    plain, mixed = ([*reports(compiled(scenario, stride=stride))] for stride in (None, 1))
    for report in (*plain, *mixed):
        assert report.error is None and ".target sm_90" in report.ptx
    if any(report.registers is None for report in mixed):
        pytest.skip("ptxas does not tell")
    assert max(report.stack for report in mixed) <= max(report.stack for report in plain)
    assert all(report.spilled == 0 and report.registers <= 128 for report in mixed)


def reports(result: Result) -> Any:
    for phase in result.phases:
        for name, source in phase.kernels.items():
            yield from _built(source.replace(name, "kernel"))


@functools.cache
def _built(source: str) -> list[KernelReport]:
    """Most kernels are those of the model as it is, under another name."""
    return build("kernel", source)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [12, 6, 1])
@pytest.mark.parametrize("layout", ["gqa", "mha", "mqa"])
def test_launches_at_twelve_layers(layout: str, stride: int) -> None:
    assert added("prefill", "inference", layout, stride, 12) <= 0
    assert added("decode", "inference", layout, stride, 12) <= 0
    assert added("decode_static", "inference", layout, stride, 12) <= 0
    assert added("train", "forward", layout, stride, 12) <= 0
    assert added("train", "backward", layout, stride, 12) <= 11

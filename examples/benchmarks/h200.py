"""All GPU numbers in one run of a few minutes: training step, prefill and decode, vanilla and mixed in turn.

    python examples/benchmarks/h200.py --out h200        # on one H200: h200/h200.csv, .json, .png
    python examples/benchmarks/h200.py --shape tiny --device cpu --backend eager --train 2x8 --lengths 16,32
                                                         # a rehearsal

Shape paper-3b (48 layers, bfloat16, random weights), compiled with Inductor, one graph each; decode with CUDA
graphs (mode "reduce-overhead"). A short trial tells how long a layer takes to compile, and the shapes tell
how long the calls take; if 48 layers would not fit the time (--minutes), fewer are taken, with the stride
shortened alike, and every row says how many. What does not fit any more is left out, and said so. --plan
prints what would be run, and runs nothing.
"""

from __future__ import annotations

import csv
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench import (
    Comparison,
    Setting,
    about,
    announce,
    compare,
    decoder,
    failed,
    parser,
    setting,
)
from scenarios import Scenario, decode, prefill, training

BOUNDS = {"train": 1.01, "prefill 131072": 1.005, "decode": 1.01}
"""What the project promises for paper-3b, by the beginning of a row's name."""


SPEED = 3e14
"""FLOP/s that the calls are expected to reach in bfloat16: a third of an H200's peak."""

PER_LAYER = 1.5
"""Seconds to compile a layer, both variants together, that --plan assumes; a run measures its own."""


@dataclass(frozen=True)
class Case:
    """One row: a scenario, its size, and how it is compiled."""

    name: str
    scenario: Callable[[Any, Setting], Scenario]
    batch: int
    length: int
    setting: Setting
    group: str
    """Cases of one group share their compiled code."""

    cost: float
    """Time to compile, in units of a prefill."""

    def seconds(self, layers: int) -> float:
        """Expected time of all its calls, from the shapes; at most :attr:`Setting.seconds` where rounds can
        be left out."""
        shape = self.setting.shape
        new = self.batch if self.scenario is decode else self.batch * self.length
        weights = shape.width * (2 * shape.query_heads + 2 * shape.kv_heads) * shape.key_size
        weights = layers * (weights + 3 * shape.width * shape.ff) + shape.width * shape.vocabulary
        scores = 2 * layers * new * self.length * shape.query_heads * shape.key_size
        once = (2 * weights * new + scores) * (3 if self.scenario is training else 1) / SPEED
        return max(min(self.setting.seconds, 2 * self.setting.rounds * max(once, 0.02)), 6 * once) + 5 * once


def cases(chosen: Setting, lengths: list[int], batches: list[int], train: tuple[int, int]) -> list[Case]:
    """In the order of their weight: what comes last is left out first."""
    chosen = replace(chosen, seconds=12.0)
    varying = replace(chosen, dynamic=True)
    graphs = varying if chosen.device != "cuda" else replace(varying, mode="reduce-overhead")
    eager = replace(chosen, backend="eager")
    batch, length = train
    context = min(lengths[0], 4096)
    found = [
        Case(f"prefill {n}", prefill, 1, n, varying, "prefill", 1.0) for n in sorted(lengths, reverse=True)
    ]
    found.append(Case(f"train {batch} x {length}", training, batch, length, chosen, "train", 3.0))
    found += [
        Case(f"decode batch {n}", decode, n, context, graphs, f"decode {n > 1}", 1.0)
        for n in sorted(batches, reverse=True)
    ]
    found.append(Case(f"prefill {lengths[0]}, eager", prefill, 1, lengths[0], eager, "eager", 0.5))
    return found


def trial(chosen: Setting, length: int) -> float:
    """Seconds a layer takes to compile, vanilla and mixed together, for prefill."""
    small = replace(chosen, shape=replace(chosen.shape, layers=4), stride=2)
    seconds = []
    for layers in (2, 4):
        one = replace(small, shape=replace(small.shape, layers=layers), stride=layers // 2)
        model = decoder(one.shape, one.device, one.dtype, length)
        began = time.monotonic()
        for call in prefill(model, one)(1, length).values():
            call()
        seconds.append(time.monotonic() - began)
        torch._dynamo.reset()
    return max(0.05, (seconds[1] - seconds[0]) / 2)


@dataclass(frozen=True)
class Plan:
    """What is run, and how long it is expected to take."""

    chosen: Setting
    cases: list[Case]
    compiling: float
    measuring: float


def plan(
    wanted: Setting, per_layer: float, seconds: float, few: bool, sizes: tuple[list[int], list[int], Any]
) -> Plan:
    """The most layers for which everything fits into ``seconds``; all of them unless ``few``."""
    layers = wanted.shape.layers
    while True:
        stride = max(1, wanted.stride * layers // wanted.shape.layers)
        chosen = replace(wanted, shape=replace(wanted.shape, layers=layers), stride=stride)
        found = cases(chosen, *sizes)
        compiling = per_layer * layers * sum({case.group: case.cost for case in found}.values())
        measuring = sum(case.seconds(layers) for case in found)
        if not few or layers <= 4 or compiling + measuring <= seconds:
            return Plan(chosen, found, compiling, measuring)
        layers -= 4


def write(folder: Path, chosen: Setting, results: list[Comparison]) -> None:
    """CSV, JSON, and a picture where matplotlib is installed; after every row, so that nothing is lost."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) for result in results]
    with (folder / "h200.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "h200.json").write_text(json.dumps({**about(chosen), "results": rows}, indent=1))


def draw(path: Path, chosen: Setting, results: list[Comparison]) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(results) + 1.5), layout="constrained")
    rows = range(len(results))[::-1]
    over = [(x.ratio - 1) * 100 for x in results]
    spread = [
        [(x.ratio - min(x.low, x.ratio)) * 100 for x in results],
        [(max(x.high, x.ratio) - x.ratio) * 100 for x in results],
    ]
    axes.barh(rows, over, xerr=spread, color="#4477aa", ecolor="#222222", capsize=3, height=0.6)
    axes.set_yticks(rows, [x.name for x in results])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("time of the mixed model over the vanilla one, % (bars: middle half)")
    device = about(chosen)["device"]
    axes.set_title(
        f"{chosen.shape.name}, {chosen.shape.layers} layers, {chosen.dtype}, {device}", fontsize=10
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = parser(__doc__, shape="paper-3b")
    arguments.add_argument("--minutes", type=float, default=7.5)
    arguments.add_argument("--lengths", default="2048,32768,131072", help="of prefill")
    arguments.add_argument("--batches", default="1,8,64", help="of decode")
    arguments.add_argument("--train", default="4x2048", help="batch and length of the training step")
    arguments.add_argument("--out", type=Path, default=Path("h200"))
    arguments.add_argument("--plan", action="store_true", help="print what would be run, and stop")
    given = arguments.parse_args()
    began = time.monotonic()
    wanted = setting(given)
    lengths, batches = ([int(n) for n in text.split(",")] for text in (given.lengths, given.batches))
    batch, length = (int(n) for n in given.train.split("x"))
    announce(wanted)
    per_layer = PER_LAYER if given.plan else trial(wanted, min(lengths))
    left = given.minutes * 60 - (time.monotonic() - began)
    planned = plan(wanted, per_layer, left, not given.layers, (lengths, batches, (batch, length)))
    chosen = planned.chosen
    layers = f"{chosen.shape.layers} of {wanted.shape.layers} layers"
    print(
        f"{layers}, stride {chosen.stride}; {per_layer:.2f} s to compile a layer; expected: "
        f"{planned.compiling:.0f} s compiling, {planned.measuring:.0f} s measuring",
        flush=True,
    )
    if given.plan:
        for case in planned.cases:
            print(f"{case.name:24} {case.seconds(chosen.shape.layers):6.1f} s measuring")
        return
    model = decoder(chosen.shape, chosen.device, chosen.dtype, max(lengths))
    results: list[Comparison] = []
    group = ""
    calls_of: Scenario | None = None
    for case in planned.cases:
        expected = case.seconds(chosen.shape.layers)
        if case.group != group:
            expected += case.cost * per_layer * chosen.shape.layers
        if time.monotonic() - began + expected > given.minutes * 60:
            print(f"{case.name}: left out, no time", flush=True)
            continue
        if case.group != group:
            torch._dynamo.reset()
            gc.collect()
            group, calls_of = case.group, case.scenario(model, case.setting)
        try:
            results.append(compare(case.name, calls_of(case.batch, case.length), case.setting, note=layers))
        except torch.OutOfMemoryError as error:
            failed(case.name, error)
            continue
        print(f"{verdict(results[-1])}{results[-1]}   [{time.monotonic() - began:.0f} s]", flush=True)
        write(given.out, chosen, results)
        model.zero_grad(set_to_none=True)
    if results:
        draw(given.out / "h200.png", chosen, results)


def verdict(result: Comparison) -> str:
    bound = next((x for name, x in BOUNDS.items() if result.name.startswith(name)), None)
    if bound is None or "eager" in result.name:
        return "      "
    return "  ok  " if result.ratio < bound else " OVER "


if __name__ == "__main__":
    main()

"""Seconds to the first result of a training forward, over depth: vanilla eager, whole model, block regions.

    python examples/benchmarks/capture_time.py --layers 12,24,48,96 --json capture.json --plot capture.png

"vanilla" runs the model as it is; the others capture, rewrite and run it (backend "eager", so no compiler's
own time is in it). Each number is a fresh start: Dynamo's store is emptied before. A first run that loads
libraries is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from bench import SHAPES, decoder

from depthify import depthify

CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
MODES = {"vanilla, eager": None, "whole model": "model", "block regions": "block"}


def first_forward(layers: int, mode: str, clock: Callable[[], float], length: int = 6) -> float:
    """Seconds of the first training forward without a cache, of a model that is built already."""
    torch._dynamo.reset()
    model = decoder(replace(SHAPES["tiny"], layers=layers), "cpu", torch.float32, length).train()
    regions = MODES[mode]
    if regions is not None:
        depthify(model, regions=regions)
    ids = torch.zeros(2, length, dtype=torch.long)
    began = clock()
    model(ids, use_cache=False, labels=ids).loss.item()
    return clock() - began


def plot(rows: dict[str, list[float]], layers: list[int], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, seconds in rows.items():
        axis.plot(layers, seconds, marker="o", label=name)
    axis.set(xlabel="layers", ylabel="seconds to the first result", xticks=layers, ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layers", default="12,24,48,96")
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many is taken")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="'process' on a machine with other work"
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--plot", type=Path, help="draw them here (needs matplotlib)")
    given = parser.parse_args()
    layers = [int(n) for n in given.layers.split(",")]
    torch.set_num_threads(1)  # tiny matrices: several threads would only wait for each other
    for mode in MODES:
        first_forward(2, mode, CLOCKS[given.clock])
    rows = {
        mode: [min(first_forward(n, mode, CLOCKS[given.clock]) for _ in range(given.rounds)) for n in layers]
        for mode in MODES
    }
    print("| seconds to the first result |" + "".join(f" L = {n} |" for n in layers))
    print("| --- |" + " ---: |" * len(layers))
    for mode, seconds in rows.items():
        print(f"| {mode} |" + "".join(f" {s:.2f} |" for s in seconds))
    print(
        f"block regions, L = {layers[-1]} against L = {layers[0]}: "
        f"{rows['block regions'][-1] / rows['block regions'][0]:.2f} times"
    )
    if given.json:
        given.json.write_text(json.dumps({"layers": layers, "seconds": rows}, indent=1))
    if given.plot:
        plot(rows, layers, given.plot)


if __name__ == "__main__":
    main()

"""Time of the pass beside the time Dynamo takes to capture the model: tiny layers, many of them.

    python examples/benchmarks/pass_time.py --layers 12,48 --json pass_time.json

"capture" is what the first call takes without the pass (backend "eager", so no compiler runs), "pass" is the
rewriting at its end: finding, ordering, mixing, verifying, checking the cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench import SHAPES, decoder

import depthify.passes
from depthify import depthify as attach


def measure(layers: int, stride: int | None, length: int = 6) -> tuple[float, float]:
    """Seconds of capture and of pass, of one first call."""
    torch._dynamo.reset()
    model = decoder(replace(SHAPES["tiny"], layers=layers), "cpu", torch.float32, length).eval()
    attach(model, stride, budget=float("inf"), backend="eager")
    ids = torch.zeros(2, length, dtype=torch.long)
    original, spent = depthify.passes.mix_graph, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = original(*args, **kwargs)
        spent.append(time.perf_counter() - began)
        return result

    depthify.passes.mix_graph = timed
    began = time.perf_counter()
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        depthify.passes.mix_graph = original
    whole = time.perf_counter() - began
    return whole - sum(spent), sum(spent)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    arguments.add_argument("--layers", default="48")
    arguments.add_argument("--stride", type=int, help="default: half the layers")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--json", type=Path, help="write the numbers here")
    given = arguments.parse_args()
    measure(2, None)  # what is loaded once
    rows = []
    for layers in map(int, given.layers.split(",")):
        runs = [measure(layers, given.stride) for _ in range(given.rounds)]
        parts = [spent / capture for capture, spent in runs]
        row = {
            "layers": layers,
            "capture": statistics.median(capture for capture, _ in runs),
            "pass": statistics.median(spent for _, spent in runs),
            "part": statistics.median(parts),
            "least": min(parts),
            "most": max(parts),
        }
        rows.append(row)
        print(
            f"{layers} layers: capture {row['capture']:.2f} s, pass {row['pass']:.2f} s, "
            f"{row['part']:.1%} ({row['least']:.1%} .. {row['most']:.1%})",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps({"torch": torch.__version__, "results": rows}, indent=1))


if __name__ == "__main__":
    main()

"""Print what mixing adds to the kernels Inductor generates for an H200: needs no GPU, but torch for CUDA.

    python examples/benchmarks/kernel_table.py                              # 4 layers, GQA, every scenario
    python examples/benchmarks/kernel_table.py --layouts gqa,mha,mqa --layers 4,12 --json kernels.json
    python examples/benchmarks/kernel_table.py --scenarios train --ptx      # also registers and spills

A row compares the mixed model with the same model unmixed. Launches are calls, not kernel definitions; MB
are 1e6 bytes, per mixed layer; "saved" is what the training forward keeps for backward. JSON is written after
every scenario, so that a run that is stopped leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from gpu_codegen import KernelReport, Result, build, unavailable
from gpu_codegen.scenarios import HEADS, SCENARIOS, Shape, compile_scenario

COLUMNS = (
    ("unmixed", "{:d}"),
    ("launches", "{:d}"),
    ("added", "{:+d}"),
    ("per mixed layer", "{:+.2f}"),
    ("externs added", "{:+d}"),
    ("MB read", "{:+.3f}"),
    ("MB written", "{:+.3f}"),
    ("MB saved", "{:+.3f}"),
)


def count(result: Result) -> dict[str, dict[str, int]]:
    """Launches, extern calls and bytes by phase."""
    return {
        phase.name: {
            "launches": len(phase.launches),
            "externs": len(phase.externs),
            "read": phase.read_bytes,
            "written": phase.write_bytes,
            "saved": result.saved_bytes if phase.name == "forward" else 0,
        }
        for phase in result.phases
    }


def rows_of(
    scenario: str, shape: Shape, stride: int, plain: Result, mixed: Result, recompute: bool = False
) -> list[dict[str, Any]]:
    """One row per phase: the mixed model's numbers, and their difference to the unmixed model's per layer."""
    before, after = count(plain), count(mixed)
    layers = shape.layers - 1  # the first has no source
    rows = []
    for name, now in after.items():
        then = before[name]
        rows.append(
            {
                "scenario": (scenario if len(after) == 1 else f"{scenario} {name}")
                + (", recompute" if recompute else ""),
                "layout": shape.layout,
                "layers": shape.layers,
                "stride": stride,
                "vanilla": then,
                "mixed": now,
                "unmixed": then["launches"],
                "launches": now["launches"],
                "added": now["launches"] - then["launches"],
                "per mixed layer": (now["launches"] - then["launches"]) / layers,
                "externs added": now["externs"] - then["externs"],
                "MB read": (now["read"] - then["read"]) / layers / 1e6,
                "MB written": (now["written"] - then["written"]) / layers / 1e6,
                "MB saved": (now["saved"] - then["saved"]) / layers / 1e6,
            }
        )
    return rows


def build_all(result: Result) -> list[KernelReport]:
    """Every kernel of ``result``, in its first configuration."""
    return [
        report
        for phase in result.phases
        for name, source in phase.kernels.items()
        for report in build(name, source)
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; bytes are per mixed layer."""
    head = ["scenario", "layout", "layers", "stride", *(name for name, _ in COLUMNS)]
    lines = ["| " + " | ".join(head) + " |", "|---" * 4 + "|--:" * len(COLUMNS) + "|"]
    for row in rows:
        cells = [str(row[name]) for name in head[:4]]
        cells += [form.format(row[name]) for name, form in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def resource_rows(which: str, reports: list[KernelReport]) -> dict[str, Any]:
    built = [report for report in reports if report.error is None]
    return {
        "model": which,
        "kernels": len(reports),
        "failed": [f"{report.name}: {report.error}" for report in reports if report.error is not None],
        "most registers": max((report.registers or 0 for report in built), default=0),
        "most stack": max((report.stack or 0 for report in built), default=0),
        "spilled": max((report.spilled or 0 for report in built), default=0),
        "each": [
            [report.name, report.config, report.warps, report.registers, report.stack, report.shared]
            for report in built
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layouts", default="gqa", help=f"of {', '.join(HEADS)}")
    parser.add_argument("--layers", default="4")
    parser.add_argument("--strides", default="all,half,1", help="numbers; all: one source; half: two")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--ptx", action="store_true", help="build every kernel, print registers and stack")
    parser.add_argument("--recompute", action="store_true", help="training also with recompute=True")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    chosen = parser.parse_args()
    if reason := unavailable():
        sys.exit(f"kernel_table: {reason}")
    rows: list[dict[str, Any]] = []
    built: list[dict[str, Any]] = []
    for scenario in chosen.scenarios.split(","):
        for layout in chosen.layouts.split(","):
            for layers in map(int, chosen.layers.split(",")):
                shape = Shape(layers, layout)
                plain = compile_scenario(scenario, shape)
                title = f"{scenario} {layout} {layers} layers"
                if chosen.ptx:
                    built.append(resource_rows(f"{title}, vanilla", build_all(plain)))
                for name in chosen.strides.split(","):
                    stride = {"all": layers, "half": layers // 2}.get(name) or int(name)
                    mixed = compile_scenario(scenario, shape, stride)
                    rows += rows_of(scenario, shape, stride, plain, mixed)
                    if chosen.recompute and scenario == "train":
                        again = compile_scenario(scenario, shape, stride, recompute=True)
                        rows += rows_of(scenario, shape, stride, plain, again, recompute=True)
                    print(table(rows).splitlines()[-1], file=sys.stderr, flush=True)
                    if chosen.ptx:
                        built.append(resource_rows(f"{title}, stride {stride}", build_all(mixed)))
                if chosen.json:
                    chosen.json.write_text(json.dumps({"rows": rows, "built": built}, indent=1))
    print(table(rows))
    for row in built:
        print(
            f"{row['model']}: {row['kernels']} kernels, {len(row['failed'])} failed, at most "
            f"{row['most registers']} registers, {row['most stack']} bytes of stack, {row['spilled']} spilled"
        )


if __name__ == "__main__":
    main()

"""What the runs of ``train_from_scratch.py`` say: CSV, table with spread over seeds, and curves."""

from __future__ import annotations

import csv
import math
import statistics
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

VANILLA = "vanilla"

QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""0.975 quantiles of Student's distribution for 1, 2, .. degrees of freedom."""


@dataclass(frozen=True)
class Row:
    """One evaluation of one run."""

    method: str
    seed: int
    step: int
    train_loss: float
    """Mean since the last evaluation, nats per byte."""
    held_out_loss: float
    held_out_accuracy: float
    seconds: float
    """Of the steps so far, without the first; CPU time on a CPU."""


class Spread(NamedTuple):
    mean: float
    deviation: float
    """Sample standard deviation; NaN for one number."""
    interval: float
    """Half the width of the 95 % interval of the mean."""


def spread(numbers: list[float]) -> Spread:
    mean = statistics.fmean(numbers)
    if len(numbers) < 2:
        return Spread(mean, float("nan"), float("inf"))
    deviation = statistics.stdev(numbers)
    quantile = QUANTILES[min(len(numbers) - 1, len(QUANTILES)) - 1]
    return Spread(mean, deviation, quantile * deviation / len(numbers) ** 0.5)


@dataclass(frozen=True)
class Result:
    """One method at the last step."""

    method: str
    seeds: int
    parameters: int
    loss: Spread
    accuracy: Spread
    seconds: float
    """Mean of a run."""
    difference: Spread | None
    """Of the loss to vanilla, pair by pair of the same seed; None for vanilla, or without pairs."""

    @property
    def verdict(self) -> str:
        if self.difference is None:
            return ""
        if self.seeds < 2:
            return "one seed"
        if abs(self.difference.mean) <= self.difference.interval:
            return "within the noise"
        return "better" if self.difference.mean < 0 else "worse"


def results(rows: list[Row], steps: int, parameters: dict[str, int]) -> list[Result]:
    """Of complete runs, in the order of ``parameters``."""
    last = {(row.method, row.seed): row for row in rows if row.step == steps}
    found = []
    for method, count in parameters.items():
        mine = {seed: row for (name, seed), row in last.items() if name == method}
        if not mine:
            continue
        pairs = [
            row.held_out_loss - last[VANILLA, seed].held_out_loss
            for seed, row in mine.items()
            if method != VANILLA and (VANILLA, seed) in last
        ]
        found.append(
            Result(
                method,
                len(mine),
                count,
                spread([row.held_out_loss for row in mine.values()]),
                spread([row.held_out_accuracy for row in mine.values()]),
                statistics.fmean(row.seconds for row in mine.values()),
                spread(pairs) if pairs else None,
            )
        )
    return found


def write_csv(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Row))
        for row in rows:
            writer.writerow(f"{value:.5f}" if isinstance(value, float) else value for value in astuple(row))


def write_summary(rows: list[Row], steps: int, parameters: dict[str, int], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["method", "seeds", "parameters", "held_out_loss", "deviation", "accuracy", "seconds"]
            + ["difference", "interval_95", "verdict"]
        )
        for result in results(rows, steps, parameters):
            first = [result.loss.mean, result.loss.deviation, result.accuracy.mean]
            rest = list(result.difference[::2]) if result.difference else [math.nan, math.nan]
            writer.writerow(
                [result.method, result.seeds, result.parameters]
                + [_known(value) for value in first]
                + [f"{result.seconds:.0f}"]
                + [_known(value) for value in rest]
                + [result.verdict]
            )


def _known(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else ""


def table(rows: list[Row], steps: int, parameters: dict[str, int]) -> Any:
    """For ``rich``."""
    from rich import box
    from rich.table import Table

    shown = Table(
        box=box.SIMPLE,
        title="Held-out loss in nats per byte, mean ± standard deviation over seeds",
        caption="Difference to vanilla with the same seed, with its 95 % interval (Student, each alone). "
        "Time of the steps, relative to vanilla.",
    )
    shown.add_column("method")
    for name in ("seeds", "parameters", "loss", "accuracy", "difference", "", "time"):
        shown.add_column(name, justify="left" if not name else "right")
    found = results(rows, steps, parameters)
    vanilla = next((r for r in found if r.method == VANILLA), None)
    for result in found:
        added = result.parameters - vanilla.parameters if vanilla else 0
        change = ""
        if result.difference:
            change = f"{result.difference.mean:+.4f}"
            change += f" ± {result.difference.interval:.4f}" if result.seeds > 1 else ""
        loss = f"{result.loss.mean:.4f}" + (f" ± {result.loss.deviation:.4f}" if result.seeds > 1 else "")
        shown.add_row(
            result.method,
            str(result.seeds),
            f"+{added:,}" if result is not vanilla and vanilla else f"{result.parameters:,}",
            loss,
            f"{result.accuracy.mean:.2%}",
            change,
            result.verdict,
            f"x {result.seconds / vanilla.seconds:.2f}" if vanilla else f"{result.seconds:.0f} s",
        )
    return shown


def plot_curves(rows: list[Row], path: Path) -> None:
    """Held-out loss over steps, and its difference to vanilla with the same seed; bands: least to largest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    losses, differences = figure.subplots(1, 2)
    of: dict[str, dict[int, dict[int, float]]] = {}
    for row in rows:
        of.setdefault(row.method, {}).setdefault(row.step, {})[row.seed] = row.held_out_loss
    vanilla = of.get(VANILLA, {})
    for number, (method, steps) in enumerate(of.items()):
        style = {
            "color": "black" if method == VANILLA else f"C{number}",
            "linestyle": "-" if method == VANILLA or method.startswith("depth") else "--",
        }
        xs = sorted(steps)
        _band(losses, xs, [list(steps[x].values()) for x in xs], label=method, **style)
        if method != VANILLA:
            shared = [x for x in xs if set(steps[x]) & set(vanilla.get(x, {}))]
            pairs = [[v - vanilla[x][s] for s, v in steps[x].items() if s in vanilla[x]] for x in shared]
            _band(differences, shared, pairs, **style)
    differences.axhline(0, color="black", lw=1)
    losses.set(xlabel="step", ylabel="held-out loss (nats per byte)")
    differences.set(xlabel="step", ylabel="difference to vanilla, same seed")
    for axes in (losses, differences):
        axes.grid(color="#e5e7eb", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    losses.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _band(axes: Any, xs: list[int], groups: list[list[float]], **style: Any) -> None:
    means = [statistics.fmean(group) for group in groups]
    axes.plot(xs, means, lw=1.5, **style)
    lows, highs = [min(g) for g in groups], [max(g) for g in groups]
    axes.fill_between(xs, lows, highs, color=style["color"], alpha=0.12, lw=0)

"""The picture of depth weights: layers over sources, and the layers' own shares per key/value head."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .errors import MissingDependencyError, OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from .weights import DepthWeights

_INK, _SOFT, _NONE, _COLOURS = "#1b1f24", "#8a929c", "#f3f4f6", "viridis"
_MOST_LABELS = 24
_LARGEST_TABLE = 400
"""Up to so many cells the numbers are written into them."""


def plot_weights(weights: DepthWeights, path: str | os.PathLike[str], title: str = "") -> None:
    """See :meth:`depthify.DepthWeights.plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("plot: needs matplotlib; install depthify[plot]") from None
    mean, heads = weights.mean(), weights.self_weight(per_head=True)
    sources = sorted({j for layer in weights.layers for j in layer.sources})
    table = mean[:, sources].clone()
    for row in range(weights.depths):  # the own share has a column of its own
        table[row, [i for i, j in enumerate(sources) if j >= row]] = float("nan")
    height = min(11.0, max(3.4, 1.6 + 0.26 * weights.depths))
    widths = (max(2.0, 0.5 * len(sources)) + 0.8, max(1.6, 0.34 * weights.kv_heads))
    figure = Figure(figsize=(min(15.0, 4.6 + sum(widths)), height), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    ending = os.path.splitext(os.fspath(path))[1].lstrip(".").lower()
    if ending not in known:
        raise OptionError(f"plot={os.fspath(path)!r}: the ending must be one of {', '.join(sorted(known))}")
    over_sources, per_head, line = figure.subplots(1, 3, width_ratios=(*widths, 2.2), sharey=True)
    columns = [*map(str, sources), "own"]
    with_own = _beside(table, weights.self_weight())
    _heat(over_sources, with_own, columns, "source layer", "mean weight")
    image = _heat(per_head, heads, [str(i) for i in range(weights.kv_heads)], "key/value head", "own share")
    bar = figure.colorbar(image, ax=per_head, shrink=0.7, pad=0.03)
    bar.ax.tick_params(colors=_SOFT, labelsize=8)
    _line(line, weights)
    over_sources.set_ylabel("layer", color=_INK)
    over_sources.set_yticks(_some(weights.depths))
    figure.suptitle(
        (f"{title}: " if title else "")
        + f"depth weights, {weights.depths} layers, stride {weights.stride}"
        + (f", recent window {weights.recent_window}" if weights.recent_window else ""),
        color=_INK,
    )
    figure.savefig(path, dpi=130)


def _beside(table: Tensor, column: Tensor) -> Tensor:
    import torch

    return torch.cat([table, column[:, None]], 1)


def _some(count: int) -> list[int]:
    """At most about two dozen of the numbers below ``count``, evenly spaced."""
    return list(range(0, count, -(-count // _MOST_LABELS)))


def _heat(axes: Any, table: Tensor, columns: list[str], label: str, title: str) -> Any:
    from matplotlib import colormaps

    colours = colormaps[_COLOURS].with_extremes(bad=_NONE)
    image = axes.imshow(
        table.numpy(), aspect="auto", origin="lower", cmap=colours, vmin=0, vmax=1, interpolation="nearest"
    )
    shown = _some(len(columns))
    if columns[-1] == "own" and len(columns) - 1 not in shown:
        shown.append(len(columns) - 1)
    axes.set_xticks(shown, [columns[i] for i in shown])
    axes.set_xlabel(label, color=_INK)
    axes.set_title(title, color=_INK, fontsize=10)
    axes.tick_params(colors=_SOFT, labelsize=8, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    if table.numel() <= _LARGEST_TABLE and table.shape[0] <= 32:
        for row, values in enumerate(table.tolist()):
            for column, value in enumerate(values):
                if value == value:
                    ink = _INK if value > 0.6 else "white"
                    text = f"{value:.2f}"
                    axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink)
    return image


def _line(axes: Any, weights: DepthWeights) -> None:
    own, heads = weights.self_weight(), weights.self_weight(per_head=True)
    layers = range(weights.depths)
    axes.fill_betweenx(
        layers,
        heads.nan_to_num(2.0).amin(1),
        heads.nan_to_num(-1.0).amax(1),
        color="#0b6bcb",
        alpha=0.18,
        lw=0,
    )
    axes.plot(own, layers, color="#0b6bcb", lw=1.6, marker="o", ms=2.5)
    axes.set_xlim(-0.03, 1.03)
    axes.set_title("own share, range of heads", color=_INK, fontsize=10)
    axes.set_xlabel("weight", color=_INK)
    axes.tick_params(colors=_SOFT, labelsize=8, length=0)
    axes.grid(color="#e5e7eb", lw=0.6)
    for side in axes.spines.values():
        side.set_visible(False)

"""The picture of a report: overhead over stride, overhead over length, the methods side by side."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependencyError, OptionError
from . import symbols as S
from .decoder import vanilla
from .methods import depth_attention

if TYPE_CHECKING:
    from .report import CostReport

_INK, _SOFT, _LINES = "#1b1f24", "#8a929c", ("#0b6bcb", "#d9480f", "#2b8a3e")
_LIMIT = 1e-4
"""The paper's "under 0.01 %"."""

_WINDOWS = (0, 2, 4)
_LENGTHS = tuple(2**i for i in range(7, 18))


def plot_report(report: CostReport, path: str | os.PathLike[str]) -> None:
    """Write the picture to ``path``; the ending says in which format.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OptionError: the ending is no format of matplotlib's.
        UnsupportedModelError: the model has no closed form.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("plot: needs matplotlib; install depthify[plot]") from None
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    ending = os.path.splitext(os.fspath(path))[1].lstrip(".").lower()
    if ending not in known:
        raise OptionError(f"plot={os.fspath(path)!r}: the ending must be one of {', '.join(sorted(known))}")
    over_stride, over_length, beside = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    _draw_strides(report, over_stride)
    _draw_lengths(report, over_length)
    _draw_methods(report, beside)
    figure.suptitle(
        f"{report.name}: {report.layers} layers, stride {report.stride}, batch {report.batch_size}, "
        f"{report.seq_len} tokens" + (f", {report.cache_len} cached" if report.cache_len else ""),
        color=_INK,
    )
    figure.savefig(path, dpi=120)


def _draw_strides(report: CostReport, axes: Any) -> None:
    shape = report._known_shape("plot()")
    sizes = {**shape.values(), S.B: report.batch_size, S.T: report.seq_len}
    extra = S.at(depth_attention(shape).executed, sizes)
    strides = list(range(1, report.layers + 1))
    for window, color in zip(_WINDOWS, _LINES, strict=True):
        shares = [float(S.at(extra, {S.s: stride, S.w: window})) / report.flops_before for stride in strides]
        axes.plot(strides, [100 * share for share in shares], color=color, label=f"recent window {window}")
    axes.plot([report.stride], [100 * report.flops_overhead], "o", color=_INK, label="this report")
    _finish(axes, "stride", "Overhead over stride")


def _draw_lengths(report: CostReport, axes: Any) -> None:
    shape = report._known_shape("plot()")
    base = vanilla(shape)
    sizes = {**shape.values(), S.B: report.batch_size, S.C: 0}
    mixing = {**sizes, S.s: report.stride, S.w: report.recent_window}
    extra = S.at(depth_attention(shape).executed, mixing)
    rows = (
        ("all pairs; also one token after so many", base.executed, "-"),
        ("causal pairs only", base.needed, "--"),
    )
    for (label, flops, style), color in zip(rows, _LINES, strict=False):
        share = extra / S.at(flops, sizes)
        shares = [100 * float(S.at(share, {S.T: tokens})) for tokens in _LENGTHS]
        axes.plot(_LENGTHS, shares, style, color=color, label=label)
    if not report.cache_len:
        axes.plot([report.seq_len], [100 * report.flops_overhead], "o", color=_INK, label="this report")
    _finish(axes, "tokens", "Overhead over length")


def _finish(axes: Any, x: str, title: str) -> None:
    axes.axhline(100 * _LIMIT, color=_SOFT, linestyle=":", linewidth=1)
    axes.annotate(
        " 0.01 %",
        (0, 100 * _LIMIT),
        xycoords=("axes fraction", "data"),
        va="bottom",
        fontsize=8,
        color=_SOFT,
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(top=max(axes.get_ylim()[1], 150 * _LIMIT))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.set_xlabel(x)
    axes.set_ylabel("added FLOPs, % of the model's")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def _draw_methods(report: CostReport, axes: Any) -> None:
    methods = sorted(report.compare(), key=lambda method: method.flops)
    shares = [100 * method.flops_overhead for method in methods]
    colors = [_LINES[0] if method.name == "Depth-Attention" else _SOFT for method in methods]
    bars = axes.barh([method.name for method in methods], shares, color=colors)
    kept = [method.live_bytes_per_token / 1000 for method in methods]
    texts = [f" {share:.2g} %, {size:.3g} kB" for share, size in zip(shares, kept, strict=True)]
    axes.bar_label(bars, texts, fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(min(shares) / 3, max(shares) * 40)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("added FLOPs, % of the model's")
    axes.set_title("Methods: FLOPs added, bytes kept per token in a call", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)

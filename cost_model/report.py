"""cost_report(): what mixing costs a model, from its config in closed form or from its counted graph."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import nn

from ..config import DepthConfig, _whole_number
from ..errors import DepthifyError, OptionError, UnsupportedModelError
from . import symbols as S
from .decoder import Cost, vanilla
from .methods import all_methods, depth_attention
from .roofline import BANDWIDTH, FLOP_RATE, Roofline, estimate
from .shapes import DecoderShape, read_shape
from .tables import Table, escape_latex, percent, seconds, short, whole

if TYPE_CHECKING:
    from ..passes.order_layers import Stack


@dataclass(frozen=True)
class MethodCost:
    """One cross-layer method on one model, for one call; what it adds, not what it ends at."""

    name: str
    source: str
    parameters: int
    flops: int
    flops_overhead: float
    """Part of the model's executed FLOPs."""

    training_flops: int
    """One forward and backward pass over the same tokens, without a cache."""

    cache_bytes: int
    live_bytes_per_token: int
    """Kept across layers within a call, at most; gone after it."""


@dataclass(frozen=True)
class CostReport:
    """What one call of a model costs without and with mixing over depth.

    FLOPs are those of the forward pass of ``batch_size`` times ``seq_len`` new tokens with ``cache_len``
    cached ones each. Conventions: :mod:`depthify.cost_model.symbols`.
    """

    name: str
    method: str
    """``"closed form"`` or ``"counted graph"``."""

    stride: int
    recent_window: int
    batch_size: int
    seq_len: int
    cache_len: int
    dtype: torch.dtype
    layers: int
    expressions: dict[str, sympy.Expr]
    """Every figure as an expression in B (batch), T (new tokens) and C (cached tokens), as far as the count
    is symbolic: ``flops_before``, ``flops_after``, ``flops_extra``, ``needed_before``, ``needed_after``,
    ``cache_bytes_before``, ``cache_bytes_after``, ``parameters_before``, ``parameters_after``,
    ``flops_overhead``."""

    shape: DecoderShape | None = None
    notes: tuple[str, ...] = field(default=())

    def _value(self, name: str) -> int:
        return int(S.at(self.expressions[name], self._sizes))

    @property
    def _sizes(self) -> dict[sympy.Symbol, int]:
        return {S.B: self.batch_size, S.T: self.seq_len, S.C: self.cache_len}

    @cached_property
    def flops_before(self) -> int:
        """Executed: every pair of a query and a key, masked ones included."""
        return self._value("flops_before")

    @cached_property
    def flops_after(self) -> int:
        return self._value("flops_after")

    @cached_property
    def needed_before(self) -> int:
        """Without the pairs that the causal mask removes."""
        return self._value("needed_before")

    @cached_property
    def needed_after(self) -> int:
        return self._value("needed_after")

    @property
    def flops_overhead(self) -> float:
        """Added FLOPs as part of the executed ones: 0.01 is one per cent."""
        return (self.flops_after - self.flops_before) / self.flops_before

    @property
    def needed_overhead(self) -> float:
        """Added FLOPs as part of the needed ones."""
        return (self.needed_after - self.needed_before) / self.needed_before

    @cached_property
    def cache_bytes_before(self) -> int:
        """Keys and values of all layers after the call."""
        return self._value("cache_bytes_before")

    @cached_property
    def cache_bytes_after(self) -> int:
        return self._value("cache_bytes_after")

    @cached_property
    def parameters_before(self) -> int:
        return self._value("parameters_before")

    @cached_property
    def parameters_after(self) -> int:
        return self._value("parameters_after")

    def compare(self) -> tuple[MethodCost, ...]:
        """Depth-Attention beside other cross-layer methods on the same model, in closed form.

        Raises:
            UnsupportedModelError: the report was counted from a model whose config has no closed form.
        """
        return self._methods

    @cached_property
    def _methods(self) -> tuple[MethodCost, ...]:
        shape = self._known_shape("compare()")
        result = []
        for cost, setting in all_methods(shape):
            values = {**shape.values(), S.s: self.stride, S.w: self.recent_window, **setting}
            here = {**values, **self._sizes}
            flops = int(S.at(cost.executed, here))
            result.append(
                MethodCost(
                    _method_name(cost, setting),
                    cost.source,
                    int(S.at(cost.parameters, values)),
                    flops,
                    flops / self.flops_before,
                    int(S.at(cost.training, here)),
                    int(S.at(cost.state, here)) * self.dtype.itemsize,
                    int(S.at(cost.live, values)) * self.dtype.itemsize,
                )
            )
        return tuple(result)

    def roofline(self, bandwidth: float = BANDWIDTH, flop_rate: float = FLOP_RATE) -> Roofline:
        """An estimate of the mixture's memory traffic and share of a step, if it is fused.

        Args:
            bandwidth: bytes per second. flop_rate: FLOPs per second. Default: an H200's data sheet.
        """
        for name, value in (("bandwidth", bandwidth), ("flop_rate", flop_rate)):
            if not isinstance(value, (int, float)) or not value > 0:
                raise OptionError(f"{name}={value!r}: {name} must be a number above 0")
        shape = self._known_shape("roofline()")
        sizes = {
            **self._sizes,
            S.s: self.stride,
            S.w: self.recent_window,
            S.e: self.dtype.itemsize,
        }
        return estimate(shape, vanilla(shape), depth_attention(shape), sizes, bandwidth, flop_rate)

    def _known_shape(self, what: str) -> DecoderShape:
        if self.shape is None:
            raise UnsupportedModelError(f"{what} needs the closed form, and there is none for {self.name}")
        return self.shape

    def tables(self) -> list[Table]:
        """The report as tables: costs, methods beside each other, memory traffic."""
        result = [self._cost_table()]
        if self.shape is not None:
            result += [self._method_table(), self._traffic_table()]
        return result

    def _cost_table(self) -> Table:
        def row(name: str, before: int, after: int, unit: str) -> tuple[str, ...]:
            added = after - before
            extra = "0" if added == 0 else f"{short(added, unit)} ({percent(added / before)})"
            return name, short(before, unit), short(after, unit), extra

        rows = [
            row("FLOPs, executed", self.flops_before, self.flops_after, "FLOP"),
            row("FLOPs, needed (causal)", self.needed_before, self.needed_after, "FLOP"),
            row("parameters", self.parameters_before, self.parameters_after, ""),
            row("key/value cache", self.cache_bytes_before, self.cache_bytes_after, "B"),
        ]
        size = f"batch {self.batch_size}, {self.seq_len} new tokens"
        size += f", {self.cache_len} cached" if self.cache_len else ""
        mixing = f"{self.layers} layers, stride {self.stride}"
        mixing += f", recent window {self.recent_window}" if self.recent_window else ""
        kind = str(self.dtype).removeprefix("torch.")
        title = f"{self.name}: {mixing}; {size}, {kind} ({self.method})"
        return Table(title, ("one forward pass", "without", "with mixing", "added"), tuple(rows))

    def _method_table(self) -> Table:
        rows = [
            (
                method.name,
                whole(method.parameters),
                short(method.flops, "FLOP"),
                percent(method.flops_overhead),
                short(method.training_flops, "FLOP"),
                whole(method.cache_bytes),
                short(method.live_bytes_per_token, "B"),
            )
            for method in self.compare()
        ]
        columns = (
            "added by",
            "parameters",
            "forward",
            "of the model",
            "training",
            "cache bytes",
            "live per token",
        )
        return Table("Cross-layer methods on the same model (closed form)", columns, tuple(rows))

    def _traffic_table(self) -> Table:
        found = self.roofline()
        rows = (
            ("read per mixed layer", short(found.read_per_layer, "B")),
            ("written per mixed layer", short(found.written_per_layer, "B")),
            ("time of all mixtures, at least", seconds(found.mix_seconds)),
            ("time of the model's forward, at least", seconds(found.step_seconds)),
            ("share", percent(found.share)),
        )
        title = (
            f"Roofline estimate of fused mixing, not measured "
            f"({found.bandwidth / 1e12:g} TB/s, {found.flop_rate / 1e12:g} TFLOP/s)"
        )
        return Table(title, ("traffic and time", "estimate"), rows)

    def to_markdown(self) -> str:
        parts = [table.markdown() for table in self.tables()]
        return "\n\n".join([*parts, *(f"Note: {note}." for note in self.notes)])

    def to_latex(self) -> str:
        """The tables (packages booktabs), and the added FLOPs and the overhead as formulas in B, T and C."""
        formulas = [
            rf"\[ \Delta F = {sympy.latex(sympy.factor(self.expressions['flops_extra']))} \]",
            rf"\[ \Delta F / F = {sympy.latex(sympy.cancel(self.expressions['flops_overhead']))} \]",
        ]
        notes = [rf"\textit{{{escape_latex(note)}.}}" for note in self.notes]
        return "\n\n".join([*(table.latex() for table in self.tables()), *formulas, *notes])

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers and text; expressions as text. Can be written as JSON."""
        figures = (
            *("flops_before", "flops_after", "flops_overhead", "needed_before", "needed_after"),
            *("needed_overhead", "cache_bytes_before", "cache_bytes_after"),
            *("parameters_before", "parameters_after"),
        )
        given = ("name", "method", "stride", "recent_window", "batch_size", "seq_len", "cache_len", "layers")
        result: dict[str, Any] = {name: getattr(self, name) for name in (*given, *figures)}
        result["dtype"] = str(self.dtype).removeprefix("torch.")
        result["expressions"] = {name: str(value) for name, value in self.expressions.items()}
        result["notes"] = list(self.notes)
        if self.shape is not None:
            result["methods"] = [vars(method) for method in self.compare()]
            result["roofline"] = {**vars(self.roofline()), "share": self.roofline().share}
        return result

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a picture: overhead over stride, overhead over length, the methods compared."""
        from .plots import plot_report

        plot_report(self, path)

    def __str__(self) -> str:
        parts = [table.plain() for table in self.tables()]
        return "\n\n".join([*parts, *(f"Note: {note}." for note in self.notes)])

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*(table.rich() for table in self.tables()), *(f"Note: {note}." for note in self.notes))


def _method_name(cost: Cost, setting: Mapping[sympy.Symbol, int]) -> str:
    if S.dilation in setting:
        return f"{cost.name}, {setting[S.dilation]}x{setting[S.period]}"
    if S.N in setting:
        return f"{cost.name} ({setting[S.N]})"
    return f"{cost.name} ({setting[S.n]} streams)" if S.n in setting else cost.name


def cost_report(
    model: Any,
    stride: int | None = None,
    *,
    recent_window: int = 0,
    batch_size: int = 1,
    seq_len: int = 4096,
    cache_len: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> CostReport:
    """See :func:`depthify.cost_report`."""
    batch_size = _whole_number("batch_size", batch_size, 1)
    seq_len = _whole_number("seq_len", seq_len, 1)
    cache_len = _whole_number("cache_len", cache_len, 0)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise OptionError(f"dtype={dtype!r}: dtype must be a floating-point torch.dtype")
    config = DepthConfig(stride=stride, recent_window=recent_window, budget=float("inf"))
    call = {"batch_size": batch_size, "seq_len": seq_len, "cache_len": cache_len, "dtype": dtype}
    if isinstance(model, nn.Module):
        return _count_model(model, config, call)
    return _closed_form(read_shape(model), config, call)


def _closed_form(shape: DecoderShape, config: DepthConfig, call: dict[str, Any]) -> CostReport:
    config = _resolve(config, shape)
    base, mixing = vanilla(shape), depth_attention(shape)
    stride = config.stride or 1
    values = {**shape.values(), S.s: stride, S.w: config.recent_window}
    extra = S.at(mixing.executed, values)
    before, needed = S.at(base.executed, values), S.at(base.needed, values)
    cache = S.at(base.state, values) * call["dtype"].itemsize
    parameters = S.at(base.parameters, values)
    notes: tuple[str, ...] = ()
    if shape.latent:
        notes = (
            "the cache holds a latent from which values are projected anew in every call, so depthify mixes "
            "such a model without a cache only",
        )
    return CostReport(
        shape.name,
        "closed form",
        stride,
        config.recent_window,
        layers=shape.layers,
        expressions=_expressions(
            before, before + extra, needed, needed + extra, (cache, cache), (parameters,) * 2
        ),
        shape=shape,
        notes=notes,
        **call,
    )


def _expressions(
    before: sympy.Expr,
    after: sympy.Expr,
    needed_before: sympy.Expr,
    needed_after: sympy.Expr,
    cache: tuple[Any, Any],
    parameters: tuple[Any, Any],
) -> dict[str, sympy.Expr]:
    before, after = sympy.expand(before), sympy.expand(after)
    extra = sympy.expand(after - before)
    return {
        "flops_before": before,
        "flops_after": after,
        "flops_extra": extra,
        "flops_overhead": extra / before,
        "needed_before": sympy.expand(needed_before),
        "needed_after": sympy.expand(needed_after),
        "cache_bytes_before": sympy.expand(cache[0]),
        "cache_bytes_after": sympy.expand(cache[1]),
        "parameters_before": sympy.sympify(parameters[0]),
        "parameters_after": sympy.sympify(parameters[1]),
    }


def _resolve(config: DepthConfig, shape: DecoderShape) -> DepthConfig:
    if config.stride is None and shape.stride is not None:
        return DepthConfig(stride=shape.stride, recent_window=config.recent_window, budget=config.budget)
    return config.resolve(shape.layers)


def _count_model(model: nn.Module, config: DepthConfig, call: dict[str, Any]) -> CostReport:
    """Capture the model, count, rewrite, count again."""
    shape = _shape_of(model)
    if shape is not None:
        config = _resolve(config, shape)
    how: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    try:
        expressions, stacks = _count_capture(model, config, call, how)
    except UnsupportedModelError:
        if call["cache_len"]:
            raise
        how["cached"] = False
        expressions, stacks = _count_capture(model, config, call, how)
        notes = ("with a cache this model cannot be mixed, so it was counted without one",)
    if any(value.free_symbols - {S.B, S.T, S.C} for value in expressions.values()):
        # Sizes of its own, such as how much of a sliding window is filled: count these very sizes instead.
        expressions, stacks = _count_capture(model, config, call, {**how, "fixed": True})
    return CostReport(
        type(model).__name__,
        "counted graph",
        stacks[0].config.stride or 1,
        config.recent_window,
        layers=sum(len(stack.layers) for stack in stacks),
        expressions=expressions,
        shape=shape,
        notes=notes,
        **call,
    )


def _count_capture(
    model: nn.Module, config: DepthConfig, call: dict[str, Any], how: dict[str, Any]
) -> tuple[dict[str, sympy.Expr], list[Stack]]:
    from ..passes import mix_graph, plan
    from .cache import cache_bytes
    from .capture import capture
    from .count import count_graph, count_parameters
    from .polynomials import to_sympy

    captured = capture(model, **call, **how)
    graph = captured.module.graph
    findings, _ = plan(graph, config)
    before = count_graph(graph, sites=findings.sites)
    cache_before, parameters_before = cache_bytes(graph, findings), count_parameters(graph)
    result = mix_graph(graph, config)
    after = count_graph(graph, sites=result.findings.sites)
    cache_after, parameters_after = cache_bytes(graph, result.findings), count_parameters(graph)

    def named(count: Any) -> sympy.Expr:
        return to_sympy(count).subs(captured.names)

    own = sum(parameter.numel() for parameter in model.parameters())
    added = named(parameters_after) - named(parameters_before)
    expressions = _expressions(
        named(before.flops.executed),
        named(after.flops.executed),
        named(before.flops.needed),
        named(after.flops.needed),
        (named(cache_before), named(cache_after)),
        (own, own + added),
    )
    return expressions, result.stacks


def _shape_of(model: nn.Module) -> DecoderShape | None:
    """The closed form's shape of a transformers model, where it has one."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    try:
        return read_shape(config)
    except (DepthifyError, AttributeError, TypeError):
        return None

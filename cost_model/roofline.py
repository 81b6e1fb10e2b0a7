"""What the mixture moves through memory, and a roofline estimate of what share of a step that takes.

An estimate from bytes and FLOPs, not a measurement: it assumes that every kernel reaches the given rates.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy import Expr

from .decoder import Cost
from .methods import sources_in_all
from .shapes import DecoderShape
from .symbols import B, Hkv, Hq, L, T, V, at, d, dk, dv, e

BANDWIDTH = 4.8e12
"""Bytes per second of an H200's memory (NVIDIA's data sheet)."""

FLOP_RATE = 989e12
"""Dense bfloat16 FLOPs per second of an H200's tensor cores (NVIDIA's data sheet)."""


def bytes_read() -> Expr:
    """All layers, fused into the kernel that makes the layer's key: the query, which has been written
    already;
    the sources' keys and mixed values; the layer's own raw value. Its own key stays in registers."""
    return e * B * T * ((L - 1) * (Hq * dk + Hkv * dv) + sources_in_all() * Hkv * (dk + dv))


def bytes_written() -> Expr:
    """All layers: the mixed value. The raw value is written with mixing and without."""
    return e * B * T * (L - 1) * Hkv * dv


@dataclass(frozen=True)
class Roofline:
    """Bytes are exact for a fused mixture; seconds are lower bounds at the given rates."""

    read_per_layer: int
    """Bytes per mixed layer and call, on average."""

    written_per_layer: int
    mix_seconds: float
    step_seconds: float
    """One forward pass without mixing: the longer of its FLOPs and its weights and cache through memory."""

    bandwidth: float
    flop_rate: float

    @property
    def share(self) -> float:
        """The mixture's part of a step, if nothing overlaps."""
        return self.mix_seconds / self.step_seconds


def estimate(
    shape: DecoderShape,
    base: Cost,
    mixing: Cost,
    values: dict[sympy.Symbol, int],
    bandwidth: float = BANDWIDTH,
    flop_rate: float = FLOP_RATE,
) -> Roofline:
    """Estimate one forward pass.

    Args:
        values: B, T, C, the stride, the window and the bytes per element.
    """
    values = {**shape.values(), **values}
    read, written = (int(at(f, values)) for f in (bytes_read(), bytes_written()))
    extra = int(at(mixing.executed, values))
    mix = max((read + written) / bandwidth, extra / flop_rate)
    table = 0 if shape.tied else V * d  # an embedding reads single rows
    moved = int(at((base.parameters - table + base.state) * e, values))
    step = max(int(at(base.executed, values)) / flop_rate, moved / bandwidth)
    mixed = max(1, shape.layers - 1)
    return Roofline(read // mixed, written // mixed, mix, step, bandwidth, flop_rate)

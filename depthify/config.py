"""What to mix: the stride and the recent window of Depth-Attention, checked once."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from .errors import OptionError


def _whole_number(name: str, value: Any, least: int) -> int:
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            pass
        else:
            if number >= least:
                return number
    raise OptionError(f"{name}={value!r}: {name} must be a whole number of at least {least}")


def _positive_number(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise OptionError(f"{name}={value!r}: {name} must be a number above 0, or None for the default")


@dataclass(frozen=True, kw_only=True)
class DepthConfig:
    """Which earlier layers a layer's query attends over.

    Layer ``l`` reads ``S(l) = {j < l : j mod stride == 0}  U  {max(0, l - recent_window) .. l - 1}``
    (arXiv 2606.05014), in execution order, counting attention layers only.
    """

    stride: int | None = None
    """Distance between source layers, at least 1. None: half the number of attention layers."""

    recent_window: int = 0
    """How many of the directly preceding layers are sources as well."""

    budget: float | None = None
    """Largest part of the graph's FLOPs that mixing may add; more is an error. None: 0.01, or 100 kFLOP per
    token where that is more, which only models of less than about 5 million weights notice. ``float("inf")``
    allows everything."""

    recompute: bool = False
    """Compute mixed values again in backward instead of saving them, where the graph is compiled by a backend
    that splits forward and backward (Inductor, aot_eager). The weights are saved either way."""

    def __post_init__(self) -> None:
        if self.stride is not None:
            object.__setattr__(self, "stride", _whole_number("stride", self.stride, 1))
        object.__setattr__(self, "recent_window", _whole_number("recent_window", self.recent_window, 0))
        if self.budget is not None:
            object.__setattr__(self, "budget", _positive_number("budget", self.budget))
        if not isinstance(self.recompute, bool):
            raise OptionError(f"recompute={self.recompute!r}: recompute must be True or False")

    def resolve(self, num_layers: int) -> DepthConfig:
        """The same configuration with the default stride filled in for ``num_layers`` attention layers."""
        return self if self.stride is not None else replace(self, stride=max(1, num_layers // 2))

    def sources(self, layer: int) -> tuple[int, ...]:
        """The source layers ``S(layer)`` in ascending order; needs a stride (see :meth:`resolve`)."""
        if self.stride is None:
            raise OptionError("stride=None: call resolve(num_layers) before sources(layer)")
        recent = max(0, layer - self.recent_window)
        return tuple(j for j in range(layer) if j % self.stride == 0 or j >= recent)

"""Warm start: a number added to every layer's own depth score.

    z_l = tau_l * < qbar, k_l >  +  self_bias

Very large, the layer's own value takes the whole softmax and the model computes what it did before; at 0 it
is the paper's model. The number is a scalar tensor that captured graphs read at every call, so that it can
change between steps without a new capture. It is no parameter and no buffer, and no file keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from .errors import OptionError

Schedule: TypeAlias = "Callable[[int], float]"

LARGEST = 1e30
"""What stands for infinity: the softmax gives every other term exactly 0, and nothing becomes NaN."""


class Biased:
    """A state whose captured graphs add a scalar, if there is one, to every layer's own score."""

    self_bias: Tensor | None = None

    @property
    def bias_value(self) -> float | None:
        return None if self.self_bias is None else float(self.self_bias)

    def set_bias(self, value: float | None, device: torch.device | None = None) -> None:
        """None: nothing is added, and no graph has a place for it."""
        if value is None:
            self.self_bias = None
        elif self.self_bias is not None:
            self.self_bias.fill_(value)
        else:
            with torch.inference_mode(False):
                self.self_bias = torch.full((), value, dtype=torch.float32, device=device)

    def move_bias(self, module: nn.Module) -> None:
        """Follow a model that was moved to another device."""
        if self.self_bias is not None:
            device = device_of(module)
            if device is not None and device != self.self_bias.device:
                self.self_bias = self.self_bias.to(device)


def device_of(module: nn.Module) -> torch.device | None:
    parameter = next(module.parameters(), None)
    return None if parameter is None else parameter.device


def checked(value: Any, default: float | None) -> float | None:
    """The number that ``self_bias=value`` asks for; a schedule is asked for its step 0."""
    if value is None:
        return default
    given = value(0) if callable(value) else value
    if isinstance(given, (int, float)) and not isinstance(given, bool) and not math.isnan(given):
        return max(-LARGEST, min(LARGEST, float(given)))
    raise OptionError(
        f"self_bias={value!r}: self_bias must be a number (inf for the vanilla model), a schedule that "
        "gives one for each step, or None"
    )


def set_self_bias(model: nn.Module, value: float | None) -> None:
    """Change what is added to every layer's own depth score, from the next call on.

    No new capture, unless there was nothing to add before: call ``depthify(model, self_bias=...)`` with the
    first number to have the place for it from the start. None takes the place away again, which costs one
    new capture: at the end of a warm start, say.

    Raises:
        OptionError: the model is not mixed by ``depthify(model)``, or ``value`` is no number.
    """
    from .module import attached_modules

    owners = [m for m in attached_modules(model) if isinstance(m._depthify, Biased)]
    if not owners:
        raise OptionError("set_self_bias: the model is not mixed; call depthify(model, self_bias=...) first")
    if callable(value):
        raise OptionError(f"value={value!r}: set_self_bias takes a number; give it schedule(step)")
    number = checked(value, None)
    for owner in owners:
        owner._depthify.set_bias(number, device_of(owner))


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A schedule: falls from ``start`` at step 0 to 0 at step ``steps``, and stays there.

    ``depthify(model, self_bias=schedule)`` begins with it; ``set_self_bias(model, schedule(step))`` before
    each step, or :class:`depthify.trainer.SelfBiasCallback` in a transformers Trainer, goes on.
    """

    steps: int
    """After how many steps the bias is 0."""

    start: float = 16.0
    """At step 0."""

    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise OptionError(f"steps={self.steps!r}: steps must be a whole number of at least 1")
        if not isinstance(self.start, (int, float)) or not 0 < self.start < math.inf:
            raise OptionError(f"start={self.start!r}: start must be a finite number above 0")
        if self.shape not in ("linear", "cosine"):
            raise OptionError(f"shape={self.shape!r}: shape must be 'linear' or 'cosine'")

    def __call__(self, step: int) -> float:
        done = min(1.0, max(0.0, step / self.steps))
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.start * left

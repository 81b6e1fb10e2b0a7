"""The errors depthify raises: one base, and one child per thing the caller can do about it."""

from __future__ import annotations


class DepthifyError(ValueError):
    """Base of every error raised by depthify. Its message says what happened, where, and what to do."""


class OptionError(DepthifyError):
    """An argument is not what it may be; the message names it, its value and what is allowed."""


class NotMixedError(DepthifyError):
    """The model would have run without depth mixing: it was not captured whole, or not captured at all."""


class UnsupportedModelError(DepthifyError):
    """The captured graph holds no attention that depthify can mix, or attention it cannot mix correctly."""


class MissingDependencyError(DepthifyError):
    """An optional package is needed for what was asked; the message names the extra that brings it."""


class BudgetError(DepthifyError):
    """Mixing would add more arithmetic than ``budget`` allows; the message gives both expressions."""

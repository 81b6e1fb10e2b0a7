"""Depth-Attention for existing PyTorch decoders, as a graph pass."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import cost_report, depthify, explain, restore
    from .config import DepthConfig
    from .errors import DepthifyError
    from .report import DepthReport

__all__ = ["DepthConfig", "DepthReport", "DepthifyError", "cost_report", "depthify", "explain", "restore"]
__version__ = "0.1.0"

_HOMES = {
    "DepthConfig": "config",
    "DepthReport": "report",
    "DepthifyError": "errors",
    "cost_report": "api",
    "depthify": "api",
    "explain": "api",
    "restore": "api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds, and not every command needs it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

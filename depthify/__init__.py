"""Depth-Attention for existing PyTorch decoders, as a graph pass."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import cost_report, depthify, explain, restore
    from .config import DepthConfig
    from .errors import DepthifyError
    from .registry import register_attention_op
    from .report import DepthReport
    from .self_bias import WarmStart, set_self_bias
    from .weights import DepthWeights, depth_weights

__all__ = [
    "DepthConfig",
    "DepthReport",
    "DepthWeights",
    "DepthifyError",
    "WarmStart",
    "cost_report",
    "depth_weights",
    "depthify",
    "explain",
    "register_attention_op",
    "restore",
    "set_self_bias",
]
__version__ = "0.1.0"

_HOMES = {
    "DepthConfig": "config",
    "DepthReport": "report",
    "DepthWeights": "weights",
    "DepthifyError": "errors",
    "WarmStart": "self_bias",
    "cost_report": "api",
    "depth_weights": "weights",
    "depthify": "api",
    "explain": "api",
    "register_attention_op": "registry",
    "restore": "api",
    "set_self_bias": "self_bias",
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

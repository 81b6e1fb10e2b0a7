"""Depth-Attention for existing PyTorch decoders, as a graph pass."""

from .api import cost_report, depthify, explain, restore
from .config import DepthConfig
from .errors import DepthifyError
from .report import DepthReport

__all__ = ["DepthConfig", "DepthReport", "DepthifyError", "cost_report", "depthify", "explain", "restore"]
__version__ = "0.1.0"

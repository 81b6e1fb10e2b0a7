"""What is known about a node without running it: its fake value, shape, dtype, module and source line."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

Size: TypeAlias = "int | torch.SymInt"


def value_of(node: Any) -> Any:
    """The fake value Dynamo (``example_value``) or export (``val``) attached; the argument itself if no
    node."""
    if not isinstance(node, Node):
        return node
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def value_key(node: Node) -> str:
    """Under which key this graph keeps fake values."""
    return "val" if "val" in node.meta and "example_value" not in node.meta else "example_value"


def is_tensor(node: Any) -> bool:
    return isinstance(value_of(node), torch.Tensor)


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_number(node: Any) -> bool:
    """Whether a node holds a size, a whole shape or another scalar of Python, rather than data."""
    known = value_of(node)
    if isinstance(known, (tuple, list)):
        return len(known) > 0 and all(isinstance(x, _NUMBERS) for x in known)
    return isinstance(known, _NUMBERS)


def shape_of(node: Node) -> tuple[Size, ...]:
    return tuple(value_of(node).shape)


def dtype_of(node: Node) -> torch.dtype:
    return value_of(node).dtype


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal, without adding a guard to the capture."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return statically_known_true(a == b)


def different_size(a: Size, b: Size) -> bool:
    """Whether two sizes are known to differ, without adding a guard to the capture."""
    if isinstance(a, int) and isinstance(b, int):
        return a != b
    return statically_known_true(a != b)


def quotient(a: Size, b: Size) -> Size | None:
    """``a / b`` if known to be whole, without adding a guard; None otherwise."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b != 0 and a % b == 0 else None
    if same_size(a, b):
        return 1
    if isinstance(b, int) and b == 1:
        return a
    ratio = a // b
    return ratio if statically_known_true(ratio * b == a) else None


def dimension(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def module_path(node: Node) -> str:
    """Dotted path of the innermost module whose forward made ``node``; empty at the top level."""
    return next(reversed(module_paths(node)), "")


def module_paths(node: Node) -> list[str]:
    """Dotted paths of the modules whose forwards led to ``node``, outermost first."""
    return [_clean(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _clean(path: str) -> str:
    path = re.sub(r"_modules\['([^']+)'\]", r"\1", str(path))
    path = re.sub(r"\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    path = re.sub(r"^L\.", "", path).replace("__", "_").strip("._")
    return re.sub(r"^(self|module|args\.\d+|fn)(\.|$)", "", path)


def hint(value: Any, unknown: int = 2) -> Any:
    """A symbolic number as it is in this call, or ``unknown``; anything else as it is."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint if value.node.has_hint() else unknown
    return value


_OWN = ("depthify/module.py", "depthify/marks.py")
"""Frames that every capture goes through. What PyTorch's own modules do has no others."""


def source_line(node: Node) -> str:
    """The user's line of code that made ``node``, as ``file.py:12 `code` ``; empty when unknown."""
    trace = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', trace)
    found = [frame for frame in found if not frame[0].endswith(_OWN)]
    if not found:
        return ""
    file, line, code = found[-1]
    return f"{file}:{line} `{code.strip()}`"


def describe(node: Node) -> str:
    """How an error names a node: module, what it calls, and the user's line."""
    target = (
        node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    )
    where = module_path(node)
    line = source_line(node)
    return (
        f"{node.name} ({target})"
        + (f" in module {where!r}" if where else "")
        + (f" at {line}" if line else "")
    )

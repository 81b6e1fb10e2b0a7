"""Looped transformers: a module whose forward runs one of its parts in a loop.

Every run of a layer counts as a layer of its own, so mixing has to reach from one cycle to the next: the
whole loop must be captured, and not the part that it runs. Told by the bytecode of ``forward``, which works
without the source.
"""

from __future__ import annotations

import dis
import inspect
from types import CodeType

from torch import nn


def runs_in_loop(module: nn.Module, name: str) -> bool:
    """Whether ``type(module).forward`` calls ``self.<name>`` inside a ``for`` or ``while`` loop."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return isinstance(code, CodeType) and _loops_over(code, name)


def _loops_over(code: CodeType, name: str) -> bool:
    instructions = list(dis.get_instructions(code))
    named = [i.offset for i in instructions if i.opname in ("LOAD_ATTR", "LOAD_METHOD") and i.argval == name]
    loops = [
        (i.argval, i.offset)
        for i in instructions
        if "JUMP" in i.opname and isinstance(i.argval, int) and i.argval < i.offset
    ]
    if any(start <= offset <= end for offset in named for start, end in loops):
        return True
    return any(_loops_over(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))

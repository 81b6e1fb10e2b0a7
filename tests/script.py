"""Import a script of ``examples/`` as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    """The script ``examples/<name>.py``; like any import, it is run once."""
    path = EXAMPLES / f"{name}.py"
    known = name.replace("/", "_")
    if known not in sys.modules:
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # scripts import their neighbours
        spec = importlib.util.spec_from_file_location(known, path)
        if spec is None or spec.loader is None:
            raise AssertionError(f"{path} cannot be imported")
        # Dynamo imports the module of a function it traces by its name.
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]

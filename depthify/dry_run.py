"""explain(): capture a model and stop at the end mark."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import huggingface
from .attach import find_owner
from .config import DepthConfig
from .errors import DepthifyError, NotMixedError, OptionError
from .module import State, _attached_class, attached_modules, original_class
from .report import DepthReport


def dry_run(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> DepthReport:
    """See :func:`depthify.explain`."""
    attached = attached_modules(model)
    if not args and not kwargs:
        if not attached or attached[0]._depthify.report is None:
            raise OptionError(
                "explain(model) without inputs needs a mixed model that has run; give example inputs"
            )
        return attached[0]._depthify.report
    if attached:
        owner, config = attached[0], attached[0]._depthify.config
    else:
        _, owner, _ = find_owner(model)
        config = huggingface.read_config(model) or DepthConfig()
        huggingface.prepare(model)
    options = {"backend": "eager", "mode": None, "options": None, "dynamic": None}
    state = State(type(owner).__qualname__, config, options)
    reports: list[DepthReport] = []
    state.on_report = reports.append
    before = owner.__dict__.get("_depthify")
    owner.__dict__["_depthify"] = state
    if not attached:
        owner.__class__ = _attached_class(type(owner))
    try:
        model(*args, **kwargs)
    except DepthifyError:
        if not reports:
            raise
    finally:
        if attached:
            owner.__dict__["_depthify"] = before
        else:
            owner.__class__ = original_class(owner)
            del owner.__dict__["_depthify"]
    if not reports:
        raise NotMixedError(f"{state.name} was not run by this call of the model")
    return reports[0]

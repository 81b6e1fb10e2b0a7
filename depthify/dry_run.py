"""explain(): capture a model and stop at the end mark."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from . import huggingface
from .attach import find_owner, holds_others
from .config import DepthConfig
from .errors import DepthifyError, NotMixedError, OptionError
from .module import State, attached_modules, swap, unswap
from .regions import BlockState
from .report import DepthReport

_OPTIONS = {"backend": "eager", "mode": None, "options": None, "dynamic": None}


def dry_run(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    where: str | None = None,
    config: DepthConfig | None = None,
    refused: bool = False,
) -> DepthReport:
    """See :func:`depthify.explain`.

    Args:
        config: instead of the model's own.
        refused: report on a model that cannot be mixed as well, instead of raising.
    """
    attached = attached_modules(model)
    if not args and not kwargs:
        if not attached or attached[0]._depthify.report is None:
            raise OptionError(
                "explain(model) without inputs needs a mixed model that has run; give example inputs"
            )
        return attached[0]._depthify.report
    if attached and where is None:
        owner = attached[0]
        blocks = _blocks(owner)
    else:
        _, owner, blocks = find_owner(model, where=where)
    if attached:
        config = config or attached[0]._depthify.config
    else:
        config = config or huggingface.with_recorded(model, DepthConfig())
        huggingface.prepare(model)
    paths = [path for path, module in owner.named_modules() if module in set(blocks)]
    only = holds_others(owner, blocks)
    state = State(type(owner).__qualname__, config, _OPTIONS, paths, only_blocks=only)
    reports: list[DepthReport] = []
    state.on_report = reports.append
    with _in_place_of(attached), contextlib.suppress(_AfterReport):
        swap(owner, state)
        try:
            model(*args, **kwargs)
        except DepthifyError as error:
            if not reports or (reports[0].problem and not refused):
                raise
            raise _AfterReport from error
        finally:
            unswap(owner)
    if not reports:
        raise NotMixedError(f"{state.name} was not run by this call of the model")
    return reports[0]


def _blocks(owner: Any) -> list[nn.Module]:
    """The decoder blocks of an owner that is attached."""
    state = owner._depthify
    if isinstance(state, State):
        return [owner.get_submodule(path) for path in state.blocks]
    return [module for module in attached_modules(owner) if isinstance(module._depthify, BlockState)]


class _AfterReport(Exception):
    """The capture ended at its end mark, as a dry run should."""


@contextlib.contextmanager
def _in_place_of(attached: list[Any]) -> Iterator[None]:
    """Take the attachment off for a while."""
    states = [module._depthify for module in attached]
    for module in attached:
        unswap(module)
    try:
        yield
    finally:
        for module, state in zip(attached, states, strict=True):
            swap(module, state)

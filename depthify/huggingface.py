"""What a transformers model gets on top: the paper's config keys, and hooks that cannot be installed while
tracing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .config import DepthConfig
from .errors import OptionError

USED, STRIDE, WINDOW = "use_depth_attention", "depth_attention_stride", "depth_attention_recent_window"
WHERE = "depth_attention_where"
"""Path of the stack that is mixed, from the transformers model; only where the caller named it."""


def pretrained(model: nn.Module) -> Any | None:
    """The outermost transformers model in ``model`` (itself, or inside an adapter or DDP); None without
    transformers."""
    return _pretrained_at(model)[1]


def _pretrained_at(model: nn.Module) -> tuple[str, Any | None]:
    """The same and its path, with a dot behind it if it is not ``model`` itself."""
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        for path, module in model.named_modules():
            if isinstance(module, transformers.PreTrainedModel):
                return f"{path}." if path else "", module
    return "", None


def recording_owner(model: nn.Module, path: str) -> str:
    """The module at or around ``path`` that records the outputs of its layers, by transformers' hooks.

    The hooks read what that module's forward has set, so they can be traced only together with it.
    """
    transformers = sys.modules.get("transformers")
    around = path
    while transformers is not None:
        if isinstance(model.get_submodule(around), transformers.PreTrainedModel):
            return around
        if not around:
            break
        around = around.rpartition(".")[0]
    return path


def read_config(model: nn.Module) -> DepthConfig | None:
    """The configuration that ``save_pretrained`` recorded, if any."""
    found = pretrained(model)
    config = getattr(found, "config", None)
    if config is None or not getattr(config, USED, False):
        return None
    try:
        return DepthConfig(
            stride=getattr(config, STRIDE, None), recent_window=getattr(config, WINDOW, None) or 0
        )
    except OptionError as error:
        raise OptionError(f"the model's config is not usable: {error}") from None


def with_recorded(model: nn.Module, config: DepthConfig) -> DepthConfig:
    """``config``; if it names no stride, with what the model's own configuration records."""
    recorded = read_config(model) if config.stride is None else None
    if recorded is None:
        return config
    return replace(
        config, stride=recorded.stride, recent_window=config.recent_window or recorded.recent_window
    )


def recorded_where(model: nn.Module) -> str | None:
    """The path of the stack that ``save_pretrained`` recorded, if any."""
    prefix, found = _pretrained_at(model)
    config = getattr(found, "config", None)
    where = getattr(config, WHERE, None) if getattr(config, USED, False) else None
    if where is None:
        return None
    if not isinstance(where, str):
        raise OptionError(f"the model's config is not usable: {WHERE}={where!r} must be the path of a module")
    return prefix + where


def write_config(model: nn.Module, config: DepthConfig, where: str | None = None) -> None:
    """Record how the model is mixed, for ``save_pretrained``; ``where`` is a path from ``model``."""
    prefix, found = _pretrained_at(model)
    if found is not None:
        setattr(found.config, USED, True)
        setattr(found.config, STRIDE, config.stride)
        setattr(found.config, WINDOW, config.recent_window)
        if where is not None and where.startswith(prefix):
            setattr(found.config, WHERE, where[len(prefix) :])


def clear_config(model: nn.Module) -> None:
    found = pretrained(model)
    if found is not None:
        for key in (USED, STRIDE, WINDOW, WHERE):
            found.config.__dict__.pop(key, None)


def prepare(model: nn.Module) -> None:
    """Let transformers install its output-capturing hooks now: later it would do so under a lock, in the
    trace.

    Not around a part that has run, and so has its hooks: it would get each of them twice.
    """
    found = pretrained(model)
    if found is None:
        return
    capturing = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    if install is not None:
        for module in found.modules():
            has = any(getattr(part, "_output_capturing_hooks_installed", False) for part in module.modules())
            if isinstance(module, sys.modules["transformers"].PreTrainedModel) and not has:
                install(module)


@dataclass(frozen=True)
class RecordingHook:
    """A hook by which transformers records what a module returns. It does nothing unless a call asks for it,
    but a capture that begins behind the model's forward cannot go through it."""

    module: nn.Module
    number: int
    function: Callable[..., Any]
    output: str
    """What it records: "attentions", say."""

    def take_off(self) -> None:
        del self.module._forward_hooks[self.number]

    def put_back(self) -> None:
        self.module._forward_hooks[self.number] = self.function


def recording_hooks(block: nn.Module) -> list[RecordingHook]:
    """Those on the modules inside ``block``."""
    found = []
    for module in block.modules():
        for number, hook in module._forward_hooks.items() if module is not block else ():
            if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
                output = inspect.getclosurevars(hook).nonlocals.get("key", "")
                found.append(RecordingHook(module, number, hook, str(output)))
    return found


def recorded_now() -> set[str]:
    """The outputs that the transformers model that is running has been asked to record."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    return set((collector.get() if collector is not None else None) or ())

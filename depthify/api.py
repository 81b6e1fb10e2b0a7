"""The public functions: argument checks and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from . import huggingface
from .config import DepthConfig
from .errors import DepthifyError, OptionError
from .report import DepthReport
from .self_bias import checked

if TYPE_CHECKING:
    from .cost_model.report import CostReport

Model = TypeVar("Model")


def depthify(
    model: Model,
    stride: int | None = None,
    *,
    recent_window: int = 0,
    budget: float | None = None,
    recompute: bool = False,
    backend: Any = "eager",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    regions: str = "auto",
    blocks: Sequence[nn.Module] | None = None,
    self_bias: float | Callable[[int], float] | None = None,
    where: str | None = None,
) -> Model:
    """Let every layer's query attend over the keys of a few earlier layers and mix their values into its own.

    No parameter, buffer, output or cache tensor is added. The model's forward is captured by Dynamo at its
    first call and rewritten while it is traced, so mixing also holds inside any outer ``torch.compile``,
    ``generate``, DDP and so on.

    Args:
        model: an ``nn.Module`` (changed in place and returned), or a ``GraphModule`` or ``ExportedProgram``
            (a new one is returned).
        stride: distance between source layers; None takes the one in the model's config, else half the layer
            count.
        recent_window: how many directly preceding layers are sources as well.
        budget: largest part of the model's FLOPs that mixing may add, decided for all batch sizes and lengths
            when the graph is rewritten. None: 0.01, or 100 kFLOP per token where that is more.
        recompute: compute mixed values again in backward instead of saving them, when the graph is compiled
            by a backend that splits forward and backward (Inductor, aot_eager).
        backend: how the captured graph is run when no outer ``torch.compile`` is there: "eager" as it is, or
            any ``torch.compile`` backend, with its ``mode``, ``options`` and ``dynamic``.
        regions: "model" captures the whole model in one graph; "block" captures each decoder block on its own
            and carries the sources from one to the next, for models that are cut between blocks (FSDP2,
            hooks) and for a capture time that does not grow with depth; "auto" takes "model" unless hooks
            on the blocks make it impossible.
        blocks: the decoder blocks, if they are not the members of the model's only module list.
        self_bias: a warm start for pretrained weights: this number, or what a schedule gives for step 0, is
            added to every layer's own depth score. ``float("inf")`` computes exactly the vanilla model, None
            or 0 the paper's. :func:`depthify.set_self_bias` changes it between steps.
        where: the path of the stack to mix, such as "model.decoder", in a model with several. Every stack is
            a depth of its own. None: the one in the model's config, else the text decoder of a transformers
            model that has one, else all that is causal self-attention, stack by stack.

    Raises:
        OptionError: an argument is not allowed, or the model is compiled or mixed already.
        BudgetError: when the graph is rewritten, mixing adds more arithmetic than ``budget`` allows.
        UnsupportedModelError, NotMixedError: at the first call, when the captured graph shows that the model
            cannot be mixed correctly. The model never runs without mixing.
    """
    config = DepthConfig(stride=stride, recent_window=recent_window, budget=budget, recompute=recompute)
    if isinstance(model, torch.export.ExportedProgram) or isinstance(model, GraphModule):
        from .graph import rewrite

        _only_for_modules(
            backend=(backend, "eager"),
            mode=(mode, None),
            options=(options, None),
            dynamic=(dynamic, None),
            regions=(regions, "auto"),
            blocks=(blocks, None),
            self_bias=(self_bias, None),
            where=(where, None),
        )
        return rewrite(model, config)  # type: ignore[return-value]
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"model={type(model).__name__}: depthify takes an nn.Module, a torch.fx.GraphModule or an "
            "ExportedProgram"
        )
    compile_options = _compile_options(backend, mode, options, dynamic)
    if regions not in ("auto", "model", "block"):
        raise OptionError(f"regions={regions!r}: regions must be 'auto', 'model' or 'block'")
    config = huggingface.with_recorded(model, config)
    bias = checked(self_bias, None)
    from .module import attach

    return attach(model, config, compile_options, regions, blocks, bias or None, where)  # type: ignore[return-value]


def restore(model: Model) -> Model:
    """Give ``model`` its original forward back and remove the config keys; returns it."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"model={type(model).__name__}: restore takes an nn.Module")
    from .module import detach

    return detach(model)  # type: ignore[return-value]


def explain(model: nn.Module, *args: Any, where: str | None = None, **kwargs: Any) -> DepthReport:
    """Capture ``model(*args, **kwargs)`` and report what would be mixed; nothing is changed and no layer is
    run.

    Without arguments, on a mixed model that has run: the report of its last capture. ``where`` names a stack,
    as in :func:`depthify`.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model={type(model).__name__}: explain takes an nn.Module")
    from .dry_run import dry_run

    return dry_run(model, args, kwargs, where)


def cost_report(
    model_or_config: Any,
    stride: int | None = None,
    *,
    recent_window: int = 0,
    batch_size: int = 1,
    seq_len: int = 4096,
    cache_len: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> CostReport:
    """What mixing costs: FLOPs, cache bytes and parameters of one call without and with it.

    Args:
        model_or_config: an ``nn.Module``, whose graph is captured on sizes alone and counted
            (``model(input_ids)`` must be enough to call it); or what is evaluated in closed form, in well
            under a second for any size: a transformers config, the name of a preset ("paper-410m",
            "paper-1.5b", "paper-3b"), a directory with a ``config.json``, a model id, a
            :class:`depthify.cost_model.shapes.DecoderShape`.
        stride: None takes the preset's or the config's, else half the layer count.
        batch_size: sequences. seq_len: new tokens of each. cache_len: tokens of each that are cached already.
        dtype: of weights, activations and cache.

    Raises:
        OptionError: an argument is not allowed.
        UnsupportedModelError: there is no closed form for the config, or the model cannot be captured or
            mixed, or its graph holds operations that have no FLOP rule.
    """
    from .cost_model.report import cost_report as report

    return report(
        model_or_config,
        stride,
        recent_window=recent_window,
        batch_size=batch_size,
        seq_len=seq_len,
        cache_len=cache_len,
        dtype=dtype,
    )


def _only_for_modules(**given: tuple[Any, Any]) -> None:
    for name, (value, default) in given.items():
        if value != default:
            raise OptionError(
                f"{name}={value!r}: only an nn.Module is compiled by depthify; compile the result yourself"
            )


def _compile_options(backend: Any, mode: Any, options: Any, dynamic: Any) -> dict[str, Any]:
    if isinstance(backend, str):
        import torch._dynamo

        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known or backend == "depthify":
            allowed = sorted(name for name in known if name != "depthify")
            raise OptionError(
                f"backend={backend!r}: unknown here; allowed are {', '.join(allowed)}, or a callable"
            )
    elif not callable(backend):
        raise OptionError(
            f"backend={backend!r}: backend must be the name of a torch.compile backend, or a callable"
        )
    if dynamic not in (None, True, False):
        raise OptionError(f"dynamic={dynamic!r}: dynamic must be None, True or False")
    if mode is not None and not isinstance(mode, str):
        raise OptionError(f"mode={mode!r}: mode must be a string or None")
    if options is not None and not isinstance(options, dict):
        raise OptionError(f"options={options!r}: options must be a dict or None")
    if mode is not None and options is not None:
        raise OptionError(f"mode={mode!r} and options={options!r}: torch.compile takes one of them, not both")
    if backend == "eager" and (mode is not None or options is not None):
        given = f"mode={mode!r}" if mode is not None else f"options={options!r}"
        raise OptionError(f"{given}: backend='eager' does not compile, so it takes neither mode nor options")
    return {"backend": backend, "mode": mode, "options": options, "dynamic": dynamic}


__all__ = ["DepthifyError", "cost_report", "depthify", "explain", "restore"]

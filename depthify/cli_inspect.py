"""``depthify inspect``: which layers of a model would be mixed, and why others would not, without weights."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from typing import Any

from .cli_options import add_mixing_options
from .errors import DepthifyError, MissingDependencyError, OptionError

_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
)


def add_inspect_command(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``inspect`` subcommand to an argparse ``subparsers`` object; its ``run`` default is
    :func:`run_inspect`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="which attention layers of a model would be mixed, and why others would not",
        description="Capture a transformers model without weights, and list its attention layers, their "
        "shapes and sources. For what is left out or refused: the rule, the node at which the search ended, "
        "and the line of code that made it. Exit status 1 if the model cannot be mixed.",
    )
    parser.add_argument("model", help="a config.json, a directory with one, or a model id")
    add_mixing_options(parser)
    parser.add_argument("--where", metavar="PATH", help="the stack to look at, in a model with several")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_inspect)
    return parser


def run_inspect(args: argparse.Namespace) -> int:
    """Print what ``args`` ask for; returns the exit status.

    Raises:
        DepthifyError: the model cannot be built or captured; the caller prints it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, see depthify demo
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependencyError('depthify inspect needs transformers: pip install "depthify[demo]"')
    name, report = inspect_model(args.model, args.stride, args.recent_window, args.where)
    if args.json:
        print(json.dumps({"model": name, **report.to_dict()}, indent=2))
    elif importlib.util.find_spec("rich") is not None:
        _show(name, report)
    else:
        print(name)
        print(report)
    return 1 if report.problem else 0


def inspect_model(
    source: str, stride: int | None = None, recent_window: int = 0, where: str | None = None
) -> tuple[str, Any]:
    """The class of the model that ``source`` configures, and its :class:`~depthify.report.DepthReport`.

    Read with a cache if the model can be mixed with one, else without; a note says so.
    """
    from dataclasses import replace

    from . import huggingface
    from .config import DepthConfig

    model, inputs = _build(source)
    config = huggingface.with_recorded(model, DepthConfig(stride=stride, recent_window=recent_window))
    report = _dry_run(model, inputs, where, config)
    if report.problem:
        without = _dry_run(model, {**inputs, "use_cache": False}, where, config)
        if not without.problem:
            reason = report.refusals[0].reason if report.refusals else report.problem.splitlines()[0]
            note = f"only without a cache (use_cache=False); with one: {reason}"
            report = replace(without, notes=(*without.notes, note))
    return type(model).__name__, report


def _dry_run(model: Any, inputs: dict[str, Any], where: str | None, config: Any) -> Any:
    import torch

    from .dry_run import dry_run

    try:
        with torch.no_grad():
            return dry_run(model, (), inputs, where, config, refused=True)
    except DepthifyError:
        raise
    except Exception as error:  # whatever a model's own code, or Dynamo, raises on tensors without values
        message = str(error).split("\n\n")[0]
        raise OptionError(
            f"model: {type(model).__name__} cannot be captured without weights: {type(error).__name__}: "
            f"{message}. Load it and use depthify.explain(model, input_ids)"
        ) from error


def _build(source: str) -> tuple[Any, dict[str, Any]]:
    """A model without weights, and what to call it with."""
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except Exception as error:  # a config class checks its values, with errors of many kinds
        raise OptionError(
            f"model={source!r}: no config.json, no directory with one, and no model id that can be read "
            f"here: {' '.join(str(error).split())[:400]}"
        ) from error
    for name in _CLASSES:
        known = getattr(transformers, name, None)
        if known is not None and type(config) in known._model_mapping:
            break
    else:
        raise OptionError(
            f"model={source!r}: {type(config).__name__} is the config of no model that writes text"
        )
    with torch.device("meta"):
        model = known.from_config(config).eval()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        ids = torch.ones(2, 8, dtype=torch.long)
    _off_meta(model, mode)
    inputs = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return model, inputs


def _off_meta(model: Any, mode: Any) -> None:
    """Turn parameters and buffers on the meta device into ones that have no memory on any other: Dynamo puts
    what a forward makes on its inputs' device, and takes tensors on "meta" for constants there."""
    import torch

    known: dict[int, Any] = {}  # tied weights stay tied
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in known:
                with mode:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_weight = isinstance(tensor, torch.nn.Parameter)
                known[id(tensor)] = (
                    tensor,
                    torch.nn.Parameter(fake, tensor.requires_grad) if is_weight else fake,
                )
            kept = module._parameters if name in module._parameters else module._buffers
            kept[name] = known[id(tensor)][1]


def _show(name: str, report: Any) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # what reads a file or a pipe scrolls
    scored = f", scores: {report.scored}" if report.scored else ""
    console.print(
        f"[bold]{name}[/]: {len(report.layers)} attention layers, {report.mixed} mixed (stride "
        f"{report.stride}, recent window {report.recent_window}{scored})"
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("layer", "module", "sources", "q / kv heads", "head size", "cached", "written as"):
        table.add_column(heading)
    for x in report.layers:
        size = str(x.key_size) if x.key_size == x.value_size else f"{x.key_size} / {x.value_size}"
        sources = ", ".join(map(str, x.sources)) or "-"
        table.add_row(
            str(x.depth), x.module, sources, f"{x.query_heads} / {x.kv_heads}", size,
            "yes" if x.cached else "no", x.written_as,
        )  # fmt: skip
    console.print(table)
    for heading, unsupported in (("Cannot be mixed", True), ("Left out", False)):
        alike: dict[tuple[str, str], list[Any]] = {}
        for x in report.refusals:
            if x.unsupported is unsupported:
                alike.setdefault((f"{x.reason}. {x.remedy}" if x.remedy else x.reason, x.source), []).append(
                    x
                )
        if alike:
            console.print(f"\n[bold]{heading}[/]")
        for (rule, source), found in alike.items():
            grid = Table(box=None, show_header=False, pad_edge=False)
            grid.add_column()
            grid.add_column(overflow="fold")
            grid.add_row("rule", escape(rule))
            grid.add_row("nearest miss", ", ".join(x.node for x in found))
            grid.add_row("source line", escape(_short(source)))
            grid.add_row("module", ", ".join(x.module for x in found))
            console.print(grid)
    for note in report.notes:
        console.print(f"note: {escape(note)}")
    if report.problem:
        console.print(f"[bold red]not mixed[/]: {escape(report.problem.splitlines()[0])}")


def _short(source: str) -> str:
    """A source line without the folder that packages are installed in."""
    return source.rpartition("site-packages/")[2]

"""``depthify weights``: what the softmax over depth of a model gives to its sources on a text."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from .cli_options import add_mixing_options, check_plot
from .errors import OptionError


def add_weights_command(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``weights`` subcommand to an argparse ``subparsers`` object; its ``run`` default is
    :func:`run_weights`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "weights",
        help="which earlier layers each layer reads, on a text",
        description="Run one forward of a transformers model over a text and show the depth weights of every "
        "layer: the share of its own value, and of each source's.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="a folder (also one with a single .gguf file) or a hub id (default: the model of depthify demo)",
    )
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to read (default: 219 tokens of Darwin)")
    parser.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="read so many tokens (default: %(default)s)"
    )
    add_mixing_options(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="(default: %(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (PNG, PDF, SVG); needs matplotlib")
    parser.set_defaults(run=run_weights)
    return parser


def run_weights(args: argparse.Namespace) -> int:
    """Print the weights that ``args`` ask for; returns the exit status.

    Raises:
        DepthifyError: an argument cannot be used; the caller prints it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, see depthify demo
    from . import demo

    if args.max_tokens < 2:
        raise OptionError(f"max-tokens={args.max_tokens}: at least 2 tokens must be read")
    check_plot(args.plot)
    text = demo.TEXT if args.text is None else _read(args.text)
    name, ids, weights = _measure(args, text)
    if args.format == "json":
        print(json.dumps({"model": name, "tokens": ids.shape[1], **weights.to_dict()}, indent=2))
    else:
        print(weights)
    if args.plot:
        weights.plot(args.plot, f"{name}, {ids.shape[1]} tokens")
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"text={path!r}: cannot be read as UTF-8 text: {error}") from error


def _measure(args: argparse.Namespace, text: str) -> tuple[str, Any, Any]:
    from . import demo

    demo._require("transformers", "rich", *(demo._FOR_GGUF if args.model is None else ()))
    from .api import depthify
    from .demo_view import View
    from .weights import depth_weights

    view = View()
    view.console.stderr = True  # standard output is for the result
    model, tokenizer, name = demo._load(demo.DemoOptions(model=args.model), view)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.max_tokens]
    if ids.shape[1] < 2:
        raise OptionError(f"text={args.text!r}: it has {ids.shape[1]} tokens; at least 2 must be read")
    depthify(model, args.stride, recent_window=args.recent_window, budget=float("inf"))
    with view.step(f"one forward of {ids.shape[1]} tokens"):
        weights = depth_weights(model, ids, use_cache=False)
    return name.split(" (")[0], ids, weights

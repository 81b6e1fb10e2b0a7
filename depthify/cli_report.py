"""``depthify report``: the cost of mixing a model, from its config, without weights."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from typing import Any

from .cli_options import add_mixing_options, check_plot

_FORMATS = ("table", "markdown", "json", "latex")


def add_report_command(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``report`` subcommand to an argparse ``subparsers`` object; its ``run`` default is
    :func:`run_report`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="FLOPs, cache and parameters with and without mixing",
        description="What mixing over depth costs a model. Computed from its config in closed form, "
        "without weights.",
    )
    parser.add_argument(
        "model",
        help="a preset (paper-410m, paper-1.5b, paper-3b), a directory with a config.json, or a model id",
    )
    add_mixing_options(parser)
    parser.add_argument("--batch-size", type=int, default=1, help="sequences (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=4096, help="new tokens each (default: %(default)s)")
    parser.add_argument("--cache-len", type=int, default=0, help="cached tokens each (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="floating-point type (default: %(default)s)")
    parser.add_argument("--format", choices=_FORMATS, default="table", help="(default: %(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (PNG, PDF, SVG); needs matplotlib")
    parser.set_defaults(run=run_report)
    return parser


def run_report(args: argparse.Namespace) -> int:
    """Print the report that ``args`` ask for; returns the exit status.

    Raises:
        DepthifyError: an argument cannot be used; the caller prints it.
    """
    import torch

    from .cost_model.report import cost_report
    from .errors import OptionError

    check_plot(args.plot)
    dtype = getattr(torch, args.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise OptionError(f"dtype={args.dtype!r}: no dtype of torch; such as bfloat16, float16, float32")
    report = cost_report(
        args.model,
        args.stride,
        recent_window=args.recent_window,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        cache_len=args.cache_len,
        dtype=dtype,
    )
    if args.format == "json":
        print(json.dumps(report.to_dict(), indent=2))
    elif args.format == "latex":
        print(report.to_latex())
    elif args.format == "markdown":
        print(report.to_markdown())
    elif sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        Console().print(report)
    else:
        print(report)
    if args.plot:
        report.plot(args.plot)
    return 0

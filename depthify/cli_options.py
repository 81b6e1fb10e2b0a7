"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from .errors import OptionError


def add_mixing_options(parser: argparse.ArgumentParser) -> None:
    """``--stride`` and ``--recent-window``: which layers are sources."""
    parser.add_argument(
        "--stride", type=int, help="distance between source layers (default: the model's, or half the layers)"
    )
    parser.add_argument(
        "--recent-window",
        type=int,
        default=0,
        metavar="N",
        help="directly preceding layers that are sources as well (default: %(default)s)",
    )


def check_plot(path: str | None) -> None:
    """Raise before anything is computed if there is no folder to put a picture in."""
    if path and not Path(path).absolute().parent.is_dir():
        raise OptionError(f"plot={path!r}: there is no folder {str(Path(path).absolute().parent)!r}")

"""How ``depthify demo`` looks: progress and tables in a terminal, plain text where the output is piped."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from . import __version__

if TYPE_CHECKING:
    from .demo import Measured
    from .demo_measure import Size
    from .report import DepthReport, LayerReport

_WIDTH = 100
_INDENT = 2


class Step:
    """A line of progress that is being worked on."""

    def __init__(self, show: Callable[[str], Any]) -> None:
        self._show = show
        self.noted = ""

    def note(self, text: str) -> None:
        """Say how far the step is."""
        self.noted = text
        self._show(text)


class View:
    """Writes the demonstration to standard output."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
        if not self.console.is_terminal or self.console.width > _WIDTH:
            self.console.width = _WIDTH

    # Progress

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[Step]:
        """Show ``text`` and the seconds running; leaves one line behind."""
        columns = (
            TextColumn(" "),
            SpinnerColumn("line"),
            TextColumn("{task.description}", style="dim"),
            TextColumn("{task.fields[note]}", style="dim"),
            TimeElapsedColumn(),
        )
        start = time.perf_counter()
        with self._live(columns) as progress:
            task = progress.add_task(text, total=None, note="")
            step = Step(lambda note: progress.update(task, note=note))
            yield step
        self._done(text + (f": {step.noted}" if step.noted else ""), time.perf_counter() - start)

    @contextlib.contextmanager
    def download(self, text: str, size: int) -> Iterator[Callable[[int], None]]:
        """Show a bar; the value it gives takes the number of bytes that have arrived."""
        columns = (
            TextColumn(" "),
            TextColumn("{task.description}", style="dim"),
            BarColumn(30),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        start = time.perf_counter()
        with self._live(columns) as progress:
            task = progress.add_task(text, total=size)
            yield lambda arrived: progress.update(task, completed=arrived)
        self._done(f"{text} ({size / 1e6:.0f} MB)", time.perf_counter() - start)

    def _live(self, columns: Sequence[ProgressColumn]) -> Progress:
        """Nothing but the last line of a step is written where the output is no terminal."""
        return Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)

    def _done(self, text: str, seconds: float) -> None:
        clock = f"{seconds:.1f} s"
        room = self.console.width - 4 - len(clock)
        self.console.print(Text(f"  {text[:room]:<{room}}{clock}", style="dim"))

    # Results

    def title(self) -> None:
        self.console.print(
            Text.assemble(
                (f"depthify {__version__}", "bold"),
                f"  on torch {torch.__version__}, Python {sys.version.split()[0]}, "
                f"{torch.get_num_threads()} threads",
            )
        )

    def heading(self, text: str) -> None:
        self.console.print()
        self.console.rule(Text(text, style="bold cyan"), align="left", style="cyan")

    def say(self, *parts: Any) -> None:
        for line in Text.assemble(*parts).wrap(self.console, self.console.width - _INDENT):
            line.rstrip()
            self.console.print(Text(" " * _INDENT) + line)

    def model(self, name: str, model: Any) -> None:
        parameters = sum(p.numel() for p in model.parameters())
        kind = str(next(model.parameters()).dtype).removeprefix("torch.")
        self.say((name, "bold"), f": {type(model).__name__}, {parameters:,} parameters in {kind}")

    def sites(self, report: DepthReport) -> None:
        self.say(
            (f"{len(report.layers)} causal self-attention layers found, {report.mixed} mixed", "bold"),
            f" (stride {report.stride}, recent window {report.recent_window})",
        )
        table = _table("layers", "module", "sources", "q / kv heads", "size", "attention written as")
        for layers in _runs(report.layers):
            x = layers[0]
            size = str(x.key_size) if x.key_size == x.value_size else f"{x.key_size}/{x.value_size}"
            table.add_row(
                _span([layer.depth for layer in layers]),
                _common([layer.module for layer in layers]),
                _shortened(x.sources) or "-",
                f"{x.query_heads} / {x.kv_heads}",
                size,
                x.written_as,
            )
        self._print(table)
        for refusal in report.refusals:
            kind = "cannot be mixed" if refusal.unsupported else "left out"
            self.say((f"{kind}: ", "yellow"), f"{refusal.module}: {refusal.reason}")

    def sizes(self, before: Size, after: Size, tokens: int) -> None:
        table = _table("", ">before", ">after", "")

        def row(name: str, old: Any, new: Any) -> None:
            counted = isinstance(old, int)
            shown = [f"{x if counted else len(x):,}" for x in (old, new)]
            same = "equal" if counted else "equal, each in shape and dtype"
            table.add_row(name, *shown, Text(same, "green") if old == new else Text("NOT EQUAL", "bold red"))

        row("parameters", before.parameters, after.parameters)
        row("entries of state_dict()", before.state, after.state)
        row("their bytes", before.state_bytes, after.state_bytes)
        row(f"KV-cache tensors, {tokens} tokens", before.cache, after.cache)
        row("KV-cache bytes", before.cache_bytes, after.cache_bytes)
        self._print(table)

    def differences(self, before: Measured, after: Measured, bound: float, changed: float) -> None:
        self.say("The largest difference to the logits of one full forward, as a part of the largest logit:")
        table = _table("read", ">vanilla", ">mixed", "")
        for name, mixed in after.differences.items():
            vanilla = f"{before.differences[name]:.1e}" if name in before.differences else ""
            good = mixed <= bound
            verdict = Text(f"below {bound:.0e}", "green") if good else Text(f"ABOVE {bound:.0e}", "bold red")
            table.add_row(name, vanilla, f"{mixed:.1e}", verdict)
        self._print(table)
        self.say(f"For comparison: mixing changes the logits by {changed:.2g} of the largest.")

    def answers(self, prompt: str, before: str, after: str) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        table.add_row("prompt", Text(prompt))
        table.add_row("vanilla", Text(before or "(nothing)", "bold"))
        table.add_row("mixed", Text(after or "(nothing)", "bold"))
        self._print(table)

    def perplexities(self, before: Measured, after: Measured, source: str, *, trained: bool) -> None:
        table = _table("", ">vanilla", ">mixed", ">ratio")
        ratio = f"{after.perplexity / before.perplexity:.2f}"
        table.add_row(source, f"{before.perplexity:,.2f}", f"{after.perplexity:,.2f}", ratio)
        self._print(table)
        if trained:
            self.say("The model's config says that these weights were trained with depth mixing.")
        else:
            self.say(
                "These weights were not trained with depth mixing, which changes what the model computes: "
                "the number is expected to go up. Mixing is meant to be trained with."
            )

    def times(self, before: Measured, after: Measured, tokens: int, *, compiled: bool) -> None:
        how = "compiled by Inductor" if compiled else "eager"
        table = _table(f"best time, {how}", ">vanilla", ">mixed", ">difference")
        for name, old, new in (
            (f"full forward of {tokens} tokens", before.read_text, after.read_text),
            ("one token behind a cache", before.read_token, after.read_token),
        ):
            table.add_row(
                name, f"{old * 1e3:.1f} ms", f"{new * 1e3:.1f} ms", f"{100 * (new / old - 1):+.1f} %"
            )
        for name, mixed in after.captures.items():
            verb = "compiling" if compiled else "capturing"
            vanilla = f"{before.captures[name]:.1f} s" if compiled and name in before.captures else ""
            table.add_row(f"{verb}, once: {name}", vanilla, f"{mixed:.1f} s", "")
        self._print(table)

    def restored(self, good: bool) -> None:
        told = ("the same, bit by bit", "green") if good else ("NOT THE SAME", "bold red")
        self.say("Logits of the restored model and of the original: ", told)

    def verdict(self, failed: Sequence[str], seconds: float) -> None:
        self.console.print()
        for message in failed:
            self.say((f"FAILED: {message}", "bold red"))
        if not failed:
            self.say(("All checks hold.", "bold green"), f" {seconds:.0f} s in all.")

    def _print(self, table: Table) -> None:
        indented = Padding(table, (0, 0, 0, _INDENT))
        if self.console.is_terminal:
            self.console.print(indented)
            return
        with self.console.capture() as written:
            self.console.print(indented)
        for line in written.get().splitlines():
            self.console.print(line.rstrip(), soft_wrap=True)


def _table(*headings: str) -> Table:
    """A table; a heading that starts with ``>`` is of a column of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in headings:
        right = heading.startswith(">")
        table.add_column(heading.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return table


def _runs(layers: Sequence[LayerReport]) -> list[list[LayerReport]]:
    """Neighbouring layers that differ in nothing but their place."""

    def kind(x: LayerReport) -> tuple[Any, ...]:
        name = re.sub(r"\d+", "#", x.module)
        return x.stack, name, x.sources, x.query_heads, x.kv_heads, x.key_size, x.value_size, x.written_as

    return [list(group) for _, group in groupby(layers, kind)]


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _common(paths: Sequence[str]) -> str:
    """One name for several modules: ``layers.1-15.self_attn``."""
    split = [re.split(r"(\d+)", path) for path in paths]
    parts = []
    for column in zip(*split, strict=False):
        parts.append(column[0] if len(set(column)) == 1 else f"{column[0]}-{column[-1]}")
    return "".join(parts)


def _shortened(sources: Sequence[int]) -> str:
    if len(sources) <= 4:
        return ", ".join(map(str, sources))
    return f"{sources[0]}, {sources[1]}, ... {sources[-1]} ({len(sources)})"

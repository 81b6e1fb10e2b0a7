"""Tables as data, and numbers as text: plain, Markdown, LaTeX, rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A title, a heading row and rows of text; the first column is a label, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def plain(self) -> str:
        """Aligned columns, ASCII."""
        widths = [max(len(row[i]) for row in (self.columns, *self.rows)) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            cells = [
                cell.ljust(w) if i == 0 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            return "  ".join(cells).rstrip()

        rule = "  ".join("-" * w for w in widths)
        return "\n".join([self.title, line(self.columns), rule, *map(line, self.rows)])

    def markdown(self) -> str:
        """GitHub's pipe table, the title in bold above."""
        rule = ("---", *("---:" for _ in self.columns[1:]))
        lines = ["| " + " | ".join(row) + " |" for row in (self.columns, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])

    def latex(self) -> str:
        """A ``tabular`` with booktabs rules."""
        head = " & ".join(map(escape_latex, self.columns)) + r" \\"
        body = [" & ".join(map(escape_latex, row)) + r" \\" for row in self.rows]
        return "\n".join(
            [
                f"% {self.title}",
                r"\begin{tabular}{l" + "r" * (len(self.columns) - 1) + "}",
                r"\toprule",
                head,
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )

    def rich(self) -> Any:
        """A ``rich.table.Table``; rich must be installed."""
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        return table


_LATEX = {"\\": r"\textbackslash{}", "%": r"\%", "&": r"\&", "#": r"\#", "_": r"\_", "^": r"\^{}", "$": r"\$"}


def escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


_PREFIXES = ((10**18, "E"), (10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def short(number: float, unit: str = "") -> str:
    """Four digits and a decimal prefix: ``12.53 TFLOP``; small whole numbers as they are."""
    for size, prefix in _PREFIXES:
        if abs(number) >= size:
            return f"{number / size:.4g} {prefix}{unit}"
    text = f"{number:.4g}" if number != int(number) else str(int(number))
    return f"{text} {unit}".rstrip()


def seconds(duration: float) -> str:
    """Four digits in a unit that fits."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if duration >= size:
            return f"{duration / size:.4g} {unit}"
    return f"{duration * 1e9:.4g} ns"


def whole(number: int) -> str:
    """All digits, grouped by three."""
    return f"{number:,}"


def percent(part: float) -> str:
    """Three significant digits of a share, in per cent, without an exponent."""
    if part == 0:
        return "0 %"
    digits = 2
    while abs(part) * 100 < 10 ** (2 - digits) and digits < 9:
        digits += 1
    return f"{part * 100:.{digits}f} %"

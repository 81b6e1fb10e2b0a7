"""What the pass found in one captured graph, as a value to print, compare and assert on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import DepthConfig
    from .passes import Findings, Stack
    from .passes.sites import AttentionSite, Refusal


@dataclass(frozen=True)
class LayerReport:
    """One attention layer. Sizes that vary between calls are strings such as ``"s0"``."""

    depth: int
    stack: int
    module: str
    sources: tuple[int, ...]
    query_heads: int | str
    kv_heads: int | str
    key_size: int | str
    value_size: int | str
    tokens: int | str
    cached: bool
    written_as: str
    """``scaled_dot_product_attention`` or the product that ends a written-out attention."""

    def at(self, depth: int, module: str, sources: tuple[int, ...]) -> LayerReport:
        """The same kind of layer at another place."""
        return replace(self, depth=depth, module=module, sources=sources)


@dataclass(frozen=True)
class RefusalReport:
    """An attention operation that is no layer, or that cannot be mixed."""

    module: str
    reason: str
    ended_at: str
    unsupported: bool
    """True: mixing the model would be wrong. False: it is left out, rightly."""

    node: str = ""
    """The node at which the search ended: the nearest miss."""

    source: str = ""
    """The line of code that made it: ``file.py:12: code``; empty where that is not known."""

    remedy: str = ""


@dataclass(frozen=True)
class DepthReport:
    """The layers in depth order, and what was left out."""

    stride: int | None
    recent_window: int
    layers: tuple[LayerReport, ...]
    scored: str = ""
    """Where depth scores are taken: before the rotary embedding where it is recognised, else after it."""

    refusals: tuple[RefusalReport, ...] = ()
    notes: tuple[str, ...] = field(default=())
    problem: str = ""
    """Why the model cannot be mixed; empty if it can. The layers have no sources then."""

    @property
    def mixed(self) -> int:
        """Number of layers that have sources."""
        return sum(bool(layer.sources) for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mixed": self.mixed}

    def __str__(self) -> str:
        lines = [
            f"{len(self.layers)} attention layers, {self.mixed} mixed "
            f"(stride {self.stride}, recent window {self.recent_window}, scores: {self.scored})"
        ]
        rows = [("layer", "module", "sources", "heads", "head size", "cached", "written as")]
        for x in self.layers:
            size = str(x.key_size) if x.key_size == x.value_size else f"{x.key_size}/{x.value_size}"
            rows.append(
                (
                    str(x.depth),
                    x.module,
                    " ".join(map(str, x.sources)) or "-",
                    f"{x.query_heads}/{x.kv_heads}",
                    size,
                    "yes" if x.cached else "no",
                    x.written_as,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        for refusal in self.refusals:
            kind = "cannot be mixed" if refusal.unsupported else "left out"
            lines.append(f"{kind}: {refusal.module}: {refusal.reason} ({refusal.ended_at})")
        lines += [f"note: {note}" for note in self.notes]
        if self.problem:
            lines.append(f"not mixed: {self.problem}")
        return "\n".join(lines)


def report_of(findings: Findings, stacks: list[Stack]) -> DepthReport:
    """Describe what :func:`depthify.passes.plan` returned."""
    layers = tuple(
        layer_report(layer.depth, number, layer.sources, layer.site)
        for number, stack in enumerate(stacks)
        for layer in stack.layers
    )
    config = stacks[0].config
    refusals = tuple(_refusal(r) for r in findings.refusals)
    scored = " and ".join(dict.fromkeys(stack.scored for stack in stacks))
    notes = tuple(dict.fromkeys(stack.note for stack in stacks if stack.note))
    return DepthReport(config.stride, config.recent_window, layers, scored, refusals, notes)


def refused_report(findings: Findings, config: DepthConfig, problem: str) -> DepthReport:
    """Describe a graph that cannot be mixed: what was found, without sources."""
    layers = tuple(layer_report(depth, 0, (), site) for depth, site in enumerate(findings.sites))
    refusals = tuple(_refusal(r) for r in findings.refusals)
    return DepthReport(config.stride, config.recent_window, layers, "", refusals, (), problem)


def _refusal(refusal: Refusal) -> RefusalReport:
    from .passes.nodes import describe, module_path, source_line
    from .passes.sites import Verdict

    return RefusalReport(
        module_path(refusal.attention),
        refusal.reason,
        describe(refusal.node),
        refusal.verdict is Verdict.UNSUPPORTED,
        refusal.node.name,
        source_line(refusal.node) or source_line(refusal.attention),
        refusal.remedy,
    )


def layer_report(depth: int, stack: int, sources: tuple[int, ...], site: AttentionSite) -> LayerReport:
    from .passes.ops import op_name
    from .passes.order_layers import features, groups, lanes

    key_size, value_size = features(site)
    heads: Any = lanes(site)[-1].size if len(lanes(site)) > 1 else 1
    query_heads: Any = heads
    for axis in groups(site):
        query_heads = query_heads * axis.size
    plain = [
        n if isinstance(n, int) else str(n) for n in (query_heads, heads, key_size, value_size, site.tokens)
    ]
    return LayerReport(
        depth, stack, site.module, sources, *plain, bool(site.cache_writes), op_name(site.output) or "?"
    )

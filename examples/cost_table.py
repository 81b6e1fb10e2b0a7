"""The published claims about the cost of Depth-Attention, beside what is counted: claimed / counted / ratio.

    python examples/cost_table.py            # closed forms, seconds
    python examples/cost_table.py --count    # also the graph of a 3B Qwen3, captured and counted; a minute

Claims: Zeng et al., "Depth-Attention: Cross-Layer Value Mixing for Language Models", arXiv 2606.05014.
Counted: the closed forms of ``depthify.cost_model``, which the tests prove identical to the count of
rewritten graphs.
"""

from __future__ import annotations

import argparse

from depthify import cost_report
from depthify.cost_model import symbols as S
from depthify.cost_model.methods import depth_attention, shorthand, shorthand_factors
from depthify.cost_model.shapes import PRESETS, DecoderShape
from depthify.cost_model.tables import Table, percent, short

BOUND = 1e-4
"""The paper's "under 0.01 % extra arithmetic FLOPs"."""


def example_shape(kv_heads: int) -> DecoderShape:
    """The example of T = 4096, d = 2048, L = 32, s = 16: 32 heads of 64, feed-forward and vocabulary as
    usual."""
    return DecoderShape(
        name=f"L=32, d=2048, 32/{kv_heads} heads",
        layers=32,
        width=2048,
        query_heads=32,
        kv_heads=kv_heads,
        key_size=64,
        value_size=64,
        rotated=64,
        ff=5632,
        vocabulary=32000,
        qk_norm=True,
    )


def per_layer(shape: DecoderShape, tokens: int, stride: int, window: int = 0) -> float:
    """Counted FLOPs of mixing, one batch entry, on average over the layers."""
    values = {**shape.values(), S.B: 1, S.T: tokens, S.s: stride, S.w: window}
    return float(depth_attention(shape).executed.subs(values)) / shape.layers


def claims() -> Table:
    rows = []
    for name in ("paper-3b", "paper-1.5b", "paper-410m"):
        report = cost_report(name, seq_len=2048)
        for kind, share in (("executed", report.flops_overhead), ("needed", report.needed_overhead)):
            what = f"{name}, added part of {kind} FLOPs, T=2048"
            claimed = name != "paper-410m"  # the claim is made for 1.5B and 3B
            claim, ratio = ("< 0.01 %", f"{share / BOUND:.3f}") if claimed else ("-", "-")
            rows.append((what, claim, percent(share), ratio))
    report = cost_report("paper-3b", seq_len=2048)
    added = report.cache_bytes_after - report.cache_bytes_before
    rows.append(("paper-3b, added cache bytes", "0", str(added), "-"))
    rows.append(
        ("paper-3b, added parameters", "0", str(report.parameters_after - report.parameters_before), "-")
    )
    for heads in (32, 8):
        shape = example_shape(heads)
        claim = float(shorthand().subs({S.T: 4096, S.d: 2048, S.s: 16}))
        counted = per_layer(shape, 4096, 16)
        rows.append(
            (
                f"{shape.name}, T=4096, s=16: 2Td/s per layer",
                short(claim, "FLOP"),
                short(counted, "FLOP"),
                f"{counted / claim:.1f}",
            )
        )
        share = cost_report(shape, 16, seq_len=4096).flops_overhead
        rows.append((f"{shape.name}, added part of the model", "-", percent(share), "-"))
    return Table("Claimed and counted", ("what", "claimed", "counted", "ratio"), tuple(rows))


def factors() -> Table:
    rows = []
    for heads in (32, 8):
        shape = example_shape(heads)
        found = shorthand_factors(shape, 16)
        rows.append((shape.name, *(f"{float(value):.4g}" for value in found.values())))
    return Table(
        "Why: counted FLOPs per layer are 2Td/s times these factors",
        ("T=4096, s=16", "sources", "two products", "heads", "rest", "= ratio"),
        tuple(rows),
    )


def growth() -> Table:
    """O(T L / s) claims that the cost doubles with T and with L, and halves when s doubles."""
    base = example_shape(32)
    rows = []

    def total(layers: int, tokens: int, stride: int) -> float:
        values = {**base.values(), S.L: layers, S.B: 1, S.T: tokens, S.s: stride, S.w: 0}
        return float(depth_attention(base).executed.subs(values)) / layers

    cases = (
        ("T 4096 -> 8192", 2.0, total(32, 8192, 4) / total(32, 4096, 4)),
        ("L 64 -> 128, s = 1", 2.0, total(128, 4096, 1) / total(64, 4096, 1)),
        ("L 32 -> 64, s = 16", 2.0, total(64, 4096, 16) / total(32, 4096, 16)),
        ("L = 128, s 1 -> 2", 0.5, total(128, 4096, 2) / total(128, 4096, 1)),
        ("L = 32, s 8 -> 16", 0.5, total(32, 4096, 16) / total(32, 4096, 8)),
    )
    for name, claim, counted in cases:
        rows.append((name, f"x {claim:g}", f"x {counted:.3f}", f"{counted / claim:.3f}"))
    return Table(
        "Growth per layer, claimed O(T L / s)", ("change", "claimed", "counted", "ratio"), tuple(rows)
    )


def counted() -> Table:
    """The 3B shape as a Qwen3 of transformers, without memory for its weights: its graph before and after the
    rewrite, beside the closed form."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = PRESETS["paper-3b"]
    config = Qwen3Config(
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.key_size,
        intermediate_size=shape.ff,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    graph = cost_report(model, shape.stride, seq_len=2048)
    closed = cost_report("paper-3b", seq_len=2048)
    names = (
        *("flops_before", "flops_after", "needed_before", "cache_bytes_before", "cache_bytes_after"),
        *("parameters_before", "parameters_after", "flops_overhead"),
    )
    rows = []
    for name in names:
        form, count = getattr(closed, name), getattr(graph, name)
        text = [f"{x:,}" if isinstance(x, int) else f"{x:.4e}" for x in (form, count)]
        rows.append((name, *text, f"{count / form:.6f}"))
    return Table(
        "paper-3b: closed form and counted graph", ("figure", "closed form", "counted", "ratio"), tuple(rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", action="store_true", help="capture and count a 3B model as well")
    tables = [claims(), factors(), growth()]
    if parser.parse_args().count:
        tables.append(counted())
    print("\n\n".join(table.plain() for table in tables))


if __name__ == "__main__":
    main()

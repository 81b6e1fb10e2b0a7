"""Depth-Attention beside other ways to read earlier layers: each against the same vanilla decoder, in turn.

    python examples/benchmarks/beside.py train --batch 1 --length 512
    python examples/benchmarks/beside.py prefill --shape paper-1.5b --length 4096 --dtype bfloat16

The decoder is that of decoder.py (the paper's and Qwen3's blocks in plain PyTorch), the others are those of
baselines.py. Given are the ratio of medians to the vanilla model, the middle half of the ratios of
neighbouring measurements, and the parameters each method adds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from baselines import BlockAttentionResiduals, DenseFormer, HyperConnections, ValueResidual
from bench import SHAPES, Comparison, Setting, about, announce, compare, failed, parser, setting, twin
from decoder import Decoder, Shape
from torch import Tensor, nn

from depthify import depthify


def shape_of(chosen: Setting) -> Shape:
    shape = chosen.shape
    if shape.query_heads * shape.key_size != shape.width:
        usable = [name for name, x in SHAPES.items() if x.query_heads * x.key_size == x.width]
        raise SystemExit(f"--shape {shape.name}: heads do not fill the width; usable: {', '.join(usable)}")
    return Shape(
        layers=shape.layers,
        width=shape.width,
        heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        inner=shape.ff,
        vocabulary=shape.vocabulary,
    )


def methods(shape: Shape, stride: int) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """By name: what makes a model of the vanilla one."""
    groups = next(n for n in range(8, 0, -1) if 2 * shape.layers % n == 0)
    return {
        f"Depth-Attention, stride {stride}": lambda m: depthify(twin(m), stride, budget=float("inf")),
        "DenseFormer": lambda m: DenseFormer(shape),
        f"Attention Residuals, {groups} blocks": lambda m: BlockAttentionResiduals(shape, groups),
        "mHC, 4 streams": lambda m: HyperConnections(shape),
        "Value Residual": lambda m: ValueResidual(shape),
    }


def train(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def call_of(scenario: str, model: nn.Module, ids: Tensor, chosen: Setting) -> Callable[[], Any]:
    if scenario == "train":
        loss = chosen.compiled(train)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            loss(model, ids).backward()

        return step
    forward = chosen.compiled(lambda model, ids: model(ids))

    def read() -> Tensor:
        with torch.no_grad():
            return forward(model, ids)

    return read


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("scenario", choices=("train", "prefill"))
    arguments.add_argument("--batch", type=int, default=1)
    arguments.add_argument("--length", type=int, default=512)
    given = arguments.parse_args()
    chosen = replace(setting(given), dynamic=False)
    announce(chosen)
    shape = shape_of(chosen)
    torch.manual_seed(0)
    vanilla = Decoder(shape).to(chosen.device, chosen.dtype)
    ids = chosen.tokens(given.batch, given.length)
    plain = call_of(given.scenario, vanilla, ids, chosen)
    parameters = sum(p.numel() for p in vanilla.parameters())
    rows: list[dict[str, Any]] = []
    for name, make in methods(shape, chosen.stride).items():
        model = make(vanilla).to(chosen.device, chosen.dtype)
        more = sum(p.numel() for p in model.parameters()) - parameters
        calls = {"vanilla": plain, "mixed": call_of(given.scenario, model, ids, chosen)}
        try:
            result: Comparison = compare(name, calls, chosen)
        except torch.OutOfMemoryError as error:
            failed(name, error)
            continue
        rows.append({**asdict(result), "parameters": more})
        print(
            f"{name:32} {result.mixed_ms:10.3f} ms   vanilla {result.vanilla_ms:10.3f} ms   "
            f"ratio {result.ratio:.4f} ({result.low:.4f} .. {result.high:.4f}, {result.rounds} rounds)   "
            f"{more:+,} parameters",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps({**about(chosen), "results": rows}, indent=1))


if __name__ == "__main__":
    main()

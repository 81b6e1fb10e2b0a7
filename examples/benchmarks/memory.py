"""Bytes kept for backward, with and without activation checkpointing: vanilla against mixed.

    python examples/benchmarks/memory.py --layers 8 --length 512

The graph is split as Inductor splits it. Counted from the tensors autograd saves, weights left out; on a
GPU the peak of the allocator is printed as well. The vocabulary is small, as what is saved for the loss can
outweigh all else and has nothing to do with mixing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench import SHAPES, decoder
from torch import Tensor, nn

from depthify import depthify


def saved_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes of distinct memory that one forward saves for backward, weights and inputs left out."""
    skip = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in skip:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = run()
    del loss
    return sum(seen.values())


def measure(
    layers: int, length: int, device: str, mixed: bool, checkpointed: bool, **options: Any
) -> dict[str, int]:
    """Saved bytes, and the allocator's peak of one step where there is a GPU."""
    torch._dynamo.reset()
    model = decoder(
        replace(SHAPES["small"], layers=layers, vocabulary=128), device, torch.bfloat16, length
    ).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mixed:
        depthify(model, backend="aot_eager_decomp_partition", **options)
        run: Any = model
    else:
        run = torch.compile(model, backend="aot_eager_decomp_partition")
    ids = torch.zeros(1, length, dtype=torch.long, device=device)

    def forward() -> Tensor:
        return run(ids, labels=ids, use_cache=False).loss

    forward().backward()
    result = {"saved": saved_bytes(model, forward)}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        forward().backward()
        result["peak"] = torch.cuda.max_memory_allocated()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    given = parser.parse_args()
    shape = SHAPES["small"]
    sources = (0, given.layers // 2)
    tensor = given.length * shape.kv_heads * (shape.key_size + shape.value_size) * 2
    print(
        f"{given.layers} layers of width {shape.width}, {given.length} tokens, bfloat16; keys and values of "
        f"the {len(sources)} sources: {len(sources) * tensor / 1e6:.2f} MB"
    )
    print("| saved for backward | vanilla | mixed | mixed, recompute |")
    print("| --- | ---: | ---: | ---: |")
    rows = {}
    for checkpointed in (False, True):
        name = "with checkpointing" if checkpointed else "without checkpointing"
        row = [
            measure(given.layers, given.length, given.device, mixed, checkpointed, **options)
            for mixed, options in ((False, {}), (True, {}), (True, {"recompute": True}))
        ]
        rows[name] = row
        print(f"| {name} |" + "".join(f" {x['saved'] / 1e6:.2f} MB |" for x in row))
        if "peak" in row[0]:
            print(f"| {name}, peak |" + "".join(f" {x['peak'] / 1e6:.1f} MB |" for x in row))
    if given.json:
        given.json.write_text(
            json.dumps({"layers": given.layers, "length": given.length, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()

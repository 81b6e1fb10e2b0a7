"""A looped transformer: 4 layers run for 8 cycles are 32 layers, and mixing reads earlier cycles.

python examples/looped.py [--stride 8] [--plot weights.png]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthify import depth_weights, depthify, explain

LAYERS, CYCLES = 4, 8
Slots = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, dim=-1)
        )
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x)))), (k, v)


class Looped(nn.Module):
    """The same 4 layers, 8 times; the input is added again in each cycle. The cache has a slot per layer and
    cycle, 32 in all."""

    def __init__(self, width: int = 64, heads: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, past: Slots | None = None) -> tuple[Tensor, Slots]:
        given = self.embed(ids)
        x, present = torch.zeros_like(given), []
        for cycle in range(CYCLES):
            x = self.norm(x + given)
            for i, block in enumerate(self.blocks):
                x, slot = block(x, None if past is None else past[cycle * LAYERS + i])
                present.append(slot)
        return self.head(x), present


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stride", type=int, default=8, help="8: every second cycle's first layer")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the depth weights")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Looped().eval()
    ids = torch.randint(0, 256, (1, 16))
    depthify(model, args.stride, budget=float("inf"))
    with torch.no_grad():
        full, slots = model(ids)
        logits, slots = model(ids[:, :12])
        parts = [logits]
        for t in range(12, 16):
            logits, slots = model(ids[:, t : t + 1], slots)
            parts.append(logits)
    print(explain(model))
    difference = (torch.cat(parts, 1) - full).abs().max().item()
    print(f"\n{len(slots)} cache slots; read through them, logits differ by at most {difference:.1e}\n")
    weights = depth_weights(model, ids)
    print(weights)
    if args.plot:
        weights.plot(args.plot, "looped transformer")


if __name__ == "__main__":
    main()

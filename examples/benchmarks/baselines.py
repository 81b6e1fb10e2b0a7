"""Other ways to let layers read earlier ones, to be measured beside Depth-Attention.

Each subclasses :class:`decoder.Decoder` and adds parameters, or state kept during a forward, or both:

    DenseFormer              (Pagliardini et al., arXiv 2402.02622): after each block a learned weighted sum
                             of the outputs of all blocks so far
    BlockAttentionResiduals  (Kimi Team, arXiv 2603.15031, section 3.2): each sublayer reads a softmax average
                             of the sums of earlier blocks of sublayers
    HyperConnections         (mHC: Xie et al., arXiv 2512.24880): several residual streams, mixed by doubly
                             stochastic matrices
    ValueResidual            (Zhou et al., arXiv 2410.17897): every layer's values are a learned mixture of
                             its own and the first layer's
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from decoder import Decoder, Shape
from torch import Tensor, nn

Turn = tuple[Tensor, Tensor]


class DenseFormer(Decoder):
    """Y_i = sum over j <= i of alpha_ij X_j, X_0 the embedding, X_i the output of block i for input Y_(i-1).

    ``dilation`` k: only j = i modulo k; ``period`` p: only after every p-th block. Begins as the vanilla
    model.
    """

    def __init__(self, shape: Shape, dilation: int = 1, period: int = 1) -> None:
        super().__init__(shape)
        self.read = {
            i: [j for j in range(i + 1) if (i - j) % dilation == 0]
            for i in range(1, shape.layers + 1)
            if i % period == 0
        }
        self.alphas = nn.ParameterDict(
            {
                str(i): nn.Parameter(F.one_hot(torch.tensor(len(js) - 1), len(js)).float())
                for i, js in self.read.items()
            }
        )

    def run(self, x: Tensor, turn: Turn) -> Tensor:
        outputs = [x]
        for i, block in enumerate(self.blocks, 1):
            x = block(x, turn)
            outputs.append(x)
            if i in self.read:
                alpha = self.alphas[str(i)]
                x = sum(alpha[n] * outputs[j] for n, j in enumerate(self.read[i]))
        return x


class Aggregation(nn.Module):
    """Softmax average of vectors, each scored by its norm's product with a learned query. Begins uniform."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.norm = nn.Parameter(torch.zeros(width)), nn.RMSNorm(width)

    def forward(self, vectors: list[Tensor]) -> Tensor:
        stacked = torch.stack(vectors)
        weights = (self.norm(stacked) @ self.query).softmax(0)
        return (weights[..., None] * stacked).sum(0)


class BlockAttentionResiduals(Decoder):
    """The 2 L sublayers fall into ``groups`` blocks; a sublayer reads the embedding, the sums of the earlier
    blocks, and the sum of its own block so far. The head reads the embedding and all sums."""

    def __init__(self, shape: Shape, groups: int = 8) -> None:
        super().__init__(shape)
        if 2 * shape.layers % groups:
            raise ValueError(f"groups={groups}: must divide the {2 * shape.layers} sublayers")
        self.size = 2 * shape.layers // groups
        # The first sublayer has nothing but the embedding to read; the last one is the head's.
        self.aggregations = nn.ModuleList(Aggregation(shape.width) for _ in range(2 * shape.layers))

    def run(self, x: Tensor, turn: Turn) -> Tensor:
        sums, own = [x], None
        for i, sublayer in enumerate(_sublayers(self, turn)):
            if i and i % self.size == 0:
                sums.append(own)
                own = None
            read = sums if own is None else [*sums, own]
            out = sublayer(read[0] if i == 0 else self.aggregations[i - 1](read))
            own = out if own is None else own + out
        return self.aggregations[-1]([*sums, own])


def _sublayers(model: Decoder, turn: Turn) -> list[Callable[[Tensor], Tensor]]:
    found: list[Callable[[Tensor], Tensor]] = []
    for block in model.blocks:
        found += [lambda x, b=block: b.attend(x, turn), block.transform]
    return found


class Connection(nn.Module):
    """The three maps of one sublayer of mHC, each computed from all streams of a token.

    Begins, up to the small learned scale of the dynamic part, as: read the mean of the streams, add the
    output to each, keep each stream to itself.
    """

    def __init__(self, streams: int, width: int, rounds: int) -> None:
        super().__init__()
        self.sizes, self.rounds = (streams, streams, streams**2), rounds
        self.phi = nn.Linear(streams * width, sum(self.sizes), bias=False)
        nn.init.normal_(self.phi.weight, std=0.02)
        self.scales = nn.Parameter(torch.full((3,), 0.01))
        mean = torch.full((streams,), 1 / streams).logit()
        self.bias = nn.Parameter(torch.cat([mean, torch.zeros(streams), 6 * torch.eye(streams).flatten()]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, n, d) -> weights to read with (B, T, n), to write with (B, T, n), and (B, T, n, n)."""
        n, flat = x.shape[2], x.flatten(2)
        dynamic = self.phi(F.rms_norm(flat, flat.shape[-1:])).split(self.sizes, -1)
        parts = zip(dynamic, self.scales.unbind(), self.bias.split(self.sizes), strict=True)
        read, write, keep = (part * scale + bias for part, scale, bias in parts)
        keep = keep.unflatten(-1, (n, n)).exp()
        for _ in range(self.rounds):  # Sinkhorn and Knopp: columns and rows sum to 1
            keep = keep / keep.sum(-2, keepdim=True)
            keep = keep / keep.sum(-1, keepdim=True)
        return read.sigmoid(), 2 * write.sigmoid(), keep


class HyperConnections(Decoder):
    """mHC: x <- H_res x + H_post F(H_pre x) for n streams; their sum goes to the head."""

    def __init__(self, shape: Shape, streams: int = 4, rounds: int = 20) -> None:
        super().__init__(shape)
        self.streams = streams
        self.connections = nn.ModuleList(
            Connection(streams, shape.width, rounds) for _ in range(2 * shape.layers)
        )

    def run(self, x: Tensor, turn: Turn) -> Tensor:
        x = x[:, :, None].expand(-1, -1, self.streams, -1)
        for connection, sublayer in zip(self.connections, _sublayers(self, turn), strict=True):
            read, write, keep = connection(x)
            out = sublayer((read[..., None] * x).sum(2))
            x = keep @ x + write[..., None] * out[:, :, None]
        return x.sum(2)


class ValueResidual(Decoder):
    """V_l <- lambda_l0 V_0 + lambda_l1 V_l in all layers but the first; both begin at 0.5."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.lambdas = nn.Parameter(torch.full((shape.layers - 1, 2), 0.5))

    def run(self, x: Tensor, turn: Turn) -> Tensor:
        first = None
        for i, block in enumerate(self.blocks):
            normed = block.attention_norm(x)
            value = block.attention.values(normed)
            if first is None:
                first = value
            else:
                value = self.lambdas[i - 1, 0] * first + self.lambdas[i - 1, 1] * value
            x = x + block.attention(normed, turn, value)
            x = x + block.transform(x)
        return x

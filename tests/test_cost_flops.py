"""FLOPs of single operations against numbers worked out by hand, torch-level and ATen-level."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from depthify.cost_model.count import count_graph
from depthify.cost_model.flops import Flops

X = torch.randn(2, 5, 12)
SQUARE = torch.randn(2, 5, 5)
Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 6)
ROWS = torch.randint(0, 9, (3, 4))


def flops(function: Callable[..., Any], *args: Any) -> Flops:
    """Counted on the graph of torch functions and methods."""
    module = torch.fx.symbolic_trace(function)
    FakeTensorProp(module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*args)
    return count_graph(module.graph).flops


def aten_flops(function: Callable[..., Any], *args: Any) -> Flops:
    return count_graph(make_fx(function, tracing_mode="fake")(*args).graph).flops


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


ELEMENTWISE = 2 * 5 * 12
CASES: dict[str, tuple[Callable[[Tensor], Any], Tensor, tuple[int, int]]] = {
    # name: function, argument, (products, rest)
    "add": (lambda x: x + 1, X, (0, ELEMENTWISE)),
    "add broadcast": (lambda x: x.unsqueeze(1) + x.unsqueeze(2), X, (0, 2 * 5 * 5 * 12)),
    "mul method": (lambda x: x.mul(x), X, (0, ELEMENTWISE)),
    "in place": (lambda x: operator.iadd(x, x), X, (0, ELEMENTWISE)),
    "exp": (torch.exp, X, (0, ELEMENTWISE)),
    "silu": (F.silu, X, (0, ELEMENTWISE)),
    "gelu": (F.gelu, X, (0, ELEMENTWISE)),
    "sigmoid": (torch.sigmoid, X, (0, ELEMENTWISE)),
    "maximum": (lambda x: torch.maximum(x, x), X, (0, ELEMENTWISE)),
    "where": (lambda x: torch.where(x > 0, x, 0.0), X, (0, ELEMENTWISE)),
    "glu": (F.glu, X, (0, ELEMENTWISE)),
    "addcmul": (lambda x: torch.addcmul(x, x, x), X, (0, 3 * ELEMENTWISE)),
    "comparison": (lambda x: (x > 0) & (x < 1), X, (0, 0)),
    "integers": (lambda x: x * 2 + 1, ROWS, (0, 0)),
    "complex product": (lambda x: torch.view_as_complex(x.unflatten(-1, (6, 2))) * 1j, X, (0, 60 * 6)),
    "sum": (lambda x: x.sum(-1), X, (0, ELEMENTWISE)),
    "mean of two": (lambda x: x.mean((0, 1)), X, (0, ELEMENTWISE)),
    "max of one": (lambda x: x.max(-1), X, (0, ELEMENTWISE)),
    "topk": (lambda x: x.topk(2), X, (0, ELEMENTWISE)),
    "softmax": (lambda x: x.softmax(-1), X, (0, 5 * ELEMENTWISE)),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), X, (0, 2 * ELEMENTWISE + 10)),
    "var": (lambda x: x.var(-1), X, (0, 4 * ELEMENTWISE + 10)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), X, (0, 4 * ELEMENTWISE + 2 * 10)),
    "layer_norm": (lambda x: F.layer_norm(x, (12,)), X, (0, 5 * ELEMENTWISE + 2 * 10)),
    "layer_norm affine": (
        lambda x: F.layer_norm(x, (12,), torch.ones(12), torch.ones(12)),
        X,
        (0, 7 * ELEMENTWISE + 2 * 10),
    ),
    "rms_norm": (lambda x: F.rms_norm(x, (12,)), X, (0, 3 * ELEMENTWISE + 2 * 10)),
    "linear": (lambda x: F.linear(x, torch.ones(7, 12)), X, (2 * 10 * 12 * 7, 0)),
    "linear bias": (lambda x: F.linear(x, torch.ones(7, 12), torch.ones(7)), X, (2 * 10 * 12 * 7, 70)),
    "matmul": (lambda x: x @ x.transpose(1, 2), X, (2 * 2 * 5 * 5 * 12, 0)),
    "matrix and vector": (lambda x: x @ torch.ones(12), X, (2 * 10 * 12, 0)),
    "addmm": (lambda x: torch.addmm(torch.ones(7), x[0], torch.ones(12, 7)), X, (2 * 5 * 12 * 7, 35)),
    "baddbmm": (lambda x: torch.baddbmm(x, x, x), SQUARE, (2 * 2 * 125, 50)),
    "einsum": (lambda x: torch.einsum("btd,bsd->bts", x, x), X, (2 * 2 * 5 * 5 * 12, 0)),
    "einsum outer": (lambda x: torch.einsum("btd,hd->bht", x, torch.ones(3, 12)), X, (2 * 2 * 5 * 3 * 12, 0)),
    "triangular solve": (
        lambda x: torch.linalg.solve_triangular(x, x, upper=False),
        SQUARE,
        (2 * 5 * 5 * 5, 0),
    ),
    "conv1d": (
        lambda x: F.conv1d(x, torch.ones(4, 5, 3), torch.ones(4)),
        X,
        (2 * (2 * 4 * 10) * 5 * 3, 2 * 4 * 10),
    ),
    "depthwise": (lambda x: F.conv1d(x, torch.ones(5, 1, 3), groups=5), X, (2 * (2 * 5 * 10) * 3, 0)),
    "views": (lambda x: x.view(10, 12).t().reshape(2, -1)[:, 3:].unsqueeze(0).expand(3, -1, -1), X, (0, 0)),
    "moves": (lambda x: torch.cat([x, x.flip(0)]).repeat(2, 1, 1).double(), X, (0, 0)),
    "embedding": (lambda x: F.embedding(x, torch.ones(9, 6)), ROWS, (0, 0)),
    "dropout off": (lambda x: F.dropout(x, 0.5, training=False), X, (0, 0)),
    "dropout on": (lambda x: F.dropout(x, 0.5, training=True), X, (0, 2 * ELEMENTWISE)),
    "sizes": (lambda x: x.reshape(x.size(0), x.size(1) * x.size(2)), X, (0, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_operation(name: str) -> None:
    function, argument, expected = CASES[name]
    found = flops(Call(function), argument)
    assert (found.matmul, found.other) == expected


@pytest.mark.parametrize(
    "name", ["add broadcast", "softmax", "layer_norm affine", "linear", "matmul", "addmm"]
)
def test_operation_as_aten(name: str) -> None:
    function, argument, expected = CASES[name]
    found = aten_flops(function, argument)
    assert (found.matmul, found.other) == expected


PAIRS = 2 * 4 * 5 * 7


@pytest.mark.parametrize(
    "keywords, per_pair, masked_pairs",
    [
        ({}, 2 * (8 + 6) + 6, 0),
        ({"attn_mask": torch.zeros(5, 7)}, 2 * (8 + 6) + 7, 0),
        ({"dropout_p": 0.1}, 2 * (8 + 6) + 8, 0),
        ({"is_causal": True}, 2 * (8 + 6) + 6, 2 * 4 * (4 + 3 + 2 + 1)),
    ],
)
def test_attention(keywords: dict[str, Any], per_pair: int, masked_pairs: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **keywords)

    found = flops(attend, Q, K, V)
    assert found.matmul == PAIRS * 2 * (8 + 6)
    assert found.executed == PAIRS * per_pair
    assert found.needed == (PAIRS - masked_pairs) * per_pair


def test_attention_written_out_is_the_fused_one() -> None:
    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(8))
        return torch.softmax(scores, -1) @ v

    fused = flops(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), Q, K, V)
    assert flops(written, Q, K, V) == fused == aten_flops(written, Q, K, V)


def test_rms_norm_written_out_is_the_fused_one() -> None:
    def written(x: Tensor) -> Tensor:
        return torch.ones(12) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    fused = flops(Call(lambda x: F.rms_norm(x, (12,), torch.ones(12))), X)
    assert aten_flops(written, X) == fused


def test_checkpointed_body_is_counted() -> None:
    from torch.utils.checkpoint import checkpoint

    graphs: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(module)
        return module.forward

    weight = torch.randn(12, 12, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        return torch.relu(x @ weight)

    def run(x: Tensor) -> Tensor:
        return checkpoint(body, x, use_reentrant=False) + 1

    torch.compile(run, backend=keep, fullgraph=True)(X)
    assert any("checkpoint" in str(node.target) for node in graphs[0].graph.nodes)
    found = count_graph(graphs[0].graph).flops
    assert (found.matmul, found.other) == (2 * 10 * 12 * 12, 2 * ELEMENTWISE)


def test_groups_of_a_count_sum_to_the_whole() -> None:
    module = torch.fx.symbolic_trace(lambda x: (x @ x.transpose(1, 2)).softmax(-1).sum())
    FakeTensorProp(module).propagate(X)
    count = count_graph(module.graph)
    by_operation = count.by_operation()
    assert by_operation == {"matmul": 2 * 2 * 25 * 12, "softmax": 5 * 50, "sum": 50}
    assert sum(by_operation.values()) == sum(count.by_module().values()) == count.flops.executed

"""The methods that Depth-Attention is compared with, each against its paper's formula written down again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from definition import relative
from script import example
from torch import Tensor, nn

from depthify import DepthConfig, depthify
from depthify.cost_model import methods
from depthify.cost_model import symbols as S
from depthify.reference import depth_mix

example("benchmarks/decoder")  # makes its folder known, for the import of one script by another
baselines = example("benchmarks/baselines")
decoder = baselines.Decoder
SHAPE = baselines.Shape(layers=6, width=16, heads=4, kv_heads=2, inner=24, vocabulary=31)
IDS = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(3))


def built(build: Callable[..., nn.Module], **options: Any) -> Any:
    """In float64, with every parameter far from where it begins, so that each of them matters."""
    torch.manual_seed(0)
    model = build(SHAPE, **options).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            added = torch.randn_like(parameter)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * added)
            elif parameter.dim() == 2 and "phi" not in name:
                parameter.copy_(0.2 * added)
            else:
                parameter.add_(0.3 * added)
    return model


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1]).sqrt()


def head(model: Any, x: Tensor) -> Tensor:
    return rms(x) * model.norm.weight @ model.embed.weight.T


def start(model: Any) -> tuple[Tensor, Any]:
    return model.embed.weight[IDS], model.turn(IDS)


def sublayers(model: Any, turn: Any) -> list[Callable[[Tensor], Tensor]]:
    """2 L functions: attention and feed-forward in turn, each with its norm."""
    found: list[Callable[[Tensor], Tensor]] = []
    for block in model.blocks:
        found.append(lambda x, b=block: b.attention(b.attention_norm(x), turn))
        found.append(lambda x, b=block: b.mlp(b.mlp_norm(x)))
    return found


def test_decoder_is_qwen3() -> None:
    pytest.importorskip("transformers")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = built(decoder)
    config = Qwen3Config(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=True, rms_norm_eps=2e-16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    twin = Qwen3ForCausalLM(config).double().eval()
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj",
             "down": "down_proj", "attention": "self_attn", "attention_norm": "input_layernorm",
             "mlp_norm": "post_attention_layernorm", "blocks": "layers", "embed": "embed_tokens"}  # fmt: skip
    weights = {
        "model." + ".".join(names.get(part, part) for part in name.split(".")): value
        for name, value in model.state_dict().items()
    }
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied
    with torch.no_grad():
        # transformers computes cosines in float32
        assert relative(model(IDS), twin(IDS, use_cache=False).logits) < 1e-6


@pytest.mark.parametrize("stride", [1, 3])
def test_decoder_mixes(stride: int) -> None:
    model = built(decoder).requires_grad_(False)
    x, turn = start(model)
    keys, values = [], []
    for depth, block in enumerate(model.blocks):
        q, k, v = projected(block, x, turn)
        sources = DepthConfig(stride=stride).sources(depth)
        if sources:
            v = depth_mix(q, [keys[j] for j in sources] + [k], [values[j] for j in sources] + [v], 0.5)
        keys.append(k)
        values.append(v)
        x = x + attended(block, q, k, v)
        x = x + block.mlp(block.mlp_norm(x))
    vanilla = model(IDS)
    found = depthify(model, stride)(IDS)
    assert relative(found, head(model, x)) < 1e-10 < relative(found, vanilla)


def projected(block: Any, x: Tensor, turn: Any) -> list[Tensor]:
    """q, k, v (B, H, T, E), written out."""
    normed = rms(x) * block.attention_norm.weight
    cos, sin = turn
    found = []
    for name, count in (("q", 4), ("k", 2), ("v", 2)):
        y = torch.einsum("btd,hed->bhte", normed, getattr(block.attention, name).weight.view(count, 4, 16))
        if name != "v":
            y = rms(y) * getattr(block.attention, f"{name}_norm").weight
            y = y * cos + torch.stack([-y[..., 2], -y[..., 3], y[..., 0], y[..., 1]], -1) * sin
        found.append(y)
    return found


def attended(block: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhgte,bhse->bhgts", q.unflatten(1, (2, 2)), k) / 2
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
    out = torch.einsum("bhgts,bhse->bthge", scores.softmax(-1), v)
    return out.flatten(2) @ block.attention.o.weight.T


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (2, 3)])
def test_denseformer(dilation: int, period: int) -> None:
    model = built(baselines.DenseFormer, dilation=dilation, period=period)
    model.requires_grad_(False)
    y, turn = start(model)
    outputs = [y]
    for i in range(1, 7):
        outputs.append(model.blocks[i - 1](y, turn))
        y = outputs[i]
        if i % period == 0:
            row, weights = torch.zeros(i + 1).double(), iter(model.alphas[str(i)])
            for j in range(i % dilation, i + 1, dilation):
                row[j] = next(weights)
            assert next(weights, None) is None
            y = torch.einsum("j,jbtd->btd", row, torch.stack(outputs))
    assert relative(model(IDS), head(model, y)) < 1e-10
    counted = methods.denseformer().parameters.subs({S.L: 6, S.dilation: dilation, S.period: period}).doit()
    assert counted == added(model)


def test_denseformer_begins_as_vanilla() -> None:
    found = []
    for build in (decoder, baselines.DenseFormer):
        torch.manual_seed(0)
        found.append(build(SHAPE)(IDS))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("groups", [2, 4, 12])
def test_attention_residuals(groups: int) -> None:
    model = built(baselines.BlockAttentionResiduals, groups=groups)
    size = 12 // groups
    embedded, turn = start(model)
    outputs: list[Tensor] = []

    def read(count: int, aggregation: Any) -> Tensor:
        """What is read when ``count`` sublayers have run, token by token."""
        blocks = [outputs[i : min(i + size, count)] for i in range(0, count, size)]
        vectors = [embedded] + [torch.stack(block).sum(0) for block in blocks]
        result = torch.zeros_like(embedded)
        for b in range(2):
            for t in range(7):
                vs = [v[b, t] for v in vectors]
                scores = [((rms(v) * aggregation.norm.weight) @ aggregation.query).exp() for v in vs]
                result[b, t] = sum(s * v for s, v in zip(scores, vs, strict=True)) / sum(scores)
        return result

    with torch.no_grad():
        for m, sublayer in enumerate(sublayers(model, turn)):
            outputs.append(sublayer(read(m, model.aggregations[m - 1]) if m else embedded))
        assert relative(model(IDS), head(model, read(12, model.aggregations[11]))) < 1e-10
    assert methods.block_attention_residuals().parameters.subs({S.L: 6, S.d: 16, S.N: groups}) == added(model)


def test_groups_divide_the_sublayers() -> None:
    with pytest.raises(ValueError, match="groups=5"):
        baselines.BlockAttentionResiduals(SHAPE, groups=5)


def doubly_stochastic(logs: Tensor, rounds: int) -> Tensor:
    """Sinkhorn and Knopp with logarithms."""
    for _ in range(rounds):
        logs = logs - logs.logsumexp(0, keepdim=True)
        logs = logs - logs.logsumexp(1, keepdim=True)
    return logs.exp()


def test_hyper_connections() -> None:
    n, rounds = 3, 20
    model = built(baselines.HyperConnections, streams=n, rounds=rounds)
    embedded, turn = start(model)
    x = torch.stack([embedded] * n, 2)
    with torch.no_grad():
        for connection, sublayer in zip(model.connections, sublayers(model, turn), strict=True):
            read, write, keep = torch.zeros(2, 7, n), torch.zeros(2, 7, n), torch.zeros(2, 7, n, n)
            read, write, keep = read.double(), write.double(), keep.double()
            a, bias = connection.scales, connection.bias
            for b in range(2):
                for t in range(7):
                    z = connection.phi.weight @ rms(torch.cat([x[b, t, i] for i in range(n)]))
                    read[b, t] = 1 / (1 + (-(a[0] * z[:n] + bias[:n])).exp())
                    write[b, t] = 2 / (1 + (-(a[1] * z[n : 2 * n] + bias[n : 2 * n])).exp())
                    keep[b, t] = doubly_stochastic((a[2] * z[2 * n :] + bias[2 * n :]).view(n, n), rounds)
            assert (keep.sum(-1) - 1).abs().max() < 1e-12 and (keep.sum(-2) - 1).abs().max() < 0.05
            out = sublayer(torch.einsum("btn,btnd->btd", read, x))
            x = torch.einsum("btnm,btmd->btnd", keep, x) + torch.einsum("btn,btd->btnd", write, out)
        assert relative(model(IDS), head(model, x.sum(2))) < 1e-10
    assert methods.manifold_hyper_connections(rounds).parameters.subs({S.L: 6, S.d: 16, S.n: n}) == added(
        model
    )


def test_hyper_connections_begin_near_vanilla() -> None:
    """Without the dynamic part they read the mean, write to each and keep each stream: n times vanilla."""
    found = []
    for build in (decoder, baselines.HyperConnections):
        torch.manual_seed(0)
        model = build(SHAPE).double()
        for connection in getattr(model, "connections", []):
            nn.init.zeros_(connection.scales)
        found.append(model(IDS))
    assert relative(found[1], found[0]) < 1e-10


def test_value_residual() -> None:
    model = built(baselines.ValueResidual)
    x, turn = start(model)
    with torch.no_grad():
        for i, block in enumerate(model.blocks):
            q, k, v = projected(block, x, turn)
            if i == 0:
                first = v
            else:
                v = model.lambdas[i - 1, 0] * first + model.lambdas[i - 1, 1] * v
            x = x + attended(block, q, k, v)
            x = x + block.mlp(block.mlp_norm(x))
        assert relative(model(IDS), head(model, x)) < 1e-10
    assert added(model) == 2 * (SHAPE.layers - 1)


def added(model: nn.Module) -> int:
    """Parameters beyond those of the vanilla decoder."""
    return sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in decoder(SHAPE).parameters())


@pytest.mark.parametrize(
    "name", ["DenseFormer", "BlockAttentionResiduals", "HyperConnections", "ValueResidual"]
)
def test_every_parameter_learns_and_the_future_is_hidden(name: str) -> None:
    options = {"groups": 4} if name == "BlockAttentionResiduals" else {}
    model = built(getattr(baselines, name), **options)
    logits = model(IDS)
    F.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    changed = IDS.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 31
    again = model(changed)
    torch.testing.assert_close(again[:, :4], logits[:, :4], rtol=1e-10, atol=1e-10)
    assert relative(again[:, 4:], logits[:, 4:]) > 1e-3

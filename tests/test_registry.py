"""Attention as one opaque operation, of flash-attn's and vLLM's schemas: mixed once it is registered, and
refused with the remedy before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import styles
import torch
from definition import relative
from eager_definition import by_definition
from torch import Tensor, nn

from depthify import depthify, explain, register_attention_op
from depthify.errors import OptionError, UnsupportedModelError
from depthify.passes import ops
from depthify.passes.find_attention import REGISTERED


@torch.library.custom_op("standin::flash", mutates_args=())
def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """(B, T, H, D), as flash-attn's forward."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), q.new_zeros(q.shape[:3])


@flash.register_fake
def _(q, k, v, dropout_p, softmax_scale=None, causal=False):  # noqa: ANN001, ANN202
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])


@torch.library.custom_op("standin::unified", mutates_args=("output", "cache"))
def unified(query: Tensor, key: Tensor, value: Tensor, output: Tensor, cache: Tensor, start: int) -> None:
    """(T, H, D) of one sequence into ``output``, keeping keys and values in ``cache``, as vLLM's does."""
    tokens = key.shape[0]
    cache[0, start : start + tokens] = key
    cache[1, start : start + tokens] = value
    q, k, v = (t.transpose(0, 1)[None] for t in (query, *cache[:, : start + tokens]))
    mask = torch.arange(start + tokens) <= start + torch.arange(tokens)[:, None]
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    output.copy_(y[0].transpose(0, 1))


@unified.register_fake
def _(query, key, value, output, cache, start):  # noqa: ANN001, ANN202
    return None


class Packed(styles.Opaque):
    """Tokens of one sequence without a batch dimension; the operation writes output and cache."""

    def __init__(self) -> None:
        super().__init__(styles.plain_attend)
        shape = (2, styles.LONGEST, styles.GROUPS, styles.SIZE)
        self.register_buffer("cache", torch.zeros(shape, dtype=torch.double), persistent=False)
        self.plain = False

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        if self.plain:
            return super().forward(x)
        q, k, v = (layer(x[0]).view(x.shape[1], -1, styles.SIZE) for layer in (self.q, self.k, self.v))
        output = torch.empty_like(q)
        unified(q, k, v, output, self.cache, start)
        return self.out(output.flatten(1))[None]


class PackedDecoder(styles.Decoder):
    def __init__(self) -> None:
        super().__init__(Packed)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, start) if not block.attention.plain else block(x)
        return self.head(self.norm(x))


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    before = dict(ops._TABLE), set(ops._IGNORED), dict(REGISTERED)
    yield
    for kept, old in zip((ops._TABLE, ops._IGNORED, REGISTERED), before, strict=True):
        kept.clear()
        kept.update(old)


def attend(scale: float | None = None, causal: bool = True) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: flash(q, k, v, 0.0, scale, causal)[0]


def opaque(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> nn.Module:
    return styles.decoder(lambda: styles.Decoder(lambda: styles.Opaque(function)))


@pytest.mark.parametrize("scale", [None, 0.7])
def test_flash_attention(scale: float | None) -> None:
    ids = styles.tokens()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return styles.plain_attend(q if scale is None else q * scale * styles.SIZE**0.5, k, v)

    expected, _ = by_definition(opaque(plain), ids, 2)
    register_attention_op(flash, q="q", k=1, v="v", scale="softmax_scale", layout="BTHD")
    model = depthify(opaque(attend(scale)), 2, budget=float("inf"))
    with torch.no_grad():
        logits = model(ids)
    assert [layer.written_as for layer in explain(model).layers] == ["standin::flash"] * styles.LAYERS
    assert relative(logits, expected) < 1e-10


def test_an_operation_with_packed_tokens_that_writes_output_and_cache() -> None:
    register_attention_op("standin::unified", q="query", k="key", v="value", layout="THD", causal=True)
    model = styles.decoder(PackedDecoder)
    ids = styles.tokens(batch=1)
    for block in model.blocks:
        block.attention.plain = True
    expected, _ = by_definition(model, ids, 2)
    for block in model.blocks:
        block.attention.plain = False
    depthify(model, 2, budget=float("inf"))
    with torch.no_grad():
        parts = [model(ids[:, :4]), model(ids[:, 4:5], 4), model(ids[:, 5:], 5)]
    assert relative(torch.cat(parts, 1), expected) < 1e-10


def test_an_operation_that_is_not_registered_is_an_error_that_names_the_remedy() -> None:
    model = depthify(opaque(attend()), 2)
    with pytest.raises(UnsupportedModelError, match=r"register_attention_op\('standin::flash', q=\.\.\."):
        model(styles.tokens())


def test_an_operation_that_is_declared_to_be_no_attention_is_left_out() -> None:
    register_attention_op(flash, attention=False)
    model = depthify(opaque(attend()), 2)
    with pytest.raises(UnsupportedModelError, match="no causal self-attention found"):
        model(styles.tokens())


def test_the_flag_counts_not_the_registration() -> None:
    register_attention_op(flash, q="q", k="k", v="v", scale="softmax_scale", layout="BTHD")
    model = depthify(opaque(attend(causal=False)), 2)
    with pytest.raises(UnsupportedModelError, match="it is not causal"):
        model(styles.tokens())


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        (
            flash,
            dict(q="query", k="k", v="v"),
            "q='query': no argument of standin::flash; it has 0 'q', 1 'k'",
        ),
        (flash, dict(q=0, k=1, v=9), "v=9: no argument"),
        (flash, dict(q="q", k="k"), "v=None: no argument"),
        (flash, dict(q="q", k="k", v="k"), "must be three arguments"),
        (flash, dict(q="q", k="k", v="causal"), "is no tensor but bool"),
        (flash, dict(q="q", k="k", v="v", scale="scale"), "scale='scale': no argument"),
        (flash, dict(q="q", k="k", v="v", layout="TBHD"), "layout must be one of 'BHTD'"),
        (flash, dict(q="q", k="k", v="v", causal=False), "nothing to register"),
        (
            unified,
            dict(q="query", k="key", v="value"),
            "give the argument that masks|Give the argument that masks",
        ),
        (
            unified,
            dict(q="query", k="key", v="output", causal=True),
            "changes its argument 'output' in place",
        ),
        ("standin::none", dict(q="q", k="k", v="v"), "no operation of that name"),
        (torch.ops.aten.mm, dict(q=0, k=1, v=2), "known already"),
        (len, dict(q=0, k=1, v=2), "must be an operation of torch.library"),
    ],
)
def test_what_is_wrong_is_said_at_once(op: object, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        register_attention_op(op, **options)


@torch.library.custom_op("standin::packed_attn", mutates_args=())
def packed_attn(qkv: Tensor) -> Tensor:
    """Query, key and value in one tensor, as flash-attn's qkvpacked functions take them."""
    return qkv[..., : styles.WIDTH].clone()


@packed_attn.register_fake
def _(qkv):  # noqa: ANN001, ANN202
    return qkv.new_empty(*qkv.shape[:-1], styles.WIDTH)


class PackedProjection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(styles.WIDTH, 3 * styles.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return packed_attn(self.qkv(x))


class LearnedExtraKeys(nn.Module):
    """An option of ``nn.MultiheadAttention`` that is not written out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(styles.WIDTH, styles.HEADS, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attention(x, x, x, attn_mask=hidden, need_weights=False)[0]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (PackedProjection, "standin::packed_attn may be attention, and cannot be looked into"),
        (LearnedExtraKeys, "multi_head_attention_forward may be attention.*scaled_dot_product_attention"),
    ],
)
def test_attention_that_cannot_be_looked_into_does_not_go_unnoticed_beside_another(
    attention: Callable[[], nn.Module], message: str
) -> None:
    kinds = iter((styles.FusedSplit, styles.FusedSplit, attention, styles.FusedSplit))
    model = styles.decoder(lambda: styles.Decoder(lambda: next(kinds)(), learned_positions=True))
    with pytest.raises(UnsupportedModelError, match=message), torch.no_grad():
        explain(model, styles.tokens())

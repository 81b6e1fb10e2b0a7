"""The unrolled arithmetic of the rewrite against the stacked softmax of the definition, values and
gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthify.passes.mix_values import Form, Scaling, combined, group_mean, parts_of_mean, scored
from depthify.reference import depth_mix, depth_weights


def _inputs(
    batch: int,
    heads: int,
    group: int,
    length: int,
    key: int,
    value: int,
    count: int,
    dtype: torch.dtype,
    seed: int,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    keys = [random(batch, heads, length, key) for _ in range(count)]
    values = [random(batch, heads, length, value) for _ in range(count)]
    return random(batch, heads * group, length, key), keys, values


def _token_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _mixed(query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, heads: int) -> Tensor:
    """The rewrite's arithmetic in the order in which it runs: (B, T, H, [group,] D)."""
    grouped = _token_major(query).unflatten(2, (heads, -1))
    wide = torch.promote_types(query.dtype, torch.float32)
    shares = scored(
        grouped,
        [_token_major(k) for k in keys],
        Scaling(scale),
        [3],
        [grouped.shape[3]],
        wide if wide != query.dtype else None,
    )
    narrow = values[-1].dtype if wide != values[-1].dtype else None
    result = combined(shares, [_token_major(v) for v in values], narrow)
    return _token_major(result)


shapes = st.fixed_dictionaries(
    dict(
        batch=st.integers(1, 3), heads=st.integers(1, 4), group=st.integers(1, 4), length=st.integers(1, 5),
        key=st.integers(1, 9), value=st.integers(1, 9), count=st.integers(2, 6), seed=st.integers(0, 99),
    )
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(shape=shapes, scale=st.floats(0.01, 30.0))
def test_values_and_gradients(shape: dict[str, int], scale: float) -> None:
    query, keys, values = _inputs(dtype=torch.float64, **shape)
    expected = depth_mix(query, keys, values, scale)
    found = _mixed(query, keys, values, scale, shape["heads"])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(expected)
    leaves = [query, *keys, *values]
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(shape=shapes, dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_precision_rounds_once(shape: dict[str, int], dtype: torch.dtype) -> None:
    query, keys, values = _inputs(dtype=dtype, **shape)
    found = _mixed(query, keys, values, 0.3, shape["heads"])
    exact = depth_mix(query.double(), [k.double() for k in keys], [v.double() for v in values], 0.3)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-2 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("size", [1e3, 1e8])
def test_large_scores_do_not_overflow(count: int, size: float) -> None:
    query, keys, values = _inputs(1, 2, 2, 3, 8, 8, count, torch.float32, 0)
    found = _mixed(query * size, keys, values, 1.0, 2)
    assert torch.isfinite(found).all()
    found.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (query, *keys, *values) if x.grad is not None)


def test_equal_keys_share_equally_and_a_far_better_key_takes_all() -> None:
    query, keys, values = _inputs(1, 2, 2, 3, 8, 8, 3, torch.float64, 0)
    same = depth_weights(query, [keys[0]] * 3, 0.5)
    torch.testing.assert_close(same, torch.full_like(same, 1 / 3))
    mean = query.reshape(1, 2, 2, 3, 8).mean(2)
    won = _mixed(query, [keys[0], mean * 100, keys[2]], values, 10.0, 2)
    torch.testing.assert_close(won, values[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [(7,), (8,), (12,), (71,), (2, 3), (2, 4), (4, 11), (6, 8), (22,)])
def test_means_over_groups_of_all_sizes(sizes: tuple[int, ...]) -> None:
    query = torch.randn(2, 5, 3, *sizes, 4, dtype=torch.float64).to(torch.bfloat16)
    dims = range(3, 3 + len(sizes))
    found = group_mean(query, dims, sizes, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, query.float().mean(list(dims)))
    parts = parts_of_mean(math.prod(sizes))
    assert sum(parts) == math.prod(sizes) and max(parts) < 8


def test_a_key_that_attention_rescales_counts_with_its_factor() -> None:
    query, keys, values = _inputs(1, 2, 1, 3, 4, 4, 3, torch.float64, 0)
    factors = [0.5, 2.0, 1.0]
    expected = depth_mix(query, [k * f for k, f in zip(keys, factors, strict=True)], values, 0.7)
    found = combined(scored(query, keys, Scaling(0.7, factors=factors)), values)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_forms_go_there_and_back(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    x = torch.randn(sizes)
    split = data.draw(st.booleans())
    rank = len(sizes) + (1 if split else 0)
    splits = ((0, (sizes[0], 1)),) if split else ()
    order = tuple(data.draw(st.permutations(range(rank))))
    adds = (data.draw(st.integers(0, rank)),)
    form = Form(splits, (), order, adds)
    assert torch.equal(form.undo(form.apply(x)), x)

"""The sources of a layer, by their definition."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthify import DepthConfig
from depthify.errors import OptionError


@given(st.integers(0, 60), st.integers(1, 70), st.integers(0, 70))
def test_sources(layer: int, stride: int, window: int) -> None:
    strided = {j for j in range(layer) if j % stride == 0}
    recent = set(range(max(0, layer - window), layer))
    assert DepthConfig(stride=stride, recent_window=window).sources(layer) == tuple(sorted(strided | recent))


@pytest.mark.parametrize(("layers", "stride"), [(2, 1), (3, 1), (4, 2), (5, 2), (30, 15), (48, 24)])
def test_default_stride_is_half_the_layers(layers: int, stride: int) -> None:
    assert DepthConfig().resolve(layers).stride == stride
    assert DepthConfig(stride=7).resolve(layers).stride == 7


def test_sources_need_a_stride() -> None:
    with pytest.raises(OptionError, match="stride=None"):
        DepthConfig().sources(3)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DepthConfig(stride=2).stride = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        DepthConfig(2)  # type: ignore[misc]

"""Capture a model's graph without running it and without its weights' memory, symbolic in batch and
length."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .. import huggingface
from ..errors import OptionError, UnsupportedModelError
from ..passes.nodes import value_of
from ..torch_internals import own_code
from . import symbols as S


@dataclass(frozen=True)
class Captured:
    """The graph of one call, and the names of its sizes."""

    module: GraphModule
    names: dict[sympy.Expr, sympy.Expr]
    """The capture's symbols as B, T and C; a size that was not left open is a number and not among them."""


def capture(
    model: nn.Module,
    batch_size: int,
    seq_len: int,
    cache_len: int,
    dtype: torch.dtype,
    cached: bool = True,
    fixed: bool = False,
) -> Captured:
    """Capture ``model(input_ids)``, with a cache of ``cache_len`` tokens where the model has one.

    Args:
        cached: whether a transformers model is to keep a cache.
        fixed: whether to capture these very sizes; the count is then a number.

    Raises:
        UnsupportedModelError: the model cannot be captured in one graph from token numbers alone.
    """
    if not fixed:
        open_batch, open_past = _apart(batch_size, seq_len, cache_len)
        try:
            return _capture(model, open_batch, seq_len, open_past, dtype, cached, open_sizes=True)
        except _Fixed:
            pass
    return _capture(model, batch_size, seq_len, cache_len, dtype, cached, open_sizes=False)


def _apart(batch_size: int, seq_len: int, cache_len: int) -> tuple[int, int]:
    """A batch size and a cache length of at least 2 that differ from each other and from the number of
    tokens.

    Two open sizes of one number would become one symbol, and a size of 1 none.
    """
    past = cache_len
    while past and (past < 2 or past == seq_len):
        past += 1
    batch = batch_size
    while batch < 2 or batch in (seq_len, past):
        batch += 1
    return batch, past


def _call(model: nn.Module, tokens: torch.Tensor, keywords: dict[str, Any]) -> Any:
    return model(tokens, **keywords)


class _Fixed(Exception):
    """The model is written for the given sizes only."""


class _Stop(Exception):
    """Raised in place of running the captured graph."""


def _fake_clone(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers have sizes but no memory."""
    from ..module import attached_modules, detach

    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        with mode:
            fake: torch.Tensor = torch.empty(tensor.shape, dtype=kind)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
    clone = copy.deepcopy(model, memo)
    if attached_modules(clone):
        detach(clone)
    huggingface.prepare(clone)
    return clone.eval()


def _past(model: nn.Module, batch_size: int, length: int, mode: FakeTensorMode) -> Any:
    """The cache that ``model`` makes of ``length`` tokens, without memory."""
    with mode, torch.no_grad():
        return model(torch.zeros(batch_size, length, dtype=torch.long), use_cache=True).past_key_values


def _capture(
    model: nn.Module,
    batch_size: int,
    seq_len: int,
    cache_len: int,
    dtype: torch.dtype,
    cached: bool,
    open_sizes: bool,
) -> Captured:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    model = _fake_clone(model, mode, dtype)
    with mode:
        tokens = torch.zeros(batch_size, seq_len, dtype=torch.long)
    keywords: dict[str, Any] = {}
    pretrained = huggingface.pretrained(model) is model
    if pretrained:
        keywords["use_cache"] = cached
    if cache_len:
        if not pretrained:
            raise OptionError(f"cache_len={cache_len}: only a transformers model can be given a cache")
        past = _past(model, batch_size, cache_len, mode)
        keywords["past_key_values"] = past
        for layer in past.layers:
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                for dim, length in enumerate(tensor.shape if tensor is not None else ()):
                    # Heads and their sizes are fixed, and so is what a sliding window keeps.
                    if (dim, length) not in ((0, batch_size), (2, cache_len)):
                        torch._dynamo.mark_static(tensor, dim)
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(graph)

        def stop(*args: Any) -> Any:
            raise _Stop

        return stop

    try:
        # A code object of its own: Dynamo counts captures per code object and refuses after a few.
        with torch._dynamo.config.patch(specialize_float=True):  # sizes are to be open, not every number
            call = torch.compile(own_code(_call), backend=keep, fullgraph=True, dynamic=open_sizes)
            call(model, tokens, keywords)
    except _Stop:
        pass
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise _not_captured(model, error) from error
    if not graphs:
        raise UnsupportedModelError(f"{type(model).__name__} computes nothing from input_ids")
    names = _sizes(graphs[0], tokens, cache_len)
    wanted = {name for name, length in ((S.B, tokens.shape[0]), (S.T, tokens.shape[1])) if length > 1}
    if open_sizes and not wanted <= set(names.values()):
        raise _Fixed
    return Captured(graphs[0], names)


def _sizes(graph: GraphModule, tokens: torch.Tensor, cache_len: int) -> dict[sympy.Expr, sympy.Expr]:
    """Which symbol of the capture is which size: told by the inputs' shapes."""
    names: dict[sympy.Expr, sympy.Expr] = {}
    for node in graph.graph.nodes:
        value = value_of(node) if node.op == "placeholder" else None
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
            continue
        for length in value.shape:
            if isinstance(length, torch.SymInt) and length.node.expr.is_Symbol:
                names.setdefault(length.node.expr, _name_of(length, tokens, cache_len))
    return names


def _name_of(length: torch.SymInt, tokens: torch.Tensor, cache_len: int) -> sympy.Expr:
    known = {int(tokens.shape[0]): S.B, int(tokens.shape[1]): S.T, cache_len: S.C}
    hint = int(length.node.hint)
    if hint not in known:
        raise AssertionError(f"a size of {hint} was left open and is none of {known}")
    return known[hint]


def _not_captured(model: nn.Module, error: Exception) -> UnsupportedModelError:
    cause = " ".join(str(error).partition("Hint:")[0].split()) or type(error).__name__
    cause = cause if len(cause) <= 600 else f"{cause[:300]} ... {cause[-300:]}"
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be captured in one graph from model(input_ids): {cause}. Give its "
        "config instead, for the closed form"
    )

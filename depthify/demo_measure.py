"""What ``depthify demo`` measures on a causal language model of transformers, mixed or not."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Reader:
    """Calls a model the way ``generate`` does, so that a mixed model serves both with the same captures."""

    model: Any
    run: Callable[..., Any] | None = None
    """What is called; the model itself by default. Set it to a compiled wrapper of the model."""

    cache_keyword: str = field(init=False)
    takes_positions: bool = field(init=False)

    def __post_init__(self) -> None:
        names = inspect.signature(self.model.forward).parameters
        self.cache_keyword = "cache" if "cache" in names else "past_key_values"
        self.takes_positions = "position_ids" in names

    def new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    @torch.no_grad()
    def read(self, ids: Tensor, cache: Any | None = None) -> Reading:
        """Read ``ids`` (1, T) behind what ``cache`` holds already, into the cache."""
        cache = self.new_cache() if cache is None else cache
        # Contiguous and no views, as generate has them: Dynamo captures views and other strides on their own.
        ids = ids.clone(memory_format=torch.contiguous_format)
        inputs = {"input_ids": ids, self.cache_keyword: cache, "use_cache": True}
        if self.takes_positions:
            past = cache.get_seq_length()
            inputs["position_ids"] = torch.arange(past, past + ids.shape[1], device=ids.device)[None].clone()
        _lengths_vary(*inputs.values())
        start = time.perf_counter()
        logits = (self.model if self.run is None else self.run)(**inputs).logits
        return Reading(logits, cache, time.perf_counter() - start)

    def read_in_parts(self, ids: Tensor, sizes: Sequence[int]) -> list[Reading]:
        """Read ``ids`` through one cache, in parts of the given sizes."""
        parts: list[Reading] = []
        for part in ids.split(list(sizes), dim=1):
            parts.append(self.read(part, parts[-1].cache if parts else None))
        return parts


def _lengths_vary(*inputs: Any) -> None:
    """Tell Dynamo that numbers of tokens vary, so that it captures once for all of them."""
    from torch._dynamo import maybe_mark_dynamic

    for tensor in tensors_in(inputs):
        dim = tensor.ndim - (1 if tensor.ndim == 2 else 2)
        if tensor.ndim >= 2 and tensor.shape[dim] > 1:
            maybe_mark_dynamic(tensor, dim)


@dataclass(frozen=True)
class Reading:
    logits: Tensor
    cache: Any
    seconds: float


class _Counter:
    """A streamer for ``generate`` that counts tokens. Its first call brings the prompt."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self.count = -1
        self.progress = progress

    def put(self, value: Tensor) -> None:
        self.count += 1
        self.progress(self.count)

    def end(self) -> None:
        pass


def generate(
    model: Any, tokenizer: Any, ids: Tensor, new_tokens: int, progress: Callable[[int], None]
) -> str:
    """Generate greedily behind ``ids`` (1, T), with a KV cache; ``progress`` is told the number of tokens."""
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=padding,
        streamer=_Counter(progress),
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()


def perplexity(logits: Tensor, ids: Tensor) -> float:
    """``exp`` of the mean negative log likelihood of each token given those before it."""
    losses = nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
    return losses.exp().item()


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest number expected."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


@dataclass(frozen=True)
class Size:
    """Sizes that depth mixing must leave as they are."""

    parameters: int
    state: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """Name, shape and dtype of every entry of ``state_dict()``."""

    state_bytes: int
    cache: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """Shape and dtype of every tensor that the cache holds."""

    cache_bytes: int


def size_of(model: nn.Module, cache: Any) -> Size:
    state = model.state_dict()
    held = tensors_in(cache)
    return Size(
        sum(p.numel() for p in model.parameters()),
        tuple((name, tuple(x.shape), x.dtype) for name, x in state.items()),
        sum(x.nbytes for x in {x.data_ptr(): x for x in state.values()}.values()),
        tuple((tuple(x.shape), x.dtype) for x in held),
        sum(x.nbytes for x in held),
    )


def tensors_in(owner: Any) -> list[Tensor]:
    """Every tensor that can be reached from ``owner`` through attributes and containers, each once."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    todo = [owner]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (type, nn.Module)):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found[id(item)] = item
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, (list, tuple)):
            todo += item
        elif hasattr(item, "__dict__"):
            todo += vars(item).values()
    return list(found.values())

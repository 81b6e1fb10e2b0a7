"""What is checked of every model of the zoo, as one dictionary per model; ``python tests/zoo_check.py
NAME`` prints it.

Logits of the full forward against the definition, in exact float64 and in float32 as the model comes;
cached decoding
against the same; attention fused and written out; sites at two depths; and that shifting all positions
changes nothing.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import zoo
from definition import relative
from eager_definition import Seen, TwinDiffers, by_definition, exact_backend
from torch import Tensor, nn

from depthify import DepthifyError, depthify, explain, restore
from depthify.errors import NotMixedError, UnsupportedModelError

STRIDE = 2
BOUND = {torch.float64: 1e-10, torch.float32: 1e-4}
LENGTH, CHUNKS = 10, (6, 1, 1, 1, 1)
_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "mems", "state")


def _bound(model: nn.Module, logits: Tensor) -> float:
    """Some heads cast their logits to float32, behind all that is captured."""
    dtype = next(model.parameters()).dtype
    return 1e-6 if dtype != logits.dtype else BOUND[dtype]


def check(name: str, parts: tuple[str, ...] = ()) -> dict[str, Any]:
    """All results of one model; every entry says ``ok``, or why not."""
    started = time.time()
    result: dict[str, Any] = {"name": name, "class": zoo.model_class(name).__name__}
    fused = "sdpa"
    try:
        zoo.tiny_model(name)
    except ValueError as error:
        if "scaled_dot_product" not in str(error):
            return result | {"status": "not built", "reason": _text(error)}
        fused = "eager"
    except Exception as error:
        return result | {"status": "not built", "reason": _text(error)}
    result["attention"] = fused
    for part in parts or _PARTS:
        if part == "eager" and fused == "eager":
            continue
        torch._dynamo.reset()
        begun = time.time()
        torch.set_default_dtype(torch.float64 if part in _EXACT else torch.float32)
        result[part] = _guarded(_PARTS[part], name, fused)
        torch.set_default_dtype(torch.float32)
        result[part]["seconds"] = round(time.time() - begun, 1)
    result["seconds"] = round(time.time() - started, 1)
    return result


def _guarded(part: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    try:
        return part(*args)
    except UnsupportedModelError as error:
        return {"status": "refused", "reason": _text(error)}
    except NotMixedError as error:
        return {
            "status": "refused" if "captured with" in str(error) else "not captured",
            "reason": _text(error),
        }
    except NotDefined as error:
        return {"status": "not defined", "reason": _text(error)}
    except NotRun as error:
        return {"status": "not built", "reason": _text(error)}
    except Exception as error:
        return {"status": "error", "reason": f"{type(error).__name__}: {_text(error)}"}


class NotRun(Exception):
    """The vanilla model does not run on token ids alone."""


class NotDefined(Exception):
    """The independent computation has no value for a model, which depthify then has to refuse."""


def _text(error: BaseException) -> str:
    return str(error).split("\n\nfrom user code:")[0].strip()[:1500]


def rotates(model: nn.Module) -> bool:
    """Whether the model may have rotary embeddings, and lets the caller choose positions."""
    return "position_ids" in inspect.signature(model.forward).parameters


def _change(model: nn.Module, ids: Tensor, options: dict[str, Any]) -> float:
    """By how much logits change when a constant is added to all positions."""
    here = torch.arange(ids.shape[1]).expand_as(ids)
    options = options | {"attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        near, far = (model(ids, position_ids=here + shift, **options).logits for shift in (0, 9))
    return relative(far, near)


def _options(model: nn.Module, name: str, dtype: torch.dtype) -> dict[str, Any]:
    return {"use_cache": False, **zoo.inputs(name, dtype)}


def _full(name: str, attention: str) -> dict[str, Any]:
    """The full forward in exact float64."""
    model, ids, options, vanilla, backend = _prepared(name, attention)
    expected, seen = _expected(model, name, ids, options)
    result: dict[str, Any] = {
        "expected sites": sum(x.mixed for x in seen),
        "matters": relative(vanilla, expected),
    }
    depthify(model, STRIDE, backend=backend, budget=float("inf"))
    with torch.no_grad():
        logits = _captured(model, lambda m: m(ids, **options).logits)
    if isinstance(logits, dict):
        return result | logits
    report = explain(model)
    result |= {
        "sites": len(report.layers), "left out": [r.reason for r in report.refusals], "scored": report.scored,
        "difference": relative(logits, expected),
    }  # fmt: skip
    fine = result["difference"] < _bound(model, logits) and result["sites"] == result["expected sites"]
    return result | {"status": "ok" if fine else "WRONG"}


def _prepared(name: str, attention: str) -> tuple[nn.Module, Tensor, dict[str, Any], Tensor, Any]:
    """A model in exact float64, its inputs, vanilla logits, and the backend to run it with; in float32 if
    the model insists on that somewhere."""
    for dtype, backend in ((torch.float64, exact_backend), (torch.float32, "eager")):
        torch.set_default_dtype(dtype)
        model = zoo.tiny_model(name, zoo.depths(name)[0], dtype, attention)
        ids, options = zoo.tokens(LENGTH), _options(model, name, dtype)
        try:
            with torch.no_grad():
                return model, ids, options, model(ids, **options).logits, backend
        except RuntimeError as error:
            failure = error
        except ValueError as error:
            raise NotRun(str(error)) from error
    raise failure


def _expected(model: nn.Module, name: str, ids: Tensor, options: dict[str, Any]) -> tuple[Tensor, list[Seen]]:
    exact = next(model.parameters()).dtype == torch.float64
    backend = "eager" if not exact else exact_backend
    try:
        return _by_definition(model, name, ids, options, exact)
    except Exception as error:
        torch._dynamo.reset()
        depthify(model, STRIDE, backend=backend, budget=float("inf"))
        with torch.no_grad():
            model(ids, **options)  # is to raise: what is not defined cannot be mixed
        raise NotDefined(f"{type(error).__name__}: {_text(error)}") from error


def _by_definition(
    model: nn.Module, name: str, ids: Tensor, options: dict[str, Any], exact: bool
) -> tuple[Tensor, list[Seen]]:
    run = functools.partial(by_definition, model, ids, STRIDE, exact=exact, stack=zoo.stack(name), **options)
    try:
        return run(unrotated=rotates(model))
    except TwinDiffers:  # a learned embedding, say: query and key are taken as attention uses them
        return run(unrotated=False)


def _captured(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> Any:
    """What ``run(model)`` returns; else why not, and whether Dynamo captures the vanilla model."""
    try:
        return run(model)
    except (DepthifyError, torch._dynamo.exc.TorchDynamoException) as error:
        result = _guarded(_raise, error)
    if result["status"] == "refused":
        return result
    restore(model)
    torch._dynamo.reset()
    try:
        run(torch.compile(model, backend="eager", fullgraph=True))
    except Exception as error:
        return {"status": "not captured", "reason": f"{type(error).__name__}: {_text(error)}"[:600]}
    return result | {"status": "error"}


def _raise(error: BaseException) -> dict[str, Any]:
    raise error


def decode(
    run: Callable[..., Any],
    model: nn.Module,
    name: str,
    ids: Tensor,
    cache: Any = None,
    positions: bool = False,
) -> Tensor:
    """Logits of decoding in chunks through the model's own cache, or the given one.

    Args:
        run: calls the model.
        positions: tell the model the positions of the tokens, as ``generate`` does.
    """
    parameters = inspect.signature(model.forward).parameters
    key = next((x for x in _CACHE_NAMES if x in parameters), None)
    if key is None:
        raise NotImplementedError("the model takes no cache")
    logits, start = [], 0
    for length in CHUNKS:
        begin = 0 if name in zoo.WHOLE_TEXT else start
        options = zoo.inputs(name, torch.get_default_dtype())
        if positions:
            options["position_ids"] = torch.arange(begin, start + length).expand(ids.shape[0], -1)
        out = run(ids[:, begin : start + length], use_cache=True, **{key: cache}, **options)
        cache = next((getattr(out, x) for x in _CACHE_NAMES if getattr(out, x, None) is not None), None)
        if cache is None:
            raise NotImplementedError("the model returns no cache")
        logits.append(out.logits[:, -length:])
        start += length
    return torch.cat(logits, 1)


def _cached(name: str, attention: str, static: bool = False) -> dict[str, Any]:
    """Decoding through a cache, in exact float64: the model's own, or a static one."""
    model, ids, options, vanilla, backend = _prepared(name, attention)

    positions = False

    def run(which: nn.Module) -> Tensor:
        return decode(which, model, name, ids, _static_cache(model) if static else None, positions)

    with torch.no_grad():
        try:
            own = relative(run(model), vanilla)
            if own > 1e-4 and rotates(model):
                positions = True
                own = relative(run(model), vanilla)
        except Exception as error:
            return {"status": "not in vanilla", "vanilla": f"{type(error).__name__}: {_text(error)}"[:300]}
        expected, _ = _expected(model, name, ids, options)
        depthify(model, STRIDE, backend=backend, budget=float("inf"))
        logits = _captured(model, run)
    if isinstance(logits, dict):
        return logits
    if own > 1e-4:
        return {"status": "not in vanilla", "vanilla": own}
    difference = relative(logits, expected)
    # Where the model keeps states in float32, its own cached decoding is no closer to its full forward.
    fine = difference < max(_bound(model, logits), 2 * own)
    return {"status": "ok" if fine else "WRONG", "difference": difference, "vanilla": own}


def _static_cache(model: nn.Module) -> Any:
    from transformers import StaticCache

    if not {"cache", "past_key_values"} & set(inspect.signature(model.forward).parameters):
        raise NotImplementedError("the model takes no static cache")
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=16)
    return cache


def _float32(name: str, attention: str) -> dict[str, Any]:
    model = zoo.tiny_model(name, zoo.depths(name)[0], torch.float32, attention)
    ids = zoo.tokens()
    options = _options(model, name, torch.float32)
    expected, _ = _expected(model, name, ids, options)
    depthify(model, STRIDE, budget=float("inf"))
    with torch.no_grad():
        difference = relative(model(ids, **options).logits, expected)
    return {"status": "ok" if difference < BOUND[torch.float32] else "WRONG", "difference": difference}


def _depth(name: str, attention: str) -> dict[str, Any]:
    """The number of sites at another depth."""
    model = zoo.tiny_model(name, zoo.depths(name)[1], torch.float32, attention)
    ids = zoo.tokens()
    options = _options(model, name, torch.float32)
    _, seen = by_definition(model, ids, STRIDE, stack=zoo.stack(name), **options)
    sites = len(explain(model, ids, **options).layers)
    expected = sum(x.mixed for x in seen)
    return {"status": "ok" if sites == expected else "WRONG", "sites": sites, "expected sites": expected}


def _shift(name: str, attention: str) -> dict[str, Any]:
    """Logits after adding a constant to all positions, where that changes nothing in the vanilla model."""
    model = zoo.tiny_model(name, zoo.depths(name)[0], torch.float32, attention)
    ids, options = zoo.tokens(), _options(model, name, torch.float32)
    own = _change(model, ids, options) if rotates(model) else 1.0
    if own > 1e-4:
        return {"status": "ok", "vanilla": "positions matter by themselves"}
    depthify(model, 1, budget=float("inf"))
    difference = _change(model, ids, options)
    return {
        "status": "ok" if difference < BOUND[torch.float32] else "WRONG",
        "difference": difference,
        "vanilla": own,
    }


_PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "full": _full,
    "eager": lambda name, fused: _full(name, "eager"),
    "cached": _cached,
    "static": lambda name, fused: _cached(name, fused, static=True),
    "float32": _float32,
    "depth": _depth,
    "shift": _shift,
}
_EXACT = ("full", "eager", "cached", "static")


def quiet() -> None:
    """No warnings of other libraries."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


if __name__ == "__main__":
    quiet()
    print(json.dumps(check(sys.argv[1], *([tuple(sys.argv[2].split(","))] if len(sys.argv) > 2 else []))))

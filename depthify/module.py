"""Attach depth mixing to a module: its class is swapped for a subclass whose forward is captured and
rewritten.

The class is swapped on the object (as FSDP2's ``fully_shard`` does), not its ``forward`` attribute: copies
and pickles then compute with their own weights. The original forward can be reached only between the marks
of :mod:`.marks`.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Graph, Node

from . import huggingface
from .attach import block_lists, find_owner, holds_others
from .config import DepthConfig
from .errors import NotMixedError, OptionError, UnsupportedModelError
from .regions import BlockState, Regions
from .report import DepthReport, refused_report, report_of
from .self_bias import Biased, device_of
from .torch_internals import compile_keywords, hides_from_dynamo, in_transform, own_code

if TYPE_CHECKING:
    from .passes.mix_values import Mixed
    from .passes.subgraphs import Bodies

log = logging.getLogger(__name__)

_keys = (f"depthify-{i}" for i in itertools.count())


def new_key(state: Any) -> str:
    """A name under which the marks find ``state``: only strings pass through a trace."""
    from .marks import register

    key = next(_keys)
    register(key, state)
    return key


_RECOMPILE_LIMIT = 64
"""Captures one model keeps; beyond that it starts over with an empty store instead of giving up."""


class State(Biased):
    """What an attached module knows: its configuration, how to compile, and what was captured."""

    def __init__(
        self,
        name: str,
        config: DepthConfig,
        compile_options: dict[str, Any],
        blocks: Sequence[str] = (),
        self_bias: float | None = None,
        may_switch: bool = False,
        only_blocks: bool = False,
    ) -> None:
        self.name = name
        self.config = config
        self.compile_options = compile_options
        self.blocks = tuple(blocks)
        """Paths of the decoder blocks, where they are known."""

        self.may_switch = may_switch
        """The blocks are captured one by one if the whole cannot be captured."""

        self.only_blocks = only_blocks
        """There are others, which are left as they are."""

        self.report: DepthReport | None = None
        self.on_report: Callable[[DepthReport], None] | None = None
        """Set for a dry run: takes the report, and the capture ends there."""

        self.on_mixed: Callable[[Sequence[dict[int, Mixed]]], None] | None = None
        """Is shown every rewrite."""

        self.set_bias(self_bias)
        self._compiled: Any = None
        self.key = new_key(self)

    def __reduce__(self) -> tuple[Any, ...]:
        fixed = (self.name, self.config, self.compile_options, self.blocks)
        return State, (*fixed, self.bias_value, self.may_switch, self.only_blocks)

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return State(*self.__reduce__()[1])

    def traced(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The forward of ``module`` inside a trace."""
        from .marks import run_marked

        return run_marked(module, self.key, self.name, args, kwargs, self.self_bias)

    def rewrite(self, graph: Graph, start: Node | None, bodies: Bodies, bias: Node | None) -> None:
        """Called at the end mark, while Dynamo traces."""
        from .passes import find, mix_graph, order_layers

        blocks = self.blocks if self.only_blocks else ()
        if self.on_report is not None:
            findings = find(graph, start, bodies, blocks)
            try:
                self.on_report(report_of(findings, order_layers(findings, self.config)))
            except UnsupportedModelError as error:
                self.on_report(refused_report(findings, self.config, str(error)))
                raise
            raise NotMixedError("dry run: the capture ends here")
        result = mix_graph(graph, self.config, start, bodies, bias, blocks)
        if self.on_mixed is not None:
            self.on_mixed(result.mixed)
        report = report_of(result.findings, result.stacks)
        if self.report is not None:
            _check_same(self.name, self.report, report)
        self.report = report

    def compiled(self) -> Any:
        if self._compiled is None:
            from .marks import run_marked

            self._compiled = torch.compile(
                own_code(run_marked),
                fullgraph=True,
                **self.compile_options,
                **compile_keywords(_RECOMPILE_LIMIT),
            )
        return self._compiled

    def run(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the forward of ``module`` captured and rewritten, outside any other capture."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

        self.move_bias(module)
        first = self.report is None
        if first:
            self._check_blocks(module)
        try:
            result = self.compiled()(module, self.key, self.name, args, kwargs, self.self_bias)
            if first and not self.blocks:
                self._guard_found(module)
            return result
        except FailOnRecompileLimitHit:
            log.warning(
                "%s was captured in more than %d variants; starting over", self.name, _RECOMPILE_LIMIT
            )
            self._compiled = None
            return self.compiled()(module, self.key, self.name, args, kwargs, self.self_bias)
        except Unsupported as error:
            if in_transform():
                raise NotMixedError(
                    f"{self.name} is called inside a transform of torch.func, where Dynamo cannot capture "
                    "it, so nothing would be mixed. Compile the transform as a whole, as in "
                    "torch.compile(torch.func.vmap(...), backend='eager', fullgraph=True). Dynamo says: "
                    f"{error}"
                ) from error
            if self.may_switch and self.blocks:  # nothing has run yet
                return _run_in_blocks(module, self, args, kwargs, error)
            raise NotMixedError(
                f"{self.name} cannot be captured in one graph, so nothing would be mixed. Dynamo says: "
                f"{error}"
            ) from error

    def _guard_found(self, owner: nn.Module) -> None:
        """Guard the blocks that turned out to hold the layers, where several lists left it open."""
        layers = [f"{layer.module}." for layer in self.report.layers] if self.report is not None else []
        blocks = [
            block
            for path, container in block_lists(owner)
            for name, block in container.named_children()
            if any(layer.startswith(f"{path}.{name}.") for layer in layers)
        ]
        _guard_blocks(blocks, self.name)

    def _check_blocks(self, module: nn.Module) -> None:
        """A copy that lost blocks, as a stage of a pipeline does, would mix over those it has, and
        wrongly."""
        present = dict(module.named_modules())
        lost = [path for path in self.blocks if path not in present]
        if lost:
            raise NotMixedError(
                f"{self.name} lost {len(lost)} of its {len(self.blocks)} decoder blocks since depthify "
                f"({lost[0]!r}, ...), as the stages of a pipeline do. Keys and values of layers in other "
                "stages cannot be reached, so pipeline parallelism is not supported; for a model that was "
                "cut on purpose, call depthify after cutting"
            )


def _check_same(name: str, before: DepthReport, now: DepthReport) -> None:
    """Captures of one model (prefill, decode, ...) must mix alike: they share one cache."""
    if len(now.layers) != len(before.layers):
        missing = sorted({x.module for x in before.layers} ^ {x.module for x in now.layers})
        raise NotMixedError(
            f"{name} was captured with {len(now.layers)} attention layers, and before with "
            f"{len(before.layers)}; the "
            f"difference is in {missing}. Layers that run in some calls only cannot be mixed over"
        )
    if now.scored != before.scored:
        raise NotMixedError(
            f"{name} was captured with depth scores taken {now.scored!r}, and before {before.scored!r}, so "
            "cached decoding would not equal the full forward. Please report this model"
        )


class Depthified:
    """Base of the generated classes. ``isinstance(model, Depthified)`` tells an attached module."""

    _depthify: State | Regions | BlockState

    def _original_forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        base = vars(type(self)).get("_depthify_base")
        if base is None:  # another library subclassed the generated class; it knows how to copy its own
            return super().__reduce_ex__(protocol)
        return _rebuild, (base,), self.__dict__.copy()


@functools.cache
def attached_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``base`` whose forward is captured and rewritten."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._depthify
        if torch.compiler.is_dynamo_compiling():
            return state.traced(self, args, kwargs)
        return state.run(self, args, kwargs)

    body = {
        "forward": forward,
        "_depthify_base": base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (Depthified, base), body)


def _rebuild(base: type[nn.Module]) -> nn.Module:
    attached = attached_class(base)
    return attached.__new__(attached)


def swap(module: nn.Module, state: Any) -> None:
    """Give ``module`` the attached class and a state."""
    module.__dict__["_depthify"] = state
    module.__class__ = attached_class(type(module))


def unswap(module: Any) -> None:
    """Give ``module`` the class it had before."""
    base = vars(type(module)).get("_depthify_base")
    if base is None:
        raise OptionError(
            f"{type(module).__name__} was changed by another library after depthify (fully_shard, say), so "
            "its class cannot be put back. Restore in the reverse order"
        )
    module.__class__ = base
    del module.__dict__["_depthify"]


def attached_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Depthified)]


def attach(
    model: nn.Module,
    config: DepthConfig,
    compile_options: dict[str, Any],
    regions: str = "auto",
    blocks: Sequence[nn.Module] | None = None,
    self_bias: float | None = None,
    where: str | None = None,
) -> nn.Module:
    """Attach to the module of ``model`` that runs all decoder blocks, and to the blocks; returns
    ``model``."""
    _check_attachable(model)
    path, owner, found = find_owner(model, blocks, where)
    name = type(owner).__qualname__ + (f" at {path!r}" if path else "")
    chosen = regions
    if regions == "auto":
        chosen = "block" if any(_cut(block) for block in found) else "model"
    if chosen == "block" and not found:
        raise OptionError(
            f"regions='block': {name} has no single list of decoder blocks. Name them with blocks=[...], or "
            "use regions='model'"
        )
    for module in (owner, *(found if chosen == "block" else ())):
        if "forward" in vars(module):
            raise OptionError(
                f"{type(module).__name__} in {path or 'the model'} has a forward of its own on the object "
                "(set by a "
                "hook or a patch), which would hide the mixed one. Call depthify before adding such hooks"
            )
    paths = {module: path for path, module in owner.named_modules()}
    blocks_at = [paths[block] for block in found]
    state: State | Regions
    if chosen == "block":
        state = Regions(name, config, compile_options, len(found), _why_blocks(found))
    else:
        only = holds_others(owner, found)
        state = State(name, config, compile_options, blocks_at, None, regions == "auto", only)
    state.set_bias(self_bias, device_of(owner))
    _check_compiles(state)
    if isinstance(state, State):
        huggingface.prepare(model)
    swap(owner, state)
    if isinstance(state, Regions):
        _attach_blocks(owner, state, blocks_at)
    else:
        _guard_blocks(found, state.name)
    huggingface.write_config(model, config, where)
    return model


def _attach_blocks(owner: nn.Module, state: Regions, paths: Sequence[str]) -> None:
    log.info("%s is captured block by block%s", state.name, f": {state.reason}" if state.reason else "")
    for path in paths:
        swap(owner.get_submodule(path), BlockState(state, path))


def _run_in_blocks(owner: Any, state: State, args: tuple, kwargs: dict[str, Any], error: Exception) -> Any:
    """Run an owner whose whole cannot be captured block by block, and leave it so if that works."""
    regions = _switch_to_blocks(owner, state, error)
    try:
        return regions.run(owner, args, kwargs)
    except NotMixedError as of_block:
        _switch_back(owner, state, regions)
        raise NotMixedError(
            f"{state.name} cannot be captured in one graph, nor block by block, so nothing would be mixed. "
            f"Dynamo says: {error}\nAnd of the blocks: {of_block}"
        ) from of_block


def _switch_back(owner: Any, state: State, regions: Regions) -> None:
    regions.put_hooks_back()
    blocks = [owner.get_submodule(path) for path in state.blocks]
    for block in blocks:
        unswap(block)
    owner.__dict__["_depthify"] = state
    _guard_blocks(blocks, state.name)


def _switch_to_blocks(owner: nn.Module, state: State, error: Exception) -> Regions:
    """Something between the blocks cannot be captured: hooks added after depthify, a graph break."""
    reason = f"the whole model cannot be captured ({str(error).splitlines()[0]})"
    regions = Regions(state.name, state.config, state.compile_options, len(state.blocks), reason)
    regions.self_bias = state.self_bias
    regions.on_mixed = state.on_mixed
    _unguard_blocks(owner)
    owner.__dict__["_depthify"] = regions
    _attach_blocks(owner, regions, state.blocks)
    return regions


def _why_blocks(blocks: Sequence[nn.Module]) -> str:
    cut = next((block for block in blocks if _cut(block)), None)
    return f"{type(cut).__name__} has hooks that no capture can go through" if cut is not None else ""


def _cut(block: nn.Module) -> bool:
    """Whether hooks around ``block`` or inside it are kept out of traces."""
    return any(
        hides_from_dynamo(hook)
        for module in block.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    )


def _check_compiles(state: State | Regions) -> None:
    """Unknown modes and options are errors now, not at the first call."""
    options = state.compile_options
    if options["backend"] == "eager":
        return
    try:
        state.compiled()
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        given = ", ".join(
            f"{name}={options[name]!r}" for name in ("backend", "mode", "options") if options[name]
        )
        raise OptionError(f"{given}: torch.compile refuses this: {error}") from error


def _check_attachable(model: nn.Module) -> None:
    if attached_modules(model):
        raise OptionError("the model is mixed already; restore(model) first to change how")
    for path, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise OptionError(
                f"{path or 'the model'} is compiled already. Call depthify first, then torch.compile: the "
                "compiler then gets the mixed graph"
            )


class BlockGuard:
    """A pre-hook that keeps a decoder block from running without mixing when it is called on its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: Any) -> None:
        from .marks import check_inside

        check_inside(self.name)


def _guard_blocks(blocks: list[nn.Module], name: str) -> None:
    guard = BlockGuard(name)
    for block in blocks:
        block.register_forward_pre_hook(guard)


def _unguard_blocks(model: nn.Module) -> None:
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, BlockGuard)]:
            del module._forward_pre_hooks[key]


def detach(model: nn.Module) -> nn.Module:
    """Give every attached module its original class back; returns ``model``."""
    found = attached_modules(model)
    if not found:
        raise OptionError("the model is not mixed, so there is nothing to restore")
    for module in found:
        if isinstance(module._depthify, Regions):
            module._depthify.put_hooks_back()
        unswap(module)
    _unguard_blocks(model)
    huggingface.clear_config(model)
    return model

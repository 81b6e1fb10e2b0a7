"""A model through ``torch.compile`` for the pretended device."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule

from .attention import fused_attention
from .device import DeviceSpec, no_primary_context, pretend
from .record import Phase, Recorder, Saved, recording


@contextlib.contextmanager
def fake_cuda(
    spec: DeviceSpec | None = None, attention: str = "auto", config: dict[str, Any] | None = None
) -> Iterator[Recorder]:
    """Inside, ``compile_fx`` compiles fake CUDA tensors; yields what it generates.

    Args:
        attention: see :func:`.attention.fused_attention`.
        config: Inductor settings.
    """
    spec = spec or DeviceSpec()
    recorder = Recorder()
    with (
        no_primary_context(),
        fused_attention(attention, spec),
        pretend(spec),
        recording(recorder, config or {}),
    ):
        yield recorder


def to_fake_cuda(value: Any, mode: FakeTensorMode) -> Any:
    """The same tensor, container or (in place) module with fake CUDA tensors; "meta" tensors will do."""
    known: dict[int, Tensor] = {}

    def tensor(x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor) and x.device.type == "cuda":
            return x
        if id(x) not in known:  # tied weights stay tied
            with mode, torch.no_grad():
                new = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda")
            if isinstance(x, nn.Parameter):
                new = nn.Parameter(new, requires_grad=x.requires_grad)
            known[id(x)] = new
        return known[id(x)]

    def convert(x: Any) -> Any:
        if isinstance(x, Tensor):
            return tensor(x)
        if isinstance(x, nn.Module):
            for module in x.modules():
                for table in (module._parameters, module._buffers, module.__dict__):
                    for name, item in list(table.items()):
                        if isinstance(item, Tensor):
                            table[name] = tensor(item)
            return x
        if type(x) in (list, tuple):
            return type(x)(map(convert, x))
        if type(x) is dict:
            return {name: convert(item) for name, item in x.items()}
        return x

    return convert(value)


@dataclass
class Result:
    """All that was generated for one call."""

    phases: list[Phase]
    saved: list[Saved]
    graph: GraphModule
    """What Dynamo handed to the compiler."""

    def phase(self, *names: str) -> Phase:
        return next(phase for phase in self.phases if phase.name in names)

    @property
    def forward(self) -> Phase:
        return self.phase("inference", "forward")

    @property
    def backward(self) -> Phase:
        return self.phase("backward")

    @property
    def saved_bytes(self) -> int:
        """Activations kept for backward."""
        return sum(saved.bytes for saved in self.saved if not saved.is_input)


def compile_for_cuda(
    target: Callable[..., Any],
    *args: Any,
    train: bool = False,
    attention: str = "auto",
    spec: DeviceSpec | None = None,
    config: dict[str, Any] | None = None,
    dynamic: bool | None = False,
    edit: Callable[[GraphModule], None] | None = None,
    **kwargs: Any,
) -> Result:
    """``torch.compile(target, fullgraph=True)(*args, **kwargs)`` for the pretended device.

    Modules (also among ``args``) and tensors become fake CUDA ones first. What holds tensors in other ways,
    such as a cache, must have been made of fake CUDA tensors in the mode of the rest.

    Args:
        train: compile forward and backward; otherwise it runs without gradients.
        edit: changes the graph before it is compiled.
    """
    from torch._inductor.compile_fx import compile_fx

    mode = _mode_of((target, args, kwargs)) or FakeTensorMode()
    target, args, kwargs = to_fake_cuda((target, args, kwargs), mode)
    spec = spec or DeviceSpec()
    seen: list[tuple[GraphModule, Recorder]] = []

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if edit is not None:
            edit(graph)
        with fake_cuda(spec, attention, config) as recorder:
            compile_fx(graph, list(inputs))
        seen.append((graph, recorder))
        return graph.forward  # which then runs on fake tensors

    torch._dynamo.reset()
    gradients = contextlib.nullcontext() if train else torch.no_grad()
    with mode, fused_attention(attention, spec), gradients:
        torch.compile(target, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    torch._dynamo.reset()
    gc.collect()
    ((graph, recorder),) = seen
    return Result(recorder.phases, recorder.saved, graph)


def _mode_of(value: Any) -> FakeTensorMode | None:
    if isinstance(value, FakeTensor):
        return value.fake_mode
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((mode for mode in map(_mode_of, value) if mode is not None), None)
    return None

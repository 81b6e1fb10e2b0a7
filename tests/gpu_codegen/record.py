"""What Inductor generated: launches with their bytes, extern calls, kernel sources, saved tensors."""

from __future__ import annotations

import ast
import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule, Node

from .device import CpuInsteadOfCuda


@dataclass
class Launch:
    """One Triton launch: its kernel, and the bytes of each buffer it reads and writes.

    A buffer counts once per launch however often it is loaded, and at most the elements that its distinct
    index expressions reach.
    """

    kernel: str
    reads: dict[str, int] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    inplace: dict[str, str] = field(default_factory=dict)
    """Parameter -> buffer read through it. Dead buffers are reused like this too: only the source tells
    whether they are read."""

    @property
    def read_bytes(self) -> int:
        return sum(self.reads.values())

    @property
    def write_bytes(self) -> int:
        return sum(self.writes.values())


@dataclass
class Phase:
    """One graph that Inductor compiled."""

    name: str
    """"inference", "forward" or "backward"."""

    wrapper: str = ""
    kernels: dict[str, str] = field(default_factory=dict)
    """Source by name; a kernel used by n layers is here once."""

    launches: list[Launch] = field(default_factory=list)
    externs: list[str] = field(default_factory=list)
    """Calls of ATen and library operations, in order."""

    @property
    def read_bytes(self) -> int:
        return sum(launch.read_bytes for launch in self.launches)

    @property
    def write_bytes(self) -> int:
        return sum(launch.write_bytes for launch in self.launches)


@dataclass(frozen=True)
class Saved:
    """One value that forward keeps for backward; ``is_input`` ones (weights) cost nothing."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    is_input: bool


class Recorder:
    """Filled by the replaced parts of Inductor; for each graph: launches, wrapper, then kernels."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.saved: list[Saved] = []
        self._launches: list[Launch] = []

    def on_launch(self, kernel: Any, name: str) -> None:
        self._launches.append(_describe(kernel, name))

    def on_wrapper(self, code: str) -> None:
        from torch._inductor.virtualized import V

        name = "inference" if V.graph.is_inference else "backward" if V.graph.is_backward else "forward"
        called, externs = calls_of(code)
        counts = Counter(called)
        launches = [launch for launch in self._launches if counts[launch.kernel]]
        if Counter(launch.kernel for launch in launches) != counts:  # a template, say
            launches = [Launch(kernel) for kernel in called]
        self.phases.append(Phase(name, code, {}, launches, externs))
        self._launches = []

    def on_kernel(self, name: str, source: str) -> None:
        phase = self.phases[-1]
        phase.kernels[name] = source
        for launch in phase.launches:
            if launch.kernel == name:
                for parameter, buffer in launch.inplace.items():
                    if f"tl.load({parameter} " not in source:
                        launch.reads.pop(buffer, None)

    def on_partition(self, forward: GraphModule, outputs: int) -> None:
        (results,) = next(n for n in forward.graph.nodes if n.op == "output").args
        self.saved = []
        for node in results[outputs:]:
            value = node.meta.get("val") if isinstance(node, Node) else None
            if isinstance(value, torch.Tensor):
                size = int(value.numel()) * value.element_size()
                self.saved.append(
                    Saved(node.name, tuple(value.shape), value.dtype, size, node.op == "placeholder")
                )


def _describe(kernel: Any, name: str) -> Launch:
    """The buffers that an Inductor kernel accesses, and their bytes."""
    from torch._inductor.codegen.common import InplacedBuffer
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.utils import get_dtype_size, sympy_product
    from torch._inductor.virtualized import V

    hint = V.graph.sizevars.optimization_hint
    accesses = kernel.features.buf_accesses()
    points = hint(sympy_product(kernel.numels.values()))

    def size(buffer: str) -> int:
        total = hint(V.graph.get_numel(buffer))
        if total > points:  # sliced, or several elements per point of the iteration space
            found = accesses.get(buffer, ())
            indices = {str(dep.index) if isinstance(dep, MemoryDep) else repr(dep) for dep in found}
            total = min(total, max(1, len(indices)) * points)
        return total * get_dtype_size(V.graph.get_dtype(buffer))

    launch = Launch(name)
    for buffer, inner in kernel.args.input_buffers.items():
        if isinstance(inner, str):  # and not removed
            launch.reads[buffer] = size(buffer)
    for buffer, inner in kernel.args.output_buffers.items():
        if isinstance(inner, str):
            launch.writes[buffer] = size(buffer)
    for shared in {id(b): b for b in kernel.args.inplace_buffers.values()}.values():
        if isinstance(shared, InplacedBuffer):
            first, last = shared.other_names[0], shared.other_names[-1]
            launch.inplace[shared.inner_name] = first
            launch.reads[first], launch.writes[last] = size(first), size(last)
    return launch


def calls_of(code: str) -> tuple[list[str], list[str]]:
    """Triton launches and extern calls in the generated ``call`` functions, in order."""
    launches, externs = [], []
    for function in ast.walk(ast.parse(code)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if not re.fullmatch(r"call|partition_\d+", function.name):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
            target = ast.unparse(call.func)
            if target.startswith(("triton_", "multi_kernel_")) and target.endswith(".run"):
                launches.append(target.removesuffix(".run"))
            elif target.startswith(("extern_kernels.", "torch.ops.")):
                externs.append(target.removeprefix("extern_kernels.").removeprefix("torch.ops."))
    return launches, externs


@contextlib.contextmanager
def recording(recorder: Recorder, config: dict[str, Any]) -> Iterator[None]:
    """Record what Inductor generates, build nothing, use no cache."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor import async_compile, compile_fx
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.fx_passes import joint_graph, pad_mm
    from torch._inductor.graph import GraphLowering

    call_kernel = TritonKernel.call_kernel
    partition = compile_fx.min_cut_rematerialization_partition

    def on_call(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        recorder.on_launch(self, name)
        return call_kernel(self, name, *args, **kwargs)

    def on_source(self: Any, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
        recorder.on_kernel(name, source)
        return SimpleNamespace(run=lambda *a, **k: None)

    def on_partition(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
        forward, backward = partition(joint, *args, **kwargs)
        recorder.on_partition(forward, kwargs["num_fwd_outputs"])
        return forward, backward

    class Folder(joint_graph.UniformValueConstantFolder):
        """Runs one-element tensors on the graph's device."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with CpuInsteadOfCuda():
                super().__init__(*args, **kwargs)

        def run(self, *args: Any, **kwargs: Any) -> Any:
            with CpuInsteadOfCuda():
                return super().run(*args, **kwargs)

    settings = {
        "compile_threads": 1,
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "autotune_local_cache": False,
        "autotune_remote_cache": False,
        **config,
    }
    replaced = [
        (TritonKernel, "call_kernel", on_call),
        (async_compile.AsyncCompile, "triton", on_source),
        (GraphLowering, "save_output_code", staticmethod(recorder.on_wrapper)),
        (compile_fx, "min_cut_rematerialization_partition", on_partition),
        (joint_graph, "UniformValueConstantFolder", Folder),
        # A benchmark in truth. Sizes that are multiples of 8 are never padded, so it does not matter here.
        (pad_mm, "should_pad", lambda *a, **k: False),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, new in replaced:
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(inductor_config.patch(settings))
        stack.enter_context(
            functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True)
        )
        yield

"""A device that is not there: everything Inductor, AOTAutograd and Triton ask about it is answered here."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

TESTED = "2.14"
"""The release whose private names are known to be the ones replaced here."""


def unavailable() -> str | None:
    """Why GPU code cannot be generated here; None if it can."""
    if not torch.backends.cuda.is_built():
        return (
            f"torch {torch.__version__} is a build without CUDA (a plain `pip install torch` on Linux has it)"
        )
    if not torch.__version__.startswith(TESTED):
        return f"torch {torch.__version__}: the replaced internals are those of {TESTED}"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    return None


@dataclass(frozen=True)
class DeviceSpec:
    """The pretended device; the defaults describe an H200."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    multi_processor_count: int = 132
    total_memory: int = 141 << 30
    l2_cache_size: int = 50 << 20
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    warp_size: int = 32

    @property
    def arch(self) -> int:
        return self.capability[0] * 10 + self.capability[1]

    def as_torch(self) -> SimpleNamespace:
        """What ``torch.cuda.get_device_properties`` returns."""
        return SimpleNamespace(
            name=self.name,
            major=self.capability[0],
            minor=self.capability[1],
            multi_processor_count=self.multi_processor_count,
            total_memory=self.total_memory,
            L2_cache_size=self.l2_cache_size,
            warp_size=self.warp_size,
            gcnArchName="",
            regs_per_multiprocessor=self.regs_per_multiprocessor,
            max_threads_per_multi_processor=self.max_threads_per_multi_processor,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=self.shared_memory_per_block_optin,
            shared_memory_per_multiprocessor=self.shared_memory_per_multiprocessor,
        )

    def as_inductor(self) -> Any:
        """What Inductor's ``DeviceProperties.create`` returns."""
        from torch._inductor.runtime.hints import DeviceProperties

        return DeviceProperties(
            type="cuda",
            index=0,
            cc=self.arch,
            major=self.capability[0],
            multi_processor_count=self.multi_processor_count,
            regs_per_multiprocessor=self.regs_per_multiprocessor,
            max_threads_per_multi_processor=self.max_threads_per_multi_processor,
            warp_size=self.warp_size,
        )


class Driver:
    """Stands for Triton's active driver; only ever asked what it targets."""

    def __init__(self, spec: DeviceSpec) -> None:
        self._spec = spec

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._spec.arch, self._spec.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_benchmarker(self) -> None:
        return None


@contextlib.contextmanager
def pretend(spec: DeviceSpec) -> Iterator[None]:
    """Answer questions about the device as ``spec``; all is undone on exit."""
    import torch._inductor.scheduler
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime import driver

    properties, for_inductor = spec.as_torch(), spec.as_inductor()
    answers: dict[str, Callable[..., Any]] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.set_device": lambda device: None,
        "torch.cuda._exchange_device": lambda device: 0,
        "torch.cuda._maybe_exchange_device": lambda device: 0,
        "torch.cuda.get_device_properties": lambda *a, **k: properties,
        "torch.cuda.get_device_capability": lambda *a, **k: spec.capability,
        "torch.cuda.get_device_name": lambda *a, **k: spec.name,
        "torch.cuda.is_bf16_supported": lambda *a, **k: True,
        "torch.cuda.synchronize": lambda *a, **k: None,
        "torch.cuda.current_stream": lambda *a, **k: SimpleNamespace(cuda_stream=0),
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.random._lazy_init": lambda: None,
        # AOTAutograd saves and restores the generator's state around tracing.
        "torch.cuda.get_rng_state": lambda *a, **k: torch.empty(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": lambda *a, **k: None,
        "torch._inductor.scheduler.has_triton": lambda *a, **k: True,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": lambda: None,
    }
    with contextlib.ExitStack() as stack:
        for target, answer in answers.items():
            stack.enter_context(mock.patch(target, answer))
        # Inductor's device interface holds references to the originals.
        create = classmethod(lambda cls, device: for_inductor)
        stack.enter_context(mock.patch.object(DeviceProperties, "create", create))
        stack.enter_context(mock.patch.object(driver, "_active", Driver(spec)))
        # Derived from torch.cuda.is_available; False would let fake tensors touch the device.
        quiet = property(lambda self: True)
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", quiet))
        yield


class CpuInsteadOfCuda(TorchDispatchMode):
    """Run real (not fake) operations that ask for a CUDA device on the CPU: constant folding does that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def move(x: Any) -> Any:
            return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x

        return func(*map(move, args), **{name: move(x) for name, x in (kwargs or {}).items()})


@contextlib.contextmanager
def no_primary_context() -> Iterator[None]:
    """Let the autograd engine trace a backward although no device exists.

    It asks ``CUDAHooks::hasPrimaryContext`` for every CUDA device, which throws without one. One slot of
    the hooks object's vtable points at a function returning false for the time being. This is the only
    native change, and none is made where a device exists.
    """
    if torch.cuda.device_count() > 0:
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    get_hooks = library._ZN2at6detail12getCUDAHooksEv  # at::detail::getCUDAHooks()
    get_hooks.restype, get_hooks.argtypes = ctypes.c_void_p, []
    hooks = ctypes.c_void_p.from_address(get_hooks())
    original = hooks.value
    # Itanium ABI, AcceleratorHooksInterface.h: two destructors, isBuilt, isAvailable, hasPrimaryContext.
    slots = (ctypes.c_void_p * 5).from_address(original)
    query = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
    if not (query(slots[2])(get_hooks()) and not query(slots[3])(get_hooks())):
        raise RuntimeError(f"CUDAHooks has another layout in torch {torch.__version__}")
    entries, header = 128, 2 * ctypes.sizeof(ctypes.c_void_p)
    table = (ctypes.c_void_p * entries)()
    ctypes.memmove(table, original - header, ctypes.sizeof(table))
    answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda *_: False)
    table[2 + 4] = ctypes.cast(answer, ctypes.c_void_p).value
    hooks.value = ctypes.addressof(table) + header
    try:
        yield
    finally:
        hooks.value = original

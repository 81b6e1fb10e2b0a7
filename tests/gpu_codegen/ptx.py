"""Build recorded kernels with Triton's compiler and the ptxas in its wheel; no device is needed."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from unittest import mock

from .device import DeviceSpec, pretend


@dataclass(frozen=True)
class KernelReport:
    """One kernel, built for one of its configurations; numbers are None where ptxas does not tell."""

    name: str
    config: str
    ptx: str = ""
    warps: int | None = None
    registers: int | None = None
    stack: int | None = None
    """Bytes per thread."""

    spilled: int | None = None
    """Bytes of registers stored and loaded again, per thread."""

    shared: int | None = None
    error: str | None = None


def build(name: str, source: str, spec: DeviceSpec | None = None, every: bool = False) -> list[KernelReport]:
    """Build the first configuration of a kernel, or ``every`` one that the device would choose from."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult

    reports = []
    with pretend(spec or DeviceSpec()), contextlib.ExitStack() as stack:
        # The static launcher would load the binary onto the device.
        never = staticmethod(lambda *args, **kwargs: None)
        stack.enter_context(mock.patch.object(StaticTritonCompileResult, "can_statically_launch", never))
        tuner = getattr(PyCodeCache.load(source), name)
        configs = list(tuner.configs)
        for config in configs if every else configs[:1]:
            try:
                binary = tuner._precompile_config(config).kernel
            except Exception as error:  # a kernel that does not build is a finding, not a crash
                reports.append(KernelReport(name, str(config), error=f"{type(error).__name__}: {error}"))
                continue
            used = resources(binary.asm["ptx"])
            shape = ", ".join(f"{key} {value}" for key, value in config.kwargs.items())
            reports.append(
                KernelReport(
                    name, shape, binary.asm["ptx"], binary.metadata.num_warps, *used, binary.metadata.shared
                )
            )
    return reports


def resources(ptx: str) -> tuple[int | None, int | None, int | None]:
    """Registers, bytes of stack and of spilled registers per thread, as ptxas reports them."""
    from triton import knobs

    tool = getattr(knobs.nvidia.ptxas, "path", None)
    target = re.search(r"^\.target (\S+?),?$", ptx, re.MULTILINE)
    if not tool or target is None:
        return None, None, None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "--verbose", f"--gpu-name={target[1]}", file.name, "--output-file", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", text)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if used is None or frame is None:
        return None, None, None
    return int(used[1]), int(frame[1]), int(frame[2]) + int(frame[3])

"""See the code Inductor generates for a CUDA GPU, on a machine that has none.

    result = compile_for_cuda(model, tokens, train=True)
    result.forward.launches, result.backward.launches, result.saved_bytes
    [build(name, source) for name, source in result.kernels.items()]     # PTX and cubin, registers, stack

Nothing runs and no memory is allocated: every tensor is a ``FakeTensor`` on ``cuda:0``, and the kernels are
recorded instead of being built. So it answers how many kernels, fused how, reading, writing and saving
what. It says nothing about time, and checks no numbers.

Needs a CUDA build of PyTorch (with its Triton wheel; both import without a driver). :func:`unavailable`
says why it cannot be used.

device.py     what is replaced so that torch believes in a device
attention.py  the choice between attention kernels, which torch makes from a real device's properties
record.py     launches, bytes and saved tensors
ptx.py        Triton's own compiler over the recorded kernels
run.py        a model through torch.compile
"""

from .device import DeviceSpec, unavailable
from .ptx import KernelReport, build
from .record import Launch, Phase, Recorder, Saved
from .run import Result, compile_for_cuda, fake_cuda, to_fake_cuda

__all__ = [
    "DeviceSpec",
    "KernelReport",
    "Launch",
    "Phase",
    "Recorder",
    "Result",
    "Saved",
    "build",
    "compile_for_cuda",
    "fake_cuda",
    "to_fake_cuda",
    "unavailable",
]

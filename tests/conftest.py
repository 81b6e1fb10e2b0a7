"""Every test starts with an empty Dynamo cache, a fixed seed and one thread."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch._dynamo


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch._dynamo.reset()
    torch.compiler.set_stance("default")

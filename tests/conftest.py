"""Every test starts with an empty Dynamo cache, a fixed seed and one thread.

``slow.txt`` names further cases that are slow: each is one of several that go through the same code, and its
siblings are in every run.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch._dynamo


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    slow = {line for line in (folder / "slow.txt").read_text().splitlines() if line and line[0] != "#"}
    for item in items:
        name = f"{item.path.relative_to(folder)}::{item.name}"
        if name in slow or f"{item.path.relative_to(folder)}::{item.originalname}" in slow:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch._dynamo.reset()
    torch.compiler.set_stance("default")

"""DDP, FSDP2 and tensor parallel on two processes: loss and every gradient equal the definition in one
process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributed_worker import SCENARIOS

# One of each kind in every run; the others are slow, each starts two processes that import torch.
SAMPLE = {
    "ddp compiled, split", "fsdp, depthify first", "fsdp, checkpointing", "tensor parallel",
    "distributed checkpoint",
}  # fmt: skip


@pytest.mark.parametrize(
    "scenario", [pytest.param(s, marks=[] if s in SAMPLE else [pytest.mark.slow]) for s in SCENARIOS]
)
def test_two_processes(scenario: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here / "distributed_worker.py")]
    workers = [
        subprocess.Popen(
            [*command, scenario, str(rank), "2", str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    failed = [
        f"rank {i}:\n{text[-3000:]}"
        for i, (w, text) in enumerate(zip(workers, outputs, strict=True))
        if w.returncode
    ]
    assert not failed, "\n".join(failed)

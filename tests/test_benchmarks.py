"""The benchmarks run, on the smallest shape and without a compiler; their numbers mean nothing here."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[1] / "examples" / "benchmarks"
TINY = ("--shape", "tiny", "--device", "cpu", "--backend", "eager", "--rounds", "2", "--threads", "1")


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", str(FOLDER / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def results(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize("scenario", ["train", "prefill", "decode"])
def test_compare(scenario: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    text = run("compare.py", scenario, "--lengths", "8,12", "--json", str(out), *TINY)
    rows = results(out)
    assert [row["name"] for row in rows] == [f"{scenario}, batch 1, {n} tokens" for n in (8, 12)]
    assert all(row["vanilla_ms"] > 0 and row["low"] <= row["high"] for row in rows)
    assert text.count("ratio") == 2


def test_eager_cost(tmp_path: Path) -> None:
    run("eager_cost.py", "--lengths", "8", "--json", str(tmp_path / "out.json"), *TINY)
    assert len(results(tmp_path / "out.json")) == 2


def test_pass_time(tmp_path: Path) -> None:
    text = run("pass_time.py", "--layers", "3", "--rounds", "1", "--json", str(tmp_path / "out.json"))
    (row,) = results(tmp_path / "out.json")
    assert 0 < row["part"] < 1 and text.startswith("3 layers: capture")


def test_h200_rehearsal(tmp_path: Path) -> None:
    sizes = ("--lengths", "8,12", "--batches", "1,2", "--train", "2x8", "--minutes", "60")
    text = run("h200.py", *TINY, *sizes, "--out", str(tmp_path))
    rows = results(tmp_path / "h200.json")
    assert len(rows) == 6 and "left out" not in text
    assert len((tmp_path / "h200.csv").read_text().splitlines()) == 7
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "h200.png").read_bytes().startswith(b"\x89PNG")


def test_h200_fits_its_time() -> None:
    """By the shapes: what is planned for paper-3b takes less than the eight minutes of one loan."""
    text = run("h200.py", "--plan", "--device", "cpu", "--dtype", "bfloat16", "--minutes", "7.5")
    layers, compiling, measuring = map(
        int, re.search(r"(\d+) of 48 layers.* (\d+) s compiling, (\d+) s measuring", text).groups()
    )
    assert layers >= 24 and compiling + measuring <= 7.5 * 60
    assert text.count("s measuring") == 1 + 8


def test_beside_the_baselines(tmp_path: Path) -> None:
    run("beside.py", "train", "--length", "8", "--json", str(tmp_path / "out.json"), *TINY)
    rows = results(tmp_path / "out.json")
    assert len(rows) == 5 and [row["parameters"] == 0 for row in rows] == [True] + [False] * 4


def test_kernel_table_says_what_it_needs() -> None:
    from gpu_codegen import unavailable

    if unavailable() is None:
        pytest.skip("it can run here; see test_gpu_codegen")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "kernel_table.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "without CUDA" in done.stderr

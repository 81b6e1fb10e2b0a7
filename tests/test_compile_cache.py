"""Compiled code on disk: found again by another process, and never under other options.

Every cache of compiled graphs sees the graph that is mixed already, so the pass and its options are in its
key as far as they change the graph. What a graph does not show, recomputation, is in the names of its nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from plain import decoder, definition, tokens
from torch._dynamo.utils import counters
from depthify import depthify

way, options = sys.argv[2], json.loads(sys.argv[3])
ids = tokens()
model = decoder(torch.float32, layers=3)
if way == "plugged in":
    compiled = torch.compile(model, backend="depthify", options=options)
elif way == "attached":
    compiled = depthify(model, backend="inductor", **options)
else:
    compiled = torch.compile(depthify(model, **options))
logits = compiled(ids)[0]
logits.pow(2).mean().backward()
plain, window = decoder(torch.float32, layers=3), options.get("recent_window", 0)
expected = definition(plain, ids, options["stride"], window)
print(json.dumps({
    "wrong": float((logits - expected).abs().max() / expected.abs().max()),
    "graph hits": counters["inductor"]["fxgraph_cache_hit"],
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
    "bypassed": counters["aot_autograd"]["autograd_cache_bypass"],
}))
"""


def run(folder: Path, way: str, **options: Any) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        SCRIPT,
        str(Path(__file__).parent),
        way,
        json.dumps(options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plugged in", "attached", "outside"])
def test_hits_across_processes_and_no_hit_under_other_options(way: str, tmp_path: Path) -> None:
    first = run(tmp_path, way, stride=1)
    again = run(tmp_path, way, stride=1)
    assert (first["hits"], first["misses"], first["bypassed"]) == (0, 1, 0)
    assert (again["hits"], again["misses"], again["bypassed"]) == (1, 0, 0)
    others = [dict(stride=2), dict(stride=2, recent_window=1), dict(stride=1, recompute=True)]
    for options in others[1:] if way == "outside" else others:
        other = run(tmp_path, way, **options)
        if options != dict(stride=2, recent_window=1):  # which has the sources of stride 1, so the same graph
            assert other["hits"] == 0, options
        assert other["wrong"] < 1e-4, options
    assert max(first["wrong"], again["wrong"]) < 1e-4

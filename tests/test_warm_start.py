"""The warm start example measures what it says: the curve against the definition, tuning against a plain
loop."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from definition import logits_by_definition
from script import example
from tiny import tiny, tokens
from torch import Tensor

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
script = example("warm_start")
OPTIONS = "--steps 4 --length 10 --windows 4 --batch 2 --megabytes 0.5 --rate 0.01 --stride 2 --device cpu"


def mean_loss(logits: Tensor, ids: Tensor) -> float:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def test_the_curve_leads_from_vanilla_to_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "BIASES", (math.inf, 64.0, 2.0, 0.0))
    model, ids = tiny("qwen3"), tokens(12, 4)
    with torch.no_grad():
        vanilla = math.exp(mean_loss(model(ids).logits, ids))
        mixed = logits_by_definition(model, ids, stride=2)
    points = script.curve(model, ids, 2, 2)
    assert [p.self_bias for p in points[1:]] == [math.inf, 64.0, 2.0, 0.0] and math.isnan(points[0].self_bias)
    for point in points[:3]:
        assert point.perplexity == pytest.approx(vanilla, rel=1e-5) and point.difference < 1e-5
    assert points[4].perplexity == pytest.approx(math.exp(mean_loss(mixed, ids)), rel=1e-4)
    assert 1e-3 < points[3].difference < points[4].difference


def test_tuning_without_mixing_is_plain_tuning() -> None:
    texts = script.Windows(tokens(10, 6), tokens(10, 4, seed=7))
    twin = tiny("qwen3").train()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.0, weight_decay=0.0)
    generator, expected = torch.Generator().manual_seed(3), []
    for step in range(4):
        ids = texts.train[torch.randint(0, 6, (2,), generator=generator)]
        loss = F.cross_entropy(twin(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 4)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    model = script.depthify(tiny("qwen3"), 2, self_bias=math.inf)
    run = script.tune(
        model, "no mixing", lambda step: math.inf, texts, steps=4, batch=2, rate=0.01, seed=3, before=5.0,
        progress=lambda step: None,
    )  # fmt: skip
    assert run.train == pytest.approx(expected, rel=1e-4)
    with torch.no_grad():
        after = mean_loss(twin.eval()(texts.held_out).logits, texts.held_out)
    assert run.before == 5.0 and run.after == pytest.approx(after, rel=1e-4)


def test_schedules() -> None:
    found = script.schedules(8, 6.0, 0.75)
    falling = [found["falling self_bias"](s) for s in range(9)]
    assert falling == pytest.approx([6, 5, 4, 3, 2, 1, 0, 0, 0], abs=1e-12)
    assert {found["at once"](s) for s in range(9)} == {0.0}
    assert {found["no mixing"](s) for s in range(9)} == {math.inf}


class Letters:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [3 + byte % 90 for byte in text.encode()[:2000]]}


def test_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "BIASES", (math.inf, 1.0, 0.0))
    monkeypatch.setattr(script, "load", lambda folder, progress: (tiny("qwen3"), Letters()))
    given = ["--out", str(tmp_path), *OPTIONS.split()]
    script.main(given)
    rows = list(csv.DictReader((tmp_path / "tuning.csv").open()))
    assert len(rows) == 3 * 4 and {r["run"] for r in rows} == set(script.schedules(4, 1.0, 0.75))
    assert (tmp_path / "warm_start.png").read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "results.json").read_bytes()
    monkeypatch.setattr(script, "tune", None)  # nothing is left to tune, or to measure
    monkeypatch.setattr(script, "curve", None)
    script.main(given)
    assert (tmp_path / "results.json").read_bytes() == before
    with pytest.raises(SystemExit, match="other settings"):
        script.main([*given, "--start", "3"])

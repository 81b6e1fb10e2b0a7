"""The small reproduction runs, goes on after a stop as if there had been none, and says what it may say."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from script import example

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
script = example("train_from_scratch")
report = script.sys.modules["training_report"]

CPU = torch.device("cpu")
SETTINGS = script.Settings(
    layers=2, width=16, heads=2, kv_heads=1, length=12, batch=2, steps=5, rate=3e-3, eval_every=2, windows=5,
    megabytes=0.02,
)  # fmt: skip
OPTIONS = (
    "--layers 2 --width 16 --heads 2 --kv-heads 1 --length 12 --batch 2 --steps 4 --eval-every 2".split()
)
OPTIONS += "--windows 4 --megabytes 0.02 --device cpu".split()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    for number in range(60):
        path = folder / f"package{number % 7}" / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f{number}(x):\n    return x + {number} ** {number % 5}\n" * 8)
    (folder / "copy.py").write_bytes((folder / "package0" / "file0.py").read_bytes())
    return folder


@pytest.fixture
def text(sources: Path) -> object:
    return script.read_text([sources], 1.0)


def test_files_are_held_out_and_each_content_is_read_once(sources: Path) -> None:
    found = script.read_text([sources], 1.0)
    train, held_out = (set(bytes(part.numpy()).split(b"\0")) for part in (found.train, found.held_out))
    files = {path.read_bytes() for path in sources.rglob("*.py")}
    assert train | held_out == files and not train & held_out and len(held_out) > 0
    assert found.files == (len(train), len(held_out)) and sum(found.files) == 60
    assert script.read_text([sources], 1.0).digest == found.digest
    some = script.read_text([sources], 0.005)
    assert 5000 <= len(some.train) + len(some.held_out) < 6000
    (sources / "copy.py").write_text("something else")
    assert script.read_text([sources], 1.0).digest != found.digest


def test_python_itself_is_enough_text() -> None:
    first, again = (script.read_text(script.default_folders(), 0.3) for _ in range(2))
    assert first.digest == again.digest and 300_000 <= len(first.train) + len(first.held_out) < 900_000


def test_too_little_text_is_refused(sources: Path) -> None:
    with pytest.raises(ValueError, match="megabytes=1e-06"):
        script.read_text([sources], 1e-6)


@pytest.mark.parametrize("method", ["vanilla", "depth, stride 1", "mHC"])
def test_a_run_goes_on_as_if_it_had_not_stopped(method: str, text: object, tmp_path: Path) -> None:
    build = script.methods(2)[method]
    whole, parts = (script.Run(method, 1, tmp_path / name) for name in ("whole.pt", "parts.pt"))
    assert script.train(whole, build, SETTINGS, text, CPU)
    assert not script.train(parts, build, SETTINGS, text, CPU, go_on=lambda step: step < 2)
    assert parts.load()["step"] == 2
    assert script.train(parts, build, SETTINGS, text, CPU)
    assert script.train(parts, build, SETTINGS, text, CPU, go_on=lambda step: False)  # nothing is left to do
    expected, found = whole.load(), parts.load()
    assert [row[0] for row in expected["rows"]] == [2, 4, 5]
    assert [row[:4] for row in found["rows"]] == [row[:4] for row in expected["rows"]]
    for name, value in expected["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=0, atol=0)


def test_all_methods_begin_with_the_same_weights_and_see_the_same_text(text: object) -> None:
    states = {}
    for name, build in script.methods(2).items():
        torch.manual_seed(2)
        states[name] = build(SETTINGS.shape).state_dict()
    for state in states.values():
        for name, value in states["vanilla"].items():
            assert torch.equal(state[name], value)
    assert set(states) == {"vanilla", "depth, stride 1", "depth, stride 2", "DenseFormer",
                           "AttnRes, blocks", "mHC", "value residual"}  # fmt: skip
    one, same, other = (script.batch_at(text.train, SETTINGS, 0, step) for step in (7, 7, 8))
    assert one.shape == (2, 13) and torch.equal(one, same) and not torch.equal(one, other)


def test_strides_are_parts_of_the_depth() -> None:
    assert [n for n in script.methods(8) if n.startswith("depth")] == [
        f"depth, stride {s}" for s in (2, 4, 8, 1)
    ]


def test_the_loss_falls(text: object, tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=60, eval_every=20, batch=8, rate=1e-2)
    run = script.Run("vanilla", 0, tmp_path / "run.pt")
    script.train(run, script.methods(2)["vanilla"], settings, text, CPU)
    losses = [row[2] for row in run.load()["rows"]]
    assert losses[-1] < losses[0] < 5.6 and losses[-1] < 3.5


def test_evaluation_is_the_mean_over_all_held_out_bytes(text: object) -> None:
    torch.manual_seed(0)
    model = script.Decoder(SETTINGS.shape)
    loss, right = script.evaluate(model, text.held_out, SETTINGS, CPU)
    ids = torch.cat(list(script.held_out_batches(text.held_out, SETTINGS)))
    assert ids.shape == (5, 13)
    logs = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])
    assert loss == pytest.approx(-logs.mean().item(), rel=1e-5)
    assert right == pytest.approx((model(ids[:, :-1]).argmax(-1) == ids[:, 1:]).float().mean().item())


def test_command(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    given = ["--out", str(out), "--text", str(sources), "--seeds", "2", "--methods", "vanilla"]
    script.main([*given, "value residual", "--minutes", "0", *OPTIONS])
    assert "call again" in capsys.readouterr().out
    script.main([*given, "value residual", "depth, stride 2", *OPTIONS])
    shown = capsys.readouterr().out
    assert "depth, stride 2" in shown and "within the noise" in shown and "call again" not in shown
    rows = list(csv.DictReader((out / "curves.csv").open()))
    assert len(rows) == 3 * 2 * 2 and {row["step"] for row in rows} == {"2", "4"}
    summary = {row["method"]: row for row in csv.DictReader((out / "summary.csv").open())}
    last = [float(r["held_out_loss"]) for r in rows if r["method"] == "vanilla" and r["step"] == "4"]
    assert float(summary["vanilla"]["held_out_loss"]) == pytest.approx(sum(last) / 2, abs=1e-4)
    assert summary["depth, stride 2"]["parameters"] == summary["vanilla"]["parameters"]
    for picture in ("curves.png", "weights-depth-stride-2.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="other settings"):
        script.main([*given, *OPTIONS, "--rate", "0.1"])
    with pytest.raises(SystemExit, match="allowed are 'vanilla'"):
        script.main([*given, "no such", *OPTIONS])


def row(method: str, seed: int, loss: float) -> object:
    return report.Row(method, seed, 9, 1.0, loss, 0.5, 2.0)


def test_differences_are_told_from_noise() -> None:
    losses = {
        "vanilla": (2.0, 2.2, 1.9),
        "pairs differ alike": (1.9, 2.11, 1.79),
        "as much up as down": (1.9, 2.35, 1.9),
        "worse": (2.3, 2.51, 2.2),
    }
    rows = [row(name, seed, loss) for name, each in losses.items() for seed, loss in enumerate(each)]
    found = {r.method: r for r in report.results(rows, 9, dict.fromkeys(losses, 7))}
    assert [found[name].verdict for name in losses] == ["", "better", "within the noise", "worse"]
    difference = found["pairs differ alike"].difference
    # of -0.10, -0.09, -0.11: mean -0.1, deviation 0.01, 4.303 of its standard errors
    assert difference == pytest.approx((-0.1, 0.01, 4.303 * 0.01 / 3**0.5))
    assert found["vanilla"].loss.deviation == pytest.approx(0.152753, rel=1e-4)
    alone = report.results([row("vanilla", 0, 2.0), row("worse", 0, 9.0)], 9, {"vanilla": 7, "worse": 7})
    assert alone[1].verdict == "one seed"
    assert report.results(rows, 8, {"vanilla": 7}) == []  # not complete

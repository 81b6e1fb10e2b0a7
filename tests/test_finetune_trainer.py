"""The example of the Trainer: what it saves is the mixed model that it tuned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from definition import logits_by_definition, relative
from script import example

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

OPTIONS = (
    "--tiny --stride 1 --steps 6 --batch 2 --length 24 --windows 4 --megabytes 0.5 --cpu --quiet".split()
)
OPTIONS += ["--rate", "5e-3"]


@pytest.mark.parametrize("bf16", ["no", pytest.param("yes", marks=pytest.mark.slow)])
def test_tune_save_load_generate(bf16: str, tmp_path: Path) -> None:
    script = example("finetune_trainer")
    lines: list[str] = []
    losses = script.main(
        [*OPTIONS, "--out", str(tmp_path), "--bf16", bf16, "--new-tokens", "5"], lines.append
    )
    assert losses["mixed, tuned"] < losses["mixed, untuned"] - 0.1 and len(lines) == 4
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.use_depth_attention and config.depth_attention_stride == 1
    # The file holds the tuned weights, and what is generated is what the definition says next.
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([script.Bytes()("def main(")["input_ids"]])
    for _ in range(5):
        expected = logits_by_definition(plain, ids, stride=1)
        ids = torch.cat([ids, expected[:, -1:].argmax(-1)], 1)
    assert lines[-1] == script.Bytes().decode(ids[0])
    mixed = script.depthify(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    with torch.no_grad():
        found = mixed(ids[:, :-1], use_cache=False).logits
    assert relative(found, expected) < 1e-4 < relative(plain(ids[:, :-1]).logits, expected)


@pytest.mark.slow
def test_the_weights_that_are_saved_were_tuned_with_the_warm_start(tmp_path: Path) -> None:
    """The loss before is that of the vanilla model where self_bias is infinite."""
    script = example("finetune_trainer")
    seen: list[float] = []
    callback = script.SelfBiasCallback

    class Seen(callback):
        def on_step_begin(self, args: object, state: object, *rest: object, **given: object) -> None:
            seen.append(self.schedule(state.global_step))
            super().on_step_begin(args, state, *rest, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "SelfBiasCallback", Seen)
        losses = script.main([*OPTIONS, "--out", str(tmp_path), "--self-bias", "4"], lambda line: None)
    assert seen[:6] == pytest.approx([4, 3, 2, 1, 0, 0], abs=1e-12)
    assert losses["vanilla"] != losses["mixed, untuned"]

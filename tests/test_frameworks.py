"""Training through other people's loops: the losses are those of the definition, and resuming goes on
where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from definition import defined
from tiny import tiny, tokens
from torch import Tensor, nn
from torch.utils.data import Dataset

from depthify import depthify, explain

pytest.importorskip("accelerate")


class Texts(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = tokens(8, 1, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def _train(
    model: nn.Module, folder: Path, resume: bool = False, steps: int = 4, **options: Any
) -> list[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2,
        logging_steps=1, save_steps=2, report_to=[], lr_scheduler_type="constant", use_cpu=True,
        disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts())
    trainer.train(resume_from_checkpoint=resume)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    with defined(tiny("qwen3"), 2) as twin:
        return _train(twin, tmp_path_factory.mktemp("definition"))


@pytest.mark.parametrize(
    ("compiled", "checkpointed"),
    [
        (False, False),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
        (True, True),
    ],
)
def test_trainer(compiled: bool, checkpointed: bool, expected: list[float], tmp_path: Path) -> None:
    model = depthify(tiny("qwen3"), 2)
    options: dict[str, Any] = {"gradient_checkpointing": checkpointed}
    if compiled:
        options |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    losses = _train(model, tmp_path, **options)
    assert losses == pytest.approx(expected, rel=2e-4)
    assert len(explain(model).layers) == 4


def test_trainer_in_bfloat16(expected: list[float], tmp_path: Path) -> None:
    losses = _train(depthify(tiny("qwen3"), 2), tmp_path, bf16=True)
    assert losses == pytest.approx(expected, rel=5e-2)


def test_resuming_goes_on_where_training_stopped(expected: list[float], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    first = _train(depthify(tiny("qwen3"), 2), tmp_path, steps=2)
    again = depthify(tiny("qwen3", seed=5), 2)
    rest = _train(again, tmp_path, resume=True)
    assert first + rest[-2:] == pytest.approx(expected, rel=2e-4)
    saved = depthify(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")).eval()
    assert saved.config.depth_attention_stride == 2
    again.eval()
    with torch.no_grad():
        torch.testing.assert_close(saved(tokens()).logits, again(tokens()).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("regions", ["model", "block"])
def test_accelerate(regions: str) -> None:
    from accelerate import Accelerator

    ids = tokens()
    with defined(tiny("qwen3"), 2) as twin:
        twin.train()
        wanted = twin(ids, labels=ids, use_cache=False).loss
        wanted.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1e9)
    accelerator = Accelerator(cpu=True)
    model = depthify(tiny("qwen3").train(), 2, regions=regions)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        loss = model(ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        found = accelerator.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-4)
    assert float(found) == pytest.approx(float(norm), rel=1e-4)


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = depthify(tiny("qwen3"), 2)
            self.losses: list[float] = []

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = self.model(**batch, use_cache=False).loss
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Texts(), batch_size=4))
    batch = {k: torch.stack([Texts()[i][k] for i in range(4)]) for k in ("input_ids", "labels")}
    with defined(tiny("qwen3"), 2) as twin:
        assert module.losses[0] == pytest.approx(float(twin(**batch, use_cache=False).loss), rel=1e-4)

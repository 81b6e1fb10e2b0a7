"""Train a mixed decoder with FSDP2, activation checkpointing and torch.compile, on CPU processes or GPUs
alike.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py --steps 20

The order of a large training run: checkpoint each block, shard each block, compile. Sharding puts hooks
between the blocks that no capture can go through, so each block is captured on its own (regions="block")
and the sources' keys and values go from block to block as ordinary tensors. Text: Python's own standard
library, byte by byte.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from depthify import depthify


def text(count: int) -> Tensor:
    """The first ``count`` bytes of the standard library's sources."""
    chunks, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data = path.read_bytes()
        chunks.append(data)
        size += len(data)
        if size >= count:
            break
    return torch.frombuffer(bytearray(b"".join(chunks)[:count]), dtype=torch.uint8).long()


def build(layers: int, width: int) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--stride", type=int, help="default: half the layers")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences per process and step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--vanilla", action="store_true", help="without mixing, to compare")
    parser.add_argument("--compile", action="store_true", help="compile the blocks with Inductor")
    given = parser.parse_args()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))

    model = build(given.layers, given.width).to(device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if not given.vanilla:
        depthify(model, given.stride, regions="block", backend="inductor" if given.compile else "eager")
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if gpu
        else MixedPrecisionPolicy()
    )
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    data = text(1 << 20)
    generator = torch.Generator().manual_seed(1000 + rank)
    for step in range(given.steps):
        began = time.perf_counter()
        starts = torch.randint(0, len(data) - given.length, (given.batch,), generator=generator)
        ids = torch.stack([data[i : i + given.length] for i in starts]).to(device)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        if rank == 0 and (step % 5 == 0 or step == given.steps - 1):
            seconds = time.perf_counter() - began
            print(
                f"step {step:4d}  loss {mean.item() / dist.get_world_size():.4f}  {seconds:.2f} s", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What each process of test_distributed.py runs: one scenario on two gloo processes, checked against one
process.

python distributed_worker.py SCENARIO RANK WORLD STORE
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from plain import Decoder, decoder, definition, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from depthify import depthify, explain

STRIDE = 2


def _batches(world: int) -> list[Tensor]:
    return [tokens(6, 2, seed=rank) for rank in range(world)]


def _loss(logits: Tensor) -> Tensor:
    return logits.square().mean()


def _expected(world: int, steps: int = 1) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of each rank, and the mean gradient, by the definition in one process."""
    model = decoder()
    losses = []
    for ids in _batches(world):
        loss = _loss(definition(model, ids, STRIDE)) * steps
        (loss / world).backward()
        losses.append(loss.detach() / steps)
    return losses, {name: p.grad for name, p in model.named_parameters()}


def _check(rank: int, world: int, loss: Tensor, named: Any, steps: int = 1) -> None:
    losses, gradients = _expected(world, steps)
    torch.testing.assert_close(loss.detach(), losses[rank], rtol=1e-9, atol=1e-9)
    for name, p in named:
        found = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        name = (
            name.removeprefix("module.").removeprefix("_orig_mod.").replace("_checkpoint_wrapped_module.", "")
        )
        torch.testing.assert_close(
            found, gradients[name], rtol=1e-7, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


def ddp(rank: int, world: int, **options: Any) -> None:
    compiled, split = options.pop("compiled", False), options.pop("split", True)
    accumulate = options.pop("accumulate", False)
    model = nn.parallel.DistributedDataParallel(depthify(decoder(), STRIDE), **options)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    ids = _batches(world)[rank]
    with torch._dynamo.config.patch(optimize_ddp=split):
        if accumulate:
            with model.no_sync():
                _loss(run(ids)[0]).backward()
        loss = _loss(run(ids)[0])
        loss.backward()
    _check(rank, world, loss, model.named_parameters(), steps=2 if accumulate else 1)


class Checkpointed(Decoder):
    def forward(self, ids: Tensor, past: Any = None) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: b(y)[0], x, use_reentrant=False)
        return self.head(x), []


def fsdp(rank: int, world: int, order: str = "depthify first", **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = decoder()
    if options.get("checkpointed"):
        model.__class__ = Checkpointed
    # An outer compile is cut at every hook, so the choice cannot be left to the first capture.
    regions = "block" if options.get("compiled") else "auto"
    if order == "depthify first":
        depthify(model, STRIDE, regions=regions)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if order == "shard first":
        depthify(model, STRIDE, regions=regions)
    run: Callable[..., Any] = torch.compile(model, backend="aot_eager") if options.get("compiled") else model
    ids = _batches(world)[rank]
    steps = 1
    if options.get("accumulate"):
        model.set_requires_gradient_sync(False)
        _loss(run(ids)[0]).backward()
        model.set_requires_gradient_sync(True)
        steps = 2
    loss = _loss(run(ids)[0])
    loss.backward()
    _check(rank, world, loss, model.named_parameters(), steps)
    if not options.get("compiled"):
        assert "captured block by block" in explain(model).notes[0]
    ids = _batches(world)[rank]
    with torch.no_grad():  # a second step after an update of the weights
        for p in model.parameters():
            p.sub_(0.01 * p.grad)
        run(ids)


def fsdp_mixed_precision(rank: int, world: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    twin, model = decoder(torch.float32), decoder(torch.float32)
    ids = _batches(world)[rank]
    expected = definition(copy.deepcopy(twin).bfloat16(), ids, STRIDE).float()
    exact = definition(twin, ids, STRIDE)
    depthify(model, STRIDE)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    found = model(ids)[0].float()
    scale = exact.abs().max()
    assert (found - exact).abs().max() / scale < 2 * (expected - exact).abs().max() / scale + 1e-2
    _loss(found).backward()
    assert all(p.grad is not None for p in model.parameters())


def tensor_parallel(rank: int, world: int, sharded: bool = False) -> None:
    """Heads split over processes: each mixes its own heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(
        "cpu", (1, world) if sharded else (world,), mesh_dim_names=("dp", "tp")[-(1 + sharded) :]
    )
    model = decoder()
    for block in model.blocks:
        plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        block.attention.heads //= world
        block.attention.kv_heads //= world
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    depthify(model, STRIDE)
    ids = tokens(6, 2, seed=0)
    loss = _loss(model(ids)[0])
    loss.backward()
    losses, gradients = _expected(1)
    torch.testing.assert_close(loss.detach(), losses[0], rtol=1e-9, atol=1e-9)
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(
            grad, gradients[name], rtol=1e-7, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


def checkpoint_files(rank: int, world: int) -> None:
    """torch.distributed.checkpoint: what a vanilla run saved, a mixed one loads, and the other way round."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    folder = os.path.join(os.path.dirname(sys.argv[4]), "dcp")

    def sharded(seed: int, mixed: bool) -> nn.Module:
        model = decoder(seed=seed)
        if mixed:
            depthify(model, STRIDE)
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    saved, loaded = sharded(1, mixed=False), sharded(2, mixed=True)
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    state = loaded.state_dict()
    assert state.keys() == saved.state_dict().keys()
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    ids = _batches(world)[rank]
    torch.testing.assert_close(loaded(ids)[0], definition(decoder(seed=1), ids, STRIDE), rtol=1e-9, atol=1e-9)


SCENARIOS: dict[str, Callable[[int, int], None]] = {
    "ddp": ddp,
    "ddp static graph": lambda r, w: ddp(r, w, static_graph=True),
    "ddp unused parameters": lambda r, w: ddp(r, w, find_unused_parameters=True),
    "ddp accumulation": lambda r, w: ddp(r, w, accumulate=True),
    "ddp compiled, split": lambda r, w: ddp(r, w, compiled=True, split=True),
    "ddp compiled, whole": lambda r, w: ddp(r, w, compiled=True, split=False),
    "fsdp, depthify first": fsdp,
    "fsdp, shard first": lambda r, w: fsdp(r, w, "shard first"),
    "fsdp, checkpointing": lambda r, w: fsdp(r, w, checkpointed=True),
    "fsdp, accumulation": lambda r, w: fsdp(r, w, accumulate=True),
    "fsdp, compiled outside": lambda r, w: fsdp(r, w, compiled=True),
    "fsdp, mixed precision": fsdp_mixed_precision,
    "tensor parallel": tensor_parallel,
    "fsdp and tensor parallel": lambda r, w: tensor_parallel(r, w, sharded=True),
    "distributed checkpoint": checkpoint_files,
}


def main() -> None:
    name, rank, world, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        SCENARIOS[name](rank, world)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

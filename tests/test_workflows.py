"""What people do with models: copy, save, load, generate, adapt, distribute. Mixing holds and nothing else
changes."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from definition import defined, logits_by_definition, relative
from plain import decoder, definition
from plain import tokens as plain_tokens
from tiny import tiny, tokens
from torch import nn

from depthify import depthify, explain, restore

IDS = tokens()


def _logits(model: nn.Module, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False, **inputs).logits


def test_nothing_visible_changes_and_restore_undoes_all() -> None:
    model = tiny("qwen3")
    vanilla = _logits(model)
    names = {k: v.data_ptr() for k, v in model.state_dict(keep_vars=True).items()}
    kinds = [type(m) for m in model.modules()]
    config = model.config.to_dict()
    mixed = depthify(model, 2)
    assert mixed is model
    assert {k: v.data_ptr() for k, v in model.state_dict(keep_vars=True).items()} == names
    assert all(
        isinstance(m, kind) and type(m).__name__ == kind.__name__
        for m, kind in zip(model.modules(), kinds, strict=True)
    )
    assert relative(_logits(model), vanilla) > 1e-2
    restore(model)
    assert [type(m) for m in model.modules()] == kinds
    assert model.config.to_dict() == config
    assert torch.equal(_logits(model), vanilla)


def test_deepcopy_computes_with_its_own_weights() -> None:
    model = depthify(tiny("qwen3"), 2)
    original = _logits(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    expected = logits_by_definition(restore(copy.deepcopy(twin)), IDS, stride=2)
    assert relative(_logits(twin), expected) < 1e-4
    assert torch.equal(_logits(model), original)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_whole_model_pickles_stay_mixed(how: str) -> None:
    model = depthify(decoder(), 2)
    ids = plain_tokens()
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        torch.testing.assert_close(twin(ids)[0], definition(decoder(), ids, 2), rtol=1e-10, atol=1e-10)
    assert explain(twin, ids).stride == 2


def test_state_dict_loads_both_ways(tmp_path: Path) -> None:
    vanilla, mixed = tiny("qwen3", seed=3), depthify(tiny("qwen3", seed=4), 2)
    torch.save(vanilla.state_dict(), tmp_path / "v.pt")
    mixed.load_state_dict(torch.load(tmp_path / "v.pt"), strict=True)
    assert relative(_logits(mixed), logits_by_definition(vanilla, IDS, stride=2)) < 1e-4
    vanilla.load_state_dict(pickle.loads(pickle.dumps(mixed.state_dict())), strict=True)


def test_save_pretrained_records_the_configuration(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = depthify(tiny("qwen3"), 3, recent_window=1)
    expected = _logits(model)
    model.save_pretrained(tmp_path)
    assert '"Qwen3ForCausalLM"' in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert (
        loaded.config.use_depth_attention,
        loaded.config.depth_attention_stride,
        loaded.config.depth_attention_recent_window,
    ) == (True, 3, 1)
    depthify(loaded)
    assert torch.equal(_logits(loaded), expected)
    assert explain(loaded).stride == 3 and explain(loaded).recent_window == 1
    assert explain(depthify(restore(loaded), 1), IDS).stride == 1


@pytest.mark.parametrize("mode", ["train", "no_grad", "inference_mode", "grad"])
def test_gradient_modes(mode: str) -> None:
    model = depthify(decoder(), 2)
    ids = plain_tokens()
    expected = definition(decoder(), ids, 2)
    model.train(mode == "train")
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)
    for _ in range(2):
        with context():
            logits = model(ids)[0]
        torch.testing.assert_close(logits.detach(), expected.detach(), rtol=1e-10, atol=1e-10)
        assert logits.requires_grad == (mode in ("train", "grad"))


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_autocast(where: str) -> None:
    model = tiny("qwen3")

    def run(which: nn.Module) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return which(IDS, use_cache=False).logits

    with defined(model, 2) as twin:
        expected, exact = run(twin), _logits(twin)
    depthify(model, 2)
    if where == "inside":
        logits = torch.compile(run, backend="eager", fullgraph=True)(model)
    else:
        logits = run(model)
    assert relative(logits, exact) < 1.5 * relative(expected, exact) + 1e-3


def test_inputs_embeds_and_left_padding() -> None:
    model = tiny("llama", torch.float64)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = logits_by_definition(model, IDS, stride=2, attention_mask=mask, position_ids=positions)
    depthify(model, 2)
    embeds = model.get_input_embeddings()(IDS)
    with torch.no_grad():
        logits = model(
            inputs_embeds=embeds, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
        alone = model(IDS[:1, 3:], use_cache=False).logits
    seen = mask.bool()
    assert relative(logits[seen], expected[seen]) < 1e-10
    assert relative(logits[:1, 3:], alone) < 1e-6, "padding must not reach the tokens"


def _greedy(model: nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy decoding by definition, with full forwards only."""
    with defined(model, 2) as twin, torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, twin(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_is_greedy_decoding_of_the_definition(cache: str | None) -> None:
    model = tiny("qwen3", torch.float64)
    model.generation_config.eos_token_id = None
    expected = _greedy(model, IDS, 6)
    depthify(model, 2)
    options = {"cache_implementation": cache} if cache else {}
    found = model.generate(IDS, max_new_tokens=6, do_sample=False, **options)
    assert torch.equal(found, expected)


def test_beam_search_equals_itself_without_a_cache() -> None:
    model = depthify(tiny("qwen3", torch.float64), 2)
    model.generation_config.eos_token_id = None
    options = dict(max_new_tokens=4, num_beams=3, do_sample=False)
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_cache=False, **options))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hidden_states_and_attentions(attention: str) -> None:
    model = tiny("llama", torch.float64, attention)
    with defined(model, 2, attention=attention) as twin, torch.no_grad():
        expected = twin(IDS, use_cache=False, output_hidden_states=True)
    depthify(model, 2)
    with torch.no_grad():
        found = model(IDS, use_cache=False, output_hidden_states=True, output_attentions=attention == "eager")
    assert len(found.hidden_states) == 5
    for a, b in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert relative(a, b) < 1e-10
    if attention == "eager":
        assert [tuple(a.shape) for a in found.attentions] == [(2, 4, 8, 8)] * 4


@pytest.mark.parametrize("order", ["depthify, then adapters", "adapters, then depthify"])
def test_lora(order: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0
    )
    torch.manual_seed(5)
    if order.startswith("depthify"):
        model = peft.get_peft_model(depthify(tiny("qwen3"), 2), config).eval()
    else:
        model = depthify(peft.get_peft_model(tiny("qwen3"), config).eval(), 2)
    found = _logits(model)
    plain = restore(copy.deepcopy(model)).merge_and_unload()
    assert relative(found, logits_by_definition(plain, IDS, stride=2)) < 1e-4
    merged = model.merge_and_unload()
    assert relative(_logits(merged), found) < 1e-4, "still mixed after merging"
    assert relative(_logits(restore(merged)), found) > 1e-2


def test_adapters_train() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(depthify(tiny("qwen3"), 2), config)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_ddp_splits_a_graph_that_is_mixed_already(process_group: None, compiled: bool, split: bool) -> None:
    model = decoder(width=256)
    ids = plain_tokens()
    expected = definition(copy.deepcopy(model), ids, 2)
    wrapped = nn.parallel.DistributedDataParallel(depthify(model, 2), bucket_cap_mb=1)
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(module.graph.nodes))
        return module.forward

    with torch._dynamo.config.patch(optimize_ddp=split):
        run = torch.compile(wrapped, backend=backend) if compiled else wrapped
        logits = run(ids)[0]
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    if compiled:
        assert (len(graphs) > 1) == split
    logits.sum().backward()
    expected.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_inductor_computes_the_definition(kind: str) -> None:
    model = tiny(kind)
    expected = logits_by_definition(model, IDS, stride=2)
    depthify(model, 2, backend="inductor")
    assert relative(_logits(model), expected) < 1e-4


def test_inductor_small() -> None:
    model = decoder(torch.float32, layers=2)
    ids = plain_tokens()
    expected = definition(model, ids, 1)
    logits = depthify(model, 1, backend="inductor")(ids)[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

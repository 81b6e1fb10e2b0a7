"""Models with several stacks: each is a depth of its own, and ``where`` names the one to mix."""

from __future__ import annotations

from typing import Any

import pytest
import styles
import torch
import torch.nn.functional as F
from definition import relative
from eager_definition import by_definition, exact_backend
from torch import Tensor, nn

from depthify import depthify, explain, restore
from depthify.errors import NotMixedError, OptionError, UnsupportedModelError

SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
)


class TwoStacks(nn.Module):
    """Two decoders that read the same tokens; their logits are added."""

    def __init__(self) -> None:
        super().__init__()
        self.left = styles.Decoder(styles.FusedSplit, learned_positions=True)
        self.right = styles.Decoder(styles.FusedSplit, learned_positions=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.left(ids) + self.right(ids)


def bart() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=96, d_model=64, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64,
    )  # fmt: skip
    inputs = {"input_ids": styles.tokens(7), "decoder_input_ids": styles.tokens(9, seed=2)}
    return BartForConditionalGeneration(config).double().eval(), inputs


def llava() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=28, patch_size=14, projection_dim=64, **vision),
        text_config=LlamaConfig(vocab_size=96, max_position_embeddings=64, **SIZES),
        image_token_index=95,
    )
    ids = styles.tokens(9)
    ids[:, 1:5] = 95
    image = torch.randn(2, 3, 28, 28, dtype=torch.double, generator=torch.Generator().manual_seed(3))
    return LlavaForConditionalGeneration(config).double().eval(), {"input_ids": ids, "pixel_values": image}


@pytest.mark.parametrize(("build", "stack"), [(bart, "model.decoder"), (llava, "model.language_model")])
def test_only_the_text_decoder_is_mixed(build: Any, stack: str) -> None:
    """The definition counts all causal attention below the decoder's path, and nothing else."""
    torch.manual_seed(0)
    model, inputs = build()
    options = {name: x for name, x in inputs.items() if name != "input_ids"}
    expected, seen = by_definition(model, inputs["input_ids"], 2, stack=stack, exact=True, **options)
    assert [x.mixed for x in seen].count(True) == 4
    with torch.no_grad():
        vanilla = model(**inputs, use_cache=False).logits
        depthify(model, 2, budget=float("inf"), where=stack, backend=exact_backend)
        logits = model(**inputs, use_cache=False).logits
    assert len(explain(model).layers) == 4
    assert relative(logits, expected) < 1e-10
    assert relative(vanilla, expected) > 1e-6


def test_where_names_one_of_two_stacks_and_without_it_each_is_its_own_depth() -> None:
    ids = styles.tokens()
    model = styles.decoder(TwoStacks)
    left, _ = by_definition(model.left, ids, 2)
    right, _ = by_definition(model.right, ids, 2)
    with torch.no_grad():
        vanilla = model.right(ids)
        both = depthify(styles.decoder(TwoStacks), 2, budget=float("inf"))
        assert relative(both(ids), left + right) < 1e-10
        assert {(x.stack, x.depth) for x in explain(both).layers} == {
            (s, d) for s in (0, 1) for d in range(4)
        }
        one = depthify(styles.decoder(TwoStacks), 2, budget=float("inf"), where="left")
        assert relative(one(ids), left + vanilla) < 1e-10
    assert len(explain(one).layers) == 4


def test_explain_takes_where_and_the_path_of_the_list() -> None:
    model = styles.decoder(TwoStacks)
    assert len(explain(model, styles.tokens(), where="right.blocks").layers) == 4


@pytest.mark.parametrize("where", ["middle", "left.norm", 3])
def test_a_wrong_path_is_an_error_that_lists_the_right_ones(where: Any) -> None:
    with pytest.raises(OptionError, match=r"where=.*lists of blocks are: 'left.blocks', 'right.blocks'"):
        depthify(styles.decoder(TwoStacks), 2, where=where)


def test_where_and_blocks_exclude_each_other() -> None:
    model = styles.decoder(TwoStacks)
    with pytest.raises(OptionError, match="give one of them"):
        depthify(model, 2, where="left", blocks=list(model.left.blocks))


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids)


def two_stacks_of_transformers() -> type[nn.Module]:
    """Without a name for the stack, both are mixed."""
    from transformers import PreTrainedConfig, PreTrainedModel

    class TwoStacksModel(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.stacks = TwoStacks()
            self.post_init()

        def forward(self, ids: Tensor) -> Tensor:
            return self.stacks(ids)

    return TwoStacksModel


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_saved_model_is_mixed_in_the_same_stack(wrapped: bool, tmp_path: Any) -> None:
    kind, ids = two_stacks_of_transformers(), styles.tokens()
    model = kind(kind.config_class()).double().eval()
    path = "inner.stacks.left" if wrapped else "stacks.left"
    mixed = depthify(Wrapped(model) if wrapped else model, 2, budget=float("inf"), where=path)
    with torch.no_grad():
        expected = mixed(ids)
    assert len(explain(mixed).layers) == 4 and model.config.depth_attention_where == "stacks.left"
    model.save_pretrained(tmp_path)

    again = kind.from_pretrained(tmp_path, dtype=torch.double).eval()
    assert len(explain(again, ids).layers) == 4
    depthify(again, budget=float("inf"))
    with torch.no_grad():
        assert relative(again(ids), expected) < 1e-12
    restore(again)
    assert not hasattr(again.config, "depth_attention_where")
    assert len(explain(again, ids).layers) == 8


def test_a_recorded_stack_that_is_not_there_is_an_error() -> None:
    kind = two_stacks_of_transformers()
    model = kind(kind.config_class(use_depth_attention=True, depth_attention_where="middle"))
    with pytest.raises(OptionError, match="where='middle'"):
        depthify(model, 2)
    model.config.depth_attention_where = 3
    with pytest.raises(OptionError, match="config is not usable"):
        depthify(model, 2)


class OneAfterTheOther(nn.Module):
    """One forward runs both lists of blocks."""

    def __init__(self) -> None:
        super().__init__()
        first = styles.Decoder(styles.FusedSplit, learned_positions=True)
        self.embed, self.norm, self.head, self.first = first.embed, first.norm, first.head, first.blocks
        self.second = styles.Decoder(styles.FusedSplit, learned_positions=True).blocks

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in [*self.first, *self.second]:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("regions", ["model", "block"])
@pytest.mark.parametrize("by", ["where", "blocks"])
def test_only_the_named_list_of_one_module_is_mixed(by: str, regions: str) -> None:
    ids = styles.tokens()
    model = styles.decoder(OneAfterTheOther)
    expected, _ = by_definition(model, ids, 2)
    named: dict[str, Any] = {"where": "second"} if by == "where" else {"blocks": list(model.second)}
    depthify(model, 2, budget=float("inf"), regions=regions, **named)
    with torch.no_grad():
        found = model(ids)
    assert relative(found, expected) > 1e-3  # which mixes both as one depth
    report = explain(model, ids)
    assert [x.module[:8] for x in report.layers] == [f"second.{i}" for i in range(4)]
    assert [x.sources for x in report.layers] == [(), (0,), (0,), (0, 2)]
    assert sum("outside" in x.reason for x in report.refusals) == 4

    # The blocks of the first list run as they are; those of the second, on what the first gives, are a model.
    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.norm, self.head = model.second, model.norm, model.head

        def forward(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return self.head(self.norm(hidden))

    restore(model)
    with torch.no_grad():
        hidden = model.embed(ids)
        for block in model.first:
            hidden = block(hidden)
    exact, _ = by_definition(Second(), hidden, 2)
    assert relative(found, exact) < 1e-10


def test_all_blocks_named_from_two_lists_are_one_depth() -> None:
    ids = styles.tokens()
    model = styles.decoder(OneAfterTheOther)
    expected, _ = by_definition(model, ids, 2)
    depthify(model, 2, budget=float("inf"), blocks=[*model.first, *model.second])
    with torch.no_grad():
        assert relative(model(ids), expected) < 1e-10


class OneForKeyAndValue(nn.Module):
    """Its value cannot change without its key."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(styles.WIDTH, styles.WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (styles.HEADS, -1)).transpose(1, 2) for p in self.project)
        return F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(2)


def test_what_cannot_be_mixed_elsewhere_does_not_matter() -> None:
    ids, model = styles.tokens(), styles.decoder(OneAfterTheOther)
    for block in model.first:
        block.attention = OneForKeyAndValue().double()
    with pytest.raises(UnsupportedModelError, match="its key and its value are one tensor"):
        explain(model, ids)
    depthify(model, 2, budget=float("inf"), where="second")(ids)
    refusals = explain(model).refusals
    assert len(refusals) == 4 and not any(x.unsupported for x in refusals)
    assert all("outside" in x.reason and "one tensor" in x.reason for x in refusals)


def test_blocks_of_several_stacks_raise_on_their_own_once_they_are_known() -> None:
    ids, model = styles.tokens(), styles.decoder(OneAfterTheOther)
    depthify(model, 2, budget=float("inf"))
    with torch.no_grad():
        expected = model(ids)
        hidden = model.embed(ids)
        for block in (model.first[0], model.second[0]):
            with pytest.raises(NotMixedError, match="on its own"):
                block(hidden)
        assert torch.equal(model(ids), expected)
        assert relative(model(ids[:, :5]), expected[:, :5]) < 1e-12  # captured again, with the guards
        restore(model)
        model.first[0](hidden)

"""Models with several stacks: each is a depth of its own, and ``where`` names the one to mix."""

from __future__ import annotations

from typing import Any

import pytest
import styles
import torch
from definition import relative
from eager_definition import by_definition, exact_backend
from torch import Tensor, nn

from depthify import depthify, explain
from depthify.errors import OptionError

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

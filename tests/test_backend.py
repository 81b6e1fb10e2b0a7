"""The torch.compile plug-in: found without an import, mixes whole captures, refuses parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import decoder, definition, tokens
from torch import Tensor, nn

from depthify.errors import NotMixedError, OptionError, UnsupportedModelError

IDS = tokens()


def _compile(target: Any, fullgraph: bool = False, **options: Any) -> Any:
    options = {"stride": 2, "backend": "eager", **options}
    return torch.compile(target, backend="depthify", options=options, fullgraph=fullgraph)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", lambda gm, inputs: gm.forward])
def test_mixes_a_whole_model(inner: Any, fullgraph: bool) -> None:
    model = decoder()
    logits, _ = _compile(model, fullgraph, backend=inner)(IDS)
    torch.testing.assert_close(logits, definition(model, IDS, 2), rtol=1e-10, atol=1e-10)
    assert type(model).__name__ == "Decoder" and not hasattr(model, "_depthify"), (
        "the model itself is untouched"
    )


def test_mixes_a_train_step() -> None:
    model = decoder()

    def step(ids: Tensor) -> Tensor:
        return model(ids)[0].pow(2).mean()

    loss = _compile(step, backend="aot_eager")(IDS)
    torch.testing.assert_close(loss, definition(model, IDS, 2).pow(2).mean(), rtol=1e-10, atol=1e-10)
    loss.backward()


def test_inductor_is_the_default() -> None:
    model = decoder(torch.float32, layers=2)
    compiled = torch.compile(model, backend="depthify", options={"stride": 1})
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS)[0], definition(model, IDS, 1), rtol=1e-4, atol=1e-4)


def test_is_found_by_its_name_alone() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch\nfrom plain import decoder, tokens\n"
        "for name in [n for n in sys.modules if n.startswith('depthify')]: del sys.modules[name]\n"
        "model = decoder()\n"
        "f = torch.compile(model, backend='depthify', options={'stride': 2, 'backend': 'eager'})\n"
        "print(bool((f(tokens())[0] - model(tokens())[0]).abs().max() > 1e-3))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"


class Breaking(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        torch._dynamo.graph_break()
        return self.inner(*args)


@pytest.mark.parametrize("where", ["in a block", "before the model", "after the model", "disabled block"])
def test_parts_are_refused(where: str) -> None:
    model = decoder()
    target: Any = model
    if where == "in a block":
        model.blocks[2].mlp = Breaking(model.blocks[2].mlp)
    elif where == "disabled block":
        model.blocks[1].forward = torch.compiler.disable(model.blocks[1].forward)
    elif where == "before the model":
        target = Breaking(model)
    else:

        def target(ids: Tensor) -> Tensor:
            logits = model(ids)[0]
            torch._dynamo.graph_break()
            return logits + 1

    with pytest.raises(NotMixedError, match="part of the program"):
        _compile(target)(IDS)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stride": 0}, "stride=0"),
        ({"strid": 2}, "options=.*strid"),
        ({"recent_window": -1}, "recent_window=-1"),
        ({"backend": "nonsense"}, "nonsense"),
        ({"backend": "depthify"}, "cannot be depthify itself"),
        ({"backend": "eager", "options": {"x": 1}}, "neither options nor mode"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        _compile(decoder(), **options)(IDS)


def test_no_attention() -> None:
    with pytest.raises(UnsupportedModelError, match="no causal self-attention"):
        _compile(lambda x: torch.softmax(x, -1) @ x)(torch.randn(3, 3))


def test_recompiles_mix_again() -> None:
    model = decoder()
    compiled = _compile(model)
    for length in (2, 3, 5, 6):
        ids = tokens(length)
        torch.testing.assert_close(compiled(ids)[0], definition(model, ids, 2), rtol=1e-10, atol=1e-10)

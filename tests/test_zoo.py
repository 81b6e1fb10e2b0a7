"""Every causal language model of transformers: mixed and equal to the definition, or refused, as recorded.

``zoo_results.json`` is what ``zoo_table.py`` found; the README's support table is made of it. The sample
has one model for every way in which value, attention and cache are spelled; ``-m slow`` runs all.
"""

from __future__ import annotations

import json
import re

import pytest
import zoo
import zoo_table

RESULTS = json.loads(zoo_table.RESULTS.read_text())
FINE = {"ok", "refused", "not captured", "not in vanilla", "not built"}

# The parts say what the model is here for.
SAMPLE = {
    "gpt_oss": "cached",  # a sink among the scores; windows in turn with full attention
    "bloom": "cached",  # baddbmm with a position bias; query, key and value interleaved in one projection
    "mpt": "full",  # scores plus a bias, three chunks of a projection
    "falcon@new": "cached",  # heads repeated before the cache
    "jetmoe": "full",  # repeated by tiling; query heads chosen by a router
    "diffllama": "full",  # two attentions per layer share a value: refused
    "gemma4_text@shared": "full",  # heads of another size in some layers; layers that reuse keys and values
    "inkling_text": "full",  # a convolution between value and cache
    "xlnet": "full",  # einsum, tokens first, relative positions
    "gpt_neox": "eager",  # partial rotation, written out
    "deepseek_v3": "full,cached",  # latent cache: right without it, refused with it
    "bart@cross": "cached",  # cross-attention is left out
    "llama4_text": "shift",  # layers without positions
    "doge": "full",  # the value makes the mask as well: refused
    "cpmant": "full",  # not causal
    "mamba": "full",  # no attention
}


def every() -> list[object]:
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in zoo.names()]


@pytest.mark.parametrize("name", every())
def test_as_recorded(name: str) -> None:
    expected = RESULTS[name]
    known = ",".join(part for part in ("full", "eager", "cached") if part in expected) or "full"
    parts = tuple(SAMPLE.get(name, known).split(","))
    result = zoo_table.check_apart(name, parts)
    found = zoo_table.statuses(result)
    assert found.keys() == {"all"} or found.keys() <= set(parts)
    for part, status in found.items():
        recorded = expected if part == "all" else expected[part]
        assert status == recorded.get("status"), result
        if "sites" in recorded:
            assert result[part]["sites"] == recorded["sites"]


def test_nothing_recorded_is_wrong() -> None:
    assert set(RESULTS) == set(zoo.names()), "run zoo_table.py check"
    for name, result in RESULTS.items():
        for part, status in zoo_table.statuses(result).items():
            assert status in FINE, f"{name}, {part}: {status}"
            if status == "refused":
                assert len(result[part]["reason"]) > 40, name


def test_most_of_what_can_be_captured_is_mixed() -> None:
    counts = zoo_table.counts(RESULTS)
    assert counts["wrong"] == counts["cached wrong"] == counts["written out wrong"] == 0
    assert counts["right"] >= 0.95 * (counts["captured"] - counts["without"])


def test_the_page_holds_this_table() -> None:
    page = zoo_table.RESULTS.parent.parent / "README.md"
    text = page.read_text()
    body = re.search(f"{zoo_table.BEGIN}\n(.*)\n{zoo_table.END}", text, re.DOTALL)
    assert body is not None and body[1] == zoo_table.body(RESULTS), "run zoo_table.py write README.md"

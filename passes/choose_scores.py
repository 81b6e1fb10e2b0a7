"""Where the depth scores of a stack are taken: before the rotary embedding if that is known, else after
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import UnsupportedModelError
from .axes import flat
from .find_rotary import NoRotation, RotaryFinder, Rotation, UnknownRotation, narrowed
from .nodes import describe
from .sites import AttentionSite, Score


@dataclass(frozen=True)
class Scores:
    """One :class:`Score` per site, and how they were chosen."""

    scores: tuple[Score, ...]
    place: str
    """``"before rotation"``, ``"after position embedding"`` or ``"no position embedding"``."""

    note: str


def choose_scores(sites: Sequence[AttentionSite], finder: RotaryFinder) -> Scores:
    """Score every layer before its rotation, or, where rotations are not recognised, every layer after it.

    Raises:
        UnsupportedModelError: some layers use positions in a way that is not recognised and others in
        another way, so
            that a score between them would depend on absolute positions.
    """
    chosen = _choose(sites, finder)
    scores = tuple(_one_key_per_head(x, site) for x, site in zip(chosen.scores, sites, strict=True))
    return replace(chosen, scores=scores)


def _one_key_per_head(score: Score, site: AttentionSite) -> Score:
    """Take the key before its heads are repeated, where it was found behind that."""
    axes = site.attention.axes
    key, *factors = (narrowed(x, axes) for x in (score.key, *(f.operand for f in score.key_factors)))
    if any(axes.shared(flat(x.layout)) for x in (key, *factors)):
        raise UnsupportedModelError(
            f"{describe(site.output)}: its key repeats heads in another way than its value; the search ended "
            f"at {describe(score.key.node)}"
        )
    scaled = tuple(replace(old, operand=new) for old, new in zip(score.key_factors, factors, strict=True))
    return replace(score, key=key, key_factors=scaled)


def _choose(sites: Sequence[AttentionSite], finder: RotaryFinder) -> Scores:
    found = [finder.find(site) for site in sites]
    unknown = [(site, x) for site, x in zip(sites, found, strict=True) if isinstance(x, UnknownRotation)]
    if not unknown:
        rotations = [x for x in found if isinstance(x, Rotation)]
        scores = tuple(x.score for x in found if not isinstance(x, UnknownRotation))
        if not rotations:
            return Scores(scores, "no position embedding", "")
        kinds = {x.angles if isinstance(x, Rotation) else None for x in found}
        note = f"layers use {len(kinds)} different rotary embeddings" if len(kinds) > 1 else ""
        return Scores(scores, "before rotation", note)
    site, reason = unknown[0]
    if len(unknown) < len(sites):
        other = next(s for s, x in zip(sites, found, strict=True) if not isinstance(x, UnknownRotation))
        kind = "no" if any(isinstance(x, NoRotation) for x in found) else "a rotary"
        raise UnsupportedModelError(
            f"{describe(site.output)}: {reason.reason} ({describe(reason.node)}), while "
            f"{describe(other.output)} has "
            f"{kind} position embedding: a score between the two would depend on absolute positions"
        )
    other, different = next(((s, x) for s, x in unknown if x.angles != reason.angles), (site, reason))
    if other is not site:
        raise UnsupportedModelError(
            f"{describe(site.output)} and {describe(other.output)} use different positions, and not by a "
            f"rotation that is recognised ({reason.reason}: {describe(reason.node)}; {different.reason}: "
            f"{describe(different.node)}): a score between the two would depend on absolute positions"
        )
    return Scores(
        tuple(Score(site.query, site.key) for site in sites),
        "after position embedding",
        f"no rotation was recognised: {reason.reason} ({describe(reason.node)})",
    )

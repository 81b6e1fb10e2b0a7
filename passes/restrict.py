"""Leave all attention outside of the named decoder blocks as it is. Finds, never edits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from .find_sites import Findings
from .nodes import module_paths
from .sites import Refusal, Verdict

OUTSIDE = "it is outside of the decoder blocks that are to be mixed"


def restrict(findings: Findings, blocks: Sequence[str]) -> Findings:
    """``findings`` with the sites in ``blocks`` alone; others, and what cannot be mixed there, are left out.

    Args:
        blocks: paths of modules, from the module that is captured or one inside it; empty: no restriction.
    """
    if not blocks:
        return findings
    sites, refusals = [], []
    for site in findings.sites:
        if _inside(site.output, blocks):
            sites.append(site)
        else:
            refusals.append(Refusal(site.output, site.output, OUTSIDE, Verdict.NOT_A_LAYER))
    for refusal in findings.refusals:
        if refusal.verdict is Verdict.UNSUPPORTED and not _inside(refusal.attention, blocks):
            refusal = replace(refusal, reason=f"{OUTSIDE}; {refusal.reason}", verdict=Verdict.NOT_A_LAYER)
        refusals.append(refusal)
    return replace(findings, sites=sites, refusals=refusals)


def _inside(node: Node, blocks: Sequence[str]) -> bool:
    """Whether ``node`` was made by one of the modules, whatever is around the one their paths begin at."""
    return any(f".{path}".endswith(f".{block}") for path in module_paths(node) for block in blocks)

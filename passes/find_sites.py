"""All attention of a graph -> sites and refusals. Finds, never edits.

Whether an attention is a decoder layer is told by what is computed: query, key and value of the current
tokens come from one stream, the future is masked, and what the attention reads of the past was written by
the same path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node

from ..torch_internals import has_escaped
from .axes import AxisRole, flat
from .dataflow import Dataflow, Dependencies
from .find_attention import find_attention
from .find_causal import CausalityFinder
from .find_eager_attention import find_eager_attention
from .find_missed import find_missed
from .nodes import describe, is_tensor, same_size, shape_of, value_of
from .ops import Role, arguments, has_role, op_name
from .sites import Attention, AttentionSite, Operand, Refusal, Verdict
from .subgraphs import Bodies, ModuleBodies
from .trace_values import Trace, is_state, trace


@dataclass
class Findings:
    """What one graph holds."""

    flow: Dataflow
    needs: Dependencies
    sites: list[AttentionSite] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


def find_sites(graph: Graph, start: Node | None = None, bodies: Bodies | None = None) -> Findings:
    """Every attention operation after ``start``, in program order, as a site or a refusal."""
    flow = Dataflow(graph, start, bodies)
    needs = Dependencies(flow)
    found: list[Attention | Refusal] = []
    for node in flow.nodes:
        hit = find_attention(node, flow) or find_eager_attention(node, flow, needs)
        if hit is not None:
            found.append(hit)
    needs.mark(hit.output for hit in found if isinstance(hit, Attention))
    result = Findings(flow, needs)
    causality = CausalityFinder(flow, needs)
    for hit in found:
        site = judge(hit, flow, needs, causality, result.sites) if isinstance(hit, Attention) else hit
        (result.sites if isinstance(site, AttentionSite) else result.refusals).append(site)
    ends = {hit.output if isinstance(hit, Attention) else hit.attention for hit in found}
    result.refusals += find_missed(flow, needs, ends)
    for node, body in flow.opaque:
        inner = find_sites(body.graph, None, ModuleBodies(body))
        if inner.sites and flow.position[node] > flow.first:
            result.refusals.append(
                Refusal(
                    node,
                    inner.sites[0].output,
                    f"{len(inner.sites)} attention layers are in a body that it may run several times or "
                    "not at all",
                    Verdict.UNSUPPORTED,
                )
            )
    return result


def judge(
    attention: Attention,
    flow: Dataflow,
    needs: Dependencies,
    causality: CausalityFinder,
    earlier: list[AttentionSite],
) -> AttentionSite | Refusal:
    """Trace an attention's operands and decide whether it is causal self-attention over the current
    tokens.

    Attention over the key and value of an ``earlier`` site has no value of its own to mix. It is noted
    there, and left out here.
    """
    at, axes = attention.value_argument, attention.axes
    value, key, query = (
        trace(operand, axes, flow, at, attention.tokens)
        for operand in (attention.value, attention.key, attention.query)
    )

    def refuse(reason: str, node: Node, verdict: Verdict = Verdict.UNSUPPORTED, remedy: str = "") -> Refusal:
        return Refusal(attention.output, node, reason, verdict, remedy)

    if has_escaped(value_of(attention.output)):
        return refuse(
            "it is computed inside torch.vmap (or another transform of torch.func) that the model calls, and "
            "other layers cannot read its key and value",
            attention.output,
            remedy="Write the attention for the whole batch",
        )
    for name, found in (("value", value), ("key", key), ("query", query)):
        if found.problem:
            return refuse(f"its {name} cannot be followed: {found.problem}", found.operand.node)
    for i, site in enumerate(earlier):
        if value.operand.node is site.value.node and key.operand.node is site.key.node:
            earlier[i] = replace(site, shared_by=(*site.shared_by, at))
            return refuse(
                f"it reuses key and value of {describe(site.output)}, and reads the mixed value there",
                value.operand.node,
                Verdict.NOT_A_LAYER,
            )
    other = _other_stream(query, key, value, flow, needs)
    if other is not None:
        return refuse(other, value.operand.node, Verdict.NOT_A_LAYER)
    if bool(key.writes) != bool(value.writes):
        return refuse(
            "only one of its key and value is cached", (key if value.writes else value).operand.node
        )
    if not value.writes:
        if value.cut or not same_size(attention.length, attention.tokens):
            if _cache_upstream(value.operand.node, query.operand.node, flow, needs) is None:
                return refuse(
                    f"it reads {attention.length} values for {attention.tokens} queries, and not because of "
                    "a cache: several streams of tokens in one",
                    value.operand.node,
                )
            return refuse(
                f"it reads {attention.length} values for {attention.tokens} queries, but the values of past "
                "tokens are not kept in a cache: they are computed anew behind it, so mixed values have no "
                "place to be kept",
                value.operand.node,
                remedy="Run the model without a cache (use_cache=False)",
            )
        latent = _cache_upstream(value.operand.node, query.operand.node, flow, needs)
        if latent is not None:
            return refuse(
                "its value is computed from a cache, for past and current tokens alike, so mixed values "
                "have no place to be kept",
                latent,
                remedy="Run the model without a cache (use_cache=False)",
            )
    if not (attention.causal or same_size(attention.tokens, 1)):
        masked = bool(attention.masks) or attention.mods is not None
        hides = causality.hides_future(attention) if masked else False
        if hides is None and not value.writes:
            at_mask = attention.masks[0][0] if attention.masks else attention.output
            return refuse("whether its mask hides the future cannot be told", at_mask)
        if hides is False:
            return refuse(
                "it is not causal: several queries, and no mask that hides the future from them",
                attention.output,
                Verdict.NOT_A_LAYER,
            )
    if attention.mods is not None:
        slope = causality.slope(attention)
        if slope is None:
            return refuse(
                "its score_mod scales scores by a number that is not the same for all or not known here, so "
                "its softmax has no one scale",
                attention.output,
                remedy="Give the scale as flex_attention(scale=...), or scale the query",
            )
        scale = attention.scale
        attention = replace(attention, scale=replace(scale, number=scale.number * slope))
    problem = _check_axes(attention, query, key, value)
    if problem:
        return refuse(problem, value.operand.node)
    if value.operand.node is key.operand.node:
        return refuse(
            "its key and its value are one tensor, so the value cannot change alone", value.operand.node
        )
    if query.factor != 1.0 or value.factor != 1.0:
        raise AssertionError("a factor of the query or value was not put back")
    resolve = lambda found: Operand(found.operand.node, axes.resolve(found.operand.layout))  # noqa: E731
    return AttentionSite(
        attention=attention,
        query=resolve(query),
        key=resolve(key),
        value=resolve(value),
        value_path=tuple(step.node for step in value.path),
        key_factor=key.factor,
        cache_writes=tuple(value.writes),
        tokens=attention.tokens,
    )


def _other_stream(query: Trace, key: Trace, value: Trace, flow: Dataflow, needs: Dependencies) -> str | None:
    """Why keys or values do not come from the tokens the query comes from; None if they do."""
    q = query.operand.node
    for name, found in (("value", value), ("key", key)):
        node = found.operand.node
        if flow.external(node) or is_state(node, flow):
            return f"its {name} is an input of the model, not computed from the current tokens"
        if not needs.activation(node):
            return f"its {name} does not depend on the tokens"
        if needs.attentions[node] != needs.attentions[q]:
            return (
                f"its {name} comes from another stream than its query (cross-attention, or another layer's)"
            )
        if not needs.inputs[node] & needs.inputs[q]:
            return f"its {name} is computed from other inputs than its query (cross-attention)"
    return None if needs.activation(q) else "its query does not depend on the tokens"


def _cache_upstream(value: Node, query: Node, flow: Dataflow, needs: Dependencies) -> Node | None:
    """A cache that the value, but not the query, is computed from."""
    own = needs.attentions[value]

    def segment(start: Node) -> set[Node]:
        seen, todo = set(), [start]
        while todo:
            node = todo.pop()
            if node in seen or flow.external(node) or needs.attentions[node] != own:
                continue
            seen.add(node)
            todo += flow.reads(node)
        return seen

    for node in segment(value) - segment(query):
        if has_role(node, Role.JOIN):
            if any(_is_past(x, flow) for x in arguments(node)["tensors"]):
                return node
        for read in (node, *flow.reads(node)):
            if any(_writes_cache(w, flow) for w in flow.writes(read, flow.position[node])):
                return node
    return None


def _writes_cache(write: Node, flow: Dataflow) -> bool:
    """Whether tokens are put into a buffer: into one from outside, or by their positions."""
    if not has_role(write, Role.WRITE):
        return False
    return flow.external(flow.root(write)) or op_name(write) not in ("copy_", "copy", "setitem")


def _is_past(node: Node, flow: Dataflow) -> bool:
    """Whether a tensor is the past part of a cache: a float input of the model, or the empty start of one."""
    if not isinstance(node, Node) or not is_tensor(node) or not is_state(node, flow):
        return False
    root, known = flow.root(node), value_of(node)
    if any(same_size(n, 0) for n in known.shape):
        return True
    weight = isinstance(value_of(root), torch.nn.Parameter)
    return not weight and not has_role(root, Role.CREATE) and known.dtype.is_floating_point


def _check_axes(attention: Attention, query: Trace, key: Trace, value: Trace) -> str:
    """Whether query, key and value agree on lanes, groups and tokens; the reason if they do not."""
    axes = attention.axes
    q, k, v = (
        [axis for axis in axes.leaves(flat(found.operand.layout)) if axis.role is AxisRole.LANE]
        for found in (query, key, value)
    )
    wide = set(axes.shared(q))
    for name, lanes in (("key", k), ("value", v)):
        for axis in set(q) - wide - set(lanes):
            if not same_size(axis.size, 1):
                return f"its {name} lacks a dimension of size {axis.size} that its query has"
        if set(lanes) - set(q):
            return f"its {name} has heads that its query has not"
        if name == "value" and wide & set(lanes):
            return "its value repeats heads in another way than its key"
    lead = axes.leaves(attention.query.layout[0]) if len(attention.query.layout) > 2 else ()
    if lead and lead[0] in wide and len(attention.query.layout) > 3:
        return "one key serves several entries of the batch"
    for name, found in (("query", query), ("key", key), ("value", value)):
        layout = axes.resolve(found.operand.layout)
        if not axes.fits(layout, shape_of(found.operand.node)):
            return f"its {name} is only part of {found.operand.node.name}"
        for dim, size in zip(layout, shape_of(found.operand.node), strict=True):
            tokens = [a for a in dim if a.role is AxisRole.TOKEN]
            if len(dim) == 1 and tokens and not same_size(size, attention.tokens):
                return f"its {name} holds {size} tokens where its query holds {attention.tokens}"
    return ""


def refusals_text(refusals: Iterable[Refusal]) -> str:
    return "\n".join(f"  - {refusal}" for refusal in refusals)

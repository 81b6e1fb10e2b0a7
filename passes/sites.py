"""What a finder returns: an attention site as named nodes, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.fx import Node

from .axes import Axes, Layout
from .flex import Mods
from .nodes import Size, describe, module_path


class Verdict(Enum):
    """What a refusal means for the model."""

    NOT_A_LAYER = "not a layer"
    """Not causal self-attention (a router, cross-attention, an encoder): left as it is, mixing goes on
    without it."""

    UNSUPPORTED = "unsupported"
    """Causal self-attention that cannot be mixed correctly: the model is refused as a whole."""


@dataclass(frozen=True, eq=False)
class Refusal:
    """Why an attention operation is no site, with the node at which the search ended: the nearest miss."""

    attention: Node
    node: Node
    reason: str
    verdict: Verdict
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{describe(self.attention)}: {self.reason}"
        if self.node is not self.attention:
            text += f"; the search ended at {describe(self.node)}"
        return text + (f". {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, eq=False)
class Operand:
    """A node that holds a query, key or value of the current tokens, and which axes its dimensions hold."""

    node: Node
    layout: Layout


@dataclass(frozen=True)
class Scale:
    """The softmax scale: a number, times and divided by the values of scalar nodes."""

    number: float = 1.0
    times: tuple[Node, ...] = ()
    over: tuple[Node, ...] = ()


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention operation in one internal form, whichever way it is written.

    The operands are those of the attention itself: keys and values still hold the cache and the repeated
    heads.
    """

    output: Node
    """The node whose result is the weighted sum of values."""

    query: Operand
    key: Operand
    value: Operand
    axes: Axes
    tokens: Size
    """Number of queries."""

    length: Size
    """Number of keys, cached ones included."""

    scale: Scale
    causal: bool
    """The operation masks the future by itself (``is_causal``)."""

    masks: tuple[tuple[Node, int], ...]
    """Everything that can mask a score: the node, and its query dimension counted from the last (-2)."""

    value_argument: Node
    """The node that reads the value operand (the attention itself, or the second product)."""

    scores: Node | None = None
    exponent: Operand | None = None
    """Of an attention that is written out: the product of query and key, and the input of the softmax."""

    mods: Mods | None = None
    """Of ``flex_attention``: the functions that change and mask single scores."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A tensor with one number per token (and head) that all features of a query or key are scaled with."""

    operand: Operand
    divides: bool = False


@dataclass(frozen=True, eq=False)
class Score:
    """What a layer's depth scores are computed from: query and key as attention uses them, or before their
    rotation."""

    query: Operand
    key: Operand
    query_number: float = 1.0
    key_number: float = 1.0
    """What the rotation scales query and key with."""

    query_factors: tuple[Factor, ...] = ()
    key_factors: tuple[Factor, ...] = ()
    """What query and key are scaled with after the rotation, token by token."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All that is read."""
        factors = (*self.query_factors, *self.key_factors)
        return (self.query.node, self.key.node, *(factor.operand.node for factor in factors))


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One decoder layer's causal self-attention: what the rewrite needs, in named nodes."""

    attention: Attention
    query: Operand
    key: Operand
    value: Operand
    """Value of the current tokens, before the cache is written and before heads are repeated."""

    value_path: tuple[Node, ...]
    """Nodes from the attention operand back to, and without, the value."""

    key_factor: float
    """Number the key is multiplied with between ``key`` and the attention."""

    cache_writes: tuple[Node, ...]
    """Nodes that write this layer's value into a cache, on the way to the attention."""

    tokens: Size

    shared_by: tuple[Node, ...] = ()
    """Nodes of later attention that reads this very key and value: it reads the mixed value then."""

    @property
    def output(self) -> Node:
        return self.attention.output

    @property
    def module(self) -> str:
        return module_path(self.output)

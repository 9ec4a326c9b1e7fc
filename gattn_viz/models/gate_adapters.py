"""Where each family keeps its gate on the attention output: a table, and nothing to run.

For the attention output O of a layer with input x, all of them are

    projection( activation(logits(x)) * O )

and differ in which module computes the logits, how these stand in its output, and in the activation. A new family
is one entry in `ADAPTERS`, by the name of its attention class, and one model in `tests/capture/gated_families.py`.

Axis letters: B batch, Q tokens, H query heads, K KV heads, D head_dim of queries, V head_dim of values, and C gate
channels of one head: 1 (headwise) or V (elementwise).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class HeadShape:
    """Of one layer: H query heads, D and V."""

    heads: int
    query_width: int
    value_width: int


def head_shape(attention: nn.Module, config: Any) -> HeadShape:
    """What an attention module that has not run says of itself, or its configuration of it."""
    heads = getattr(attention, "num_heads", config.num_attention_heads)
    head_dim = getattr(attention, "head_dim", None) or config.hidden_size // heads
    return HeadShape(
        heads, getattr(attention, "qk_head_dim", head_dim), getattr(attention, "v_head_dim", head_dim)
    )


Layout = Callable[[Tensor, HeadShape], Tensor | None]
"""(B, Q, width) of a module's output to gate logits (B, Q, H, C); None if they cannot stand in it that way."""


def whole(output: Tensor, shape: HeadShape) -> Tensor | None:
    """The module computes the gate alone, one score a head or one a channel."""
    output = output.flatten(2)
    if output.shape[-1] not in (shape.heads, shape.heads * shape.value_width):
        return None
    return output.unflatten(-1, (shape.heads, -1))


def after_query(output: Tensor, shape: HeadShape) -> Tensor | None:
    """For each head its query, then its gate: `[query (D) | gate (C)] x H`."""
    output = output.flatten(2)
    per_head, rest = divmod(output.shape[-1], shape.heads)
    if rest or per_head - shape.query_width not in (1, shape.value_width):
        return None
    return output.unflatten(-1, (shape.heads, -1))[..., shape.query_width :]


LAYOUTS: tuple[Layout, ...] = (whole, after_query)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": functional.softplus}
"""From gate logits to gate scores. Softplus has no upper bound."""


@dataclass(frozen=True)
class GateAdapter:
    """Where the gate of a family is. Modules are named as in the attention module.

    Attributes:
        source: the module whose output holds the logits.
        layout: how they stand in it.
        activation: in `ACTIVATIONS`; None when `source` is the activation itself: logits go in, scores come out.
        adjust: what else is done to the (B, Q, H, C) logits, by the attention module's own parameters.
        multiplies: the module whose output the gate multiplies; None is attention itself.
        reaches: the module that receives the product.
    """

    source: str
    layout: Layout = whole
    activation: str | None = "sigmoid"
    adjust: Callable[[nn.Module, Tensor], Tensor] | None = None
    multiplies: str | None = None
    reaches: str = "o_proj"

    def see(
        self, attention: nn.Module, taken: Tensor | None, given: Tensor | None, shape: HeadShape
    ) -> tuple[Tensor, Tensor] | None:
        """Gate logits and scores, (B, Q, H, C), from what `source` took and gave; None if they do not stand there.

        Scores are computed in float32.
        """
        output = taken if self.activation is None else given
        logits = None if output is None or output.dim() < 3 else self.layout(output, shape)
        if logits is None or given is None:
            return None
        if self.activation is None:
            return logits, given.reshape(logits.shape)
        if self.adjust is not None:
            logits = self.adjust(attention, logits)
        return logits, ACTIVATIONS[self.activation](logits.float())


def _add_head_bias(attention: nn.Module, logits: Tensor) -> Tensor:
    """Beam: one bias for each head."""
    return logits + attention.gate_bias[:, None]  # type: ignore[index]


def _scale_channels(attention: nn.Module, logits: Tensor) -> Tensor:
    """Dory: a learned factor for each channel, squared."""
    factor = (attention.s_gate * attention.s_gate_scale).square()  # type: ignore[operator]
    return logits * factor.view(logits.shape[2:])


ADAPTERS: dict[str, GateAdapter] = {
    # the paper's models: per KV group, which the module itself splits
    "GatedQwen3Attention": GateAdapter("gate_activation", activation=None),
    "Qwen3NextAttention": GateAdapter("q_proj", after_query),
    "Qwen3_5Attention": GateAdapter("q_proj", after_query),
    "Qwen3_5MoeAttention": GateAdapter("q_proj", after_query),
    "Qwen4ExpTextAttention": GateAdapter("q_proj", after_query),
    # a projection of the query latents holds both
    "AXK2Attention": GateAdapter("q_gate_proj", after_query),
    "AfmoeAttention": GateAdapter("gate_proj"),
    "BeamAttention": GateAdapter("gate_proj", adjust=_add_head_bias),
    "HrmTextAttention": GateAdapter("gate_proj"),
    "HYV4Attention": GateAdapter("gate_proj"),
    "MuseGlimmerTextAttention": GateAdapter("gate_proj"),
    # a norm without weights stands between attention and gate
    "MuseSparkTextAttention": GateAdapter("gate_proj", multiplies="o_norm"),
    # and here between gate and projection
    "DoryAttention": GateAdapter("gate_proj", adjust=_scale_channels, reaches="attn_sub_norm"),
    "BailingHybridAttention": GateAdapter("g_proj"),
    "Dots3NoteTextAttention": GateAdapter("g_proj"),
    "Lfm3Attention": GateAdapter("g_proj"),
    "Step3p7Attention": GateAdapter("g_proj"),
    "LagunaAttention": GateAdapter("g_proj", activation="softplus"),
}


def adapter_of(attention: nn.Module) -> GateAdapter | None:
    """Its class's, or that of a class it derives from; None without one, or if this module has no such part.

    Some families have a gate in some layers, or when their configuration says so.
    """
    for base in type(attention).__mro__:
        adapter = ADAPTERS.get(base.__name__)
        if adapter is not None:
            return adapter if find_module(attention, adapter.source) is not None else None
    return None


def find_module(parent: nn.Module, name: str) -> nn.Module | None:
    """The module of that dotted name inside another; None if there is none."""
    found: nn.Module | None = parent
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None

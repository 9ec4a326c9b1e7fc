"""What a cell of a map holds: the attention probability, or that times what the key's value then amounts to.

Of a head, with p[i, j] the probability of query i and key j:

    probability     p[i, j]
    value           p[i, j] |v[j]|
    gate            p[i, j] g[i], headwise;  p[i, j] |g[i] * v[j]|, elementwise
    output          p[i, j] |W (g[i] * v[j])|, what key j adds to the residual stream at query i

v[j] is the key's value in the head's KV head, g[i] the gate scores of the query: one, or one for each channel of
v; 1 in a model without a gate. W is the head's part of the output projection; its bias belongs to no key. |x| is
the L2 norm. What a layer does with the projection's output before adding it (a norm, a factor) is not in it.

`output` without a gate is the norm of Kobayashi et al. 2020, arXiv 2004.10102; `value` is the same before W. A
norm of a sum is not the sum of norms: neither the cells of a row nor the heads add up to what a query receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Weight = Literal["probability", "value", "gate", "output"]


@dataclass(frozen=True)
class Quantity:
    """Words for what a cell holds.

    Attributes:
        title: for a title.
        label: for a colour bar, with the unit.
        formula: for a footnote; empty for the probability itself.
    """

    title: str
    label: str
    formula: str = ""


_WORDS: dict[Weight, Quantity] = {
    "probability": Quantity("attention", "attention probability"),
    "value": Quantity(
        "attention x value norm",
        "probability x value norm (L2)",
        "p |v|: v the key's value, L2 norm",
    ),
    "output": Quantity(
        "norm of what a key adds to the residual stream",
        "norm added to the residual stream (L2)",
        "p |W (g * v)|: v the key's value, g the query's gate if there is one, W the head's part of the output "
        "projection without its bias, L2 norm",
    ),
}

_OF_GATES = {
    "headwise": Quantity(
        "attention x gate score",
        "probability x gate score",
        "p g: g the query's gate score",
    ),
    "elementwise": Quantity(
        "attention x norm of the gated value",
        "probability x norm of gate * value (L2)",
        "p |g * v|: g the query's gate scores, v the key's value, L2 norm",
    ),
}


def quantity(weight: Weight, gate: str | None) -> Quantity:
    """What a cell holds, in words.

    Args:
        gate: of the model, `headwise`, `elementwise` or None; the weight `gate` needs one.
    """
    if weight == "gate":
        assert gate is not None
        return _OF_GATES[gate]
    return _WORDS[weight]

"""Probabilities times what a key's value then amounts to, see `gattn_viz.metrics.weights`.

Without a gate, or with one score a head, a cell's factor is one number of its query times one of its key. With a
score for each channel it is a norm of its own:

    |g[i] * v[j]|^2 = sum_d g[i, d]^2 v[j, d]^2         one product more of the scores' size
    |W (g[i] * v[j])| = |(R diag g[i]) v[j]|            D x D multiplications a cell, where a score takes D

with R of the QR decomposition of W: as long as W x, for D rows in place of the hidden size. Nothing larger than
`MOST_NUMBERS` is made on the way, beyond what one query needs (D x keys).

Axis letters as in `blocks`; N rows of R, at most D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gattn_viz.capture.attention import Attention
from gattn_viz.metrics.weights import Weight

MOST_NUMBERS = 1024 * 1024


class Weighing:
    """Of one sequence's attention at one layer.

    Args:
        gate: (Q, H, C), the queries' gate scores, C 1 or Dv; None without a gate.
        projection: (H, N, Dv), see `head_factors`; for the weight `output`.
    """

    def __init__(
        self, weight: Weight, attention: Attention, gate: Tensor | None, projection: Tensor | None
    ) -> None:
        assert gate is not None or weight != "gate"
        v, self.group = attention.v, attention.q.shape[2]
        self.v = v
        self.gate = None if gate is None or weight == "value" else gate.to(v).transpose(0, 1)  # (H, Q, C)
        self.projection = None if projection is None or weight != "output" else projection.to(v)
        self.by_channel = self.gate is not None and self.gate.shape[-1] > 1
        self.key_norms = None  # (H, T)
        if weight != "gate" and not self.by_channel:
            self.key_norms = value_norms(v, self.group, self.projection)

    def weigh(self, p: Tensor, heads: slice, rows: range, columns: range) -> None:
        """Multiply (G, R, C) probabilities of one KV head's query heads, in place.

        Args:
            rows, columns: of the attention's queries and keys.
        """
        keys = slice(columns.start, columns.stop)
        if self.key_norms is not None:
            p *= self.key_norms[heads, None, keys]
        if self.gate is None:
            return
        gate = self.gate[heads, rows.start : rows.stop]  # (G, R, C)
        if not self.by_channel:
            p *= gate
            return
        v = self.v[heads.start // self.group, keys]
        for index in range(len(p)):
            projection = None if self.projection is None else self.projection[heads.start + index]
            p[index] *= gated_norms(gate[index], v, projection)


def value_norms(v: Tensor, group: int, projection: Tensor | None) -> Tensor:
    """(H, T): the norms of (K, T, Dv) values, of each of a KV head's `group` heads through its projection."""
    if projection is None:
        return v.norm(dim=-1).repeat_interleave(group, 0)
    return torch.stack([(v[head // group] @ matrix.T).norm(dim=-1) for head, matrix in enumerate(projection)])


def gated_norms(gate: Tensor, v: Tensor, projection: Tensor | None) -> Tensor:
    """(R, C): the norms of (R, Dv) gates times (C, Dv) values, through an (N, Dv) projection if there is one."""
    if projection is None:
        return (gate.square() @ v.T.square()).sqrt_()
    step = max(1, MOST_NUMBERS // (len(projection) * max(v.shape)))
    parts = []
    for some in gate.split(step):
        gated_projection = projection * some[:, None]  # (rows, N, Dv)
        moved = gated_projection.flatten(0, 1) @ v.T
        parts.append(moved.unflatten(0, (len(some), -1)).norm(dim=1))
    return torch.cat(parts)

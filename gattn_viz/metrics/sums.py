"""Reduce attention to per-head sums over queries, some rows at a time.

Every attention measure is a function of these sums, so a map need never exist as a whole: a caller hands over
any partition of the rows, in any order, and the sums are those of the whole map.

Axis letters: H heads, h some of them, Q queries of a block, T tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from gattn_viz.metrics.layer import NEEDS, Need


@dataclass
class AttentionSums:
    """Sums over the queries of one prompt at one layer, for each head; None for what was not asked.

    Attributes:
        first_token, first_row, learned_sink, learned_sink_first_row, entropy, entropy_ratio, row_max: (H,), see
            `LayerSums`. Float64 where the device has it: over many queries float32 would lose digits.
        received: (H, T).
        ratio_queries: how many queries see two keys or more.
        queries_of_key, uniform_first: (T,), see `LayerSums`.
    """

    heads: int
    tokens: int
    first_token: Tensor | None = None
    first_row: Tensor | None = None
    learned_sink: Tensor | None = None
    learned_sink_first_row: Tensor | None = None
    received: Tensor | None = None
    entropy: Tensor | None = None
    entropy_ratio: Tensor | None = None
    row_max: Tensor | None = None
    ratio_queries: int = 0
    queries_of_key: Tensor | None = None
    uniform_first: Tensor | None = None

    @classmethod
    def zeros(
        cls,
        heads: int,
        tokens: int,
        needs: Collection[Need] = NEEDS,
        device: torch.device | str = "cpu",
    ) -> AttentionSums:
        """Sums over no query yet."""

        def of_heads(need: Need) -> Tensor | None:
            return torch.zeros(heads, dtype=_precise(device), device=device) if need in needs else None

        return cls(
            heads,
            tokens,
            first_token=of_heads("first_token"),
            first_row=of_heads("first_token"),
            learned_sink=of_heads("learned_sink"),
            learned_sink_first_row=of_heads("learned_sink"),
            received=torch.zeros(heads, tokens, device=device) if "received" in needs else None,
            entropy=of_heads("entropy"),
            entropy_ratio=of_heads("entropy"),
            row_max=of_heads("row_max"),
        )

    def add_first_token(self, heads: slice, first_query: int, p: Tensor) -> None:
        """Add (h, Q) probabilities of the first token, of queries `first_query`, ... (0-based) and those heads."""
        _add_with_first_row(self.first_token, self.first_row, heads, first_query, p)

    def add_learned_sink(self, heads: slice, first_query: int, p: Tensor) -> None:
        """The same of (h, Q) probabilities of a learned sink."""
        _add_with_first_row(self.learned_sink, self.learned_sink_first_row, heads, first_query, p)

    def add_received(self, heads: slice, first_key: int, received: Tensor) -> None:
        """Add (h, keys) attention, summed over some queries, to keys `first_key`, ... (0-based)."""
        assert self.received is not None
        self.received[heads, first_key : first_key + received.shape[-1]] += received

    def add_entropy(self, heads: slice, entropy: Tensor, visible: Tensor) -> None:
        """Add (h, Q) entropies of queries that see `visible` (Q,) keys each. All heads have the same queries."""
        assert self.entropy is not None
        assert self.entropy_ratio is not None
        several = visible > 1  # a query that sees one key has no choice: log 1 = 0
        dtype = self.entropy.dtype
        self.entropy[heads] += entropy.sum(-1, dtype=dtype)
        self.entropy_ratio[heads] += (entropy / visible.log().where(several, torch.inf)).sum(-1, dtype=dtype)
        if heads.start == 0:
            self.ratio_queries += int(several.sum())

    def add_visible(self, first_query: int, first_key: int, visible: Tensor) -> None:
        """Say which keys some queries see: (Q, keys) of queries `first_query`, ... and keys `first_key`, ...

        Of queries that nothing is said of it is taken that they see all keys up to themselves. Each is said once.
        """
        device = visible.device
        if self.queries_of_key is None or self.uniform_first is None:
            each = torch.arange(1, self.tokens + 1, device=device)
            self.queries_of_key = each.flip(0)
            self.uniform_first = 1 / each.to(_precise(device))
        queries = slice(first_query, first_query + len(visible))
        sees_first = visible[:, 0] if first_key == 0 else visible.new_zeros(len(visible))
        self.uniform_first[queries] = sees_first.to(self.uniform_first.dtype) / visible.sum(-1).clamp_min(1)
        up_to_themselves = queries.stop - torch.arange(queries.stop, device=device).clamp_min(first_query)
        self.queries_of_key[: queries.stop] -= up_to_themselves
        self.queries_of_key[first_key : first_key + visible.shape[1]] += visible.sum(0)

    def add_row_max(self, heads: slice, largest: Tensor) -> None:
        """Add (h, Q) largest probabilities of some queries."""
        assert self.row_max is not None
        self.row_max[heads] += largest.sum(-1, dtype=self.row_max.dtype)


def _precise(device: torch.device | str) -> torch.dtype:
    """Float64 where the device has it."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def _add_with_first_row(
    rest: Tensor | None, first_row: Tensor | None, heads: slice, first_query: int, p: Tensor
) -> None:
    """Add (h, Q) probabilities of queries `first_query`, ... (0-based), those of query 0 apart."""
    assert rest is not None
    assert first_row is not None
    if first_query == 0:
        first_row[heads] += p[:, :1].sum(-1)
        p = p[:, 1:]
    rest[heads] += p.sum(-1, dtype=rest.dtype)


def sum_map(probabilities: Tensor) -> AttentionSums:
    """The sums of a whole causal map without a learned sink, straight from their definitions.

    Args:
        probabilities: (H, T, T), rows are queries.
    """
    heads, tokens, _ = probabilities.shape
    sums = AttentionSums.zeros(heads, tokens, NEEDS - {"learned_sink"}, probabilities.device)
    every = slice(0, heads)
    sums.add_first_token(every, 0, probabilities[:, :, 0])
    sums.add_received(every, 0, probabilities.sum(1))
    visible = torch.arange(1, tokens + 1, device=probabilities.device)
    sums.add_entropy(every, torch.special.entr(probabilities).sum(-1), visible)
    sums.add_row_max(every, probabilities.amax(-1))
    return sums

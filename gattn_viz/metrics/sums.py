"""Reduce attention probabilities to per-head sums, a block of query rows at a time.

Every attention measure is a function of these sums, so a map need never exist as a whole: a caller hands over
any partition of the rows, in any order, and the sums are those of the whole map.

Axis letters: H heads, Q queries of a block, T tokens of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class AttentionSums:
    """Sums over the queries of one prompt at one layer, for each head.

    Attributes:
        received: (H, T), for each key the sum of the attention it gets, over all queries.
        first_row: (H,), the attention of the first query to the first key (1, unless there is a learned sink).
        entropy: (H,), the sum over queries of -sum_k p log p, in nats.
        entropy_ratio: (H,), the sum over queries that see two keys or more of their entropy / log(keys seen).
        ratio_queries: how many queries see two keys or more.
    """

    received: Tensor
    first_row: Tensor
    entropy: Tensor
    entropy_ratio: Tensor
    ratio_queries: int = 0

    @classmethod
    def zeros(cls, heads: int, tokens: int, device: torch.device | str = "cpu") -> AttentionSums:
        """Sums over no query yet."""
        return cls(
            received=torch.zeros(heads, tokens, device=device),
            first_row=torch.zeros(heads, device=device),
            entropy=torch.zeros(heads, device=device),
            entropy_ratio=torch.zeros(heads, device=device),
        )

    def add(self, probabilities: Tensor, first_query: int, visible: Tensor) -> None:
        """Add the rows of queries `first_query`, `first_query` + 1, ... (0-based).

        Args:
            probabilities: (H, Q, T), float32; 0 for the keys that a query does not see.
            first_query: the index in the prompt of the block's first row.
            visible: (Q,), how many keys each of these queries sees.
        """
        self.received += probabilities.sum(1)
        if first_query == 0:
            self.first_row += probabilities[:, 0, 0]
        entropy = torch.special.entr(probabilities).sum(-1)  # (H, Q)
        self.entropy += entropy.sum(-1)
        several = visible > 1  # a query that sees one key has no choice: log 1 = 0
        self.entropy_ratio += (entropy[:, several] / visible[several].log()).sum(-1)
        self.ratio_queries += int(several.sum())


def sum_map(probabilities: Tensor) -> AttentionSums:
    """The sums of a whole causal map.

    Args:
        probabilities: (H, T, T), rows are queries.
    """
    heads, tokens, _ = probabilities.shape
    sums = AttentionSums.zeros(heads, tokens, probabilities.device)
    sums.add(probabilities, 0, torch.arange(1, tokens + 1, device=probabilities.device))
    return sums

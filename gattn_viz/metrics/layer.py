"""What the measures see of one prompt at one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gattn_viz.metrics.gate_sums import GateSums, OutputSums

Array = NDArray[np.float64]


Need = Literal[
    "first_token", "learned_sink", "received", "entropy", "row_max", "gate", "values", "residual",
    "gate_scores", "gate_histogram", "gate_tokens", "output_before", "output_after", "output_histogram",
]  # fmt: skip
"""What has to be taken out of a layer for a measure."""

NEEDS: frozenset[Need] = frozenset(get_args(Need))


@dataclass(frozen=True)
class LayerSums:
    """All that the measures need to know of one prompt at one layer. NumPy, on the host; None is "not asked".

    Attributes:
        tokens: T, the prompt's real tokens.
        heads: H.
        first_token: (H,), the attention to the first token, summed over the queries after the first. With the 1 of
            the first one in it, what is next to 0 would have lost its digits.
        first_row: (H,), the attention of the first query to it (1, unless there is a learned sink).
        learned_sink: (H,), the attention that a learned sink takes, summed over the queries after the first; None
            without such a sink too.
        learned_sink_first_row: (H,), that of the first query.
        received: (H, T), for each key the sum of the attention it gets, over all queries.
        entropy: (H,), the sum over queries of -sum_k p log p, in nats.
        entropy_ratio: (H,), the sum over queries that see two keys or more of their entropy / log(keys seen).
        ratio_queries: how many queries see two keys or more.
        queries_of_key: (T,), how many queries see each key. None: every query sees all keys up to itself.
        uniform_first: (T,), the attention that each query would give the first token if it attended equally to all
            keys that it sees: 0 where it does not see the first. None: as above.
        row_max: (H,), the largest probability of a query, summed over all queries.
        gate_mean: (H,), the mean gate score over tokens and channels; None without a gate too.
        gates: the gate scores reduced; None without a gate too.
        gate_tokens: (H, T), each token's mean gate score over channels; None without a gate too.
        output_before, output_after: the attention output before and after the gate reduced; the second is None
            without a gate too.
        value_norm: (H, T), the L2 norm of each token's value; a query head has its KV head's.
        max_activation: max abs of the residual stream after the layer. NaN if not asked.
        max_activation_position, max_activation_channel: where that is, 0-based: the first token as large, see
            `largest`, and its largest channel. -1 if not asked.
        median_activation: the median abs over tokens and channels. NaN if not asked.
    """

    tokens: int
    heads: int
    first_token: Array | None = None
    first_row: Array | None = None
    learned_sink: Array | None = None
    learned_sink_first_row: Array | None = None
    received: Array | None = None
    entropy: Array | None = None
    entropy_ratio: Array | None = None
    ratio_queries: int = 0
    queries_of_key: Array | None = None
    uniform_first: Array | None = None
    row_max: Array | None = None
    gate_mean: Array | None = None
    gates: GateSums | None = None
    gate_tokens: Array | None = None
    output_before: OutputSums | None = None
    output_after: OutputSums | None = None
    value_norm: Array | None = None
    max_activation: float = float("nan")
    max_activation_position: int = -1
    max_activation_channel: int = -1
    median_activation: float = float("nan")

"""What the measures see of one prompt at one layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LayerSums:
    """All that the measures need to know of one prompt at one layer. NumPy, on the host.

    Attributes:
        tokens: T, the prompt's real tokens.
        received, first_row, entropy, entropy_ratio, ratio_queries: as in `AttentionSums`, in float64.
        gate_mean: (H,), the mean gate score over tokens and channels; None without a gate.
        value_norm: (H, T), the L2 norm of each token's value, a query head has its KV head's; None if not asked.
        max_activation: max abs of the residual stream after the layer. NaN if not asked.
        max_activation_position, max_activation_channel: where that is, 0-based. -1 if not asked.
        median_activation: the median abs over tokens and channels. NaN if not asked.
    """

    tokens: int
    received: NDArray[np.float64]
    first_row: NDArray[np.float64]
    entropy: NDArray[np.float64]
    entropy_ratio: NDArray[np.float64]
    ratio_queries: int
    gate_mean: NDArray[np.float64] | None = None
    value_norm: NDArray[np.float64] | None = None
    max_activation: float = float("nan")
    max_activation_position: int = -1
    max_activation_channel: int = -1
    median_activation: float = float("nan")

    @property
    def heads(self) -> int:
        return int(self.received.shape[0])

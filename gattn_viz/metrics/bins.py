"""Counts in fixed bins whose width is a share of their value: quantiles and shares without keeping the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

# Elements that are put into bins together.
_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Bins:
    """Bins of numbers of at least 0, from 2^low to 2^high, 2^bits of them in each doubling.

    A bin is at most 2^-bits of its value wide. The first one begins at 0, and what is beyond the last is in it.
    Axis letters: Q tokens, H heads, B bins.
    """

    low: int
    high: int
    bits: int

    @property
    def count(self) -> int:
        return (self.high - self.low) << self.bits

    @cached_property
    def edges(self) -> Array:
        """(B + 1,)."""
        bits = (np.arange(self.count + 1) + self._first << self._dropped).astype(np.int32)
        edges = bits.view(np.float32).astype(np.float64)
        edges[0] = 0
        return edges

    def counts(self, values: Tensor) -> Counts:
        """(H, B): how many of each head's values, (Q, H, any) float32, lie in each bin."""
        heads = values.shape[1]
        counts = torch.zeros(heads * self.count, dtype=torch.long, device=values.device)
        offsets = torch.arange(heads, device=values.device)[:, None] * self.count
        for part in values.split(max(1, _ELEMENTS // values[0].numel())):
            # float32 numbers of at least 0 are ordered as their bits are: exponent, then mantissa
            bins = (part.contiguous().view(torch.int32) >> self._dropped).long() - self._first
            bins = bins.clamp(0, self.count - 1) + offsets
            counts += torch.bincount(bins.flatten(), minlength=len(counts))
        found: NDArray[Any] = counts.view(heads, self.count).cpu().numpy()
        return found

    def quantile(self, counts: Counts, percent: int) -> Array:
        """(H,): the smallest number that at least `percent` of 100 do not exceed.

        It is in the right bin, so at most 2^-bits of its value off (2^low, of a number below that); numbers within
        a bin count as evenly spread.
        """
        seen = counts.cumsum(1)
        rank = np.maximum(1, -(-percent * seen[:, -1:] // 100))  # in whole numbers: .05 x 20 is not just above 1
        bins = (seen < rank).sum(1, keepdims=True)
        inside = np.take_along_axis(counts, bins, 1)
        before = np.take_along_axis(seen, bins, 1) - inside
        part = (rank - before - 0.5) / inside
        found: Array = (self.edges[bins] + part * (self.edges[bins + 1] - self.edges[bins]))[:, 0]
        return found

    def share_below(self, counts: Counts, thresholds: Array) -> Array:
        """(H,): the share of each head's numbers below its own threshold, which is not in the first bin.

        It is the share below a threshold that is at most 2^-bits off; numbers within a bin count as evenly spread.
        """
        bins = np.minimum(self.edges.searchsorted(thresholds, side="right"), self.count)[:, None] - 1
        low, high = self.edges[bins], self.edges[bins + 1]
        part = np.minimum((thresholds[:, None] - low) / (high - low), 1)
        inside = np.take_along_axis(counts, bins, 1)
        before = np.take_along_axis(counts.cumsum(1), bins, 1) - inside
        found: Array = ((before + part * inside) / counts.sum(1, keepdims=True))[:, 0]
        return found

    @property
    def _dropped(self) -> int:
        """Bits of a float32's mantissa that do not count."""
        return 23 - self.bits

    @property
    def _first(self) -> int:
        """The bits that do, of 2^low."""
        return (127 + self.low) << self.bits

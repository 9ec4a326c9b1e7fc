"""Reduce gate scores and attention outputs to sums for each head, some tokens at a time.

    sums = GateSums.of(scores)              # (Q, H, C), the first tokens of a prompt
    sums = sums + GateSums.of(more)         # those after them, or another prompt's

Nothing is kept for a token. Quantiles come from counts in fixed bins, which add up exactly.

Axis letters: Q tokens, H heads, C gate channels (1 headwise), D head_dim, B bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gattn_viz.metrics.bins import Array, Bins, Counts

GATE_BINS = Bins(low=-16, high=5, bits=7)
"""Of scores: a quantile is right to 1/128 of its value, below 2^-16 to that.

Scores are at most 1 where they are a sigmoid; others (softplus) may be larger, but above 32 are not told apart.
"""

SMALL = (1e-2, 1e-3)
"""Below which an output element is small."""

OUTPUT_BINS = Bins(low=-15, high=22, bits=6)
"""Of the abs of output elements, each at most 1/64 of its value wide; a 32nd of the least of `SMALL` is beyond the
first."""


@dataclass(frozen=True)
class GateSums:
    """The gate scores of one layer over some tokens.

    Attributes:
        tokens, channels: how many; a head has tokens x channels scores.
        total, squares: (H,), the sum over both of the score, and of its squared distance from 0.
        first: (H,), the mean over channels of the first token's score; of several prompts, summed.
        below, above: (H,), how many scores lie strictly below and above the thresholds.
        largest: (H, C), each channel's largest score.
        histogram: (H, B), counts of scores in `GATE_BINS`; None if not asked.
    """

    tokens: int
    channels: int
    total: Array
    squares: Array
    first: Array
    below: Counts
    above: Counts
    largest: Array
    histogram: Counts | None = None

    @classmethod
    def of(
        cls,
        scores: Tensor,
        thresholds: tuple[float, float] = (0.1, 0.9),
        *,
        begins: bool = True,
        histogram: bool = False,
    ) -> GateSums:
        """The sums of (Q, H, C) scores, Q at least 1.

        Args:
            thresholds: of `below` and `above`.
            begins: whether the first of them is its prompt's first token.
        """
        scores = scores.detach().float()
        tokens, heads, channels = scores.shape
        # the squares by way of the variance: their sum itself would lose a small one in float32
        variance, mean = (_numpy(x) for x in torch.var_mean(scores, dim=(0, 2), correction=0))
        count = tokens * channels
        return cls(
            tokens,
            channels,
            total=count * mean,
            squares=count * (variance + mean**2),
            first=_numpy(scores[0].mean(-1)) if begins else np.zeros(heads),
            below=_numpy((scores < thresholds[0]).sum((0, 2)), np.int64),
            above=_numpy((scores > thresholds[1]).sum((0, 2)), np.int64),
            largest=_numpy(scores.amax(0)),
            histogram=GATE_BINS.counts(scores) if histogram else None,
        )

    def __add__(self, other: GateSums) -> GateSums:
        return GateSums(
            self.tokens + other.tokens,
            self.channels,
            total=self.total + other.total,
            squares=self.squares + other.squares,
            first=self.first + other.first,
            below=self.below + other.below,
            above=self.above + other.above,
            largest=np.maximum(self.largest, other.largest),
            histogram=_add(self.histogram, other.histogram),
        )

    @property
    def count(self) -> int:
        """Scores of a head."""
        return self.tokens * self.channels

    @property
    def mean(self) -> Array:
        """(H,)."""
        return self.total / self.count

    def quantile(self, percent: int) -> Array:
        """(H,): the score that `percent` of 100 do not exceed, see `Bins.quantile`."""
        assert self.histogram is not None
        return np.minimum(GATE_BINS.quantile(self.histogram, percent), self.largest.max(1))


@dataclass(frozen=True)
class OutputSums:
    """The attention output of one layer over some tokens, before or after the gate.

    Attributes:
        tokens, width: how many, and D; a head has tokens x width elements.
        absolute: (H,), the sum of abs over both.
        norm: (H,), the sum over tokens of the L2 norm.
        small: (2, H), how many elements have an abs strictly below each of `SMALL`.
        histogram: (H, B), counts of abs in `OUTPUT_BINS`; None if not asked.
    """

    tokens: int
    width: int
    absolute: Array
    norm: Array
    small: Counts
    histogram: Counts | None = None

    @classmethod
    def of(cls, output: Tensor, *, histogram: bool = False) -> OutputSums:
        """The sums of (Q, H, D) outputs, Q at least 1."""
        output = output.detach().float()
        size = output.abs()
        return cls(
            output.shape[0],
            output.shape[2],
            absolute=_numpy(size.mean((0, 2))) * size.shape[0] * size.shape[2],
            norm=_numpy(output.norm(dim=-1).sum(0)),
            small=np.stack([_numpy((size < threshold).sum((0, 2)), np.int64) for threshold in SMALL]),
            histogram=OUTPUT_BINS.counts(size) if histogram else None,
        )

    def __add__(self, other: OutputSums) -> OutputSums:
        return OutputSums(
            self.tokens + other.tokens,
            self.width,
            absolute=self.absolute + other.absolute,
            norm=self.norm + other.norm,
            small=self.small + other.small,
            histogram=_add(self.histogram, other.histogram),
        )

    @property
    def count(self) -> int:
        """Elements of a head."""
        return self.tokens * self.width

    def share_below(self, thresholds: Array) -> Array:
        """(H,): the share of a head's elements with an abs below its own threshold, see `Bins.share_below`."""
        assert self.histogram is not None
        return OUTPUT_BINS.share_below(self.histogram, thresholds)


def _add(a: Counts | None, b: Counts | None) -> Counts | None:
    return None if a is None or b is None else a + b


def _numpy(tensor: Tensor, dtype: Any = np.float64) -> NDArray[Any]:
    return tensor.cpu().numpy().astype(dtype)

"""The median of many numbers, and of more than one would keep."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# float32 numbers of at least 0 are ordered as their bits are. Exponent and 10 bits of the mantissa tell 2^18 of
# them apart; a bin is 2^-10 of its value wide.
_DROPPED_BITS = 13
_BINS = 1 << (31 - _DROPPED_BITS)


def median(values: NDArray[np.float32]) -> float:
    """The mean of the two middle values, or the middle one; NaN if any is NaN, or of none.

    As `numpy.median`, seven times as fast: a partition at two places is not vectorised, at one place it is.
    """
    count = values.size
    if count == 0:
        return float("nan")
    parts = np.partition(values, count // 2, axis=None)
    upper = parts[count // 2]
    lower = parts[: count // 2].max() if count % 2 == 0 else upper
    return float(np.nan if np.isnan(parts[count // 2 :].max()) else (float(lower) + float(upper)) / 2)


class MagnitudeHistogram:
    """Numbers of at least 0 that come in parts, as counts in bins; their median is right to 2^-11 (.05 %)."""

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS, np.int64)

    def add(self, values: NDArray[np.float32]) -> None:
        """Take in values of any shape."""
        bits = np.ascontiguousarray(values).view(np.int32).ravel() >> _DROPPED_BITS
        self.counts += np.bincount(bits, minlength=_BINS)

    def median(self) -> float:
        """The mean of the two middle values' bins; NaN of no numbers."""
        cumulative = self.counts.cumsum()
        count = cumulative[-1]
        if count == 0:
            return float("nan")
        bins = cumulative.searchsorted([(count - 1) // 2, count // 2], side="right").astype(np.int32)
        centres = (bins << _DROPPED_BITS) + (1 << (_DROPPED_BITS - 1))
        return float(centres.astype(np.int32).view(np.float32).mean(dtype=np.float64))

"""Where the residual stream is largest, whatever rounding does.

Prompts that begin alike have their largest activation in common, and so have tokens that repeat the first one: but
for rounding, which differs with batches and chunks. So all that is within 1 % of the largest counts as it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gattn_viz.metrics.bootstrap import Bootstrap
from gattn_viz.metrics.measures import SINK_MEASURES

Array = NDArray[np.float64]

LARGEST = next(measure for measure in SINK_MEASURES if measure.combine == "largest")

# Neighbours in bfloat16 are up to .8 % apart.
SAME = 0.01


def as_large(size: NDArray[np.floating], axis: int | None = None) -> NDArray[np.bool_]:
    """Which magnitudes are the largest along an axis, or of all."""
    found: NDArray[np.bool_] = size >= (1 - SAME) * size.max(axis)
    return found


@dataclass
class Largest:
    """The largest activation of each prompt and layer, and what goes with it. P prompts, L layers.

    All are kept, four numbers each: which ones are as large as the largest is known at the end only.

    Attributes:
        prompts: of each prompt, by its index, the measures' (L,) values; those of `max_activation` among them.
    """

    prompts: dict[int, dict[str, Array]] = field(default_factory=dict)

    def values(self) -> Array:
        """(L,): the largest of all prompts."""
        found: Array = self._all(LARGEST.name).max(0)
        return found

    def model_resamples(self, bootstrap: Bootstrap, all_prompts: int) -> Array:
        """(resamples,): the mean over layers of the largest of the prompts that each resample holds."""
        values = self._all(LARGEST.name)
        held = np.stack([bootstrap.counts(prompt, all_prompts) for prompt in sorted(self.prompts)]) > 0  # (P, S)
        return np.array([values[prompts].max(0).mean() for prompts in held.T])

    def mean(self, name: str) -> Array:
        """(L,): the mean over the prompts that have the largest; a NaN does not count."""
        values = self._all(name)
        chosen = as_large(self._all(LARGEST.name), 0) & ~np.isnan(values)
        count = chosen.sum(0)
        found: Array = np.where(chosen, values, 0).sum(0) / np.where(count == 0, np.nan, count)
        return found

    def most_frequent(self, name: str) -> Array:
        """(L,): the most frequent value over the prompts that have the largest; of several, the smallest."""
        chosen = as_large(self._all(LARGEST.name), 0)
        layers = zip(self._all(name).T, chosen.T, strict=True)
        return np.array([_most_frequent(values[here]) for values, here in layers])

    def most_frequent_of_all_layers(self, name: str) -> float:
        """The same over the prompts and layers that have the largest of all."""
        return _most_frequent(self._all(name)[as_large(self._all(LARGEST.name))])

    def _all(self, name: str) -> Array:
        """(P, L), in the order of the prompts' indices."""
        return np.stack([self.prompts[prompt][name] for prompt in sorted(self.prompts)])


def _most_frequent(values: Array) -> float:
    different, counts = np.unique(values, return_counts=True)
    return float(different[counts.argmax()])

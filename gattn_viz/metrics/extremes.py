"""The largest values of each head over the tokens of many prompts, without keeping the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Extreme:
    """A value, and where it is: the prompt's index and the position in it, both from 0."""

    value: float
    prompt: int
    position: int


class Extremes:
    """The `count` largest of each of `heads` heads. Of equals, the earlier prompt's and the earlier position.

    Prompts may come in any order: the result is the same.
    """

    def __init__(self, count: int, heads: int) -> None:
        self.count = count
        self._values = np.empty((heads, 0))
        self._prompts = np.empty((heads, 0), int)
        self._positions = np.empty((heads, 0), int)

    def add(self, prompt: int, values: NDArray[np.float64]) -> None:
        """Take in a prompt's (H, T) values."""
        places = np.broadcast_to(np.arange(values.shape[1]), values.shape)
        values = np.concatenate([self._values, values], 1)
        prompts = np.concatenate([self._prompts, np.full(places.shape, prompt)], 1)
        positions = np.concatenate([self._positions, places], 1)
        order = np.lexsort((positions, prompts, -values), axis=1)[:, : self.count]
        self._values, self._prompts, self._positions = (
            np.take_along_axis(array, order, 1) for array in (values, prompts, positions)
        )

    def of(self, head: int) -> list[Extreme]:
        """Those of a head, from 0, the largest first."""
        found = zip(self._values[head], self._prompts[head], self._positions[head], strict=True)
        return [Extreme(float(value), int(prompt), int(position)) for value, prompt, position in found]

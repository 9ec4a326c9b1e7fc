"""The percentile bootstrap over prompts: how often each resample of the prompts holds each prompt.

A resample draws as many prompts as there are, with replacement, so that the counts of all prompts are multinomial.
Here the counts of one prompt are computed from the seed and its index alone: prompts may come in any order and be
forgotten, and models that see the same prompts see the same resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gattn_viz.errors import GattnVizError


@dataclass(frozen=True)
class Bootstrap:
    """Which confidence intervals are wanted.

    Attributes:
        level: of confidence, such as .95.
        seed: 0 or more.
        resamples: how many; the more, the smoother the interval's ends.
    """

    level: float
    seed: int = 0
    resamples: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise GattnVizError(f"ci is {self.level}; expected a level between 0 and 1, such as .95")
        if self.seed < 0:
            raise GattnVizError(f"seed is {self.seed}; expected 0 or more")
        if self.resamples < 1:
            raise GattnVizError(f"resamples is {self.resamples}; expected 1 or more, such as 1000")

    def counts(self, prompt: int, prompts: int) -> NDArray[np.int64]:
        """(resamples,): how often each resample holds a prompt.

        The prompts are halved until one is left. Of the draws that fall into a part, a binomial number falls into
        its left half, from a generator that is seeded for that part.

        Args:
            prompt: its index, from 0.
            prompts: how many there are.
        """
        first, last = 0, prompts
        drawn = np.full(self.resamples, prompts)
        while last - first > 1:
            middle = (first + last) // 2
            generator = np.random.default_rng([self.seed, first, last])
            in_left = generator.binomial(drawn, (middle - first) / (last - first))
            if prompt < middle:
                drawn, last = in_left, middle
            else:
                drawn, first = drawn - in_left, middle
        return drawn

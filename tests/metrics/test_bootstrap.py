"""The counts of the bootstrap against those of drawing with replacement."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import factorial, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.bootstrap import Bootstrap


def counts(prompts: int, seed: int = 0, resamples: int = 100) -> np.ndarray:
    """(prompts, resamples)"""
    bootstrap = Bootstrap(0.95, seed, resamples)
    return np.stack([bootstrap.counts(prompt, prompts) for prompt in range(prompts)])


@given(st.integers(1, 40), st.integers(0, 2**40))
def test_each_resample_draws_as_many_prompts_as_there_are(prompts: int, seed: int) -> None:
    drawn = counts(prompts, seed, 5)
    assert (drawn >= 0).all()
    assert (drawn.sum(0) == prompts).all()


@pytest.mark.parametrize("prompts", [2, 3, 5])
def test_they_are_multinomial(prompts: int) -> None:
    resamples = 20_000
    seen = Counter(map(tuple, counts(prompts, 1, resamples).T.tolist()))
    outcomes = [one for one in product(range(prompts + 1), repeat=prompts) if sum(one) == prompts]
    assert set(seen) <= set(outcomes)
    # the number of ways to draw these counts, of all n^n
    expected = {
        one: resamples * factorial(prompts) / prod(map(factorial, one)) / prompts**prompts for one in outcomes
    }
    assert sum(expected.values()) == pytest.approx(resamples)
    # chi-squared with len - 1 degrees of freedom: mean len - 1, variance 2 (len - 1)
    chi = sum((seen[one] - mean) ** 2 / mean for one, mean in expected.items())
    free = len(outcomes) - 1
    assert abs(chi - free) < 5 * (2 * free) ** 0.5


def test_mean_variance_and_covariance_of_many() -> None:
    drawn = counts(16, 2, 20_000)
    np.testing.assert_allclose(drawn.mean(1), 1, atol=0.04)
    covariance = np.cov(drawn)
    np.testing.assert_allclose(covariance, np.eye(16) - 1 / 16, atol=0.05)


def test_they_follow_from_seed_and_index() -> None:
    one = Bootstrap(0.9, 3)
    assert np.array_equal(one.counts(5, 9), Bootstrap(0.5, 3).counts(5, 9))  # whatever was asked before
    assert not np.array_equal(one.counts(5, 9), one.counts(6, 9))
    assert not np.array_equal(one.counts(5, 9), Bootstrap(0.9, 4).counts(5, 9))
    assert one.counts(0, 1).tolist() == [1] * 1000


@pytest.mark.parametrize(
    "wrong",
    [
        {"level": 0},
        {"level": 1},
        {"level": 95},
        {"level": float("nan")},
        {"level": 0.5, "seed": -1},
        {"level": 0.5, "resamples": 0},
    ],
)
def test_what_is_none(wrong: dict[str, float]) -> None:
    with pytest.raises(GattnVizError, match="expected"):
        Bootstrap(**wrong)  # type: ignore[arg-type]

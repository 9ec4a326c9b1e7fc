"""The median against Python's and NumPy's."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gattn_viz.metrics import median as module
from gattn_viz.metrics.median import MOST_KEPT, RunningMedian, median

SIZES = st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=50)


@given(values=SIZES)
def test_median(values: list[float]) -> None:
    assert median(np.array(values, np.float32)) == pytest.approx(statistics.median(values), rel=1e-6)


def test_of_two_dimensions_of_none_and_of_nan() -> None:
    assert median(np.array([[4, 1], [3, 9]], np.float32)) == 3.5
    assert math.isnan(median(np.array([], np.float32)))
    assert math.isnan(median(np.array([1, np.nan, 2], np.float32)))


def running(parts: list[np.ndarray]) -> RunningMedian:
    found = RunningMedian()
    for part in parts:
        found.add(part)
    return found


@given(values=SIZES, parts=st.integers(1, 5))
def test_of_parts_is_exact_while_they_are_kept(values: list[float], parts: int) -> None:
    apart = [np.array(values[part::parts], np.float32) for part in range(parts)]
    assert running(apart).result() == median(np.array(values, np.float32))


@given(values=SIZES, parts=st.integers(1, 5), most_kept=st.integers(0, 40))
def test_of_more_it_is_right_to_a_part_in_two_thousand(values: list[float], parts: int, most_kept: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_KEPT", most_kept)
        found = running([np.array(values[part::parts], np.float32) for part in range(parts)])
    assert found.result() == pytest.approx(statistics.median(values), rel=2**-11, abs=1e-37)


def test_the_switch() -> None:
    """One value more than the counts take memory for."""
    values = np.abs(np.random.default_rng(0).normal(size=MOST_KEPT + 1)).astype(np.float32)
    few, many = running(np.array_split(values[1:], 4)), running(np.array_split(values, 4))
    assert few.result() == np.median(values[1:])
    assert many.result() != np.median(values)
    assert many.result() == pytest.approx(np.median(values), rel=2**-11)


@pytest.mark.parametrize("count", [10, 1000, MOST_KEPT, 3 * MOST_KEPT])
def test_memory_is_that_of_the_values_or_of_the_counts(count: int) -> None:
    found = running(np.array_split(np.ones(count, np.float32), 10))
    kept = sum(part.nbytes for part in found._kept) + (0 if found._counts is None else found._counts.nbytes)
    assert kept == min(4 * count, 2 << 20)


def test_zeros_are_zero_and_nothing_has_no_median() -> None:
    for count in (10, MOST_KEPT + 10):
        assert running([np.zeros(count // 2, np.float32)] * 2).result() == 0
    assert median(np.zeros(10, np.float32)) == 0
    assert math.isnan(RunningMedian().result())

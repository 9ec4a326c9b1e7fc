"""The median against Python's and NumPy's."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gattn_viz.metrics.median import MagnitudeHistogram, median

SIZES = st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=50)


@given(values=SIZES)
def test_median(values: list[float]) -> None:
    assert median(np.array(values, np.float32)) == pytest.approx(statistics.median(values), rel=1e-6)


def test_of_two_dimensions_of_none_and_of_nan() -> None:
    assert median(np.array([[4, 1], [3, 9]], np.float32)) == 3.5
    assert math.isnan(median(np.array([], np.float32)))
    assert math.isnan(median(np.array([1, np.nan, 2], np.float32)))


@given(values=SIZES, parts=st.integers(1, 5))
def test_histogram_is_right_to_a_part_in_two_thousand(values: list[float], parts: int) -> None:
    histogram = MagnitudeHistogram()
    for part in range(parts):
        histogram.add(np.array(values[part::parts], np.float32))
    assert histogram.median() == pytest.approx(statistics.median(values), rel=2**-11, abs=1e-37)


def test_of_real_looking_numbers() -> None:
    values = np.abs(np.random.default_rng(0).normal(size=(301, 64))).astype(np.float32)
    histogram = MagnitudeHistogram()
    for part in np.array_split(values, 4):
        histogram.add(part)
    assert histogram.median() == pytest.approx(np.median(values), rel=2**-11)
    assert median(values) == np.median(values)


def test_histogram_of_nothing() -> None:
    assert math.isnan(MagnitudeHistogram().median())

"""Quantiles and shares from bins against those of the numbers themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn_viz.metrics import bins as bins_module
from gattn_viz.metrics.bins import Bins

BINS = Bins(low=-4, high=1, bits=2)  # 5 octaves of 4 bins


def test_the_edges_by_hand() -> None:
    edges = BINS.edges.tolist()
    assert len(edges) == BINS.count + 1 == 21
    assert edges[:6] == [0, 1.25 / 16, 1.5 / 16, 1.75 / 16, 1 / 8, 1.25 / 8]
    assert edges[-5:] == [1, 1.25, 1.5, 1.75, 2]


def test_where_numbers_go() -> None:
    values = torch.tensor([0.0, 1e-30, 0.0624, 0.078125, 1.0, 1.2499, 1.75, 2.0, 1e30])
    [counts] = BINS.counts(values[:, None, None])
    assert {place: count for place, count in enumerate(counts.tolist()) if count} == {0: 3, 1: 1, 16: 2, 19: 3}


@st.composite
def numbers(draw: st.DrawFn) -> torch.Tensor:
    """(Q, H, C) of all sizes: some equal, some on edges."""
    shape = draw(st.tuples(st.integers(1, 20), st.integers(1, 3), st.integers(1, 3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.rand(shape, generator=generator) ** draw(st.sampled_from([1, 4]))
    return values.mul(16).round().div(16) if draw(st.booleans()) else values


@settings(deadline=None, max_examples=100)
@given(numbers(), st.sampled_from([1, 5, 25, 50, 75, 95, 100]), st.sampled_from([(-4, 2), (-16, 7)]))
def test_quantiles(values: torch.Tensor, percent: int, shape: tuple[int, int]) -> None:
    bins = Bins(shape[0], 1, shape[1])
    found = bins.quantile(bins.counts(values), percent)
    for head, quantile in enumerate(found):
        ordered = sorted(values[:, head].flatten().tolist())
        exact = next(x for n, x in enumerate(ordered, start=1) if 100 * n >= percent * len(ordered))
        assert abs(quantile - exact) <= max(exact * 2.0 ** -shape[1], 2.0 ** shape[0] * (1 + 2.0 ** -shape[1]))


def test_a_quantile_is_not_one_rank_too_high() -> None:
    # 95% of 20 numbers are 19, and .95 * 20 in floating point is not to make it 20
    values = torch.tensor([0.25] * 19 + [1.0])[:, None, None]
    assert BINS.quantile(BINS.counts(values), 95)[0] < 0.3125
    assert BINS.quantile(BINS.counts(values), 96)[0] >= 1


@settings(deadline=None, max_examples=100)
@given(numbers(), st.floats(1.25 / 16, 10))
def test_shares(values: torch.Tensor, threshold: float) -> None:
    heads = values.shape[1]
    found = BINS.share_below(BINS.counts(values), np.full(heads, threshold))
    for head, share in enumerate(found):
        numbers = values[:, head].flatten().tolist()
        low, high = threshold / 1.25, threshold * 1.25
        assert sum(x < low for x in numbers) <= share * len(numbers) + 1e-9
        assert share * len(numbers) <= sum(x < high for x in numbers) + 1e-9


def test_a_share_within_a_bin_by_hand() -> None:
    # of 4 numbers two are below the bin from 1 to 1.25, one is in it, of which 3/5 lie below 1.15
    counts = BINS.counts(torch.tensor([0.2, 0.9, 1.1, 1.3])[:, None, None])
    assert BINS.share_below(counts, np.array([1.15])) == pytest.approx([2.6 / 4])
    assert BINS.share_below(counts, np.array([np.inf])) == [1]


def test_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.rand(50, 2, 3, generator=torch.Generator().manual_seed(0))
    whole = BINS.counts(values)
    monkeypatch.setattr(bins_module, "_ELEMENTS", 13)
    np.testing.assert_array_equal(BINS.counts(values), whole)
    assert whole.sum(1).tolist() == [150, 150]

"""Rounds of calls, by a clock that stands still unless a call moves it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from gattn_viz.pipeline.timing import Spread, ratio, spread, time_rounds


class Clock:
    def __init__(self) -> None:
        self.now, self.calls = 0.0, ""

    def __call__(self) -> float:
        return self.now

    def taking(self, name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.calls += name
            self.now += seconds * len(self.calls)  # the machine becomes slower and slower

        return call


def test_each_round_begins_with_the_next_one() -> None:
    clock = Clock()
    rounds: list[int] = []
    calls = {"a": clock.taking("a", 1), "b": clock.taking("b", 2), "c": clock.taking("c", 3)}
    seconds = time_rounds(calls, 4, clock, rounds.append)
    assert clock.calls == "abc" + "abc" + "bca" + "cab" + "abc"  # the first is not timed
    assert seconds == {"a": [4, 9, 11, 13], "b": [2 * 5, 2 * 7, 2 * 12, 2 * 14], "c": [18, 24, 30, 45]}
    assert rounds == [1, 2, 3, 4]


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_collection_is_as_before(collecting: bool) -> None:
    during: list[bool] = []

    def call() -> None:
        during.append(gc.isenabled())
        if len(during) == 3:
            raise ValueError

    was = gc.isenabled()
    try:
        gc.enable() if collecting else gc.disable()
        with pytest.raises(ValueError):  # noqa: PT011
            time_rounds({"a": call}, 5)
        assert gc.isenabled() == collecting
        assert during == [collecting, False, False]
    finally:
        gc.enable() if was else gc.disable()


def test_median_and_quartiles_of_the_ratios_of_each_round() -> None:
    assert spread([4, 1, 3, 2, 5]) == Spread(3, 2, 4)
    # of the ratios, not the ratio of the medians
    assert ratio([2, 9, 40], [1, 3, 10]) == Spread(3, 2.5, 3.5)
    assert ratio([3, 4], [3, 4]) == Spread(1, 1, 1)

"""Ratios by hand, who runs in which round, and the rounds themselves with contenders that do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import timing
from benchmarks.contenders import Contender
from benchmarks.shapes import Shape
from benchmarks.timing import order, ratio, still_in, time_rounds

TINY = Shape("tiny", "tiny", 1, 8, 2, 1, 4, 8, (4,))


def test_ratio_is_taken_round_by_round() -> None:
    # ratios 2, 3, 1, 4, 2: sorted 1 2 2 3 4
    found = ratio([2.0, 6.0, 2.0, 4.0, 4.0], plain=[1.0, 2.0, 2.0, 1.0, 2.0])
    assert (found.median, found.q1, found.q3) == (2.0, 2.0, 3.0)
    assert (found.seconds, found.rounds) == (4.0, 5)


def test_ratio_of_who_left_early_compares_with_the_rounds_it_ran_in() -> None:
    found = ratio([6.0], plain=[2.0, 100.0, 100.0])
    assert (found.median, found.q1, found.q3, found.seconds, found.rounds) == (3.0, 3.0, 3.0, 6.0, 1)


def test_each_begins_once() -> None:
    names = ["a", "b", "c"]
    assert [order(names, round_) for round_ in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert order([], 5) == []


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"plain": [], "a": [], "b": []}, ["plain", "a", "b"]),
        ({"plain": [1.0], "a": [2.0, 3.0], "b": [1.0]}, ["plain", "b"]),  # a has used up its 5 seconds
        ({"plain": [9.0], "a": [1.0]}, ["plain", "a"]),  # plain stays as long as anybody does
        ({"plain": [9.0], "a": [9.0]}, []),
        ({"a": [1.0]}, []),  # nothing to compare with
    ],
)
def test_who_is_still_in(seconds: dict[str, list[float]], expected: list[str]) -> None:
    assert still_in(seconds, budget=5.0) == expected


class Fake(Contender):
    def __init__(self, calls: list[tuple[str, int]], name: str, fails: str = "") -> None:
        self.calls, self.name, self.fails = calls, name, fails

    def prepare(self, model: Any) -> None:
        if self.fails == "at once":
            raise ValueError("no such model\nand more")

    def run(self, ids: torch.Tensor) -> None:
        self.calls.append((self.name, ids.shape[1]))
        if self.fails == "in a long run" and ids.shape[1] > timing.WARM_UP:
            raise MemoryError


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def rounds(monkeypatch: pytest.MonkeyPatch, *fakes: Fake, budget: float = 60.0) -> dict[str, Any]:
    monkeypatch.setattr(timing, "CONTENDERS", {fake.name: fake for fake in fakes})
    monkeypatch.setattr(timing, "WARM_UP", 2)
    names = [fake.name for fake in fakes]
    return time_rounds(names, TINY, 4, "cpu", torch.float32, 1, 3, budget)


def test_rounds_are_interleaved_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    seconds = rounds(monkeypatch, Fake(calls, "plain"), Fake(calls, "a"))
    assert calls == [("plain", 2), ("a", 2), *[(name, 4) for name in ("plain", "a", "a", "plain", "plain", "a")]]
    assert {name: len(own) for name, own in seconds.items()} == {"plain": 3, "a": 3}
    assert all(second > 0 for own in seconds.values() for second in own)


def test_once_at_least_whatever_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    seconds = rounds(monkeypatch, Fake(calls, "plain"), Fake(calls, "a"), budget=1e-9)
    assert {name: len(own) for name, own in seconds.items()} == {"plain": 1, "a": 1}


def test_who_fails_is_reported_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    fakes = [
        Fake(calls, "plain"),
        Fake(calls, "a", fails="at once"),
        Fake(calls, "b", fails="in a long run"),
        Fake(calls, "c"),
    ]
    seconds = rounds(monkeypatch, *fakes)
    assert seconds["a"] == "failed: ValueError: no such model"
    assert seconds["b"] == "does not fit"
    assert len(seconds["plain"]) == len(seconds["c"]) == 3


def test_without_plain_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    seconds = rounds(monkeypatch, Fake(calls, "plain", fails="at once"), Fake(calls, "a"))
    assert isinstance(seconds["plain"], str)
    assert seconds["a"] == []

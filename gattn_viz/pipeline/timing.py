"""How long calls take beside each other: in rounds of one call each, so that all share the machine's moods."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

Call = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """The median of several values, and their quartiles."""

    median: float
    q1: float
    q3: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    q1, median, q3 = np.percentile(values, [25, 50, 75])
    return Spread(float(median), float(q1), float(q3))


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Of the ratios of each round."""
    return spread(np.divide(seconds, baseline).tolist())


def time_rounds(
    calls: Mapping[str, Call],
    rounds: int,
    clock: Callable[[], float] = perf_counter,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, list[float]]:
    """The seconds of each call in each round.

    Each is called once before, untimed. Each round begins with the next of them, and no garbage is collected while
    it lasts.

    Args:
        clock: seconds.
        on_round: called with the number of rounds that are done.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for name in names:
        calls[name]()
    collecting = gc.isenabled()
    try:
        for done in range(rounds):
            gc.collect()
            gc.disable()
            first = done % len(names)
            for name in names[first:] + names[:first]:
                start = clock()
                calls[name]()
                seconds[name].append(clock() - start)
            if on_round is not None:
                on_round(done + 1)
    finally:
        if collecting:
            gc.enable()
    return seconds

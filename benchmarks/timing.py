"""Time, as a ratio to the plain forward pass of the same round."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from benchmarks.contenders import CONTENDERS, PLAIN, Contender
from benchmarks.processes import status_of
from benchmarks.shapes import Shape

# Before each length everyone runs once on so many tokens, untimed.
WARM_UP = 512


@dataclass(frozen=True)
class Ratio:
    """Of several rounds: the median and the quartiles of time over plain time, and the median time in seconds."""

    median: float
    q1: float
    q3: float
    seconds: float
    rounds: int


def ratio(seconds: Sequence[float], plain: Sequence[float]) -> Ratio:
    """Compare a contender with the plain forward pass, round by round; it may have left after some rounds."""
    own = np.asarray(seconds)
    ratios = own / np.asarray(plain[: len(own)])
    q1, median, q3 = np.percentile(ratios, [25, 50, 75])
    return Ratio(float(median), float(q1), float(q3), float(np.median(own)), len(own))


def order(names: Sequence[str], round_: int) -> list[str]:
    """Who runs when: each round the next one begins."""
    start = round_ % max(1, len(names))
    return [*names[start:], *names[:start]]


def still_in(seconds: Mapping[str, Sequence[float]], budget: float) -> list[str]:
    """Who runs in the next round: whoever's calls have lasted less than the budget, and plain with them."""
    if PLAIN not in seconds:
        return []  # nothing to compare with
    waiting = [name for name, own in seconds.items() if sum(own) < budget]
    return [name for name in seconds if name in waiting or (waiting and name == PLAIN)]


def time_rounds(
    names: Sequence[str],
    shape: Shape,
    tokens: int,
    device: str,
    dtype: torch.dtype,
    threads: int,
    rounds: int,
    budget: float,
) -> dict[str, list[float] | str]:
    """The seconds of each round for each contender, or why there are none.

    Args:
        names: with plain among them.
        rounds: at most so many.
        budget: seconds; a contender takes part until its calls have lasted so long, once at least.
    """
    torch.set_num_threads(threads)
    model, ids = shape.model(device, dtype), shape.prompt(tokens, device)
    failed: dict[str, list[float] | str] = {}
    seconds: dict[str, list[float]] = {}
    for name in names:
        try:
            CONTENDERS[name].prepare(model)
            _call(CONTENDERS[name], ids[:, :WARM_UP])
            seconds[name] = []
        except Exception as error:
            failed[name] = status_of(error)
    gc.collect()
    gc.freeze()  # else each collection looks at every module again, for half a second
    for round_ in range(rounds):
        for name in order(still_in(seconds, budget), round_):
            try:
                seconds[name].append(_call(CONTENDERS[name], ids))
            except Exception as error:
                failed[name] = status_of(error)
                del seconds[name]
    return seconds | failed


def _call(contender: Contender, ids: Tensor) -> float:
    """The seconds of one call. What it returns is freed after the clock has stopped."""
    gc.collect()
    with torch.no_grad():
        _synchronise(ids)
        start = perf_counter()
        result = contender.run(ids)
        _synchronise(ids)
        seconds = perf_counter() - start
    del result
    return seconds


def _synchronise(ids: Tensor) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize()

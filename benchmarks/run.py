"""What is measured, in which order, and what of it is there already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.agreement import check_all
from benchmarks.contenders import CONTENDERS, PLAIN
from benchmarks.memory import peak_memory
from benchmarks.processes import DOES_NOT_FIT, NOT_INSTALLED, OK, call_in_process
from benchmarks.results import KEY, Quantity, Row, append, check_same, environment, read
from benchmarks.shapes import Shape
from benchmarks.timing import ratio, time_rounds

Say = Callable[[str], None]

Key = tuple[str, int, int, str, str]
"""The values of `results.KEY`."""


@dataclass(frozen=True)
class Settings:
    """What a person chose.

    Attributes:
        lengths: tokens of a prompt; None is each shape's own.
        threads: a timed run for each. Memory is measured with the last.
        contenders: names, plain among them.
        rounds, budget: see `timing.time_rounds`.
        limit: MiB that a contender may take.
        output: the CSV, which is added to.
    """

    shapes: Sequence[Shape]
    lengths: Sequence[int] | None
    threads: Sequence[int]
    contenders: Sequence[str]
    rounds: int
    budget: float
    limit: float
    device: str
    dtype: torch.dtype
    output: Path


def run(settings: Settings, say: Say) -> pd.DataFrame:
    """Measure what the CSV does not hold yet, and return all it holds.

    Raises:
        GattnVizError: the CSV is of another machine or setting.
    """
    where = environment(settings.device, settings.dtype)
    before = read(settings.output)
    check_same(settings.output, before, where)
    have = _final(before)
    for shape in settings.shapes:
        say(shape.title)
        cells = [_Cell(settings, shape, tokens, say) for tokens in settings.lengths or shape.lengths]
        if all(cell.keys() <= have for cell in cells):
            continue
        barred = _barred(settings, shape, say)
        for cell in cells:
            for name in settings.contenders:
                if cell.key(name, "memory", settings.threads[-1]) not in have:
                    append(settings.output, [cell.memory(name, barred)], where)
            left_out = cell.without_memory(read(settings.output)) | barred
            for threads in settings.threads:
                if any(cell.key(name, "time", threads) not in have for name in settings.contenders):
                    append(settings.output, cell.time(threads, left_out), where)
    return read(settings.output)


def _final(frame: pd.DataFrame) -> set[Key]:
    """The measurements that need not be made again. What failed is tried again, and what was not installed."""
    missing = [name for name, contender in CONTENDERS.items() if not contender.installed]
    final = frame["status"].isin([OK, DOES_NOT_FIT])
    final |= (frame["status"] == NOT_INSTALLED) & frame["contender"].isin(missing)
    return set(frame[final][KEY].itertuples(index=False, name=None))


def _barred(settings: Settings, shape: Shape, say: Say) -> dict[str, str]:
    """Who cannot take part, each with its status: not installed, or not in agreement with eager attention."""
    barred = {name: NOT_INSTALLED for name in settings.contenders if not CONTENDERS[name].installed}
    names = [name for name in settings.contenders if name not in barred]
    status, found = call_in_process(check_all, names, shape, settings.device, settings.dtype)
    for name in names:
        outcome = found[name] if status == OK else status
        if isinstance(outcome, str):
            barred[name] = outcome
        else:
            off = ", ".join(f"{what} {difference:.1e}" for what, difference in outcome.items())
            say(f"  {CONTENDERS[name].title}: off eager attention by at most: {off}")
    for name, reason in barred.items():
        say(f"  {CONTENDERS[name].title}: {reason}")
    return barred


@dataclass(frozen=True)
class _Cell:
    """One shape at one length."""

    settings: Settings
    shape: Shape
    tokens: int
    say: Say

    def key(self, name: str, quantity: Quantity, threads: int) -> Key:
        return self.shape.name, self.tokens, threads, name, quantity

    def keys(self) -> set[Key]:
        """All that is to be measured here."""
        settings = self.settings
        memory = {self.key(name, "memory", settings.threads[-1]) for name in settings.contenders}
        return memory | {self.key(name, "time", n) for name in settings.contenders for n in settings.threads}

    def without_memory(self, frame: pd.DataFrame) -> dict[str, str]:
        """Who was seen not to fit: with its status, as in `barred`."""
        here = (frame["shape"] == self.shape.name) & (frame["tokens"] == self.tokens)
        seen = frame[here & (frame["quantity"] == "memory") & (frame["status"] == DOES_NOT_FIT)]
        return dict.fromkeys(seen["contender"], DOES_NOT_FIT)

    def memory(self, name: str, barred: dict[str, str]) -> Row:
        settings, threads = self.settings, self.settings.threads[-1]
        if name in barred:
            return self._row(name, "memory", threads, barred[name])
        status, mib = call_in_process(
            peak_memory, name, self.shape, self.tokens, settings.device, settings.dtype, threads, settings.limit
        )
        if status != OK:
            return self._row(name, "memory", threads, status)
        return self._row(name, "memory", threads, OK, median=mib, rounds=1)

    def time(self, threads: int, left_out: dict[str, str]) -> list[Row]:
        settings = self.settings
        names = [name for name in settings.contenders if name not in left_out]
        status, measured = call_in_process(
            time_rounds,
            *(names, self.shape, self.tokens, settings.device, settings.dtype),
            *(threads, settings.rounds, settings.budget),
        )
        outcomes = left_out | (measured if status == OK else dict.fromkeys(names, status))
        plain = outcomes[PLAIN]
        rows = []
        for name in settings.contenders:
            seconds = outcomes[name]
            if isinstance(seconds, str):
                rows.append(self._row(name, "time", threads, seconds))
            elif isinstance(plain, str):
                rows.append(self._row(name, "time", threads, f"failed: no plain forward, which {plain}"))
            else:
                rows.append(self._row(name, "time", threads, OK, **vars(ratio(seconds, plain))))
        return rows

    def _row(self, name: str, quantity: Quantity, threads: int, status: str, **numbers: Any) -> Row:
        unit = "MiB" if quantity == "memory" else "x plain"
        row = Row(
            *(self.shape.name, self.tokens, threads, name, quantity, status, unit),
            **numbers,
            limit_mib=self.settings.limit,
        )
        what = f"{row.median:.4g} {unit}" if status == OK else status
        seconds = f", {row.seconds:.3g} s, rounds: {row.rounds}" if quantity == "time" and status == OK else ""
        self.say(f"  {self.tokens} tokens, {threads} threads, {quantity}, {name}: {what}{seconds}")
        return row

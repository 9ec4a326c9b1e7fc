"""The order of a run, its CSV, and going on where a run was stopped; measurements are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from benchmarks import run as module
from benchmarks.agreement import check_all
from benchmarks.contenders import CONTENDERS
from benchmarks.memory import peak_memory
from benchmarks.results import append, check_same, environment, read
from benchmarks.run import Settings, run
from benchmarks.shapes import SHAPES
from benchmarks.timing import time_rounds
from gattn_viz.errors import GattnVizError

SECONDS = {"plain": [1.0, 1.0, 2.0], "ours_all": [1.5, 1.5, 3.0], "eager": [9.0]}


class Machine:
    """Stands for the processes: answers as told, and remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.memory: dict[str, tuple[str, Any]] = {}
        self.check: dict[str, Any] = {}

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
        if function is check_all:
            return "ok", {name: self.check.get(name, {"maps": 0.0}) for name in arguments[0]}
        if function is peak_memory:
            name, _, tokens, *_, threads, limit = arguments
            assert limit == 100.0
            self.asked.append((f"memory {tokens} {threads}", name))
            return self.memory.get(name, ("ok", 8.0))
        assert function is time_rounds
        names, _, tokens, *_, threads, rounds, budget = arguments
        assert (rounds, budget) == (3, 10.0)
        self.asked.append((f"time {tokens} {threads}", list(names)))
        return "ok", {name: SECONDS[name] for name in names}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(module, "call_in_process", machine)
    return machine


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        shapes=[SHAPES["model"]],
        lengths=[8],
        threads=[1, 2],
        contenders=["plain", "ours_all", "eager"],
        rounds=3,
        budget=10.0,
        limit=100.0,
        device="cpu",
        dtype=torch.float32,
        output=tmp_path / "benchmark.csv",
    )


def quiet(message: str) -> None:
    pass


def at(frame: pd.DataFrame, contender: str, quantity: str, threads: int = 2) -> pd.Series:
    chosen = frame["contender"].eq(contender) & frame["quantity"].eq(quantity) & frame["threads"].eq(threads)
    [row] = [row for _, row in frame[chosen].iterrows()]
    return row


def test_memory_first_then_time_for_each_number_of_threads(machine: Machine, settings: Settings) -> None:
    frame = run(settings, quiet)
    everyone = ["plain", "ours_all", "eager"]
    assert machine.asked == [
        *[("memory 8 2", name) for name in everyone],
        ("time 8 1", everyone),
        ("time 8 2", everyone),
    ]
    assert len(frame) == 9
    row = at(frame, "ours_all", "time")
    assert (row["median"], row["seconds"], row["rounds"], row["unit"]) == (1.5, 1.5, 3, "x plain")
    row = at(frame, "eager", "time")
    assert (row["median"], row["rounds"]) == (9.0, 1)
    row = at(frame, "eager", "memory")
    assert (row["median"], row["unit"], row["limit_mib"], row["device"]) == (8.0, "MiB", 100.0, "cpu")


def test_the_same_command_goes_on_where_it_was_stopped(machine: Machine, settings: Settings) -> None:
    run(settings, quiet)
    complete = settings.output.read_text()
    lines = complete.splitlines(keepends=True)
    settings.output.write_text("".join(lines[:-3]))  # without the last cell's times
    machine.asked.clear()
    run(settings, quiet)
    assert machine.asked == [("time 8 2", ["plain", "ours_all", "eager"])]
    assert settings.output.read_text() == complete
    machine.asked.clear()
    run(settings, quiet)
    assert machine.asked == []


def test_what_does_not_fit_is_a_row_and_not_timed(machine: Machine, settings: Settings) -> None:
    machine.memory["eager"] = ("does not fit", None)
    frame = run(settings, quiet)
    assert ("time 8 1", ["plain", "ours_all"]) in machine.asked
    for quantity in ("memory", "time"):
        row = at(frame, "eager", quantity)
        assert row["status"] == "does not fit"
        assert pd.isna(row["median"])
    machine.asked.clear()
    run(settings, quiet)
    assert machine.asked == []


def test_what_failed_is_tried_again(machine: Machine, settings: Settings) -> None:
    machine.memory["eager"] = ("failed: its process ended with -9", None)
    assert at(run(settings, quiet), "eager", "memory")["status"] == "failed: its process ended with -9"
    machine.memory.clear()
    machine.asked.clear()
    frame = run(settings, quiet)
    assert machine.asked == [("memory 8 2", "eager")]
    assert at(frame, "eager", "memory")["median"] == 8.0


def test_who_disagrees_is_not_measured(machine: Machine, settings: Settings) -> None:
    machine.check["eager"] = "failed: ValueError: maps differs from eager attention by 0.3"
    frame = run(settings, quiet)
    assert "eager" not in str(machine.asked)
    assert at(frame, "eager", "time")["status"] == machine.check["eager"]


def test_not_installed_is_a_row_until_it_is(
    machine: Machine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONTENDERS["eager"], "package", "no_such_package")
    frame = run(settings, quiet)
    assert at(frame, "eager", "memory")["status"] == at(frame, "eager", "time")["status"] == "not installed"
    machine.asked.clear()
    run(settings, quiet)
    assert machine.asked == []
    monkeypatch.setattr(CONTENDERS["eager"], "package", None)
    frame = run(settings, quiet)
    assert at(frame, "eager", "time")["status"] == "ok"


def test_without_plain_there_is_no_ratio(machine: Machine, settings: Settings) -> None:
    machine.memory["plain"] = ("does not fit", None)
    frame = run(settings, quiet)
    assert at(frame, "ours_all", "time")["status"] == "failed: no plain forward, which does not fit"


def test_one_file_is_of_one_machine(machine: Machine, settings: Settings) -> None:
    run(settings, quiet)
    with pytest.raises(GattnVizError, match="was measured with dtype float32, and this is bfloat16; name another"):
        run(replace(settings, dtype=torch.bfloat16), quiet)
    frame = read(settings.output)
    where = environment("cpu", torch.float32)
    check_same(settings.output, frame, where | {"nnsight": "another"})  # a peer may come later
    with pytest.raises(GattnVizError, match="measured with torch"):
        check_same(settings.output, frame, where | {"torch": "0.0"})


def test_another_csv_is_refused(machine: Machine, settings: Settings) -> None:
    settings.output.write_text("a,b\n1,2\n")
    with pytest.raises(GattnVizError, match=r"has no column contender, .*; expected a CSV of this benchmark"):
        run(settings, quiet)


def test_append_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "b.csv"
    row = module.Row("model", 8, 1, "plain", "memory", "ok", "MiB", median=1.0)
    append(path, [row], {"date": "today"})
    append(path, [replace(row, tokens=16)], {"date": "today"})
    assert [line.split(",")[:4] for line in path.read_text().splitlines()[1:]] == [
        ["model", "8", "1", "plain"],
        ["model", "16", "1", "plain"],
    ]

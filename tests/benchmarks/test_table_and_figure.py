"""What the table and the figure say of made-up results."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from benchmarks.contenders import CONTENDERS
from benchmarks.figure import LOOKS, draw, main
from benchmarks.results import Row, append, environment, read
from benchmarks.table import tables
from gattn_viz.errors import GattnVizError
from gattn_viz.figures.save import read_metadata

ROWS = [
    Row("model", 512, 1, "plain", "time", "ok", "x plain", 1.0, 1.0, 1.0, 7, 0.0601),
    Row("model", 512, 1, "eager", "time", "ok", "x plain", 2.5, 2.25, 3.0, 7, 0.15),
    Row("model", 1024, 1, "plain", "time", "ok", "x plain", 1.0, 1.0, 1.0, 7, 0.12),
    Row("model", 1024, 1, "eager", "time", "does not fit", "x plain"),
    Row("model", 512, 2, "plain", "memory", "ok", "MiB", 10.4, rounds=1, limit_mib=2048),
    Row("model", 512, 2, "eager", "memory", "ok", "MiB", 2048.4, rounds=1, limit_mib=2048),
    Row("model", 1024, 2, "plain", "memory", "ok", "MiB", 20.0, rounds=1, limit_mib=2048),
    Row("model", 1024, 2, "eager", "memory", "does not fit", "MiB", limit_mib=2048),
    Row("model", 1024, 2, "nnsight", "memory", "not installed", "MiB", limit_mib=2048),
]


@pytest.fixture
def frame() -> pd.DataFrame:
    return pd.DataFrame([asdict(row) for row in ROWS])


def test_table(frame: pd.DataFrame) -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    for table in tables(frame):
        console.print(table)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    assert [line for line in lines if line] == [
        ["plain forward (SDPA)", "0.0601 s", "0.12 s"],
        ["eager, output_attentions", "2.50 (2.25-3.00)", "does not fit"],
        ["plain forward (SDPA)", "10 MiB", "20 MiB"],
        ["eager, output_attentions", "2,048 MiB", "does not fit"],
        ["nnsight, first-token mass", "", "not installed"],
    ]


def test_figure_draws_what_was_measured(frame: pd.DataFrame) -> None:
    figure = draw(frame, "model", 1)
    left, right = figure.axes
    lines = {line.get_label(): line for line in left.lines}
    assert set(lines) == {"plain forward (SDPA)", "eager, output_attentions"}
    np.testing.assert_array_equal(lines["eager, output_attentions"].get_xydata(), [[512, 2.5]])
    lines = {line.get_label(): line for line in right.lines}
    np.testing.assert_array_equal(lines["plain forward (SDPA)"].get_xydata(), [[512, 10.4], [1024, 20.0]])
    assert (
        [axes.get_xscale() for axes in figure.axes] == [axes.get_yscale() for axes in figure.axes] == ["log"] * 2
    )
    assert right.get_title(loc="left") == "memory; dashes end at the limit, 2 GiB"


def test_every_contender_has_a_look_of_its_own() -> None:
    assert set(LOOKS) == set(CONTENDERS)
    assert len({colour for colour, _, _ in LOOKS.values()}) == len({mark for _, _, mark in LOOKS.values()}) == 7


def test_nothing_to_draw(frame: pd.DataFrame) -> None:
    with pytest.raises(GattnVizError, match="no times of shape 'layer' with 1 threads"):
        draw(frame, "layer", 1)


def test_figure_command(tmp_path: Path) -> None:
    where = environment("cpu", torch.float32)
    append(tmp_path / "b.csv", ROWS, where)
    assert len(read(tmp_path / "b.csv")) == len(ROWS)
    main(tmp_path / "b.csv", tmp_path / "b.png", "model", 1)
    metadata = read_metadata(tmp_path / "b.png")
    assert (metadata["shape"], metadata["threads"], metadata["torch"]) == ("model", "1", where["torch"])
    with pytest.raises(SystemExit, match="error: --shape 'no': expected one of model, layer"):
        main(tmp_path / "b.csv", tmp_path / "b.png", "no", 1)

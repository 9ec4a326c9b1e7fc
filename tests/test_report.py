from __future__ import annotations

import io

from rich.console import Console

from gattn_viz import tables
from gattn_viz.report import print_sink_report
from tests.test_tables import make_rows


def printed(width: int = 120) -> str:
    rows = make_rows({"short": 4, "long": 20}, models=("gated", "baseline"))
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_sink_report(tables.summarise(rows, "layer"), tables.summarise(rows, "model"), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_table_a_model_with_the_numbers_of_the_summary() -> None:
    text = printed()
    gated, baseline = text.split("baseline")
    rows = make_rows({"short": 4, "long": 20}, models=("gated", "baseline"))
    layers = tables.summarise(rows, "layer")
    for _, row in layers[layers.model == "gated"].iterrows():
        line = next(line for line in gated.splitlines() if line.split()[1:2] == [str(row.layer)])
        assert f"{row.first_token_mass:.3f}" in line
        assert f"{row.gate_mean:.3f}" in line
        assert f"{row.max_activation:.1f}" in line
        assert "█" in line
    assert "gate mean" in gated
    assert "gate mean" not in baseline


def test_what_the_numbers_stand_for_is_said() -> None:
    text = " ".join(printed().split())
    assert "mean over heads; first query left out; 2 prompts, 24 tokens, 22 queries" in text
    assert "uniform null" in text


def test_no_colour_codes_when_piped() -> None:
    assert "\x1b" not in printed()

"""Breaking text into lines that fit."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gattn_viz.figures.style import style
from gattn_viz.figures.text import text_width, wrap_text

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*deprecated(,| -) use:DeprecationWarning")

SANS = ["DejaVu Sans"]
LONG = "/home/someone/checkpoints/experiments/qwen3-1b7-gated-attention-headwise-lr4e-3-wd0.1-step-100000"


def test_width_grows_with_text_and_size() -> None:
    assert 0 < text_width("a", 8, SANS) < text_width("aa", 8, SANS) < text_width("aa", 16, SANS)


@pytest.mark.parametrize("text", [LONG, "baseline", "", "a b c " * 20, "x" * 300, "two\nlines"])
@pytest.mark.parametrize("lines", [None, 1, 2])
def test_lines_fit(text: str, lines: int | None) -> None:
    shown = wrap_text(text, 1.5, 8, SANS, lines)
    assert all(text_width(line, 8, SANS) <= 1.5 for line in shown.split("\n"))
    assert lines is None or shown.count("\n") < max(lines, 1)


def test_nothing_is_lost_where_there_is_room() -> None:
    assert wrap_text(LONG, 1.5, 8, SANS).replace("\n", "") == LONG
    assert wrap_text("mean over 4 heads, T = 16", 1.5, 8, SANS) == "mean over 4 heads,\nT = 16"


def test_lines_end_where_phrases_do() -> None:
    text = "baseline: attention, layer 21 of 28, T = 700, queries 601-700, max over 2 x 14 cells"
    assert wrap_text(text, 4.6, 8, SANS).split("\n") == [
        "baseline: attention, layer 21 of 28, T = 700, queries 601-700,",
        "max over 2 x 14 cells",
    ]


def test_long_names_are_shortened_in_the_middle() -> None:
    shown = wrap_text(LONG, 1.5, 8, SANS, 1)
    assert shown.startswith("/home/")
    assert shown.endswith("000")
    assert "…" in shown


@pytest.mark.parametrize("dpi", [60, 90, 110, 300])
def test_a_line_is_as_wide_as_it_will_be_drawn_at_any_dpi(dpi: int) -> None:
    line = "Rows are queries; keys after the query are blank. One linear scale from 0 to 1."
    with style():
        drawn = Figure(dpi=dpi)
        text = drawn.text(0, 0, line, fontsize=7, fontfamily=SANS)
        width = text.get_window_extent(FigureCanvasAgg(drawn).get_renderer()).width / dpi
    assert text_width(line, 7, SANS) == pytest.approx(width, rel=0.01)

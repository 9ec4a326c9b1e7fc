"""One map: what is drawn, what is blank, which tokens are named."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from gattn_viz.figures.heatmap import draw_map, round_positions, tick_positions
from gattn_viz.figures.panel import Panel, Positions

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*deprecated(,| -) use:DeprecationWarning")

NORM = Normalize(0, 1)


def axes(inches: float = 2.0) -> Axes:
    figure = Figure(figsize=(2 * inches, 2 * inches))
    FigureCanvasAgg(figure)
    return figure.add_axes((0.3, 0.3, 0.5, 0.5))


def words(tokens: int) -> list[str]:
    return [f"␣w{n}" for n in range(1, tokens + 1)]


def tick_texts(ax: Axes) -> tuple[list[str], list[str]]:
    return [t.get_text() for t in ax.get_xticklabels()], [t.get_text() for t in ax.get_yticklabels()]


def test_upper_triangle_and_nan_are_blank_and_zero_is_not() -> None:
    values = np.full((4, 4), 0.25)
    values[2, 0] = np.nan
    values[3, 1] = 0.0
    image = draw_map(axes(), Panel.whole(values, words(4)), norm=NORM, title="layer 1")
    shown = image.get_array()
    expected = ~np.tri(4, dtype=bool)
    expected[2, 0] = True
    assert np.ma.getmaskarray(shown).tolist() == expected.tolist()
    colours = image.to_rgba(shown)
    assert (colours[expected][:, 3] == 0).all()
    assert (colours[~expected][:, 3] == 1).all()
    assert colours[3, 1].tolist() == list(image.get_cmap()(0.0))
    assert tuple(colours[3, 1][:3]) != (1, 1, 1)


def test_orientation_norm_and_names() -> None:
    ax = axes()
    norm = Normalize(0, 0.5)
    image = draw_map(ax, Panel.whole(np.tri(3) / 3, ["a", "b", "c"]), norm=norm, title="layer 21")
    assert image.norm is norm
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("key", "query", "layer 21")
    assert tick_texts(ax) == (["a", "b", "c"], ["a", "b", "c"])
    assert ax.get_ylim() == (3.5, 0.5)  # queries from top to bottom
    assert ax.get_xlim() == (0.5, 3.5)
    assert all(label.get_rotation() == 90 for label in ax.get_xticklabels())


def test_without_the_first_key(attention: Callable[..., np.ndarray]) -> None:
    ax = axes()
    values = attention(4)
    keys = Positions(2, 4, labels=words(4)[1:])
    image = draw_map(ax, Panel(values[:, 1:], Positions(1, 4, labels=words(4)), keys), norm=NORM)
    shown = image.get_array()
    assert shown.shape == (4, 3)
    np.testing.assert_array_equal(shown.compressed(), values[:, 1:][np.tri(4, 4, dtype=bool)[:, 1:]])
    assert tick_texts(ax) == (words(4)[1:], words(4))
    assert ax.get_xlim() == (1.5, 4.5)


def test_one_token() -> None:
    ax = axes()
    image = draw_map(ax, Panel.whole(np.eye(1), ["a"]), norm=NORM)
    ax.figure.canvas.draw()
    assert image.get_array().count() == 1
    assert tick_texts(ax) == (["a"], ["a"])


def test_a_part_has_the_tokens_of_its_own_rows_and_columns() -> None:
    ax = axes()
    part = Panel(
        np.ones((4, 3)), Positions(11, 14, labels=["q", "r", "s", "t"]), Positions(12, 14, labels=["r", "s", "t"])
    )
    shown = draw_map(ax, part, norm=NORM).get_array()
    assert np.ma.getmaskarray(shown).tolist() == [
        [True] * 3,
        [False, True, True],
        [False] * 2 + [True],
        [False] * 3,
    ]
    # nobody can count from 1 to them
    assert tick_texts(ax) == (["r 12", "s 13", "t 14"], ["q 11", "r 12", "s 13", "t 14"])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    assert (ax.get_xlim(), ax.get_ylim()) == ((11.5, 14.5), (14.5, 10.5))
    # the outline: down the reachable cells' right sides, and nothing above the first query that sees a key
    line = ax.lines[0].get_xydata()
    assert line.tolist() == [
        [11.5, 11.5],
        *([12.5, 11.5], [12.5, 12.5]),
        *([13.5, 12.5], [13.5, 13.5]),
        *([14.5, 13.5], [14.5, 14.5]),
        [11.5, 14.5],
        [11.5, 11.5],
    ]


def test_pooled_axes_of_the_same_positions_have_the_same_ticks() -> None:
    both = Positions(1, 2000, 400)
    ax = axes(2.0)
    draw_map(ax, Panel(np.ones((5, 5)), both, both), norm=NORM)
    assert ax.get_xticks().tolist() == ax.get_yticks().tolist() == [1, 1000, 2000]  # alone, y has 500
    # and those of the rows stand off, or a dark first column would look like the axis
    assert ax.spines["left"].get_position() == ("outward", 3)


def test_pooled_axes_have_round_positions() -> None:
    """Ten queries from 991 in buckets of three, and 2,000 keys in buckets of 400."""
    ax = axes(4.0)
    pooled = Panel(np.ones((4, 5)), Positions(991, 1000, 3, ()), Positions(1, 2000, 400))
    shown = draw_map(ax, pooled, norm=NORM).get_array()
    # keys from 801 on are seen from query 991 on, those from 1201 on by none
    assert np.ma.getmaskarray(shown).tolist() == [[False] * 3 + [True] * 2] * 4
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key position", "query position")
    keys, queries = ax.get_xticks().tolist(), ax.get_yticks().tolist()
    assert keys[0] == 1
    assert keys[-1] == 2000
    assert set(keys[1:]) <= {*range(100, 2001, 100)}
    assert queries[0] == 991
    assert queries[-1] == 1000
    ax.figure.canvas.draw()
    assert tick_texts(ax)[0] == [f"{key:.0f}" for key in keys]
    boxes = [t.get_window_extent() for t in ax.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    # whole cells are drawn, the last one of the rows too, of which one position is in the prompt
    assert ax.get_ylim() == (1002.5, 990.5)


@given(st.integers(1, 5000), st.integers(0, 40_000), st.floats(0.01, 20_000))
def test_round_positions(first: int, more: int, gap: float) -> None:
    ticks = round_positions(first, first + more, gap)
    assert ticks[0] == first
    assert ticks[-1] <= first + more
    assert all(after - before >= gap for before, after in itertools.pairwise(ticks))
    if len(ticks) > 2:
        step = ticks[2] - ticks[1]
        assert all(n % step == 0 for n in ticks[1:])
        assert str(step).rstrip("0") in {"1", "2", "5"}
        assert step < max(2.5 * gap, 1.01)  # no rounder than need be
        assert first + more - ticks[-1] < step  # up to the end


@pytest.mark.parametrize(("tokens", "keep"), [(16, []), (128, [1, 61]), (400, [202, 51, 203])])
def test_ticks_are_thinned(tokens: int, keep: list[int], attention: Callable[..., np.ndarray]) -> None:
    ax = axes()
    draw_map(ax, Panel.whole(attention(tokens), words(tokens), keep=keep), norm=NORM)
    keys, queries = tick_texts(ax)
    assert keys == queries
    assert keys[0].startswith("␣w1")
    assert len(keys) <= 16
    if tokens > 16:
        assert keys[0] == "␣w1 1"
        assert all(text.split(" ")[0] == f"␣w{text.split(' ')[1]}" for text in keys)
    for k in keep[:2]:
        assert f"␣w{k} {k}" in keys
    if 203 in keep:  # beside 202: no room for its label, but its mark is there
        assert "␣w203 203" not in keys
        assert ax.xaxis.get_minorticklocs().tolist() == [203]
    ax.figure.canvas.draw()
    boxes = sorted((t.get_window_extent() for t in ax.get_yticklabels()), key=lambda b: b.y0)
    assert all(low.y1 <= high.y0 + 0.5 for low, high in itertools.pairwise(boxes))
    boxes = sorted((t.get_window_extent() for t in ax.get_xticklabels()), key=lambda b: b.x0)
    assert all(left.x1 <= right.x0 + 0.5 for left, right in itertools.pairwise(boxes))


@given(
    st.integers(0, 60),
    st.floats(0.01, 80),
    st.lists(st.integers(0, 59), max_size=5),
    st.integers(0, 1),
)
def test_tick_positions(tokens: int, gap: float, keep: list[int], first: int) -> None:
    positions = range(first, tokens)
    ticks = tick_positions(positions, gap, keep)
    assert set(ticks) <= set(positions)
    assert all(after - before >= gap for before, after in itertools.pairwise(ticks))
    if positions:
        assert ticks[0] == positions[0]
    if gap <= 1:
        assert ticks == list(positions)


def test_tokens_that_look_like_mathematics() -> None:
    ax = axes()
    labels = ["$\\frac{$", "$x$", "_^{", "a" * 40]
    draw_map(ax, Panel.whole(np.tri(4), labels), norm=NORM, title="$\\frac{$")
    ax.figure.canvas.draw()  # mathtext would raise
    assert tick_texts(ax)[0][:3] == labels[:3]
    assert len(tick_texts(ax)[0][3]) == 16
    assert "…" in tick_texts(ax)[0][3]


@pytest.mark.usefixtures("only_dejavu")
def test_tokens_without_a_font() -> None:
    ax = axes()
    draw_map(ax, Panel.whole(np.tri(2), ["你好", "😀"]), norm=NORM, title="你")
    ax.figure.canvas.draw()
    assert tick_texts(ax)[0] == ["U+4F60 U+597D", "😀"]
    assert ax.get_title() == "U+4F60"

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

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.heatmap import draw_map, tick_positions

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
    image = draw_map(axes(), values, words(4), norm=NORM, title="layer 1")
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
    image = draw_map(ax, np.tri(3) / 3, ["a", "b", "c"], norm=norm, title="layer 21")
    assert image.norm is norm
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("key", "query", "layer 21")
    assert tick_texts(ax) == (["a", "b", "c"], ["a", "b", "c"])
    assert ax.get_ylim() == (2.5, -0.5)  # queries from top to bottom
    assert ax.get_xlim() == (-0.5, 2.5)
    assert ax.get_aspect() == 1  # square cells
    assert all(label.get_rotation() == 90 for label in ax.get_xticklabels())


def test_drop_first(attention: Callable[..., np.ndarray]) -> None:
    ax = axes()
    values = attention(4)
    image = draw_map(ax, values, words(4), norm=NORM, drop_first=True)
    shown = image.get_array()
    assert shown.shape == (4, 3)
    np.testing.assert_array_equal(shown.compressed(), values[:, 1:][np.tri(4, 4, dtype=bool)[:, 1:]])
    assert tick_texts(ax) == (words(4)[1:], words(4))
    assert ax.get_xlim() == (0.5, 3.5)


@pytest.mark.parametrize("drop_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_smallest(tokens: int, drop_first: bool) -> None:
    ax = axes()
    image = draw_map(ax, np.eye(tokens), words(tokens), norm=NORM, drop_first=drop_first)
    ax.figure.canvas.draw()
    assert (
        image.get_array().count() == {(1, False): 1, (1, True): 0, (2, False): 3, (2, True): 1}[tokens, drop_first]
    )
    assert tick_texts(ax)[1] == words(tokens)
    assert [t.get_text() for t in ax.texts] == (["no key left"] if tokens == 1 and drop_first else [])


@pytest.mark.parametrize(("tokens", "keep"), [(16, []), (128, [0, 60]), (400, [201, 50, 202])])
def test_ticks_are_thinned(tokens: int, keep: list[int], attention: Callable[..., np.ndarray]) -> None:
    ax = axes()
    draw_map(ax, attention(tokens), words(tokens), norm=NORM, keep=keep)
    keys, queries = tick_texts(ax)
    assert keys == queries
    assert keys[0].startswith("␣w1")
    assert len(keys) <= 16
    if tokens > 16:
        assert keys[0] == "␣w1 1"
        assert all(text.split(" ")[0] == f"␣w{text.split(' ')[1]}" for text in keys)
    for k in keep[:2]:
        assert f"␣w{k + 1} {k + 1}" in keys
    if 202 in keep:  # beside 201: no room for its label, but its mark is there
        assert "␣w203 203" not in keys
        assert ax.xaxis.get_minorticklocs().tolist() == [202]
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
    draw_map(ax, np.tri(4), labels, norm=NORM, title="$\\frac{$")
    ax.figure.canvas.draw()  # mathtext would raise
    assert tick_texts(ax)[0][:3] == labels[:3]
    assert len(tick_texts(ax)[0][3]) == 16
    assert "…" in tick_texts(ax)[0][3]


@pytest.mark.usefixtures("only_dejavu")
def test_tokens_without_a_font() -> None:
    ax = axes()
    draw_map(ax, np.tri(2), ["你好", "😀"], norm=NORM, title="你")
    ax.figure.canvas.draw()
    assert tick_texts(ax)[0] == ["U+4F60 U+597D", "😀"]
    assert ax.get_title() == "U+4F60"


def test_bad_input() -> None:
    with pytest.raises(GattnVizError, match="3 token labels for a map of 2 tokens"):
        draw_map(axes(), np.tri(2), words(3), norm=NORM)
    with pytest.raises(GattnVizError, match=r"shape \(2, 3\)"):
        draw_map(axes(), np.ones((2, 3)), words(2), norm=NORM)
    with pytest.raises(GattnVizError, match="position 2 to keep is not in 0 to 1"):
        draw_map(axes(), np.tri(2), words(2), norm=NORM, keep=[2])

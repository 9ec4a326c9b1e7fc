from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.matrix import Bar, Matrix, matrix_grid
from gattn_viz.figures.scale import ColorScale

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*deprecated(,| -) use:DeprecationWarning")

BAR = Bar(ColorScale("linear", 0, 1), "gate score")


def grid(*rows: list[Matrix], bars: list[Bar] | None = None, names: tuple[str, ...] = ()) -> Figure:
    return matrix_grid(rows, bars or [BAR], names=("layer", "head"), title="title", row_names=names)


def ticks(ax: Axes) -> tuple[list[str], list[str]]:
    return [t.get_text() for t in ax.get_xticklabels()], [t.get_text() for t in ax.get_yticklabels()]


def test_rows_go_down_from_1_and_what_is_not_finite_is_blank() -> None:
    values = np.array([[0.0, 0.5, 1.0], [np.nan, 0.25, np.inf]])
    ax = grid([Matrix(values, "gate_mean")]).axes[0]
    [image] = ax.images
    shown = image.get_array()
    assert np.ma.getmaskarray(shown).tolist() == [[False] * 3, [True, False, True]]
    assert shown[0].tolist() == [0, 0.5, 1]
    assert image.to_rgba(shown)[1, 0, 3] == 0
    assert (ax.get_xlim(), ax.get_ylim()) == ((0.5, 3.5), (2.5, 0.5))
    assert ticks(ax) == (["1", "2", "3"], ["1", "2"])
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("head", "layer", "gate_mean")


@pytest.mark.parametrize(
    ("shape", "heads", "layers"),
    [
        ((1, 1), ["1"], ["1"]),
        ((28, 8), [str(n) for n in range(1, 9)], [str(n) for n in range(1, 29)]),
        ((80, 64), ["1", *map(str, range(5, 65, 5))], ["1", *map(str, range(4, 81, 2))]),
    ],
)
def test_numbers_are_thinned(shape: tuple[int, int], heads: list[str], layers: list[str]) -> None:
    figure = grid([Matrix(np.ones(shape))])
    assert ticks(figure.axes[0]) == (heads, layers)
    for labels in (figure.axes[0].get_xticklabels(), figure.axes[0].get_yticklabels()):
        extents = [label.get_window_extent() for label in labels]
        assert not any(one.overlaps(two) for one, two in itertools.pairwise(extents))


def test_tokens_and_chosen_heads() -> None:
    tokens = [f"␣w{n}" for n in range(1, 401)]
    ax = grid([Matrix(np.ones((400, 2)), "layer 1", tokens, ["1", "6"])]).axes[0]
    heads, shown = ticks(ax)
    assert heads == ["1", "6"]
    assert 20 < len(shown) < 60
    assert shown[0] == "␣w1 1"
    positions = [int(tick) for tick in ax.get_yticks()]
    assert shown == [f"␣w{n} {n}" for n in positions]


def test_dollars_are_no_formula() -> None:
    figure = grid([Matrix(np.ones((2, 1)), "$\\frac{$", ["$\\frac{$", "$_{$"])], names=("$\\frac{$",))
    figure.canvas.draw()
    assert ticks(figure.axes[0])[1] == ["$\\frac{$", "$_{$"]


def test_a_bar_a_column_and_labels_on_the_outside_only() -> None:
    bars = [Bar(ColorScale("linear", 0, 1), "one"), Bar(ColorScale("log", 0.01, 2), "two")]
    row = [Matrix(np.ones((2, 2)), "a"), Matrix(np.ones((2, 2)), "b")]
    figure = grid(row, row, bars=bars, names=("m1", "m2"))
    panels, colour_bars = figure.axes[:4], figure.axes[4:]
    assert [ax.images[0].get_clim() for ax in panels] == [(0, 1), (0.01, 2)] * 2
    assert [bar.get_ylabel() for bar in colour_bars] == ["one", "two"]
    assert [ax.get_title() for ax in panels] == ["a", "b", "", ""]
    assert [ax.get_xlabel() for ax in panels] == ["", "", "head", "head"]
    assert [ax.get_ylabel() for ax in panels] == ["layer", "", "layer", ""]
    assert [len(ticks(ax)[1]) for ax in panels] == [2, 0, 2, 0]
    assert [text.get_text() for ax in panels for text in ax.texts] == ["m1", "m2"]


def test_a_short_last_row() -> None:
    panels = [Matrix(np.ones((2, 2)), f"layer {n}") for n in range(3)]
    axes = grid(panels[:2], panels[2:]).axes
    assert [ax.axison for ax in axes[:4]] == [True, True, True, False]
    assert [ax.get_title() for ax in axes[:3]] == ["layer 0", "layer 1", "layer 2"]
    assert [ax.get_xlabel() for ax in axes[:3]] == ["", "head", "head"]


def test_a_blank_panel_says_why() -> None:
    axes = grid([Matrix(np.full((2, 2), np.nan), instead="no gate"), Matrix(np.ones((2, 2)), instead="no")]).axes
    assert [[text.get_text() for text in ax.texts] for ax in axes[:2]] == [["no gate"], []]


@pytest.mark.parametrize("values", [np.zeros((3, 3)), np.full((3, 3), np.nan), np.full((1, 1), 0.5)])
def test_any_values(values: np.ndarray) -> None:
    grid([Matrix(values)]).canvas.draw()


def test_errors() -> None:
    with pytest.raises(GattnVizError, match="no heatmap"):
        grid()
    with pytest.raises(GattnVizError, match=r"shape \(3,\); expected rows x columns"):
        Matrix(np.ones(3))
    with pytest.raises(GattnVizError, match="1 names for 2 rows"):
        Matrix(np.ones((2, 2)), rows=["a"])
    with pytest.raises(GattnVizError, match="3 names for 2 columns"):
        Matrix(np.ones((2, 2)), columns=["a", "b", "c"])
    with pytest.raises(GattnVizError, match="2 colour bars for 3 columns"):
        grid([Matrix(np.ones((2, 2)))] * 3, bars=[BAR, BAR])

"""Panels have the size that was planned, whatever stands around them, and nothing overlaps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from gattn_viz.figures.layout import finish, panel_figure
from gattn_viz.figures.matrix import Bar, Matrix, matrix_grid
from gattn_viz.figures.scale import ColorScale
from gattn_viz.figures.shaded_text import TextBlock, shaded_text
from gattn_viz.figures.style import style

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*deprecated(,| -) use:DeprecationWarning")

LONG = "Qwen/Qwen3-Next-80B-A3B-Instruct-a-very-long-model-name-indeed-with-suffixes " * 2


def inches(ax: Axes) -> tuple[float, float]:
    box = ax.get_position()
    width, height = ax.figure.get_size_inches()
    return box.width * width, box.height * height


@pytest.mark.parametrize("label", ["7", "a label that is long"])
@pytest.mark.parametrize("title", ["short", LONG * 3])
def test_panels_have_their_size(label: str, title: str) -> None:
    widths, heights = [2.0, 3.0], [0.2, 1.5]
    with style():
        figure, axes = panel_figure(widths, heights)
        for ax in axes.ravel():
            ax.set_yticks([0.5], [label])
        finish(figure, axes, widths, heights, title=title, footnote=LONG, font=None)
    for (row, column), ax in np.ndenumerate(axes):
        assert inches(ax) == pytest.approx((widths[column], heights[row]), abs=0.02)


def test_a_narrow_figure_has_room_for_a_title() -> None:
    with style():
        figure, axes = panel_figure([0.5], [1.0])
        finish(figure, axes, [0.5], [1.0], title="gate score", footnote="", font=None)
    assert figure.get_size_inches()[0] == pytest.approx(4.4)
    assert inches(axes[0, 0]) == pytest.approx((4.2, 1.0), abs=0.2)


def boxes(figure: Figure) -> list[Bbox]:
    """Of the figure's panels with their labels, its title and its note."""
    panels = [ax.get_tightbbox() for ax in figure.axes]
    texts = [figure._suptitle, figure._supxlabel]  # type: ignore[attr-defined]
    return [*panels, *(text.get_window_extent() for text in texts)]  # type: ignore[list-item]


BAR = Bar(ColorScale("linear", 0, 1), "gate score")
FIGURES = [
    matrix_grid([[Matrix(np.eye(2), "layer 1")]], [BAR], names=("layer", "head"), title=LONG, footnote=LONG),
    matrix_grid(
        [[Matrix(np.ones((80, 64)), "a"), Matrix(np.ones((80, 64)), "output_scaled_below_001")]] * 2, [BAR, BAR],
        names=("layer", "head"), title="t", footnote=LONG, row_names=[LONG, "b"],
    ),
    matrix_grid(
        [[Matrix(np.ones((3, 1)), f"layer {n}", ["␣a" * 20, "b", "c"], ["mean"]) for n in range(7)]], [BAR],
        names=("token", "head"), title=LONG, footnote="n",
    ),
    shaded_text([TextBlock(["a"], np.ones(1), "layer 1")], BAR, title=LONG, footnote=LONG),
    shaded_text([TextBlock([" a"] * 99, np.ones(99), f"layer {n}") for n in (1, 2)], BAR, title="t", footnote="n"),
]  # fmt: skip


@pytest.mark.parametrize("figure", FIGURES)
def test_nothing_overlaps_and_all_is_inside(figure: Figure) -> None:
    found = boxes(figure)
    for one, other in itertools.combinations(found, 2):
        common = Bbox.intersection(one, other)
        assert common is None or min(common.width, common.height) < 1.5, (one, other)
    for box in found:
        assert box.x0 >= -1
        assert box.y0 >= -1
        assert box.x1 <= figure.bbox.width + 1
        assert box.y1 <= figure.bbox.height + 1

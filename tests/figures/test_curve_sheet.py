from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from matplotlib.figure import Figure

from gattn_viz.figures.curve_sheet import curve_sheet
from gattn_viz.figures.curves import Curve

LONG = "org/a-model-with-a-name-that-goes-on-and-on@0123456789abcdef:checkpoints/step-100000"


def sheet(names: list[str], layers: int = 28, **options: object) -> Figure:
    x = np.arange(1, layers + 1)
    curves = [Curve(name, x, np.full(layers, 0.1 * n)) for n, name in enumerate(names)]
    arguments: dict = {"title": "a title " * 12, "footnote": "a note " * 40, "x_label": "layer", "y_label": "mass"}
    return curve_sheet(curves, **{**arguments, **options})


@pytest.mark.parametrize("names", [["one"], ["baseline", "gate_headwise"], [f"{LONG}{n}" for n in range(9)]])
@pytest.mark.parametrize("layers", [1, 80])
def test_nothing_overlaps_and_nothing_is_cut(names: list[str], layers: int) -> None:
    figure = sheet(names, layers, null=0.03)
    figure.draw_without_rendering()
    [axes] = figure.axes
    title, note = (text.get_window_extent() for text in figure.texts)
    legend = axes.get_legend()
    assert legend is not None
    inside = figure.bbox
    boxes = [title, legend.get_window_extent(), axes.bbox, axes.xaxis.label.get_window_extent(), note]
    for upper, lower in pairwise(boxes):
        assert upper.y0 >= lower.y1 - 1
    for box in [*boxes, axes.yaxis.label.get_window_extent()]:
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1 + 1
        assert inside.y0 <= box.y0
        assert box.y1 <= inside.y1


def test_without_a_note() -> None:
    with_note, without = sheet(["one"]), sheet(["one"], footnote="")
    assert without.get_figheight() < with_note.get_figheight()
    assert without.axes[0].get_position().height * without.get_figheight() == pytest.approx(2.6)
    assert without.get_figwidth() == 5.6

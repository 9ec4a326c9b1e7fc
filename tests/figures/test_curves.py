from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.curves import Curve, draw_curves, line_looks

TRIO = ["baseline", "gate_headwise", "gate_elementwise"]


@pytest.fixture
def axes() -> Axes:
    return Figure(figsize=(3.25, 2.2)).add_subplot()


def names_in_legend(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_what_is_drawn(axes: Axes) -> None:
    curves = [
        Curve("a", [1, 2, 3], [0.1, 0.5, 0.2], [0, 0.4, 0.1], [0.2, 0.6, 0.3]),
        Curve("b", [1, 2], [0.3, 0.4]),
    ]
    lines = draw_curves(axes, curves, x_label="layer", y_label="$mass", null=0.05)
    assert [list(line.get_ydata()) for line in lines] == [[0.1, 0.5, 0.2], [0.3, 0.4], [0.05, 0.05]]
    assert [list(line.get_xdata()) for line in lines[:2]] == [[1, 2, 3], [1, 2]]
    [band] = [artist for artist in axes.collections if isinstance(artist, PolyCollection)]
    assert band.get_paths()[0].get_extents().extents.tolist() == [1, 0, 3, 0.6]
    assert names_in_legend(axes) == ["a", "b", "uniform attention"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("layer", "$mass")
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize(
    ("null", "drawn"), [(None, []), ([0.1, 0.1], [0.1]), ([0.1, 0.2], [0.1, 0.2]), ([float("nan")], [])]
)
def test_nulls_are_drawn_once_each(axes: Axes, null: list[float] | None, drawn: list[float]) -> None:
    lines = draw_curves(axes, [Curve("a", [1], [1])], x_label="", y_label="", null=null)
    assert [line.get_ydata()[0] for line in lines[1:]] == drawn
    assert names_in_legend(axes) == ["a", "uniform attention"][: 1 + bool(drawn)]


def test_lonely_points_have_markers_and_long_lines_have_few(axes: Axes) -> None:
    nan = np.nan
    long = np.ones(80)
    long[[40, 42]] = nan  # 41 stands alone
    curves = [Curve("one", [1], [0.5]), Curve("long", np.arange(80), long), Curve("nothing", [1, 2], [nan, nan])]
    one, many, nothing = draw_curves(axes, curves, x_label="", y_label="")
    assert one.get_markevery() == [0]
    assert 41 in many.get_markevery()
    assert len(many.get_markevery()) <= 15
    assert nothing.get_markevery() == []


def test_layers_are_ticked_from_the_first(axes: Axes) -> None:
    draw_curves(axes, [Curve("a", range(1, 29), range(28))], x_label="", y_label="")
    assert axes.get_xticks().tolist() == [1, 5, 10, 15, 20, 25]
    assert axes.get_xlim()[0] < 1
    assert axes.get_xlim()[1] > 28


def test_equal_values_and_a_logarithmic_axis(axes: Axes) -> None:
    draw_curves(axes, [Curve("a", [1, 2], [0, 0])], x_label="", y_label="")
    assert axes.get_ylim()[0] == 0 < axes.get_ylim()[1]
    draw_curves(axes, [Curve("a", [1, 2], [10, 0])], x_label="", y_label="", log_y=True)
    assert axes.get_yscale() == "log"
    below = Figure().add_subplot()
    draw_curves(below, [Curve("a", [1, 2], [-3, 2])], x_label="", y_label="")
    assert below.get_ylim()[0] < -3


def test_looks_are_apart_in_grey_and_do_not_depend_on_who_else_is_there() -> None:
    names = [*TRIO, "llama", "qwen", "a third"]
    looks = line_looks(names)
    assert len({(look.dashes, look.marker) for look in looks.values()}) == len(names)
    assert len({look.color for look in looks.values()}) == len(names)
    assert line_looks(["gate_elementwise"])["gate_elementwise"] == looks["gate_elementwise"]
    assert all(looks[a].dashes != looks[b].dashes for a, b in pairwise(names))


def test_names_are_drawn_as_they_are_and_shortened(axes: Axes) -> None:
    draw_curves(axes, [Curve("x" * 90, [1], [1]), Curve("b $\\frac{$", [1], [1])], x_label="", y_label="")
    long, odd = names_in_legend(axes)
    assert (len(long), odd) == (40, "b $\\frac{$")
    axes.figure.canvas.draw()  # mathtext would fail here


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([1, 2], [1]), r"curve 'a' has arrays of shapes \(2,\), \(1,\); expected one length"),
        (([1], [1], [1]), "the band of curve 'a' has one end; expected low and high, or neither"),
    ],
)
def test_wrong_curves(arrays: tuple[list[float], ...], message: str) -> None:
    with pytest.raises(GattnVizError, match=message):
        Curve("a", *arrays)


def test_no_curve(axes: Axes) -> None:
    with pytest.raises(GattnVizError, match="no curve to draw"):
        draw_curves(axes, [], x_label="", y_label="")

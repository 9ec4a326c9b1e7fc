from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gattn_viz.figures.by_layer import (
    draw_first_token_by_layer,
    draw_gate_by_layer,
    draw_output_magnitude,
    draw_output_sparsity,
    draw_sinks_and_activations,
)
from gattn_viz.figures.style import VARIANT_COLORS, StyleKind

TRIO = list(VARIANT_COLORS)


def table(models: list[str], layers: int = 4) -> pd.DataFrame:
    """A number of its own in each cell."""
    frame = pd.DataFrame([(model, layer) for model in models for layer in range(1, layers + 1)])
    frame.columns = pd.Index(["model", "layer"])
    count = np.arange(1, len(frame) + 1)
    return frame.assign(
        first_token_mass=count / 100, uniform_null=0.03, max_activation=count * 10.0, gate_mean=count / 50
    )


def drawn(ax: Axes) -> dict[str, list[float]]:
    """What is drawn under each name."""
    return {str(line.get_label()): [float(y) for y in np.asarray(line.get_ydata())] for line in ax.get_lines()}


def legend(figure: Figure) -> list[str]:
    [found] = figure.legends
    return [text.get_text() for text in found.get_texts()]


@pytest.mark.parametrize(
    ("draw", "column", "nulls"),
    [
        (draw_first_token_by_layer, "first_token_mass", ["uniform attention"]),
        (draw_gate_by_layer, "gate_mean", []),
    ],
)
def test_a_line_a_model(draw: Callable[..., Figure], column: str, nulls: list[str]) -> None:
    frame = table(TRIO)
    figure = draw(frame)
    [ax] = figure.axes
    expected = {model: frame.loc[frame["model"] == model, column].tolist() for model in TRIO}
    assert drawn(ax) == expected | {name: [0.03, 0.03] for name in nulls}
    assert {str(line.get_label()): line.get_color() for line in ax.get_lines()[:3]} == VARIANT_COLORS
    assert legend(figure) == TRIO + nulls
    assert (ax.get_xlabel(), ax.get_ylim()[0]) == ("layer", 0)


def test_models_of_different_depth_share_the_axis() -> None:
    frame = pd.concat([table(["a"], 3), table(["b"], 5)])
    frame["depth"] = [0, 0.5, 1, 0, 0.25, 0.5, 0.75, 1]
    stages = frame.assign(stage="before", mean_abs=0.1, threshold=0.01, share_below=0.5)
    for draw, of in (
        (draw_first_token_by_layer, frame),
        (draw_gate_by_layer, frame),
        (draw_sinks_and_activations, frame),
        (draw_output_magnitude, stages),
        (draw_output_sparsity, stages),
    ):
        axes = draw(of).axes
        for ax in axes:
            for line in ax.get_lines():
                if line.get_label() in ("a", "b"):
                    expected = frame.loc[frame["model"] == line.get_label(), "depth"]
                    assert np.asarray(line.get_xdata()).tolist() == expected.tolist()
            assert ax.get_xlim() == pytest.approx((-0.03, 1.03))
        assert axes[-1].get_xlabel() == "relative depth"


@pytest.mark.parametrize(("kind", "one", "two"), [("paper", 3.25, 6.75), ("screen", 5.5, 9.0)])
def test_widths(kind: StyleKind, one: float, two: float) -> None:
    frame = table(TRIO)
    assert draw_first_token_by_layer(frame, kind=kind).get_figwidth() == one
    assert draw_sinks_and_activations(frame, kind=kind).get_figwidth() == two
    assert draw_gate_by_layer(frame, kind=kind, width=4.5).get_figwidth() == 4.5


def test_a_long_legend_makes_the_figure_higher_and_takes_nothing_from_the_panel() -> None:
    few, many = (draw_gate_by_layer(table([f"model-{n}" + "x" * 40 for n in range(count)])) for count in (1, 6))
    heights = []
    for figure in (few, many):
        figure.draw_without_rendering()
        heights.append(figure.axes[0].get_position().height * figure.get_figheight())
    assert many.get_figheight() > few.get_figheight() + 0.5
    assert heights[1] == pytest.approx(heights[0], rel=0.1)


def test_magnitude_has_a_panel_a_stage_on_one_axis() -> None:
    rows = [(model, layer, "before", 2.0 * layer) for model in TRIO for layer in (1, 2)]
    rows += [(model, layer, "after", 0.01 * layer) for model in TRIO[1:] for layer in (1, 2)]
    figure = draw_output_magnitude(pd.DataFrame(rows, columns=["model", "layer", "stage", "mean_abs"]))
    before, after = figure.axes
    assert list(drawn(before)) == TRIO
    assert list(drawn(after)) == TRIO[1:]
    assert drawn(after)["gate_headwise"] == [0.01, 0.02]
    assert before.get_ylim() == after.get_ylim()
    assert before.get_ylim()[0] < 0.01 < 4 < before.get_ylim()[1]
    assert before.get_yscale() == after.get_yscale() == "log"
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["before the gate", "after the gate"]
    colors = {line.get_color() for ax in figure.axes for line in ax.get_lines() if line.get_label() == TRIO[1]}
    assert colors == {VARIANT_COLORS[TRIO[1]]}
    assert legend(figure) == TRIO
    alone = draw_output_magnitude(pd.DataFrame(rows[:2], columns=["model", "layer", "stage", "mean_abs"]))
    assert [ax.get_title(loc="left") for ax in alone.axes] == ["attention output, no gate"]


def test_sparsity_has_a_row_a_threshold_and_a_panel_a_stage() -> None:
    stages = ["before", "after", "before x mean gate"]
    rows = [
        ("gate_headwise", layer, threshold, stage, n / 10 + threshold)
        for threshold in (0.01, 0.001)
        for n, stage in enumerate(stages)
        for layer in (1, 2)
    ]
    columns = ["model", "layer", "threshold", "stage", "share_below"]
    figure = draw_output_sparsity(pd.DataFrame(rows, columns=columns))
    values = [drawn(ax)["gate_headwise"][0] for ax in figure.axes]
    assert values == pytest.approx([0.01, 0.11, 0.21, 0.001, 0.101, 0.201])
    assert [ax.get_ylabel() for ax in figure.axes] == ["share < 0.01", "", "", "share < 0.001", "", ""]
    assert [ax.get_title(loc="left") for ax in figure.axes[:3]] == [
        "before the gate",
        "after the gate",
        "before × mean gate",
    ]
    assert len({ax.get_ylim() for ax in figure.axes[:3]}) == 1


def test_sinks_and_activations_have_a_row_a_model() -> None:
    names = [*TRIO, "a $\\frac{ name " + "x" * 200]
    frame = table(names)
    figure = draw_sinks_and_activations(frame)
    assert len(figure.axes) == 8
    for row, model in enumerate(names):
        left, right = figure.axes[2 * row : 2 * row + 2]
        rows = frame[frame["model"] == model]
        assert drawn(left)[model] == rows["first_token_mass"].tolist()
        assert drawn(left)["uniform attention"] == [0.03, 0.03]
        assert drawn(right) == {model: rows["max_activation"].tolist()}
        assert left.get_title(loc="left")[:5] == model[:5]
    assert len({ax.get_ylim() for ax in figure.axes[::2]}) == 1
    assert len({ax.get_ylim() for ax in figure.axes[1::2]}) == 1
    assert legend(figure) == ["uniform attention"]
    figure.draw_without_rendering()  # mathtext would fail here
    assert figure.axes[-2].title.get_text() == ""
    edge = figure.axes[-2]._left_title.get_window_extent().x1 / figure.dpi  # type: ignore[attr-defined]
    assert edge < figure.get_figwidth() / 2


@pytest.mark.parametrize("value", [0.0, 0.5, np.nan])
@pytest.mark.filterwarnings("error")
def test_values_that_are_all_equal_or_missing(value: float) -> None:
    frame = table(TRIO).assign(first_token_mass=value, max_activation=value, gate_mean=value)
    for draw in (draw_first_token_by_layer, draw_gate_by_layer, draw_sinks_and_activations):
        figure = draw(frame)
        figure.draw_without_rendering()
        assert all(low < high for low, high in (ax.get_ylim() for ax in figure.axes))

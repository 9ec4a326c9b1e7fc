"""Figures with a value for each layer: one panel, or several that share their axes.

Each function takes the table that its figure shows, a row a point, and draws nothing else. Where the table has a
column `depth`, that is the x axis, from 0 to 1, in place of the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gattn_viz.figures.curves import Curve, draw_curves, draw_legend, line_looks, tick_log_axis
from gattn_viz.figures.fonts import fit_fonts
from gattn_viz.figures.style import StyleKind, figure_width, points, style
from gattn_viz.figures.text import wrap_text

# Inches.
_PANEL_HEIGHT = {"paper": 1.45, "screen": 2.3}
_ROW_HEIGHT = {"paper": 0.95, "screen": 1.5}
_LEGEND = 0.3

MASS = "first-token mass"


class XAxis(TypedDict):
    """Two of the arguments of `draw_curves`."""

    x_label: str
    x_ends: tuple[float, float] | None


def draw_first_token_by_layer(
    frame: pd.DataFrame, *, kind: StyleKind = "paper", width: float | None = None, font: str | None = None
) -> Figure:
    """Attention to the first token, a line a model, with what uniform attention would give.

    Args:
        frame: the columns model, layer, first_token_mass and uniform_null.
        kind: the style, see `style.style`.
        width: in inches; None is that of a column of the style.
        font: a family or font file to prefer.
    """
    with style(kind):
        figure, axes = _sheet(1, 1, kind, width or figure_width(kind))
        curves = _curves(frame, "first_token_mass", frame["model"])
        null = frame["uniform_null"].tolist()
        lines = draw_curves(axes[0][0], curves, **x_axis(frame), y_label=MASS, null=null, legend=False)
        draw_legend(figure, lines, font)
    return figure


def draw_gate_by_layer(
    frame: pd.DataFrame,
    *,
    models: Sequence[str] = (),
    kind: StyleKind = "paper",
    width: float | None = None,
    font: str | None = None,
) -> Figure:
    """The mean gate score, a line a model.

    Args:
        frame: the columns model, layer and gate_mean.
        models: of all figures of a set, those without a gate too: each looks as it does in the others.
        kind, width, font: see `draw_first_token_by_layer`.
    """
    with style(kind):
        figure, axes = _sheet(1, 1, kind, width or figure_width(kind))
        curves = _curves(frame, "gate_mean", [*models, *frame["model"]])
        lines = draw_curves(axes[0][0], curves, **x_axis(frame), y_label="mean gate score", legend=False)
        draw_legend(figure, lines, font)
    return figure


def draw_output_magnitude(
    frame: pd.DataFrame, *, kind: StyleKind = "paper", width: float | None = None, font: str | None = None
) -> Figure:
    """The mean abs attention output: a panel before the gate, one after it, on one logarithmic axis.

    Args:
        frame: the columns model, layer, stage and mean_abs.
        kind, width, font: see `draw_first_token_by_layer`.
    """
    stages = list(dict.fromkeys(frame["stage"]))
    with style(kind):
        figure, [axes] = _sheet(1, len(stages), kind, width or figure_width(kind, 2))
        lines: list[Line2D] = []
        for ax, stage in zip(axes, stages, strict=True):
            curves = _curves(frame[frame["stage"] == stage], "mean_abs", frame["model"])
            label = "mean abs attention output" if ax is axes[0] else ""
            lines += draw_curves(ax, curves, **x_axis(frame), y_label=label, log_y=True, legend=False)
            ax.set_title(_stage(stage, stages), loc="left")
        _share_y(axes)
        _legend_of_all(figure, lines, font)
    return figure


def draw_output_sparsity(
    frame: pd.DataFrame, *, kind: StyleKind = "paper", width: float | None = None, font: str | None = None
) -> Figure:
    """The share of small elements of the attention output: a row a threshold, a panel a stage.

    Args:
        frame: the columns model, layer, threshold, stage and share_below.
        kind, width, font: see `draw_first_token_by_layer`.
    """
    stages, thresholds = list(dict.fromkeys(frame["stage"])), list(dict.fromkeys(frame["threshold"]))
    with style(kind):
        figure, axes = _sheet(len(thresholds), len(stages), kind, width or figure_width(kind, 2))
        lines: list[Line2D] = []
        for row, threshold in zip(axes, thresholds, strict=True):
            for ax, stage in zip(row, stages, strict=True):
                rows = frame[(frame["stage"] == stage) & (frame["threshold"] == threshold)]
                label = f"share < {threshold:g}" if ax is row[0] else ""
                x = x_axis(frame, row is axes[-1])
                curves = _curves(rows, "share_below", frame["model"])
                lines += draw_curves(ax, curves, **x, y_label=label, legend=False)
                if row is axes[0]:
                    ax.set_title(_stage(stage, stages), loc="left")
            _share_y(row)
        _legend_of_all(figure, lines, font)
    return figure


def draw_sinks_and_activations(
    frame: pd.DataFrame, *, kind: StyleKind = "paper", width: float | None = None, font: str | None = None
) -> Figure:
    """A row a model: attention to the first token, and the largest activation of the residual stream.

    Args:
        frame: the columns model, layer, first_token_mass, uniform_null and max_activation.
        kind, width, font: see `draw_first_token_by_layer`.
    """
    models = list(dict.fromkeys(frame["model"]))
    with style(kind):
        wide = width or figure_width(kind, 2)
        figure, axes = _sheet(len(models), 2, kind, wide, row_height=_ROW_HEIGHT[kind])
        nulls: list[Line2D] = []
        for model, (left, right) in zip(models, axes, strict=True):
            rows = frame[frame["model"] == model]
            x = x_axis(frame, model == models[-1])
            [mass] = _curves(rows, "first_token_mass", models)
            of_rows = rows["uniform_null"].tolist()
            _, *null = draw_curves(left, [mass], **x, y_label=MASS, null=of_rows, legend=False)
            nulls += null
            [activation] = _curves(rows, "max_activation", models)
            draw_curves(right, [activation], **x, y_label="max activation", log_y=True, legend=False)
            families, (name,) = fit_fonts([model], font)
            text = wrap_text(name, wide * 0.42, points("axes.titlesize"), families, lines=1)
            left.set_title(text, loc="left", fontfamily=families, parse_math=False)
        _share_y([row[0] for row in axes])
        _share_y([row[1] for row in axes])
        _legend_of_all(figure, nulls, font)
    return figure


def _sheet(
    rows: int, columns: int, kind: StyleKind, width: float, row_height: float | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of its own (not pyplot's) with its panels, row by row."""
    height = (row_height or _PANEL_HEIGHT[kind]) + 0.3
    figure = Figure(figsize=(width, rows * height + _LEGEND), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in axes]


def _curves(frame: pd.DataFrame, column: str, models: Iterable[str]) -> list[Curve]:
    """A curve a model, in the order in which they come; `models` are all that share a set of looks."""
    looks = line_looks(list(dict.fromkeys(models)))
    return [
        Curve(
            str(model),
            rows[x_column(frame)].to_numpy(),
            rows[column].to_numpy(float, na_value=np.nan),
            look=looks[str(model)],
        )
        for model, rows in frame.groupby("model", sort=False)
    ]


def x_column(frame: pd.DataFrame) -> str:
    """Which column is the x axis."""
    return "depth" if "depth" in frame else "layer"


def x_axis(frame: pd.DataFrame, named: bool = True) -> XAxis:
    """The x axis as `draw_curves` takes it; without its name if it stands below another panel's."""
    if x_column(frame) == "layer":
        return {"x_label": "layer" if named else "", "x_ends": None}
    return {"x_label": "relative depth" if named else "", "x_ends": (0, 1)}


def _stage(stage: str, stages: Sequence[str]) -> str:
    """`before` as it stands above a panel; where no model has a gate there is one panel."""
    if list(stages) == ["before"]:
        return "attention output, no gate"
    return f"{stage} the gate" if stage in ("before", "after") else stage.replace(" x ", " × ")


def _share_y(axes: Sequence[Axes]) -> None:
    """Give panels the widest range of them, so that their heights compare."""
    limits = [ax.get_ylim() for ax in axes]
    for ax in axes:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        if ax.get_yscale() == "log":
            tick_log_axis(ax)


def _legend_of_all(figure: Figure, lines: Sequence[Line2D], font: str | None) -> None:
    """Each label once, though it is in several panels."""
    once = {str(line.get_label()): line for line in reversed(lines) if not str(line.get_label()).startswith("_")}
    if once:
        draw_legend(figure, list(once.values())[::-1], font)

"""A histogram of scores for several models, from counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gattn_viz.figures.curves import draw_legend, limit_log_axis, line_looks
from gattn_viz.figures.style import StyleKind, figure_width, style

_HEIGHT = {"paper": 1.95, "screen": 3.0}


def draw_gate_distribution(
    frame: pd.DataFrame, *, kind: StyleKind = "paper", width: float | None = None, font: str | None = None
) -> Figure:
    """How many gate scores lie in each bin, a step line a model, counts on a logarithmic axis.

    Args:
        frame: the columns model, low, high (a bin's edges; each begins where the one above it ends) and count.
        kind: the style, see `style.style`.
        width: in inches; None is that of a column of the style.
        font: a family or font file to prefer.
    """
    with style(kind):
        figure = Figure(figsize=(width or figure_width(kind), _HEIGHT[kind]), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        looks = line_looks(list(dict.fromkeys(frame["model"])))
        steps = []
        for model, rows in frame.groupby("model", sort=False):
            look = looks[str(model)]
            counts = rows["count"].to_numpy(float)
            edges = np.append(rows["low"].to_numpy(float), rows["high"].to_numpy(float)[-1])
            # an empty bin is a gap: a logarithmic axis has no zero
            counts = np.where(counts > 0, counts, np.nan)
            line: dict[str, Any] = {"color": look.color, "linestyle": look.dashes, "linewidth": 1.2}
            steps.append(axes.stairs(counts, edges, baseline=None, label=str(model), **line))
        limit_log_axis(axes, frame["count"].to_numpy(float))
        axes.set_xlim(float(frame["low"].min()), float(frame["high"].max()))
        axes.set_xlabel("gate score")
        axes.set_ylabel("scores")
        draw_legend(figure, steps, font)
    return figure

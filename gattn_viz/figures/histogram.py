"""Histograms of scores for several models, from counts: of a whole model, and of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gattn_viz.figures.curves import LABEL_LIMIT, draw_legend, limit_log_axis, line_looks
from gattn_viz.figures.fonts import fit_fonts, shorten
from gattn_viz.figures.style import StyleKind, figure_width, map_colormap, style

_HEIGHT = {"paper": 1.95, "screen": 3.0}


def draw_gate_distribution(
    frame: pd.DataFrame,
    *,
    models: Sequence[str] = (),
    kind: StyleKind = "paper",
    width: float | None = None,
    font: str | None = None,
) -> Figure:
    """How many gate scores lie in each bin, a step line a model, counts on a logarithmic axis.

    Args:
        frame: the columns model, low, high (a bin's edges; each begins where the one above it ends) and count.
        models: of all figures of a set, those without a gate too: each looks as it does in the others.
        kind: the style, see `style.style`.
        width: in inches; None is that of a column of the style.
        font: a family or font file to prefer.
    """
    with style(kind):
        figure = Figure(figsize=(width or figure_width(kind), _HEIGHT[kind]), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        looks = line_looks(list(dict.fromkeys([*models, *frame["model"]])))
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


def draw_gate_distribution_by_layer(
    frame: pd.DataFrame, *, kind: StyleKind = "paper", width: float | None = None, font: str | None = None
) -> Figure:
    """How many gate scores of each layer lie in each bin, a panel a model, one logarithmic colour range for all.

    Args:
        frame: the columns model, layer, low, high (a bin's edges) and count; all layers have the same bins.
        kind: the style, see `style.style`.
        width: in inches; None is that of a column of the style for each model, two at most.
        font: a family or font file to prefer.
    """
    models = list(dict.fromkeys(frame["model"].astype(str)))
    largest = max(float(frame["count"].max()), 2.0)
    with style(kind):
        across: Literal[1, 2] = 2 if len(models) > 1 else 1
        down = -(-len(models) // across)
        size = width or figure_width(kind, across), 1.4 * down * _HEIGHT[kind]
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        panels = [figure.add_subplot(down, across, number) for number in range(1, len(models) + 1)]
        for axes, model in zip(panels, models, strict=True):
            rows = frame[frame["model"].astype(str) == model]
            counts = rows.pivot_table("count", "layer", "low", sort=True)
            edges = np.append(counts.columns.to_numpy(float), float(rows["high"].max()))
            layers = counts.index.to_numpy()
            # a layer that has no gate is a gap, and one alone has a row too
            every = counts.reindex(range(int(layers.min()), int(layers.max()) + 1)).to_numpy(float)
            image = axes.pcolormesh(
                edges,
                np.arange(layers.min(), layers.max() + 2) - 0.5,
                np.ma.masked_where(~(every > 0), every),
                norm=LogNorm(1, largest),
                cmap=map_colormap(),
                rasterized=True,
            )
            axes.invert_yaxis()
            fitted = fit_fonts([model], font)
            axes.set_title(shorten(fitted.texts[0], LABEL_LIMIT), parse_math=False, fontfamily=fitted.families)
            axes.set_xlabel("gate score")
            axes.set_ylabel("layer")
            axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        figure.colorbar(image, ax=panels, label="scores", pad=0.02)
    return figure

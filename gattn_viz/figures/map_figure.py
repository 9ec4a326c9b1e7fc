"""The attention maps of several models as a figure, from a table of their cells."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gattn_viz.figures.grid import map_grid
from gattn_viz.figures.panel import Panel, Positions, map_title
from gattn_viz.figures.style import StyleKind, figure_width


def draw_attention_maps(
    frame: pd.DataFrame, *, kind: StyleKind = "paper", width: float | None = None, font: str | None = None
) -> Figure:
    """A row a model, a column a layer, one colour range for all.

    Args:
        frame: a row for each cell that has a value: the columns model, layer, query, key (the first positions of
            the cell, from 1), key_token (empty where cells are pooled), probability, cell (positions along its
            side) and tokens (T); learned_sink_mass, the mean of what a learned sink takes, if a layer has one.
        kind: the style, see `style.style`.
        width: in inches; None is that of two columns of the style, of one if there is one layer.
        font: a family or font file to prefer.

    Raises:
        GattnVizError: `width` has no room for so many layers.
    """
    rows = [
        [_panel(cells, int(str(layer))) for layer, cells in of_model.groupby("layer", sort=False)]
        for _, of_model in frame.groupby("model", sort=False)
    ]
    names = [str(name) for name in dict.fromkeys(frame["model"])]
    columns: Literal[1, 2] = 1 if max(map(len, rows)) == 1 else 2
    width = width or figure_width(kind, columns)
    return map_grid(rows, title="", row_labels=names, kind=kind, width=width, font=font)


def _panel(cells: pd.DataFrame, layer: int) -> Panel:
    size, tokens = int(cells["cell"].iloc[0]), int(cells["tokens"].iloc[0])
    side = -(-tokens // size)
    values = np.full((side, side), np.nan)
    values[(cells["query"] - 1) // size, (cells["key"] - 1) // size] = cells["probability"]
    labels: list[str] = []
    if size == 1:
        last_row = cells[cells["query"] == tokens].sort_values("key")  # which sees every key
        labels = [str(token) for token in last_row["key_token"]]
    axis = Positions(1, tokens, size, labels)
    learned_sink = float(cells["learned_sink_mass"].iloc[0]) if "learned_sink_mass" in cells else np.nan
    return Panel(values, axis, axis, map_title(f"layer {layer}", learned_sink))

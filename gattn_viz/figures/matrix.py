"""Heatmaps of numbered rows and columns: layers x heads, tokens x heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.fonts import fit_fonts
from gattn_viz.figures.heatmap import label_axis, round_positions, tick_positions
from gattn_viz.figures.layout import bar_beside, finish, panel_figure, row_name
from gattn_viz.figures.panel import Positions
from gattn_viz.figures.scale import ColorScale
from gattn_viz.figures.style import MUTED, StyleKind, map_colormap, points, style
from gattn_viz.figures.text import wrap_text


@dataclass(frozen=True, eq=False)
class Matrix:
    """One panel.

    Attributes:
        values: (rows, columns), the first row at the top; NaN is left blank.
        title: what stands above it.
        rows: a token for each row; empty where rows are numbered from 1.
        columns: the name of each column; empty where they are numbered from 1.
        instead: what is written into a panel that is blank throughout.

    Raises:
        GattnVizError: no cell, or another number of names.
    """

    values: np.ndarray
    title: str = ""
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    instead: str = ""

    def __post_init__(self) -> None:
        if np.ndim(self.values) != 2 or np.size(self.values) == 0:
            raise GattnVizError(f"a heatmap has shape {np.shape(self.values)}; expected rows x columns")
        for names, count, what in zip(
            (self.rows, self.columns), self.values.shape, ("row", "column"), strict=True
        ):
            if len(names) not in (0, count):
                raise GattnVizError(f"{len(names)} names for {count} {what}s of a heatmap; expected one for each")

    @cached_property
    def shown(self) -> np.ma.MaskedArray:
        """The values in float64, masked where they are not finite."""
        return np.ma.masked_invalid(np.asarray(self.values, dtype=np.float64))


@dataclass(frozen=True)
class Bar:
    """A colour range and what its bar says: the measure with its unit."""

    scale: ColorScale
    label: str


def draw_matrix(
    ax: Axes, matrix: Matrix, *, norm: Normalize, cell: tuple[float, float], font: str | None = None
) -> AxesImage:
    """Draw one panel into `ax`; ticks are thinned to what the size of a cell allows.

    Args:
        cell: width and height of one in inches.

    Returns:
        The image, of `matrix.shown`; data coordinates are numbers from 1.
    """
    rows, columns = matrix.values.shape
    image = ax.imshow(
        matrix.shown, norm=norm, cmap=map_colormap(), extent=(0.5, columns + 0.5, rows + 0.5, 0.5), aspect="auto",
        interpolation="antialiased", interpolation_stage="data",
    )  # fmt: skip
    ax.spines[:].set_visible(True)
    if not matrix.shown.count():
        ax.text(
            0.5, 0.5, matrix.instead, transform=ax.transAxes, ha="center", va="center", color=MUTED,
            parse_math=False,
        )  # fmt: skip
    wide, high = cell
    size = points("ytick.labelsize")
    _label_numbers(ax, "x", columns, matrix.columns, (len(str(columns)) + 1) * 0.65 * size / 72 / wide)
    if matrix.rows:
        label_axis(ax, "y", Positions(1, rows, 1, matrix.rows), (), font, high, "token")
    else:
        _label_numbers(ax, "y", rows, (), 1.3 * size / 72 / high)
    return image


def _label_numbers(ax: Axes, which: Literal["x", "y"], count: int, names: Sequence[str], gap: float) -> None:
    """Labels at least `gap` cells apart: round numbers, or some of the names."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    if names:
        ticks = tick_positions(range(1, count + 1), gap)
        axis.set_ticks(ticks, [names[tick - 1] for tick in ticks])
    else:
        ticks = round_positions(1, count, max(gap, 1))
        axis.set_ticks(ticks, [str(tick) for tick in ticks])


def matrix_grid(
    panels: Sequence[Sequence[Matrix]],
    bars: Sequence[Bar],
    *,
    names: tuple[str, str],
    title: str,
    footnote: str = "",
    row_names: Sequence[str] = (),
    font: str | None = None,
    kind: StyleKind = "screen",
) -> Figure:
    """Panels in rows, with a colour bar for each column or one for all.

    Titles stand above the first row only if they are those of every row. The panels of a row have their own rows
    alike, which are labelled once, on the left.

    Args:
        panels: rows of them; the last may be shorter.
        bars: one for each column, or a single one.
        names: of the rows and of the columns of a panel, such as `layer` and `head`.
        title, footnote: wrapped to the figure's width.
        row_names: one for each row of panels, such as models; empty is none.

    Returns:
        A figure of its own. Its Axes are the panels in reading order, empty places among them, then the bars.

    Raises:
        GattnVizError: no panel, or another number of bars.
    """
    if not panels or not panels[0]:
        raise GattnVizError("no heatmap to draw; pass at least one panel")
    columns = len(panels[0])
    if len(bars) not in (1, columns):
        raise GattnVizError(f"{len(bars)} colour bars for {columns} columns of panels; expected 1 or one for each")
    with style(kind):
        wide, high = _good_size(panels)
        widths, heights = [wide] * columns, [high] * len(panels)
        figure, axes = panel_figure(widths, heights)
        once = all([panel.title for panel in row] == [panel.title for panel in panels[0]] for row in panels)
        images: list[AxesImage] = []
        for r, row in enumerate(panels):
            below = len(panels[r + 1]) if r + 1 < len(panels) else 0
            for c, panel in enumerate(row):
                ax, bar = axes[r, c], bars[c % len(bars)]
                rows, cells = panel.values.shape
                cell = wide / cells, high / rows
                images.append(draw_matrix(ax, panel, norm=bar.scale.norm(), cell=cell, font=font))
                if r == 0 or not once:
                    _write_title(ax, panel.title, wide, font)
                ax.set_xlabel(names[1] if c >= below else "")
                ax.set_ylabel(names[0] if c == 0 else "")
                if c > 0:
                    ax.set_yticks([])
            for ax in axes[r, len(row) :]:
                ax.set_axis_off()
            if row_names:
                row_name(axes[r, 0], row_names[r], high, font)
        for c, bar in enumerate(bars):
            beside = axes[:, c : c + 1] if len(bars) > 1 else axes
            size = beside.shape[1] * wide, sum(heights)
            bar_beside(figure, images[c], list(beside.ravel()), size, high, bar.label)
        finish(figure, axes, widths, heights, title=title, footnote=footnote, font=font)
    return figure


def _write_title(ax: Axes, title: str, wide: float, font: str | None) -> None:
    families, (text,) = fit_fonts([title], font)
    wrapped = wrap_text(text, wide, points("axes.titlesize"), families, lines=2)
    ax.set_title(wrapped, parse_math=False, fontfamily=families)


def _good_size(panels: Sequence[Sequence[Matrix]]) -> tuple[float, float]:
    """Width and height of a panel in inches: a label for each row and column as long as a page has room."""
    most_rows, most_columns = np.max([panel.values.shape for row in panels for panel in row], axis=0)
    label = points("ytick.labelsize") * 1.34 / 72
    high = min(max(most_rows * label, 1.3), {1: 6.0, 2: 4.0}.get(len(panels), 3.0))
    return min(max(most_columns * 0.17, 1.5), 4.5), high

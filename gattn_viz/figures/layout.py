"""Panels of a given size in inches, whatever stands around them.

Matplotlib's constrained layout finds the room for labels, titles and colour bars inside a figure; here the figure
grows or shrinks until what is left for the panels is what was planned. Ticks can then be chosen before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from numpy.typing import NDArray

from gattn_viz.figures.fonts import fit_fonts
from gattn_viz.figures.style import INK, MUTED, points
from gattn_viz.figures.text import wrap_text

# Inches.
_MARGIN = 0.1
_GAP = 0.12
_LEAST_WIDTH = 4.4  # of a figure: room for a title
_BAR = 0.12
_SLACK = 0.96  # letters are a little wider where a figure is drawn at few pixels per inch
_MOST_BAR = 3.6


def panel_figure(widths: Sequence[float], heights: Sequence[float]) -> tuple[Figure, NDArray[np.object_]]:
    """A figure of its own (not pyplot's) with a panel for each width and height, and room for labels.

    Returns:
        the figure, and its (rows, columns) Axes.
    """
    figure = Figure(figsize=(sum(widths) + 2 * len(widths), sum(heights) + 2 * len(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    # the gaps of constrained layout are shares of the panels' size, the pads are inches
    figure.get_layout_engine().set(w_pad=_MARGIN / 2, h_pad=_MARGIN / 2, wspace=0, hspace=0)  # type: ignore[union-attr, call-arg]
    axes = figure.subplots(
        len(heights), len(widths), squeeze=False, width_ratios=list(widths), height_ratios=list(heights)
    )
    return figure, axes


def finish(
    figure: Figure,
    axes: NDArray[np.object_],
    widths: Sequence[float],
    heights: Sequence[float],
    *,
    title: str,
    footnote: str,
    font: str | None,
) -> None:
    """Write title and footnote, wrapped to the figure's width, and give the panels the size that was planned.

    A figure that would be too narrow for a title is wider than that, and so are its panels.
    """
    _fit(figure, axes, widths, heights)
    width, height = figure.get_size_inches()
    size, note_size = points("figure.titlesize"), points("xtick.labelsize")
    for text, points_, write in ((title, size, figure.suptitle), (footnote, note_size, figure.supxlabel)):
        if text:
            families, (shown,) = fit_fonts([text], font)
            wrapped = wrap_text(shown, _SLACK * (width - 2 * _MARGIN), points_, families)
            write(
                wrapped, x=_MARGIN / width, ha="left", fontsize=points_, parse_math=False, fontfamily=families,
                linespacing=1.15, color=INK if write == figure.suptitle else MUTED,
            )  # fmt: skip
    figure.set_size_inches(width, height + 3)  # room for them to begin with: a panel may be lower than a title
    _fit(figure, axes, widths, heights)
    figure.set_layout_engine("none")  # at another resolution nothing moves


def bar_beside(
    figure: Figure, image: AxesImage, axes: Sequence[Axes], size: tuple[float, float], length: float, label: str
) -> Colorbar:
    """A colour bar to the right of panels, at most `length` inches long, its label wrapped beside it.

    Args:
        size: width and height in inches of the panels together.
    """
    length = min(length, _MOST_BAR)
    bar = figure.colorbar(
        image, ax=list(axes), location="right", shrink=length / size[1], fraction=_BAR / size[0],
        aspect=length / _BAR, anchor=(0, 1), pad=0.02,
    )  # fmt: skip
    families, (shown,) = fit_fonts([label])
    _dress(bar)
    text = wrap_text(shown, length, points("axes.labelsize"), families)
    bar.ax.set_ylabel(text, parse_math=False, linespacing=1.15)
    return bar


def bar_below(
    figure: Figure, colors: ScalarMappable, axes: Sequence[Axes], size: tuple[float, float], label: str
) -> Colorbar:
    """A colour bar below panels, see `bar_beside`."""
    length = min(size[0], _MOST_BAR)
    bar = figure.colorbar(
        colors, ax=list(axes), location="bottom", shrink=length / size[0], fraction=_BAR / size[1],
        aspect=length / _BAR, anchor=(0, 1), pad=0.02,
    )  # fmt: skip
    families, (shown,) = fit_fonts([label])
    _dress(bar)
    text = wrap_text(shown, length, points("axes.labelsize"), families)
    bar.ax.set_xlabel(text, parse_math=False, linespacing=1.15)
    return bar


def _dress(bar: Colorbar) -> None:
    norm = bar.mappable.norm
    assert norm.vmin is not None
    assert norm.vmax is not None
    bar.set_ticks([tick for tick in bar.get_ticks() if norm.vmin <= tick <= norm.vmax])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)


def row_name(ax: Axes, text: str, room: float, font: str | None) -> Text:
    """The name of a row of panels, upright to the left of the first one's axis label; two lines at most."""
    families, (shown,) = fit_fonts([text], font)
    size = points("axes.titlesize")
    return ax.annotate(
        wrap_text(shown, room, size, families, lines=2), (0, 0.5), (-3, 0),
        xycoords=(ax.yaxis.label, "axes fraction"), textcoords="offset points", rotation=90, ha="right",
        va="center", fontsize=size, fontfamily=families, parse_math=False, linespacing=1.15, annotation_clip=False,
    )  # fmt: skip


def _fit(figure: Figure, axes: NDArray[np.object_], widths: Sequence[float], heights: Sequence[float]) -> None:
    """Grow or shrink the figure until its panels have their size, to a hundredth of an inch."""
    planned = np.array([sum(widths), sum(heights)])
    for _ in range(6):
        figure.get_layout_engine().execute(figure)  # type: ignore[union-attr]
        size = figure.get_size_inches()
        shares = sum(ax.get_position().width for ax in axes[0]), sum(ax.get_position().height for ax in axes[:, 0])
        missing = planned - np.array(shares) * size
        grown = np.maximum(size + missing, [_LEAST_WIDTH, 0])
        if np.abs(grown - size).max() < 0.01:
            return
        figure.set_size_inches(grown)
    figure.get_layout_engine().execute(figure)  # type: ignore[union-attr]

"""Lines: a value against the layer (or anything else) for several models, told apart by more than colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.fonts import fit_fonts, shorten
from gattn_viz.figures.heatmap import round_positions
from gattn_viz.figures.style import MUTED, VARIANT_COLORS, points, variant_colors
from gattn_viz.figures.text import text_width

LABEL_LIMIT = 40  # characters of a name in a legend

_DASHES = ("-", "--", "-.", (0, (6, 1.5, 1, 1.5, 1, 1.5)), (0, (3, 1)))
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_NULL = (0, (1, 2))
_MOST_MARKERS = 14  # on one line: more would hide it


class LineLook(NamedTuple):
    """How one model's lines look in every figure: apart in colour, and in grey by dashes and marker."""

    color: str
    dashes: str | tuple[float, tuple[float, ...]]
    marker: str


@dataclass(frozen=True, eq=False)
class Curve:
    """One line.

    Attributes:
        label: what the legend calls it, such as a model.
        x, y: (N,), in the axes' units. NaN in y leaves a gap.
        low, high: (N,), the ends of a band round it, such as a confidence interval; both or neither.
        look: None is that of `line_looks` for its label.

    Raises:
        GattnVizError: arrays of different lengths, one end of a band without the other.
    """

    label: str
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None
    look: LineLook | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise GattnVizError(f"the band of curve {self.label!r} has one end; expected low and high, or neither")
        given = [self.x, self.y, *(end for end in (self.low, self.high) if end is not None)]
        shapes = [np.shape(one) for one in given]
        if len(set(shapes)) > 1 or len(shapes[0]) != 1:
            raise GattnVizError(
                f"curve {self.label!r} has arrays of shapes {', '.join(map(str, shapes))}; expected one length"
            )


def line_looks(names: Sequence[str]) -> dict[str, LineLook]:
    """A look for each name: the variants have theirs, others take the next one free, in the order given."""
    colors = variant_colors(names)
    variants = list(VARIANT_COLORS)
    order = [*variants, *(name for name in colors if name not in VARIANT_COLORS)]
    return {
        name: LineLook(
            color, _DASHES[order.index(name) % len(_DASHES)], _MARKERS[order.index(name) % len(_MARKERS)]
        )
        for name, color in colors.items()
    }


def draw_curves(
    axes: Axes,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    null: float | Sequence[float] | None = None,
    null_label: str = "uniform attention",
    log_y: bool = False,
    legend: bool = True,
    font: str | None = None,
    x_ends: tuple[float, float] | None = None,
) -> list[Line2D]:
    """Draw curves into `axes`, with a legend above them.

    A point without neighbours, such as a model of one layer, shows as a marker. The y axis starts at 0, unless it
    is logarithmic (there, what is not above 0 is left out) or a value is below. Whole numbers on the x axis, such
    as layers, are ticked from the first of them on.

    Args:
        curves: may be of different lengths.
        x_label, y_label: with the unit; drawn as they are (no mathtext), as all names are.
        null: what would be seen if nothing were to be found, as a dotted line; several values are several lines.
        null_label: the legend's word for it.
        legend: whether there is one.
        font: a family or font file to prefer, see `fonts.fit_fonts`.
        x_ends: of the x axis; None is those of the curves.

    Returns:
        A line for each curve, in their order, then one for each value of `null`.

    Raises:
        GattnVizError: no curve.
    """
    if not curves:
        raise GattnVizError("no curve to draw; expected at least one")
    looks = line_looks([curve.label for curve in curves])
    lines = [_draw(axes, curve, curve.look or looks[curve.label]) for curve in curves]
    for n, value in enumerate(_distinct(null)):
        label = null_label if n == 0 else "_"
        lines.append(axes.axhline(value, color=MUTED, linestyle=_NULL, linewidth=1.0, label=label, zorder=1))
    _limit_axes(axes, curves, log_y)
    if x_ends is not None:
        air = 0.03 * (x_ends[1] - x_ends[0])
        axes.set_xticks(np.linspace(*x_ends, 5))
        axes.set_xlim(x_ends[0] - air, x_ends[1] + air)
    axes.set_xlabel(x_label, parse_math=False)
    axes.set_ylabel(y_label, parse_math=False)
    if legend:
        draw_legend(axes, lines, font)
    return lines


def draw_legend(where: Axes | Figure, artists: Sequence[Artist], font: str | None = None) -> None:
    """A legend above an Axes or a whole figure, flush left: over the data it would hide some of it.

    A figure grows by the rows that are more than one.
    """
    shown = [artist for artist in artists if not str(artist.get_label()).startswith("_")]
    fitted = fit_fonts([str(artist.get_label()) for artist in shown], font)
    names = [shorten(text, LABEL_LIMIT) for text in fitted.texts]
    if isinstance(where, Figure):
        width = where.get_figwidth()
        place: dict[str, Any] = {"loc": "outside upper left"}
    else:
        width = where.get_position(original=True).width * where.figure.get_size_inches()[0]  # type: ignore[union-attr]
        place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
    columns = _columns(width, names, fitted.families)
    if isinstance(where, Figure):
        rows = math.ceil(len(names) / columns)
        where.set_figheight(where.get_figheight() + (rows - 1) * points("legend.fontsize") * 1.5 / 72)
    legend = where.legend(
        shown,
        names,
        ncols=columns,
        frameon=False,
        borderpad=0.2,
        handlelength=3.2,
        columnspacing=1.2,
        labelspacing=0.3,
        **place,
    )
    for text in legend.get_texts():
        text.set(fontfamily=fitted.families, parse_math=False)


def _columns(width: float, names: Sequence[str], families: Sequence[str]) -> int:
    """How many names go side by side into `width` inches."""
    size = points("legend.fontsize")
    widest = max(text_width(name, size, families) for name in names) + 5.5 * size / 72  # with its handle
    return max(1, min(int(width / widest), len(names)))


def _draw(axes: Axes, curve: Curve, look: LineLook) -> Line2D:
    x, y = np.asarray(curve.x, float), np.asarray(curve.y, float)
    if curve.low is not None and curve.high is not None:
        low, high = np.asarray(curve.low, float), np.asarray(curve.high, float)
        axes.fill_between(x, low, high, color=look.color, alpha=0.2, linewidth=0)
    [line] = axes.plot(
        x,
        y,
        color=look.color,
        linestyle=look.dashes,
        marker=look.marker,
        markersize=3.2,
        markeredgewidth=0,
        markevery=_marked(y),
        label=curve.label,
    )
    return line


def _marked(y: NDArray[np.float64]) -> list[int]:
    """Which points get a marker: each n-th, and all that have no neighbour to draw a line to."""
    there = np.isfinite(y)
    apart = there & ~np.r_[False, there[:-1]] & ~np.r_[there[1:], False]
    step = max(math.ceil(len(y) / _MOST_MARKERS), 1)
    regular = there & (np.arange(len(y)) % step == 0)
    return [int(n) for n in np.flatnonzero(apart | regular)]


def _distinct(null: float | Sequence[float] | None) -> list[float]:
    """The values to draw, those that cannot be told apart once."""
    if null is None:
        return []
    values = [float(value) for value in np.atleast_1d(np.asarray(null, float)) if np.isfinite(value)]
    return list({f"{value:.4g}": value for value in reversed(values)}.values())[::-1]


def _limit_axes(axes: Axes, curves: Sequence[Curve], log_y: bool) -> None:
    x = np.concatenate([np.asarray(curve.x, float) for curve in curves])
    x = x[np.isfinite(x)]
    if len(x) and (x == np.round(x)).all():
        first, last = int(x.min()), int(x.max())
        axes.set_xticks(round_positions(first, last, (last - first) / 7))
        air = max((last - first) * 0.03, 0.5)
        axes.set_xlim(first - air, last + air)
    ends = [values for curve in curves for values in (curve.y, curve.low, curve.high) if values is not None]
    y = np.concatenate([np.asarray(values, float) for values in ends])
    y = y[np.isfinite(y)]
    if log_y:
        limit_log_axis(axes, y)
    elif not len(y) or y.min() >= 0:
        top = axes.get_ylim()[1]
        axes.set_ylim(0, top if top > 0 else 1)


def limit_log_axis(axes: Axes, values: NDArray[np.float64]) -> None:
    """A logarithmic y axis from a round number to a round number, so that two at least are written beside it."""
    seen = values[np.isfinite(values) & (values > 0)]
    low, high = (float(seen.min()), float(seen.max())) if len(seen) else (1.0, 1.0)
    bottom = max(n for n in _round_numbers(low) if n < low)
    top = min(n for n in _round_numbers(high) if n > high)
    axes.set_ylim(bottom, top)  # before the scale, which else warns where there is no positive value
    axes.set_yscale("log", nonpositive="mask")
    tick_log_axis(axes)


def tick_log_axis(axes: Axes) -> None:
    """Ticks for the limits that a logarithmic y axis has, written as plain numbers."""
    bottom, top = axes.get_ylim()
    subs = (1, 2, 5) if top / bottom <= 100 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _round_numbers(near: float) -> list[float]:
    """1, 2 and 5 times the powers of ten round a number."""
    power = math.floor(math.log10(near))
    return [n * 10.0**p for p in (power - 1, power, power + 1) for n in (1, 2, 5)]

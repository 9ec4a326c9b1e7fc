"""One attention map: queries down, keys across, the causal upper triangle blank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.image import AxesImage

from gattn_viz.figures.fonts import fit_fonts, shorten
from gattn_viz.figures.panel import Panel, Positions
from gattn_viz.figures.style import HAIRLINE, map_colormap

LABEL_LIMIT = 16  # characters of a token on an axis

# Distance between two tick labels' base lines, in font sizes: DejaVu Sans needs 1.16, and a little air.
_LINE = 1.3


def draw_map(
    ax: Axes,
    panel: Panel,
    *,
    norm: Normalize,
    cmap: Colormap | str | None = None,
    title: str = "",
    font: str | None = None,
    show_keys: bool = True,
    show_queries: bool = True,
) -> AxesImage:
    """Draw one map into `ax`, which it fills and whose size must be final: it decides how many ticks there are.

    An axis with a token label for each row (column) has these, thinned where there are many, and then with the
    position, from 1: ``␣the 129``. The first token and those of `panel.keep` stay; where two are too close for
    both labels, the later one keeps its tick mark only. Any other axis has round positions.

    Args:
        ax: where to draw.
        panel: the map.
        norm: values to colours, shared with the panels beside (`ColorScale.norm`).
        cmap: a colormap or its name; None is `style.map_colormap`'s.
        title: above the map, drawn as it is (no mathtext).
        font: a family or font file to prefer, see `fonts.fit_fonts`.
        show_keys, show_queries: whether the axis has labels.

    Returns:
        The image, of `panel.shown`; data coordinates are positions.
    """
    box = ax.get_position(original=True).transformed(ax.figure.transSubfigure - ax.figure.dpi_scale_trans)
    colormap = cmap if isinstance(cmap, Colormap) else map_colormap(cmap)
    left, right = panel.keys.edges
    top, bottom = panel.queries.edges
    image = ax.imshow(
        panel.shown,
        norm=norm,
        cmap=colormap,
        extent=(left, right, bottom, top),
        aspect="auto",
        interpolation="antialiased",  # also called "auto" from matplotlib 3.10 on
        # In the norm's unit, not in colours: a thin column that is drawn smaller than a pixel fades towards its
        # neighbours' values, and blank stays blank.
        interpolation_stage="data",
    )
    _outline(ax, panel)
    ax.spines[:].set_visible(False)
    if title:
        families, (text,) = fit_fonts([title], font)
        ax.set_title(text, parse_math=False, fontfamily=families)
    if panel.keys.size > 1:  # away from its ticks, a sink in the first, thin column does not pass for the axis
        ax.spines["left"].set_position(("outward", 3))
    wide, high = box.width / (right - left), box.height / (bottom - top)
    gap = 0.0
    if (panel.keys.starts, panel.keys.last) == (panel.queries.starts, panel.queries.last):  # the same ticks
        gap = max(_number_gap(ax, "x", panel.keys, wide), _number_gap(ax, "y", panel.queries, high))
    label_axis(ax, "x", panel.keys if show_keys else None, panel.keep, font, wide, "key", gap)
    label_axis(ax, "y", panel.queries if show_queries else None, panel.keep, font, high, "query", gap)
    return image


def tick_positions(positions: Sequence[int], gap: float, keep: Iterable[int] = ()) -> list[int]:
    """Which of `positions` (ascending) get a label, so that any two are at least `gap` apart.

    The first always does; then those of `keep`, in the order given; then every n-th, where there is room.
    """
    if not positions:
        return []
    step = max(math.ceil(gap), 1)
    taken: list[int] = []
    for candidate in [positions[0], *keep, *positions[::step]]:
        if candidate in positions and all(abs(candidate - other) >= gap for other in taken):
            taken.append(candidate)
    return sorted(taken)


def round_positions(first: int, last: int, gap: float) -> list[int]:
    """`first`, then the multiples of 1, 2 or 5 times a power of ten, any two of them at least `gap` apart.

    >>> round_positions(1, 2000, 300)
    [1, 500, 1000, 1500, 2000]
    """
    step = next(n * 10**power for power in itertools.count() for n in (1, 2, 5) if n * 10**power >= gap)
    return [first, *(n for n in range(-(-first // step) * step, last + 1, step) if n - first >= max(gap, 1))]


def _outline(ax: Axes, panel: Panel) -> None:
    """A hairline round what causal attention can reach: zero inside it is a value, outside there is none."""
    reachable = panel.reachable()
    if not reachable.any():
        return
    start = int(np.flatnonzero(reachable)[0])  # the rows above come before every key
    left, top = panel.keys.edges[0], panel.queries.edges[0] + start * panel.queries.size
    right = left + reachable[start:] * panel.keys.size
    down = top + np.arange(len(right) + 1) * panel.queries.size
    # The stair's corners: along the top of each row's last cell, then down its right side.
    ax.plot(
        [left, *np.repeat(right, 2), left, left],
        [top, *np.repeat(down, 2)[1:-1], down[-1], top],
        color=HAIRLINE,
        linewidth=0.9,
        zorder=-1,  # below the image, which covers the inner half: no value is ever drawn over
        solid_joinstyle="miter",
        clip_on=False,  # else the left and lower edge are cut to half their width
        scalex=False,
        scaley=False,
    )


def _tick_size(ax: Axes, which: Literal["x", "y"]) -> float:
    """Of the labels, in points."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    return float(axis.get_major_ticks(1)[0].label1.get_fontsize())


def _number_gap(ax: Axes, which: Literal["x", "y"], shown: Positions, cell: float) -> float:
    """How many positions apart numbers must be on an axis that has `cell` inches for each."""
    # They lie side by side on the x axis: a digit is some .65 of its height wide, with two for air.
    line = (len(str(shown.last)) + 2) * 0.65 if which == "x" else 2 * _LINE
    return _tick_size(ax, which) * line / 72 / cell


def label_axis(
    ax: Axes,
    which: Literal["x", "y"],
    shown: Positions | None,
    keep: Sequence[int],
    font: str | None,
    cell: float,
    name: str,
    gap: float = 0.0,
) -> None:
    """Ticks and name of an axis that has `cell` inches for each position; `shown` of None leaves it bare.

    See `draw_map` for which positions get a label; `keep` are those that always do. Numbers are at least `gap`
    apart.
    """
    axis = ax.xaxis if which == "x" else ax.yaxis
    if shown is None:
        axis.set_ticks([])
        return
    points = _tick_size(ax, which)
    if shown.size > 1 or not shown.labels:
        gap = max(gap, _number_gap(ax, which, shown, cell))
        axis.set_ticks(round_positions(shown.first, shown.last, gap))
        axis.set_major_formatter("{x:.0f}")
        axis.set_label_text(f"{name} position")
        return
    positions = range(shown.first, shown.last + 1)
    ticks = tick_positions(positions, points * _LINE / 72 / cell, keep)
    fitted = fit_fonts([shown.labels[k - shown.first] for k in ticks], font)
    texts = [shorten(text, LABEL_LIMIT) for text in fitted.texts]
    if len(ticks) < len(positions) or shown.first > 2:
        # With tokens left out, more than the first, nobody can count to where a token stands.
        texts = [f"{text} {k}" for text, k in zip(texts, ticks, strict=True)]
    # Turned labels hang from their ticks by the base line; by their boxes those with a tail would be off.
    turned: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center_baseline"}
    axis.set_ticks(ticks, texts, fontfamily=fitted.families, parse_math=False, **(turned if which == "x" else {}))
    # Marks only: those that stand out stay findable where their label had no room.
    axis.set_ticks(sorted({k for k in keep if k in positions} - set(ticks)), minor=True)
    axis.set_label_text(name)

"""One attention map: queries down, keys across, the causal upper triangle blank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.image import AxesImage

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.fonts import fit_fonts, shorten
from gattn_viz.figures.scale import check_square
from gattn_viz.figures.style import HAIRLINE, MUTED, map_colormap

LABEL_LIMIT = 16  # characters of a token on an axis

# Distance between two tick labels' base lines, in font sizes: DejaVu Sans needs 1.16, and a little air.
_LINE = 1.3


def draw_map(
    ax: Axes,
    probabilities: np.ndarray,
    labels: Sequence[str],
    *,
    norm: Normalize,
    cmap: Colormap | str | None = None,
    drop_first: bool = False,
    title: str = "",
    keep: Sequence[int] = (),
    font: str | None = None,
    show_keys: bool = True,
    show_queries: bool = True,
) -> AxesImage:
    """Draw one map into `ax`, whose size must be final: it decides how many tokens get a label.

    Args:
        ax: where to draw.
        probabilities: (T, T), queries x keys. What lies above the diagonal is never drawn; NaN is left blank.
        labels: T token labels, as `tokens.token_labels` gives them.
        norm: values to colours, shared with the panels beside (`ColorScale.norm`).
        cmap: a colormap or its name; None is `style.map_colormap`'s.
        drop_first: leave out the first key's column, so that the axis starts at the second key. The caller says so
            in a title.
        title: above the map, drawn as it is (no mathtext).
        keep: positions from 0 whose tick is kept when ticks are thinned, the most important first. The first
            token's always is. Where two of them are too close for both labels, the later one keeps its tick mark
            only. Thinned labels carry the position, from 1: ``␣the 129``.
        font: a family or font file to prefer, see `fonts.fit_fonts`.
        show_keys, show_queries: whether the axis has token labels.

    Returns:
        The image: a masked array (T, T), or (T, T - 1) with `drop_first`, in data coordinates that count
        tokens from 0.

    Raises:
        GattnVizError: not (T, T), another number of labels, a position of `keep` that is not in the map.
    """
    check_square(probabilities)
    tokens = len(probabilities)
    if len(labels) != tokens:
        raise GattnVizError(f"{len(labels)} token labels for a map of {tokens} tokens; expected one for each")
    if outside := [k for k in keep if not 0 <= k < tokens]:
        raise GattnVizError(f"position {outside[0]} to keep is not in 0 to {tokens - 1}, the map's tokens")

    first = int(drop_first)
    blank = ~np.tri(tokens, dtype=bool) | ~np.isfinite(probabilities)
    shown = np.ma.masked_array(np.asarray(probabilities, dtype=np.float64), blank)[:, first:]
    if tokens == first:  # a lone token whose only key is left out
        shown = np.ma.masked_all((tokens, 1))
        ax.text(0.5, 0.5, "no key left", transform=ax.transAxes, ha="center", va="center", color=MUTED)
    box = ax.get_position(original=True).transformed(ax.figure.transSubfigure - ax.figure.dpi_scale_trans)
    cell = min(box.width / shown.shape[1], box.height / tokens)  # inches
    colormap = cmap if isinstance(cmap, Colormap) else map_colormap(cmap)
    right = max(tokens, first + 1) - 0.5
    image = ax.imshow(
        shown,
        norm=norm,
        cmap=colormap,
        extent=(first - 0.5, right, tokens - 0.5, -0.5),
        aspect="equal",
        interpolation="antialiased",  # also called "auto" from matplotlib 3.10 on
        # In the norm's unit, not in colours: a thin column that is drawn smaller than a pixel fades towards its
        # neighbours' values, and blank stays blank.
        interpolation_stage="data",
    )
    _outline(ax, tokens, first)
    ax.spines[:].set_visible(False)
    if title:
        families, (text,) = fit_fonts([title], font)
        ax.set_title(text, parse_math=False, fontfamily=families)
    _label_axis(ax, "x", range(first, tokens) if show_keys else (), labels, keep, font, cell)
    _label_axis(ax, "y", range(tokens) if show_queries else (), labels, keep, font, cell)
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


def _outline(ax: Axes, tokens: int, first: int) -> None:
    """A hairline round what causal attention can reach: zero inside it is a value, outside there is none."""
    # The stair's corners: along the top of each diagonal cell, then down its right side.
    edges = np.arange(first, tokens + 1) - 0.5
    across = [*np.repeat(edges, 2)[1:], edges[0], edges[0]]
    down = [*np.repeat(edges, 2)[:-1], tokens - 0.5, edges[0]]
    ax.plot(
        across,
        down,
        color=HAIRLINE,
        linewidth=0.9,
        zorder=-1,  # below the image, which covers the inner half: no value is ever drawn over
        solid_joinstyle="miter",
        clip_on=False,  # else the left and lower edge are cut to half their width
        scalex=False,
        scaley=False,
    )


def _label_axis(
    ax: Axes,
    which: Literal["x", "y"],
    positions: Sequence[int],
    labels: Sequence[str],
    keep: Sequence[int],
    font: str | None,
    cell: float,
) -> None:
    axis, name = (ax.xaxis, "key") if which == "x" else (ax.yaxis, "query")
    if not positions:
        axis.set_ticks([])
        return
    points = float(axis.get_major_ticks(1)[0].label1.get_fontsize())
    ticks = tick_positions(positions, points * _LINE / 72 / cell, keep)
    fitted = fit_fonts([labels[k] for k in ticks], font)
    texts = [shorten(text, LABEL_LIMIT) for text in fitted.texts]
    if len(ticks) < len(positions):
        # With tokens left out, nobody can count to where a token stands.
        texts = [f"{text} {k + 1}" for text, k in zip(texts, ticks, strict=True)]
    # Turned labels hang from their ticks by the base line; by their boxes those with a tail would be off.
    turned: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center_baseline"}
    axis.set_ticks(ticks, texts, fontfamily=fitted.families, parse_math=False, **(turned if which == "x" else {}))
    # Marks only: those that stand out stay findable where their label had no room.
    axis.set_ticks(sorted({k for k in keep if k in positions} - set(ticks)), minor=True)
    axis.set_label_text(name)

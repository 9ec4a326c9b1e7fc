"""A figure of curves, with the words that it needs."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gattn_viz.figures.curves import Curve, draw_curves
from gattn_viz.figures.fonts import fit_fonts
from gattn_viz.figures.style import INK, MUTED, StyleKind, points, style
from gattn_viz.figures.text import wrap_text

_MARGIN = 0.12
_TOP, _BOTTOM, _SIDES = 0.1, 0.45, 0.6  # inches for the axes' own labels
_HEIGHT = 2.6  # of the axes


def curve_sheet(
    curves: Sequence[Curve],
    *,
    title: str,
    footnote: str = "",
    x_label: str,
    y_label: str,
    null: float | Sequence[float] | None = None,
    x_ends: tuple[float, float] | None = None,
    kind: StyleKind = "screen",
    width: float = 5.6,
    font: str | None = None,
) -> Figure:
    """Draw curves into one pair of axes, see `draw_curves`, between a title and a note.

    Args:
        title: whatever a reader must know. Wrapped to the figure's width, as the note is.
        kind: the style, see `style.style`.
        width: of the figure, in inches.
    """
    with style(kind):
        inner = width - 2 * _MARGIN
        title_size, note_size = points("figure.titlesize"), points("xtick.labelsize")
        title_text, title_families = _fitted(title, inner, title_size, font)
        note_text, note_families = _fitted(footnote, inner, note_size, font)
        title_band, note_band = _band(title_text, title_size), _band(note_text, note_size)

        figure = Figure(figsize=(width, _HEIGHT))
        FigureCanvasAgg(figure)
        axes = figure.add_axes((_SIDES / width, 0.2, (inner - _SIDES) / width, 0.6))
        draw_curves(axes, curves, x_label=x_label, y_label=y_label, null=null, font=font, x_ends=x_ends)
        legend = axes.get_legend()
        assert legend is not None
        legend_band = legend.get_window_extent().height / figure.dpi
        height = 2 * _MARGIN + title_band + legend_band + _TOP + _HEIGHT + _BOTTOM + note_band
        figure.set_size_inches(width, height)
        bottom = _MARGIN + note_band + _BOTTOM
        axes.set_position((_SIDES / width, bottom / height, (inner - _SIDES) / width, _HEIGHT / height))
        for text, at, va, families, size, color in (
            (title_text, height - _MARGIN, "top", title_families, title_size, INK),
            (note_text, _MARGIN, "bottom", note_families, note_size, MUTED),
        ):
            figure.text(
                _MARGIN / width, at / height, text, ha="left", va=va, color=color, fontsize=size,
                fontfamily=families, parse_math=False, linespacing=1.15,
            )  # fmt: skip
    return figure


def _fitted(text: str, width: float, size: float, font: str | None) -> tuple[str, list[str]]:
    families, (shown,) = fit_fonts([text], font)
    return wrap_text(shown, width, size, families), families


def _band(text: str, size: float) -> float:
    """The inches that a text takes, with air beside it."""
    return (text.count("\n") + 1) * size * 1.25 / 72 + 0.08 if text else 0.0

"""How every figure looks: fonts, sizes, colours. One place, as a context manager.

Sizes are in points and inches, so that a figure put into a paper at its own width keeps its text size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import matplotlib as mpl
import matplotlib.style
import seaborn as sns
from matplotlib.colors import Colormap
from matplotlib.font_manager import FontProperties

from gattn_viz.errors import GattnVizError

StyleKind = Literal["screen", "paper"]

# Points: tick labels and notes, axis labels, panel titles, figure title.
_SIZES: dict[str, tuple[float, float, float, float]] = {"screen": (7, 8, 8.5, 11), "paper": (6, 7, 7, 8.5)}

# Inches: a column of a two-column paper, and both; on a screen as much as reads well.
_WIDTHS: dict[str, tuple[float, float]] = {"screen": (5.5, 9.0), "paper": (3.25, 6.75)}

INK = "#262626"
MUTED = "#6B6B6B"
HAIRLINE = "#B8B8B8"

# Okabe and Ito's colours: apart for the colour-blind, and the three variants apart in grey too (L* 26, 46, 58).
VARIANT_COLORS = {"baseline": "#3D3D3D", "gate_headwise": "#0072B2", "gate_elementwise": "#009E73"}
OTHER_COLORS = ("#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#8C510A", "#000000")


@contextmanager
def style(kind: StyleKind = "screen") -> Iterator[None]:
    """Matplotlib's settings for our figures, for the length of a `with` block.

    `screen` is for README, notebooks and slides; `paper` has the smaller type of a two-column paper.

    Raises:
        GattnVizError: an unknown kind.
    """
    # "default" first: a person's own matplotlibrc shall not change what a recipe says the figure is.
    with mpl.style.context(["default", settings(kind)]):
        yield


def settings(kind: StyleKind = "screen") -> dict[str, Any]:
    """The rcParams of a style, on top of matplotlib's defaults."""
    if kind not in get_args(StyleKind):
        raise GattnVizError(f"unknown figure style {kind!r}; expected one of {', '.join(get_args(StyleKind))}")
    tick, label, panel, title = _SIZES[kind]
    return {
        "font.family": ["DejaVu Sans"],
        "font.size": label,
        "axes.titlesize": panel,
        "axes.labelsize": label,
        "xtick.labelsize": tick,
        "ytick.labelsize": tick,
        "legend.fontsize": tick,
        "figure.titlesize": title,
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": HAIRLINE,
        "xtick.color": HAIRLINE,
        "ytick.color": HAIRLINE,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "axes.linewidth": 0.6,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "xtick.major.pad": 2.0,
        "ytick.major.pad": 2.0,
        "lines.linewidth": 1.2,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.dpi": 100,
        "savefig.bbox": None,
        **SAVING,
    }


def points(setting: str) -> float:
    """A font size of the style in force, such as that of ``xtick.labelsize``; matplotlib's own says "medium"."""
    settings: Any = mpl.rcParams
    return float(FontProperties(size=settings[setting]).get_size_in_points())


def figure_width(kind: StyleKind, columns: Literal[1, 2] = 1) -> float:
    """The inches of a figure as wide as one column of a paper, or two."""
    return _WIDTHS[kind][columns - 1]


# What is read when a figure is written, not when it is drawn.
SAVING: Any = {
    "pdf.fonttype": 42,  # TrueType: text stays text, and journals that refuse Type 3 take it
    "ps.fonttype": 42,
    "svg.fonttype": "path",  # looks the same where the fonts are not installed
    "svg.hashsalt": "gattn-viz",  # else the ids in an SVG are random
    "pdf.compression": 6,
    "text.hinting": "none",  # else letters are up to 8 % wider at some dpi, and lines leave the page
}


def map_colormap(name: str | None = None) -> Colormap:
    """The colours of attention maps: one hue path, even steps, light (zero) to dark (the top of the range).

    It prints in grey in the same order. Zero is tinted, so that it differs from blank, which is the paper. `name`
    is any colormap that matplotlib or seaborn knows; None is ours.

    Raises:
        GattnVizError: an unknown name.
    """
    try:
        colormap = sns.color_palette(name or "mako_r", as_cmap=True)
    except (ValueError, KeyError, AttributeError) as error:
        raise GattnVizError(
            f"unknown colormap {name!r}; expected a name that matplotlib or seaborn knows, such as cividis"
        ) from error
    return colormap.with_extremes(bad=(0, 0, 0, 0))


def variant_colors(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, in the order given: the variants have theirs, others take the next one free."""
    others = [name for name in dict.fromkeys(names) if name not in VARIANT_COLORS]
    free = {name: OTHER_COLORS[n % len(OTHER_COLORS)] for n, name in enumerate(others)}
    return {name: VARIANT_COLORS.get(name) or free[name] for name in dict.fromkeys(names)}

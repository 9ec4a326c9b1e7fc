"""A text whose tokens are shaded by a value each: read it, and see where the value is large.

A shade covers a token with the spaces that belong to it. Lines break between words as far as they can, and where
the text breaks them, which a ``↵`` marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.fonts import fit_fonts
from gattn_viz.figures.layout import bar_below, finish, panel_figure
from gattn_viz.figures.matrix import Bar
from gattn_viz.figures.scale import ColorScale
from gattn_viz.figures.style import StyleKind, map_colormap, style
from gattn_viz.figures.text import text_width

NEWLINE = "↵"

WIDTH = 6.5
"""Inches of a line: some 90 characters, which an eye can follow."""

_SIZE = 8.5  # points
_LINE = 0.19  # inches from a line to the next
_SHADE = 0.165
_PAD = 0.004  # of a token's shade beyond its text, on either side


@dataclass(frozen=True, eq=False)
class TextBlock:
    """A text with a value for each token.

    Attributes:
        tokens: what each token says, as it is to be read: spaces as spaces, line breaks as line breaks, nothing
            else that is invisible.
        values: (T,); NaN is not shaded.
        title: what stands above it.

    Raises:
        GattnVizError: no token, or another number of values.
    """

    tokens: Sequence[str]
    values: np.ndarray
    title: str = ""

    def __post_init__(self) -> None:
        if not self.tokens or np.shape(self.values) != (len(self.tokens),):
            raise GattnVizError(
                f"{np.size(self.values)} values for {len(self.tokens)} tokens of a text; expected one for each"
            )


@dataclass(frozen=True)
class Piece:
    """A token, or a part of one that a line's end divides, at its place."""

    token: int
    text: str
    line: int
    x: float
    width: float


def shaded_text(
    blocks: Sequence[TextBlock],
    bar: Bar,
    *,
    title: str,
    footnote: str = "",
    font: str | None = None,
    kind: StyleKind = "screen",
) -> Figure:
    """Texts below each other, their tokens shaded by one colour range.

    Args:
        bar: the range, and what the colour bar below the texts says.
        title, footnote: wrapped to the figure's width.
        font: a family or font file to prefer, see `fonts.fit_fonts`.

    Returns:
        A figure of its own. Its Axes are the texts in order, then the bar. Each has a `PolyCollection` with a
        shade for each piece of a token and a `Text` for each that is not blank.

    Raises:
        GattnVizError: no text.
    """
    if not blocks:
        raise GattnVizError("no text to draw; pass at least one")
    with style(kind):
        families = fit_fonts([token for block in blocks for token in block.tokens], font).families
        placed = [place_tokens(fit_fonts(block.tokens, font).texts, families) for block in blocks]
        heights = [(pieces[-1].line + 1) * _LINE for pieces in placed]
        figure, axes = panel_figure([WIDTH], heights)
        for ax, block, pieces, height in zip(axes[:, 0], blocks, placed, heights, strict=True):
            ax.set(xlim=(0, WIDTH), ylim=(height, 0))
            ax.set_axis_off()
            title_families, (text,) = fit_fonts([block.title], font)
            ax.set_title(text, loc="left", parse_math=False, fontfamily=title_families)
            _draw_pieces(ax, pieces, block.values, bar.scale, families)
        colors = ScalarMappable(bar.scale.norm(), map_colormap())
        bar_below(figure, colors, list(axes[:, 0]), (WIDTH, sum(heights)), bar.label)
        finish(figure, axes, [WIDTH], heights, title=title, footnote=footnote, font=font)
    return figure


def place_tokens(tokens: Sequence[str], families: Sequence[str], width: float = WIDTH) -> list[Piece]:
    """Break a text into lines of `width` inches: before a word that has no room left, else wherever it must be."""
    found: list[Piece] = []
    line, x = 0, 0.0
    for word in _words(tokens):
        sizes = [_advance(text, families) for _, text in word]
        if x > 0 and x + sum(sizes) > width >= sum(sizes):
            line, x = line + 1, 0.0
        for (token, text), size in zip(word, sizes, strict=True):
            for part, part_size in _parts(text, size, families, width):
                if x > 0 and x + part_size > width:
                    line, x = line + 1, 0.0
                found.append(Piece(token, part, line, x, part_size))
                x += part_size
            if text.endswith(NEWLINE):
                line, x = line + 1, 0.0
    return found


def _words(tokens: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    """Runs of (token, text) between which a line may break: before a space, and after a line break."""
    pieces = [(number, part) for number, token in enumerate(tokens) for part in _lines(token)]
    starts = np.cumsum(
        [n == 0 or text[0].isspace() or pieces[n - 1][1].endswith(NEWLINE) for n, (_, text) in enumerate(pieces)]
    )
    for _, word in groupby(zip(starts, pieces, strict=True), key=lambda pair: pair[0]):
        yield [piece for _, piece in word]


def _lines(token: str) -> list[str]:
    """`a\\n\\nb` as `a↵`, `↵`, `b`."""
    return [part for part in token.replace("\n", f"{NEWLINE}\n").split("\n") if part]


def _parts(text: str, size: float, families: Sequence[str], width: float) -> Iterator[tuple[str, float]]:
    """A token as it is, or cut where it is wider than a line, with the width of each part."""
    while size > width:
        count = next(n for n in range(len(text), 0, -1) if n == 1 or _advance(text[:n], families) <= width)
        yield text[:count], _advance(text[:count], families)
        text = text[count:]
        size = _advance(text, families) if text else 0
    if text:
        yield text, size


def _advance(text: str, families: Sequence[str]) -> float:
    """The width in inches that a text takes in a line, with the spaces at its ends, which have no ink."""
    return text_width(f"|{text}|", _SIZE, families) - text_width("||", _SIZE, families) + 2 * _PAD


def _draw_pieces(
    ax: Axes, pieces: Sequence[Piece], values: np.ndarray, scale: ColorScale, families: Sequence[str]
) -> None:
    top = (_LINE - _SHADE) / 2
    boxes = [
        [
            (piece.x, piece.line * _LINE + top),
            (piece.x + piece.width, piece.line * _LINE + top),
            (piece.x + piece.width, piece.line * _LINE + top + _SHADE),
            (piece.x, piece.line * _LINE + top + _SHADE),
        ]
        for piece in pieces
    ]
    colormap, norm = map_colormap(), scale.norm()
    shown = np.ma.masked_invalid(np.asarray(values, dtype=np.float64)[[piece.token for piece in pieces]])
    # a hairline of paper keeps neighbours of one shade apart
    shades = PolyCollection(boxes, array=shown, cmap=colormap, norm=norm, edgecolors="white", linewidths=0.4)
    ax.add_collection(shades, autolim=False)
    for piece, value in zip(pieces, np.ma.filled(shown, np.nan), strict=True):
        if piece.text.strip():
            # by its left end, the spaces before it included, which have no ink
            before = piece.text[: len(piece.text) - len(piece.text.lstrip())]
            x = piece.x + _PAD + (_advance(before, families) - 2 * _PAD if before else 0)
            ax.text(
                x, (piece.line + 0.74) * _LINE, piece.text.strip(), va="baseline", ha="left", fontsize=_SIZE,
                color="black" if np.isnan(value) else ink_on(colormap(norm(value))), fontfamily=list(families),
                parse_math=False, in_layout=False,
            )  # fmt: skip


def ink_on(shade: tuple[float, float, float, float]) -> str:
    """Black or white, whichever stands out more: at least 4.5 to 1 on any shade (WCAG 2.2's contrast)."""
    channels = np.array(to_rgb(shade))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ [0.2126, 0.7152, 0.0722])
    return "black" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "white"

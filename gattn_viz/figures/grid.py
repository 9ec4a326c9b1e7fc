"""Many attention maps on one sheet, with one colour range: models x layers, heads, all layers of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.fonts import fit_fonts
from gattn_viz.figures.heatmap import draw_map
from gattn_viz.figures.scale import ColorScale, shared_range, shown_values
from gattn_viz.figures.style import INK, MUTED, StyleKind, points, style
from gattn_viz.figures.text import wrap_text

# Inches.
_MARGIN = 0.12
_GAP = 0.14
_BAR = 0.12
_BAR_GAP = 0.2
_LEAST_WIDTH = 4.4  # of what is inside the margins: room for a title
_LEAST_SIDE = 1.3
_TINIEST_SIDE = 0.3
_MOST_SIDE = {1: 5.5, 2: 4.2, 3: 3.4, 4: 2.8, 5: 2.4, 6: 2.1}
_LEAST_BAR = 1.2
_MOST_BAR = 3.6
# A token is never narrower than a pixel at this resolution; below it a sink's column would fade.
_TOKENS_PER_INCH = 150


@dataclass(frozen=True, eq=False)
class Panel:
    """One map of a grid.

    map: (T, T) attention, queries x keys; labels: T token labels; title: what stands above it (``layer 21``);
    keep: positions from 0 whose ticks are kept, see `heatmap.draw_map`.
    """

    map: np.ndarray
    labels: Sequence[str]
    title: str = ""
    keep: Sequence[int] = ()


Grid = Sequence[Sequence[Panel | None]]


def wrap_panels(panels: Sequence[Panel | None], columns: int | None = None) -> list[list[Panel | None]]:
    """Panels in reading order as rows: `columns` a row, or as many as make the sheet a little wider than high.

    28 become 7 x 4, 64 become 8 x 8, up to 4 stay on one row.
    """
    count = len(panels)
    if columns is None:
        columns = max(count, 1) if count <= 4 else _good_columns(count)
    if columns < 1:
        raise GattnVizError(f"{columns} columns were asked for; expected at least 1")
    return [list(panels[start : start + columns]) for start in range(0, count, columns)]


def _good_columns(count: int) -> int:
    square = math.sqrt(count)
    # Full rows if a width near the square root gives them, else the next above it.
    near = range(math.ceil(square), math.ceil(square * 1.6) + 1)
    return next((n for n in near if count % n == 0), math.ceil(square * 1.15))


def map_grid(
    panels: Grid,
    *,
    title: str,
    footnote: str = "",
    colorbar_label: str = "attention probability",
    row_labels: Sequence[str] | None = None,
    scale: ColorScale | None = None,
    cmap: Colormap | str | None = None,
    drop_first: bool = False,
    font: str | None = None,
    kind: StyleKind = "screen",
    side: float | None = None,
    width: float | None = None,
) -> Figure:
    """Draw rows x columns of maps with one colour range and one colour bar.

    Token labels stand on the outer panels only when all panels have the same labels, else on each. Titles
    stand above the columns once if all panels of each column share theirs, else above each panel.

    Args:
        panels: rows of panels; None leaves a cell empty, short rows are filled up with empty cells.
        title: model, layer, aggregation, T: whatever a reader must know. Wrapped to the figure's width.
        footnote: range, first-row policy and the like, small, below; wrapped.
        colorbar_label: what the colours mean, with its unit.
        row_labels: one for each row (model names); long ones are wrapped or shortened in the middle.
        scale: None is linear, from 0 to the largest value drawn in any panel.
        cmap: a colormap or its name; None is `style.map_colormap`'s.
        drop_first: leave out the first key's column in each map.
        font: a family or font file to prefer, see `fonts.fit_fonts`.
        kind: the style, see `style.style`.
        side: a panel's side in inches; None fits it to the number of tokens and panels.
        width: the figure's width in inches, instead of `side`.

    Returns:
        A figure of its own (not pyplot's), sized in inches so that nothing overlaps. One Axes a cell, in
        reading order, then the colour bar's.

    Raises:
        GattnVizError: no panel at all, not one label a row, a `width` that leaves no room, or a map that
            `draw_map` refuses.
    """
    columns = max((len(row) for row in panels), default=0)
    cells = [[*row, *[None] * (columns - len(row))] for row in panels]
    filled = [panel for row in cells for panel in row if panel is not None]
    if not filled:
        raise GattnVizError("no attention map to draw; pass at least one panel")
    if row_labels is not None and len(row_labels) != len(cells):
        raise GattnVizError(f"{len(row_labels)} row labels for {len(cells)} rows of maps; expected one for each")
    if scale is None:
        scale = ColorScale("linear", *shared_range((panel.map for panel in filled), drop_first=drop_first))

    with style(kind):
        sheet = _Sheet(cells, title, footnote, colorbar_label, row_labels, scale, cmap, drop_first, font)
        if side is None:
            side = _good_side(max(len(panel.labels) for panel in filled), columns)
        figure, spare = sheet.draw(side, width)
        if width is not None:
            # All that is not panel keeps its size; what is over or missing goes to the panels. Grown once, then
            # only shrunk: other panels thin their labels otherwise, and so take other margins.
            grown = False
            while spare < -0.005 or not grown:
                grown = True
                side += spare / columns
                if side < _TINIEST_SIDE:
                    raise GattnVizError(
                        f"a figure {width:g} inches wide has no room for {columns} maps in a row; "
                        "pass a larger width or fewer maps"
                    )
                figure, spare = sheet.draw(side, width)
    return figure


def _good_side(tokens: int, columns: int) -> float:
    every_label = tokens * points("xtick.labelsize") * 1.32 / 72
    side = min(max(every_label, _LEAST_SIDE), _MOST_SIDE.get(columns, 1.7))
    return max(side, tokens / _TOKENS_PER_INCH)


@dataclass
class _Overhang:
    """How far labels and titles reach beyond the panels' squares, in inches, for each column or row."""

    left: list[float]
    right: list[float]
    top: list[float]
    bottom: list[float]


@dataclass
class _Sheet:
    cells: list[list[Panel | None]]
    title: str
    footnote: str
    colorbar_label: str
    row_labels: Sequence[str] | None
    scale: ColorScale
    cmap: Colormap | str | None
    drop_first: bool
    font: str | None

    def draw(self, side: float, width: float | None) -> tuple[Figure, float]:
        """Panels first, at their final size but anywhere; then, with their labels measured, everything's place.

        Returns the figure, and how much of `width` (inches) is over; negative if it does not do, 0 if it is None.
        """
        rows, columns = len(self.cells), len(self.cells[0])
        figure = Figure(figsize=(2 * side, 2 * side))
        FigureCanvasAgg(figure)
        axes = [[figure.add_axes((0.25, 0.25, 0.5, 0.5)) for _ in range(columns)] for _ in range(rows)]
        image = self._draw_panels(axes, side)
        over = self._measure(axes)
        bar_height = min(max(rows * side, _LEAST_BAR), _MOST_BAR)
        bar = figure.add_axes((0, 0, _BAR / (2 * side), bar_height / (2 * side)))
        self._draw_bar(figure, bar, image, bar_height)
        bar_band = _BAR_GAP + _BAR + _overhang(bar)[1]

        row_text = self._row_texts(side)
        row_band = max((_lines_height(text, points("axes.titlesize")) for text in row_text), default=0.0)
        row_band += 0.08 if row_text else 0.0

        grid_width = sum(over.left) + sum(over.right) + columns * side + (columns - 1) * _GAP
        needed = row_band + grid_width + bar_band
        inner = max(needed, _LEAST_WIDTH) if width is None else width - 2 * _MARGIN
        title_size, note_size = points("figure.titlesize"), points("xtick.labelsize")
        title, title_families = self._fitted(self.title, inner, title_size)
        note, note_families = self._fitted(self.footnote, inner, note_size)
        title_band = _lines_height(title, title_size) + 0.12 if title else 0.0
        note_band = _lines_height(note, note_size) + 0.12 if note else 0.0

        lefts, tops = self._places(over, side)
        grid_height = tops[-1] + side + over.bottom[-1]
        bar_top = tops[0]
        body = max(grid_height, bar_top + bar_height + 0.06)
        total_width = inner + 2 * _MARGIN
        total_height = 2 * _MARGIN + title_band + body + note_band
        figure.set_size_inches(total_width, total_height)

        def rectangle(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
            """Inches from the upper left corner of the grid's band to figure fractions."""
            bottom = total_height - _MARGIN - title_band - y - h
            return (_MARGIN + x) / total_width, bottom / total_height, w / total_width, h / total_height

        for r, row in enumerate(axes):
            for c, ax in enumerate(row):
                ax.set_position(rectangle(row_band + lefts[c], tops[r], side, side))
        bar.set_position(rectangle(row_band + grid_width + _BAR_GAP, bar_top, _BAR, bar_height))
        if row_text:
            families = fit_fonts(list(self.row_labels or ()), self.font).families
            for text, top in zip(row_text, tops, strict=True):
                x, y, _, h = rectangle(0, top, 0, side)
                figure.text(
                    x, y + h / 2, text, rotation=90, ha="left", va="center", parse_math=False,
                    fontfamily=families, fontsize=points("axes.titlesize"), linespacing=1.15,
                )  # fmt: skip
        if title:
            figure.suptitle(
                title, x=_MARGIN / total_width, y=1 - _MARGIN / total_height, ha="left", va="top", color=INK,
                parse_math=False, fontfamily=title_families, linespacing=1.15,
            )  # fmt: skip
        if note:
            figure.text(
                _MARGIN / total_width, _MARGIN / total_height, note, ha="left", va="bottom", color=MUTED,
                parse_math=False, fontfamily=note_families, fontsize=note_size, linespacing=1.15,
            )  # fmt: skip
        return figure, 0.0 if width is None else inner - needed

    def _draw_panels(self, axes: list[list[Axes]], side: float) -> AxesImage:
        labels = [tuple(panel.labels) for row in self.cells for panel in row if panel is not None]
        shared = len(set(labels)) == 1
        norm = self.scale.norm()
        once = all(self._same_title(column) for column in range(len(axes[0])))
        image: AxesImage | None = None
        for r, row in enumerate(self.cells):
            for c, panel in enumerate(row):
                ax = axes[r][c]
                if panel is None:
                    ax.set_axis_off()
                    continue
                text = panel.title if r == self._first_row(c) or not once else ""
                title, _ = self._fitted(text, side, points("axes.titlesize"), lines=2)
                image = draw_map(
                    ax,
                    panel.map,
                    panel.labels,
                    norm=norm,
                    cmap=self.cmap,
                    drop_first=self.drop_first,
                    title=title,
                    keep=panel.keep,
                    font=self.font,
                    show_keys=not shared or not self._filled_below(r, c),
                    show_queries=not shared or all(other is None for other in row[:c]),
                )
        assert image is not None
        return image

    def _first_row(self, column: int) -> int:
        return next(r for r, row in enumerate(self.cells) if row[column] is not None)

    def _same_title(self, column: int) -> bool:
        return len({panel.title for row in self.cells if (panel := row[column]) is not None}) == 1

    def _filled_below(self, row: int, column: int) -> bool:
        return any(other[column] is not None for other in self.cells[row + 1 :])

    def _measure(self, axes: list[list[Axes]]) -> _Overhang:
        rows, columns = len(axes), len(axes[0])
        over = _Overhang([0.0] * columns, [0.0] * columns, [0.0] * rows, [0.0] * rows)
        for r, row in enumerate(axes):
            for c, ax in enumerate(row):
                if self.cells[r][c] is None:
                    continue
                left, right, top, bottom = _overhang(ax)
                over.left[c] = max(over.left[c], left)
                over.right[c] = max(over.right[c], right)
                over.top[r] = max(over.top[r], top)
                # Labels may hang into empty cells.
                if self._filled_below(r, c) or r == rows - 1:
                    over.bottom[r] = max(over.bottom[r], bottom)
        return over

    def _places(self, over: _Overhang, side: float) -> tuple[list[float], list[float]]:
        """Inches from the grid's left edge to each column's squares, and from its top to each row's."""
        lefts, tops = [], []
        x = y = 0.0
        for left, right in zip(over.left, over.right, strict=True):
            lefts.append(x + left)
            x += left + side + right + _GAP
        for top, bottom in zip(over.top, over.bottom, strict=True):
            tops.append(y + top)
            y += top + side + bottom + _GAP
        return lefts, tops

    def _row_texts(self, side: float) -> list[str]:
        return [self._fitted(label, side, points("axes.titlesize"), lines=2)[0] for label in self.row_labels or ()]

    def _draw_bar(self, figure: Figure, bar: Axes, image: AxesImage, height: float) -> None:
        label, families = self._fitted(self.colorbar_label, height, points("axes.labelsize"))
        values = np.concatenate(
            [shown_values(p.map, drop_first=self.drop_first) for row in self.cells for p in row if p is not None]
        )
        finite = values[np.isfinite(values)]
        above = bool((finite > self.scale.vmax).any())
        below = bool((finite < self.scale.low).any())
        extend = {(False, False): "neither", (True, False): "max", (False, True): "min", (True, True): "both"}
        colorbar = figure.colorbar(image, cax=bar, extend=extend[above, below], extendfrac=0.04)
        colorbar.outline.set_visible(False)
        bar.tick_params(length=2)
        bar.set_ylabel(label, parse_math=False, fontfamily=families, linespacing=1.15)

    def _fitted(self, text: str, width: float, size: float, lines: int | None = None) -> tuple[str, list[str]]:
        families, (shown,) = fit_fonts([text], self.font)
        return wrap_text(shown, width, size, families, lines), families


def _overhang(ax: Axes) -> tuple[float, float, float, float]:
    """How far an Axes' labels and title reach beyond its rectangle: left, right, top, bottom, in inches."""
    inner = ax.get_position(original=True).transformed(ax.figure.transSubfigure)
    outer = ax.get_tightbbox()
    assert outer is not None
    beyond = (inner.x0 - outer.x0, outer.x1 - inner.x1, outer.y1 - inner.y1, inner.y0 - outer.y0)
    left, right, top, bottom = (max(length, 0.0) / ax.figure.dpi for length in beyond)
    return left, right, top, bottom


def _lines_height(text: str, size: float) -> float:
    return (text.count("\n") + 1) * size * 1.25 / 72 if text else 0.0

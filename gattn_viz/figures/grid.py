"""Many attention maps on one sheet, with one colour range: models x layers, heads, all layers of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.fonts import fit_fonts
from gattn_viz.figures.heatmap import draw_map
from gattn_viz.figures.panel import Panel
from gattn_viz.figures.scale import ColorScale, shared_range
from gattn_viz.figures.style import INK, MUTED, StyleKind, points, style
from gattn_viz.figures.text import text_width, wrap_text

# Inches.
_MARGIN = 0.12
_GAP = 0.14
_BAR = 0.12
_BAR_GAP = 0.2
_LEAST_WIDTH = 4.4  # of what is inside the margins: room for a title
_LEAST_SIDE = 1.3
_LEAST_HEIGHT = 0.35  # of a map of one query
_LEAST_WIDTH_OF_MAP = 0.6  # of a map of one key
_TINIEST_SIDE = 0.3
_MOST_SIDE = {1: 5.5, 2: 4.2, 3: 3.4, 4: 2.8, 5: 2.4, 6: 2.1}
_LEAST_BAR = 1.2
_MOST_BAR = 3.6
# Below this a name that stands upright beside a row of maps has no room.
_LEAST_UPRIGHT = 1.2
_MOST_ROW_LABEL = 1.6
# A cell is never narrower than a pixel at this resolution; below it a sink's column would fade.
_CELLS_PER_INCH = 150


Grid = Sequence[Sequence[Panel | None]]


def wrap_panels(panels: Sequence[Panel | None], columns: int | None = None) -> list[list[Panel | None]]:
    """Panels in reading order as rows: `columns` a row, or as many as make the sheet a little wider than high.

    28 become 7 x 4, 64 become 8 x 8, up to 4 stay on one row. Maps that are much wider than high stand below
    each other: up to 8 in one column.
    """
    count = len(panels)
    if columns is None:
        filled = [panel for panel in panels if panel is not None]
        if filled and all(panel.is_strip for panel in filled):
            columns = math.ceil(count / 8)
        else:
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
        font: a family or font file to prefer, see `fonts.fit_fonts`.
        kind: the style, see `style.style`.
        side: a panel's longer side in inches; None fits it to the number of cells and panels. Cells are square,
            unless that leaves the shorter side no room for labels, or maps differ in shape.
        width: the figure's width in inches, instead of `side`.

    Returns:
        A figure of its own (not pyplot's), sized in inches so that nothing overlaps. One Axes a cell, in
        reading order, then the colour bar's.

    Raises:
        GattnVizError: no panel at all, not one label a row, a `width` that leaves no room.
    """
    columns = max((len(row) for row in panels), default=0)
    cells = [[*row, *[None] * (columns - len(row))] for row in panels]
    filled = [panel for row in cells for panel in row if panel is not None]
    if not filled:
        raise GattnVizError("no attention map to draw; pass at least one panel")
    if row_labels is not None and len(row_labels) != len(cells):
        raise GattnVizError(f"{len(row_labels)} row labels for {len(cells)} rows of maps; expected one for each")
    if scale is None:
        scale = ColorScale("linear", *shared_range(panel.shown for panel in filled))

    with style(kind):
        sheet = _Sheet(cells, title, footnote, colorbar_label, row_labels, scale, cmap, font)
        if side is None:
            side = _good_side(max(sheet.map_shape), columns)
        figure, spare = sheet.draw(side, width)
        if width is not None:
            # All that is not panel keeps its size; what is over or missing goes to the panels. Grown once, then
            # only shrunk: other panels thin their labels otherwise, and so take other margins.
            grown = False
            while spare < -0.005 or not grown:
                grown = True
                side *= 1 + spare / columns / sheet.box(side)[0]
                if side < _TINIEST_SIDE:
                    raise GattnVizError(
                        f"a figure {width:g} inches wide has no room for {columns} maps in a row; "
                        "pass a larger width or fewer maps"
                    )
                figure, spare = sheet.draw(side, width)
    return figure


def _good_side(longer: int, columns: int) -> float:
    """The inches of a map's longer side, of `longer` rows or columns, with so many maps beside each other."""
    side = min(max(_every_label(longer), _LEAST_SIDE), _MOST_SIDE.get(columns, 1.7))
    return max(side, longer / _CELLS_PER_INCH)


def _every_label(count: int) -> float:
    """The inches along which so many rows or columns have room for a label each."""
    return count * points("xtick.labelsize") * 1.32 / 72


@dataclass
class _Overhang:
    """How far labels and titles reach beyond the panels' boxes, in inches, for each column or row."""

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
    font: str | None

    @property
    def filled(self) -> list[Panel]:
        return [panel for row in self.cells for panel in row if panel is not None]

    @property
    def map_shape(self) -> tuple[int, int]:
        """The most rows and columns that a map has."""
        shapes = [panel.map.shape for panel in self.filled]
        return max(rows for rows, _ in shapes), max(columns for _, columns in shapes)

    def box(self, side: float) -> tuple[float, float]:
        """Width and height of a panel, in inches; the longer is `side`."""
        rows, columns = self.map_shape
        fewer, more = sorted((rows, columns))
        shorter = max(side * fewer / more, min(_every_label(fewer), side / 2))
        if columns >= rows:
            return side, max(shorter, _LEAST_HEIGHT)
        return max(shorter, _LEAST_WIDTH_OF_MAP), side

    def draw(self, side: float, width: float | None) -> tuple[Figure, float]:
        """Panels first, at their final size but anywhere; then, with their labels measured, everything's place.

        Returns the figure, and how much of `width` (inches) is over; negative if it does not do, 0 if it is None.
        """
        rows, columns = len(self.cells), len(self.cells[0])
        wide, high = self.box(side)
        figure = Figure(figsize=(2 * wide, 2 * high))
        FigureCanvasAgg(figure)
        axes = [[figure.add_axes((0.25, 0.25, 0.5, 0.5)) for _ in range(columns)] for _ in range(rows)]
        image = self._draw_panels(axes, wide)
        over = self._measure(axes)
        bar_height = min(max(rows * high, _LEAST_BAR), _MOST_BAR)
        bar = figure.add_axes((0, 0, _BAR / (2 * wide), bar_height / (2 * high)))
        self._draw_bar(figure, bar, image, bar_height)
        bar_band = _BAR_GAP + _BAR + _overhang(bar)[1]

        upright = high >= _LEAST_UPRIGHT
        row_text, row_band = self._row_texts(high if upright else _MOST_ROW_LABEL, upright)

        grid_width = sum(over.left) + sum(over.right) + columns * wide + (columns - 1) * _GAP
        needed = row_band + grid_width + bar_band
        inner = max(needed, _LEAST_WIDTH) if width is None else width - 2 * _MARGIN
        title_size, note_size = points("figure.titlesize"), points("xtick.labelsize")
        title, title_families = self._fitted(self.title, inner, title_size)
        note, note_families = self._fitted(self.footnote, inner, note_size)
        title_band = _lines_height(title, title_size) + 0.12 if title else 0.0
        note_band = _lines_height(note, note_size) + 0.12 if note else 0.0

        lefts, tops = self._places(over, wide, high)
        grid_height = tops[-1] + high + over.bottom[-1]
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
                ax.set_position(rectangle(row_band + lefts[c], tops[r], wide, high))
        bar.set_position(rectangle(row_band + grid_width + _BAR_GAP, bar_top, _BAR, bar_height))
        if row_text:
            families = fit_fonts(list(self.row_labels or ()), self.font).families
            for text, top in zip(row_text, tops, strict=True):
                x, y, _, h = rectangle(0, top, 0, high)
                figure.text(
                    x, y + h / 2, text, rotation=90 if upright else 0, ha="left", va="center", parse_math=False,
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

    def _draw_panels(self, axes: list[list[Axes]], wide: float) -> AxesImage:
        shared = all(
            panel.queries.same_as(self.filled[0].queries) and panel.keys.same_as(self.filled[0].keys)
            for panel in self.filled
        )
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
                title, _ = self._fitted(text, wide, points("axes.titlesize"), lines=2)
                image = draw_map(
                    ax,
                    panel,
                    norm=norm,
                    cmap=self.cmap,
                    title=title,
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

    def _places(self, over: _Overhang, wide: float, high: float) -> tuple[list[float], list[float]]:
        """Inches from the grid's left edge to each column's boxes, and from its top to each row's."""
        lefts, tops = [], []
        x = y = 0.0
        for left, right in zip(over.left, over.right, strict=True):
            lefts.append(x + left)
            x += left + wide + right + _GAP
        for top, bottom in zip(over.top, over.bottom, strict=True):
            tops.append(y + top)
            y += top + high + bottom + _GAP
        return lefts, tops

    def _row_texts(self, room: float, upright: bool) -> tuple[list[str], float]:
        """The rows' names, in two lines of `room` inches at most, and the width of the band they stand in."""
        size = points("axes.titlesize")
        fitted = [self._fitted(label, room, size, lines=2) for label in self.row_labels or ()]
        texts = [text for text, _ in fitted]
        if upright:
            across = [_lines_height(text, size) for text in texts]
        else:
            across = [text_width(line, size, families) for text, families in fitted for line in text.split("\n")]
        return texts, max(across) + 0.08 if across else 0.0

    def _draw_bar(self, figure: Figure, bar: Axes, image: AxesImage, height: float) -> None:
        label, families = self._fitted(self.colorbar_label, height, points("axes.labelsize"))
        above = any((panel.shown > self.scale.vmax).any() for panel in self.filled)
        below = any((panel.shown < self.scale.low).any() for panel in self.filled)
        extend = {(False, False): "neither", (True, False): "max", (False, True): "min", (True, True): "both"}
        colorbar = figure.colorbar(image, cax=bar, extend=extend[above, below], extendfrac=0.04)
        if self.scale.kind == "sqrt":  # matplotlib puts a tick above the range at its end: 0.6 for 0.513
            inside = [tick for tick in colorbar.get_ticks() if self.scale.low <= tick <= self.scale.vmax]
            colorbar.set_ticks(inside)
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

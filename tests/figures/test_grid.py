"""Many maps on a sheet: one range, labels where they are needed, and nothing over anything else."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.grid import map_grid, wrap_panels
from gattn_viz.figures.panel import Panel, Positions
from gattn_viz.figures.save import save_figure
from gattn_viz.figures.scale import ColorScale
from gattn_viz.figures.style import StyleKind

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*deprecated(,| -) use:DeprecationWarning")

Attention = Callable[..., np.ndarray]
TITLE = "baseline (demo), mean over 4 heads, T = 16"
LONG = "/home/someone/checkpoints/experiments/qwen3-1b7-gated-attention-headwise-lr4e-3-wd0.1-step-100000"
HARD = [
    "<|endoftext|>",
    "$\\frac{$",
    "你好",
    "␣مرحبا",
    "नमस्ते",
    "😀🦄",
    "<0xE4>",
    "\\n",
    "␣" * 30,
    "gjpqy",
    "<empty>",
]


def words(tokens: int) -> list[str]:
    return ["<|bos|>", *(f"␣word{n}" for n in range(2, tokens + 1))][:tokens]


def panel(values: np.ndarray, title: str = "layer 1", labels: Sequence[str] | None = None) -> Panel:
    return Panel.whole(values, labels or words(len(values)), title)


def texts(figure: Figure) -> list[Text]:
    """What is drawn: neither the ticks of axes that are switched off nor those beyond the ends of a colour bar."""
    shown: list[Text] = [
        t for t in figure.findobj(Text) if t in figure.texts or t.get_text() == figure.get_suptitle()
    ]
    for ax in figure.axes:
        if ax.axison:
            ticks = [tick for axis in (ax.xaxis, ax.yaxis) for tick in axis._update_ticks()]
            shown += [ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts]
            shown += [label for tick in ticks for label in (tick.label1, tick.label2) if label.get_visible()]
    return [t for t in shown if t.get_text()]


def assert_tidy(figure: Figure) -> None:
    """All text lies inside the figure, and no text on another or on a map."""
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    shown = [(t, t.get_window_extent()) for t in texts(figure)]
    for text, box in shown:
        inside = box.x0 >= -0.5 and box.y0 >= -0.5 and box.x1 <= width + 0.5 and box.y1 <= height + 0.5
        assert inside, f"{text.get_text()!r} leaves the figure"
        for ax in figure.axes:
            if ax.axison and text not in ax.texts:
                cover = ax.get_window_extent().padded(-1)
                assert not cover.overlaps(box), f"{text.get_text()!r} lies on a map"
    # A little less than the boxes: their ascender and descender room may touch.
    boxes = [(t.get_text(), box.padded(-0.12 * min(box.width, box.height))) for t, box in shown]
    edges = np.array([box.extents for _, box in boxes])
    low, high = edges[:, None, :2], edges[:, None, 2:]
    hits = ((low < edges[None, :, 2:]) & (high > edges[None, :, :2])).all(axis=2)
    np.fill_diagonal(hits, False)
    assert not hits.any(), [(boxes[a][0], boxes[b][0]) for a, b in np.argwhere(hits)[:3]]


@pytest.mark.parametrize(
    ("rows", "columns", "tokens", "kind"),
    [(1, 1, 1, "screen"), (1, 4, 2, "paper"), (3, 4, 16, "screen"), (1, 1, 128, "paper"), (1, 2, 400, "screen")],
)
def test_sheets_are_tidy(attention: Attention, rows: int, columns: int, tokens: int, kind: StyleKind) -> None:
    figure = map_grid(
        [[panel(attention(tokens, seed=c), f"layer {c + 1}") for c in range(columns)] for _ in range(rows)],
        title=TITLE,
        footnote="Colours: linear scale from 0 to 1. First row included.",
        row_labels=["baseline", "gate_headwise", "gate_elementwise"][:rows] if rows > 1 else None,
        kind=kind,
    )
    assert_tidy(figure)
    assert len(figure.axes) == rows * columns + 1
    sides = [ax.get_window_extent().width / figure.dpi for ax in figure.axes[:-1]]
    assert min(sides) >= 1.29
    assert min(sides) >= tokens / 151  # no key is narrower than a pixel at 150 dpi


def test_many_panels(attention: Attention) -> None:
    count = 64
    rows = wrap_panels([panel(attention(16, seed=n), f"head {n}") for n in range(1, count + 1)])
    assert len({len(row) for row in rows}) == 1
    figure = map_grid(rows, title=TITLE)
    assert_tidy(figure)
    assert [ax.get_title() for ax in figure.axes[:-1]] == [f"head {n}" for n in range(1, count + 1)]


def test_hard_tokens_and_long_names(attention: Attention) -> None:
    maps = [panel(attention(len(HARD)), f"layer {n}, {LONG}", HARD) for n in (1, 2)]
    figure = map_grid([maps, maps], title=LONG, row_labels=[LONG, "short"], footnote=LONG * 3, colorbar_label=LONG)
    assert_tidy(figure)
    assert any("…" in t.get_text() and t.get_rotation() == 90 for t in figure.texts)
    assert figure.get_suptitle().replace("\n", "") == LONG


def test_one_range_and_one_bar(attention: Attention) -> None:
    figure = map_grid([[panel(attention(5)), panel(attention(5) / 2)]], title=TITLE, colorbar_label="p")
    *maps, bar = figure.axes
    norms = [ax.images[0].norm for ax in maps]
    assert norms[0] is norms[1]
    assert (norms[0].vmin, norms[0].vmax) == (0, 1)
    assert bar.get_ylabel() == "p"
    assert bar.get_ylim() == (0, 1)


@pytest.mark.parametrize(
    ("scale", "extend"),
    [
        (("linear", 0, 1), "neither"),
        (("linear", 0, 0.5), "max"),
        (("log", 0.9, 1), "min"),
        (("log", 0.8, 0.9), "both"),
    ],
)
def test_bar_says_what_is_out_of_range(attention: Attention, scale: tuple[str, float, float], extend: str) -> None:
    figure = map_grid([[panel(attention(5))]], title=TITLE, scale=ColorScale(*scale))  # type: ignore[arg-type]
    colorbar = figure.axes[0].images[0].colorbar
    assert colorbar is not None
    assert colorbar.extend == extend
    assert_tidy(figure)


def test_labels_stand_on_the_outer_panels_when_shared(attention: Attention) -> None:
    shared = [[panel(attention(3)), panel(attention(3))], [panel(attention(3)), None]]
    figure = map_grid(shared, title=TITLE)
    a, b, c, d = figure.axes[:-1]
    assert [bool(ax.get_ylabel()) for ax in (a, b, c)] == [True, False, True]
    assert [bool(ax.get_xlabel()) for ax in (a, b, c)] == [False, True, True]  # b has none below it
    assert [len(ax.get_xticks()) for ax in (a, b, c)] == [0, 3, 3]
    assert not d.axison
    assert_tidy(figure)


def test_labels_stand_on_each_panel_when_they_differ(attention: Attention) -> None:
    figure = map_grid([[panel(attention(3)), panel(attention(4))], [None, panel(attention(3))]], title=TITLE)
    drawn = [ax for ax in figure.axes[:-1] if ax.axison]
    assert [len(ax.get_xticks()) for ax in drawn] == [3, 4, 3]
    assert all(ax.get_xlabel() == "key" and ax.get_ylabel() == "query" for ax in drawn)
    assert_tidy(figure)


def test_titles_stand_once_only_if_every_column_shares_them(attention: Attention) -> None:
    rows = [[panel(attention(3), "layer 1"), panel(attention(3), name)] for name in ("a", "b")]
    titles = [ax.get_title() for ax in map_grid(rows, title=TITLE).axes[:-1]]
    assert titles == ["layer 1", "a", "layer 1", "b"]


def part(rows: Positions, columns: Positions, title: str = "layer 1") -> Panel:
    return Panel(np.random.default_rng(0).random((len(rows), len(columns))), rows, columns, title)


def box(figure: Figure) -> tuple[float, float]:
    """Width and height of the first map, in inches."""
    extent = figure.axes[0].get_window_extent()
    return extent.width / figure.dpi, extent.height / figure.dpi


POOLED = Positions(1, 8192, 16)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (POOLED, Positions(2, 8192, 16)),
        (Positions(1000, 1200, labels=words(201)), Positions(1, 150, labels=words(150))),
        (Positions(700, 720, labels=HARD + words(10)), Positions(690, 740, labels=words(51))),
        (Positions(700, 700, labels=["␣word"]), Positions(1, 700, 2)),
        (POOLED, Positions(1, 1, labels=["<|bos|>"])),
        (POOLED, Positions(1, 8, labels=words(8))),
    ],
    ids=["pooled", "zoom", "tokens", "one query", "one key", "few keys"],
)
def test_views_are_tidy(rows: Positions, columns: Positions) -> None:
    panels = [[part(rows, columns, f"layer {n}") for n in (1, 28)] for _ in range(2)]
    names = ["baseline", "gate_elementwise"]
    figure = map_grid(panels, title=TITLE, footnote=TITLE, row_labels=names)
    assert_tidy(figure)
    width, height = box(figure)
    assert width >= len(columns) / 151
    assert height >= len(rows) / 151
    assert max(figure.get_size_inches()) < 12
    assert {t.get_text().replace("\n", "") for t in figure.texts} >= set(names)  # none is shortened


def test_cells_are_square_unless_labels_need_room() -> None:
    def ratio(rows: int, columns: int) -> float:
        width, height = box(map_grid([[part(Positions(1, rows), Positions(1, columns))]], title=TITLE))
        return (height / rows) / (width / columns)

    assert ratio(512, 512) == pytest.approx(1)
    assert ratio(512, 300) == pytest.approx(1)
    assert ratio(60, 100) == pytest.approx(1)
    assert ratio(3, 60) > 1.3
    assert ratio(60, 3) < 0.75


def test_maps_of_different_shape_fill_their_places() -> None:
    panels = [[part(POOLED, POOLED), part(Positions(1, 300), Positions(2, 300))]]
    figure = map_grid(panels, title=TITLE)
    first, second = (ax.get_window_extent() for ax in figure.axes[:2])
    assert (first.width, first.height) == pytest.approx((second.width, second.height))
    assert first.width == pytest.approx(first.height)
    assert_tidy(figure)


def test_strips_stand_below_each_other() -> None:
    strips = [part(Positions(700, 700), Positions(1, 700, 2), f"layer {n}") for n in range(28)]
    assert [len(row) for row in wrap_panels(strips[:4])] == [1] * 4
    assert [len(row) for row in wrap_panels(strips)] == [4] * 7
    assert_tidy(map_grid(wrap_panels(strips), title=TITLE))


def test_width_of_views() -> None:
    for rows, columns in ((Positions(1, 60), Positions(1, 3)), (Positions(1, 3), Positions(1, 60))):
        figure = map_grid([[part(rows, columns)] * 3], title=TITLE, kind="paper", width=6.9)
        assert figure.get_size_inches()[0] == pytest.approx(6.9)
        assert_tidy(figure)


def test_bar_has_no_tick_beyond_its_range(attention: Attention) -> None:
    figure = map_grid([[panel(attention(5) * 0.513)]], title=TITLE, scale=ColorScale("sqrt", 0, 0.513))
    figure.canvas.draw()
    ticks = figure.axes[-1].get_yticks()
    assert len(ticks) > 2
    assert max(ticks) <= 0.513
    assert_tidy(figure)


def test_values_that_have_no_range() -> None:
    blank = [np.full((4, 4), v) for v in (0.25, 0.0, np.nan)]
    figure = map_grid([[panel(v, str(n)) for n, v in enumerate(blank)]], title=TITLE)
    assert_tidy(figure)
    assert figure.axes[0].images[0].norm.vmax == 0.25
    assert_tidy(map_grid([[panel(blank[2])]], title=TITLE))


def test_width(attention: Attention) -> None:
    rows = [[panel(attention(16), f"layer {n}") for n in (1, 7, 21, 28)]]
    figure = map_grid(rows, title=TITLE, footnote=TITLE * 3, kind="paper", width=6.9)
    assert figure.get_size_inches()[0] == pytest.approx(6.9)
    assert_tidy(figure)
    assert map_grid(rows, title=TITLE, side=1.0).axes[0].get_window_extent().width == pytest.approx(100)
    with pytest.raises(GattnVizError, match="a figure 2 inches wide has no room for 4 maps"):
        map_grid(rows, title=TITLE, width=2)


def test_wrap_panels() -> None:
    def shape(count: int, columns: int | None = None) -> list[int]:
        return [len(row) for row in wrap_panels([None] * count, columns)]

    assert [shape(n) for n in (0, 1, 4)] == [[], [1], [4]]
    assert shape(5) == [3, 2]
    assert shape(28) == [7] * 4
    assert shape(64) == [8] * 8
    assert shape(80) == [10] * 8
    assert shape(5, 2) == [2, 2, 1]
    assert all(len(shape(n)) <= shape(n)[0] for n in range(1, 200))
    with pytest.raises(GattnVizError, match="0 columns"):
        shape(3, 0)


def test_bad_input(attention: Attention) -> None:
    for empty in ([], [[]], [[None]]):
        with pytest.raises(GattnVizError, match="no attention map to draw"):
            map_grid(empty, title=TITLE)
    with pytest.raises(GattnVizError, match="2 row labels for 1 rows"):
        map_grid([[panel(attention(3))]], title=TITLE, row_labels=["a", "b"])


@pytest.mark.parametrize(("dpi", "darkest"), [(200, 20), (100, 150)])
def test_pixels_show_sinks_and_blank(attention: Attention, tmp_path: Path, dpi: int, darkest: int) -> None:
    """The one look at pixels: T = 400, two sinks, four maps a row; from 150 dpi on colours are true."""
    values = attention(400, sink=0)
    values[:, 0] = 0.97
    values[100:, 100] = 0.97
    figure = map_grid([[panel(values)] * 4], title=TITLE)
    with Image.open(save_figure(figure, tmp_path / "a.png", dpi=dpi)) as image:
        pixels = np.asarray(image.convert("RGB")).mean(axis=2)
    box = figure.axes[0].get_window_extent()
    left, right, middle = (round(v * dpi / figure.dpi) for v in (box.x0, box.x1, (box.y0 + box.y1) / 2))
    row = pixels[len(pixels) - middle, left:right]
    quarter = len(row) // 4
    assert row[:3].min() < darkest
    assert row[quarter - 3 : quarter + 4].min() < darkest
    assert 200 < np.median(row[: 2 * quarter]) < 250  # near zero: tinted
    assert (row[3 * quarter :] == 255).all()  # beyond the diagonal: paper
    assert figure.axes[0].images[0].get_interpolation() == "antialiased"


def test_no_display(tmp_path: Path) -> None:
    """Neither a display nor a chosen backend is needed, and pyplot is not started."""
    code = """
import sys, numpy as np
from gattn_viz.figures.grid import map_grid
from gattn_viz.figures.panel import Panel
from gattn_viz.figures.save import save_figure
figure = map_grid([[Panel.whole(np.eye(2), ["a", "b"], "layer 1")]], title="t")
for kind in ("png", "pdf", "svg"):
    save_figure(figure, f"{sys.argv[1]}/a.{kind}")
assert "torch" not in sys.modules
"""
    environment = {"PATH": "", "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path / "mpl")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / f"a.{kind}").stat().st_size > 1000 for kind in ("png", "pdf", "svg"))


def test_axes_come_in_reading_order(attention: Attention) -> None:
    figure = map_grid([[panel(attention(3), f"{r}{c}") for c in range(3)] for r in range(2)], title=TITLE)
    corners = [(-round(ax.get_position().y0, 6), ax.get_position().x0) for ax in figure.axes[:-1]]
    assert corners == sorted(corners)
    for a, b in itertools.combinations(figure.axes, 2):
        assert not a.get_window_extent().overlaps(b.get_window_extent())

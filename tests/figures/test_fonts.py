"""Every character is drawn by an installed font or spelt out."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.fonts import drawn_with_cff, fit_fonts, shorten, user_family
from gattn_viz.tokens import EMPTY, SPACE

from .conftest import MakeFont

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*deprecated(,| -) use:DeprecationWarning")

TEXTS = ["a", f"{SPACE}Ωж", "你好", "नमस्ते", "مرحبا", "😀🦄", "$\\frac{$", "❤\ufe0f", EMPTY, "…é"]


@pytest.mark.usefixtures("only_dejavu")
def test_no_font_but_dejavu() -> None:
    families, texts = fit_fonts(["a", f"{SPACE}é", "你好!", "x你y", "🦄", "مرحبا"])
    assert families == ["DejaVu Sans"]
    assert texts == ["a", f"{SPACE}é", "U+4F60 U+597D!", "xU+4F60y", "U+1F984", "مرحبا"]


def test_nothing_missing_is_ever_drawn(caplog: pytest.LogCaptureFixture) -> None:
    """On whatever machine this runs: matplotlib neither warns of a missing glyph nor of a missing font."""
    families, texts = fit_fonts(TEXTS)
    figure = Figure()
    canvas = FigureCanvasAgg(figure)
    for text in texts:
        figure.text(0.5, 0.5, text, fontfamily=families, parse_math=False)
    with caplog.at_level(logging.WARNING):
        canvas.draw()
    assert not caplog.records


@pytest.mark.usefixtures("only_dejavu")
def test_few_fonts_are_preferred(make_font: MakeFont) -> None:
    for family, characters in [("Fake One", "你"), ("Fake Both", "你好"), ("Fake Other", "🦄")]:
        user_family(str(make_font(family, characters)))
    assert fit_fonts(["a你好", "🦄"]).families == ["DejaVu Sans", "Fake Both", "Fake Other"]
    assert fit_fonts(["a", "b"]).families == ["DejaVu Sans"]


@pytest.mark.usefixtures("only_dejavu")
def test_fonts_that_draw_nothing_are_not_believed(make_font: MakeFont) -> None:
    """Layered colour fonts and blank ones have an index for a character, and no outline."""
    user_family(str(make_font("Fake Blank", "你", empty=True)))
    assert fit_fonts(["你"]) == (["DejaVu Sans"], ["U+4F60"])


@pytest.mark.usefixtures("only_dejavu")
@pytest.mark.parametrize("cff", [False, True])
def test_users_font_comes_first(make_font: MakeFont, cff: bool) -> None:
    path = make_font(f"Fake User {cff}", "你a", cff=cff)
    family = f"Fake User {cff}"
    assert fit_fonts(["a你b"], str(path)) == ([family, "DejaVu Sans"], ["a你b"])
    assert fit_fonts(["a你b"], family.upper()).families[0] == family
    assert drawn_with_cff("b你", [family, "DejaVu Sans"]) is cff
    assert drawn_with_cff("b", [family, "DejaVu Sans"]) is False
    assert drawn_with_cff("a", ["DejaVu Sans", family]) is False


def test_users_font_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GattnVizError, match="font family 'No Such Family' is not installed; pass"):
        fit_fonts(["a"], "No Such Family")
    with pytest.raises(GattnVizError, match=r"font file .*none\.ttf does not exist; pass"):
        fit_fonts(["a"], str(tmp_path / "none.ttf"))
    broken = tmp_path / "broken.otf"
    broken.write_bytes(b"not a font")
    with pytest.raises(GattnVizError, match=r"broken\.otf cannot be read as a font; pass"):
        fit_fonts(["a"], str(broken))


@pytest.mark.parametrize(
    ("text", "limit", "short"),
    [
        ("attention", 9, "attention"),
        ("attention", 8, "atten…on"),
        ("attention", 2, "a…"),
        ("U+4F60 U+597D U+4E16", 16, "U+4F60… U+4E16"),
        ("U+4F60U+597D", 8, "U+4F60…"),
        ("\\u200b\\u200b\\u200b", 14, "\\u200b…\\u200b"),
        ("<0xE4><0xBD><0xA0>", 12, "<0xE4>…"),
    ],
)
def test_shorten(text: str, limit: int, short: str) -> None:
    assert shorten(text, limit) == short

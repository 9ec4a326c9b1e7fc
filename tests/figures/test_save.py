"""Writing figures and reading back what is written in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.fonts import fit_fonts
from gattn_viz.figures.save import FORMATS, read_metadata, save_figure

from .conftest import MakeFont

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*deprecated(,| -) use:DeprecationWarning")

RECIPE = {
    "command": "gattn-viz maps --model gate_headwise",
    "title": 'odd (text) \\ with ")" and <tags> & /Keywords (none)',
    "prompts": "你好 😀 é\n\x00",
    "json": '{"nested": [1, 2]}',
}


def figure(text: str = "a", font: str | None = None) -> Figure:
    made = Figure(figsize=(2, 1))
    FigureCanvasAgg(made)
    families, (shown,) = fit_fonts([text], font)
    made.text(0.1, 0.5, shown, fontfamily=families)
    return made


@pytest.mark.parametrize("kind", FORMATS)
def test_round_trip(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "new" / "folder" / f"map.{kind}"
    assert save_figure(figure(), path, metadata=RECIPE) == path
    assert read_metadata(path) == RECIPE
    assert os.listdir(path.parent) == [path.name]  # nothing partial is left
    assert read_metadata(save_figure(figure(), path)) == {}
    assert read_metadata(save_figure(figure(), str(path).replace("map", "MAP").replace(kind, kind.upper()))) == {}


@pytest.mark.parametrize("kind", FORMATS)
def test_same_figure_same_bytes(tmp_path: Path, kind: str) -> None:
    first, second = (save_figure(figure(), tmp_path / f"{n}.{kind}", metadata=RECIPE) for n in (1, 2))
    assert first.read_bytes() == second.read_bytes()


def test_png_size_and_key(tmp_path: Path) -> None:
    path = save_figure(figure(), tmp_path / "a.png", dpi=150, metadata=RECIPE)
    with Image.open(path) as image:
        assert image.size == (300, 150)
        assert "gattn-viz" in image.text  # type: ignore[attr-defined]


def test_permissions_are_as_for_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    path = save_figure(figure(), tmp_path / "a.png")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_pdf_fonts(tmp_path: Path) -> None:
    raw = save_figure(figure(), tmp_path / "a.pdf").read_bytes()
    assert b"/Type3" not in raw
    assert b"/FontFile2" in raw
    assert b"CreationDate" not in raw


@pytest.mark.usefixtures("only_dejavu")
def test_pdf_draws_what_it_could_not_embed(tmp_path: Path, make_font: MakeFont) -> None:
    """Matplotlib's PDFs show nothing for fonts with CFF outlines, such as Noto Sans CJK: these become paths."""
    made = figure("你a", str(make_font("Fake Cff", "你", cff=True)))
    raw = save_figure(made, tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile" not in raw
    assert not made.texts[0].get_path_effects()
    kept = save_figure(figure("你a", str(make_font("Fake Ttf", "你"))), tmp_path / "b.pdf").read_bytes()
    assert b"/FontFile2" in kept


def test_a_file_that_was_there_stays_when_writing_fails(tmp_path: Path) -> None:
    path = save_figure(figure(), tmp_path / "a.png")
    before = path.read_bytes()
    with pytest.raises(
        GattnVizError, match=r"cannot write .*20,000,000 x 10,000,000 pixels; expected .*: lower the dpi"
    ):
        save_figure(figure(), path, dpi=10_000_000)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.png"]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GattnVizError, match=r"cannot write .*a\.png: .*; expected a place that can be written to"):
        save_figure(figure(), tmp_path / "file" / "a.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(GattnVizError, match=r"cannot write .*folder\.png"):
        save_figure(figure(), tmp_path / "folder.png")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.png"]


@pytest.mark.parametrize("name", ["a.jpg", "a", "a.tar"])
def test_unknown_formats(tmp_path: Path, name: str) -> None:
    for call in (lambda p: save_figure(figure(), p), read_metadata):
        with pytest.raises(GattnVizError, match=r"unknown figure format .*expected one of \.png, \.pdf, \.svg"):
            call(tmp_path / name)


@pytest.mark.parametrize("kind", FORMATS)
def test_files_that_are_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    with pytest.raises(GattnVizError, match="cannot read the metadata"):
        read_metadata(path)
    path.write_text("something else")
    with pytest.raises(GattnVizError, match="cannot read the metadata"):
        read_metadata(path)

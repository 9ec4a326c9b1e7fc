"""The one place that writes figures, and reads back what is written in them."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patheffects import Normal
from matplotlib.text import Text
from PIL import Image

from gattn_viz.errors import GattnVizError, first_line
from gattn_viz.figures.fonts import drawn_with_cff
from gattn_viz.figures.style import SAVING
from gattn_viz.files import replacing

FORMATS = ("png", "pdf", "svg")

# Of a PNG. Pillow refuses to open one of 179 million, as a guard against decompression bombs.
MOST_PIXELS = 150_000_000

# PNG has free keys; PDF and SVG have fixed ones, and these two are the ones meant for such text.
_PNG_KEY = "gattn-viz"
_PDF_KEY = "Keywords"
_SVG_KEY = "Description"
_DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}description"


def save_figure(
    figure: Figure, path: str | os.PathLike[str], *, dpi: float = 200, metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a figure; the file is there whole or not at all.

    Args:
        figure: what to write, at its own size in inches.
        path: ends in .png, .pdf or .svg, which chooses the format. Missing folders are made.
        dpi: pixels per inch of a PNG, and of images inside the others.
        metadata: what `read_metadata` gives back. Kept as one JSON text: in the PNG text chunk ``gattn-viz``,
            the PDF's ``Keywords``, the SVG's ``Description``.

    Returns:
        The path. The same figure and metadata give the same bytes: no date is written.

    Raises:
        GattnVizError: another ending, a place that cannot be written, a figure too large for a PNG.
    """
    target = Path(path)
    kind = _format(target)
    width, height = (round(inches * dpi) for inches in figure.get_size_inches())
    if kind == "png" and width * height > MOST_PIXELS:
        raise GattnVizError(
            f"cannot write {target}: it would have {width:,} x {height:,} pixels; expected {MOST_PIXELS:,} in all "
            "at most: lower the dpi, draw fewer or smaller maps in one figure, or write a PDF"
        )
    note = json.dumps(dict(metadata)) if metadata else None  # ASCII, which every format takes as it is
    outlines = _outlines_where_needed(figure) if kind == "pdf" else nullcontext()
    try:
        with replacing(target) as partial, mpl.rc_context(SAVING), _true_colours(figure, dpi), outlines:
            figure.savefig(partial, format=kind, dpi=dpi, facecolor="white", metadata=_entries(kind, note))
    except ValueError as error:
        if "too large" not in str(error):  # "Image size of 90000x90000 pixels is too large"
            raise
        raise GattnVizError(
            f"cannot write {target}: {first_line(error)}; lower the dpi or draw fewer maps in one figure"
        ) from error
    return target


def read_metadata(path: str | os.PathLike[str], kind: str | None = None) -> dict[str, str]:
    """What `save_figure` was given as `metadata`; empty if the file carries none.

    Args:
        kind: `png`, `pdf` or `svg`; None is by the path's ending.

    Raises:
        GattnVizError: no such file, another ending than .png, .pdf or .svg, or not a file of that format.
    """
    source = Path(path)
    read = {"png": _read_png, "pdf": _read_pdf, "svg": _read_svg}[kind or _format(source)]
    try:
        note = read(source)
        found = json.loads(note) if note else {}
    except (OSError, SyntaxError, ValueError) as error:  # ElementTree's ParseError is a SyntaxError
        raise GattnVizError(
            f"cannot read the metadata of {source}: {first_line(error)}; expected a figure that gattn-viz wrote"
        ) from error
    return found if isinstance(found, dict) else {}


def _format(path: Path) -> str:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise GattnVizError(
            f"unknown figure format {path.suffix or 'without an ending'!r} of {path.name}; "
            f"expected one of {', '.join('.' + f for f in FORMATS)}"
        )
    return kind


@contextmanager
def _true_colours(figure: Figure, dpi: float) -> Iterator[None]:
    """Draw images in their exact colours, for the length of a `with` block, where a cell is a pixel or more.

    Matplotlib smooths below three pixels a cell, and so a column of 0.97 in a map of 400 tokens looked like 0.75.
    Below one pixel smoothing is right: a column would be left out.
    """
    images: list[Any] = figure.findobj(AxesImage)
    before = [image.get_interpolation() for image in images]
    try:
        for image in images:
            box = image.get_window_extent()
            rows, columns = image.get_size()
            pixels = min(box.width / columns, box.height / rows) * dpi / figure.dpi
            image.set_interpolation("nearest" if pixels >= 1 else "antialiased")
        yield
    finally:
        for image, interpolation in zip(images, before, strict=True):
            image.set_interpolation(interpolation)


@contextmanager
def _outlines_where_needed(figure: Figure) -> Iterator[None]:
    """Draw as paths, for the length of a `with` block, the texts whose font a PDF would not show."""
    texts: list[Any] = figure.findobj(Text)
    changed = [t for t in texts if not t.get_path_effects() and drawn_with_cff(t.get_text(), t.get_fontfamily())]
    try:
        for text in changed:
            text.set_path_effects([Normal()])  # no effect at all, but effects are applied to paths
        yield
    finally:
        for text in changed:
            text.set_path_effects([])


def _entries(kind: str, note: str | None) -> dict[str, Any]:
    if kind == "png":
        return {_PNG_KEY: note} if note else {}
    if kind == "pdf":
        return {"CreationDate": None} | ({_PDF_KEY: note} if note else {})
    return {"Date": None} | ({_SVG_KEY: note} if note else {})


def _read_png(path: Path) -> str | None:
    with Image.open(path, formats=["PNG"]) as image:
        return image.text.get(_PNG_KEY)  # type: ignore[attr-defined]


def _read_pdf(path: Path) -> str | None:
    """The Keywords of the info dictionary, which matplotlib writes uncompressed and last."""
    raw = path.read_bytes()
    if not raw.startswith(b"%PDF"):
        raise ValueError("not a PDF")
    found = re.findall(rb"/" + _PDF_KEY.encode() + rb" \(((?:\\.|[^\\)])*)\)", raw, re.S)
    return re.sub(rb"\\(.)", rb"\1", found[-1]).decode("ascii") if found else None


def _read_svg(path: Path) -> str | None:
    element = ElementTree.parse(path).find(f".//{_DUBLIN_CORE}")
    return None if element is None else element.text

"""Text that has to fit: its width in inches, and breaking it into lines."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import matplotlib as mpl
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.font_manager import FontProperties

from gattn_viz.figures.fonts import shorten

_DPI = 100


@lru_cache(maxsize=1)
def _renderer() -> RendererAgg:
    return RendererAgg(1, 1, _DPI)


def text_width(text: str, size: float, families: Sequence[str]) -> float:
    """The width in inches of one line of `text`, `size` in points."""
    properties = FontProperties(family=list(families), size=size)
    with mpl.rc_context({"text.hinting": "none"}):  # as it will be drawn: the same at any dpi
        return _renderer().get_text_width_height_descent(text, properties, ismath=False)[0] / _DPI


def wrap_text(text: str, width: float, size: float, families: Sequence[str], lines: int | None = None) -> str:
    """`text` broken into lines of at most `width` inches, at spaces and after ``/ _ - :``.

    Between phrases, that is after ``, ; .``, where that leaves a line at least half as long as it could be.
    A piece that is wider than a line is shortened in the middle; with `lines`, so is what does not fit in that
    many. Line breaks that are there stay.
    """

    def fits(line: str) -> bool:
        return text_width(line.rstrip(), size, families) <= width

    def squeezed(line: str) -> str:
        shown = line.rstrip()
        if fits(shown):
            return shown
        limits = range(2, len(shown))
        too_long = bisect_left(limits, True, key=lambda limit: not fits(shorten(shown, limit)))
        return shorten(shown, limits[max(too_long - 1, 0)])

    done: list[str] = []
    glued = re.sub(r" ([=<>]) ", "\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}", text)  # T = 16 is one word
    for paragraph in glued.split("\n"):
        line = ""
        for piece in re.findall(r"[^ /_\-:]*[/_\-:] *|[^ /_\-:]+ *| +", paragraph):
            if line and not fits(line + piece):
                end = max(line.rfind(mark) for mark in (", ", "; ", ". ")) + 2
                end = end if end >= len(line) / 2 else len(line)
                done.append(line[:end])
                line = line[end:]
            line += piece
        done.append(line)
    if lines is not None and len(done) > lines:
        done = [*done[: lines - 1], "".join(done[lines - 1 :])]
    return "\n".join(squeezed(line) for line in done).replace("\N{NO-BREAK SPACE}", " ")

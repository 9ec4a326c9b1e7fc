"""Fixtures for the figures: fake maps, and fonts made here, since machines differ in what is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.t2CharStringPen import T2CharStringPen
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.font_manager import fontManager

from gattn_viz.figures import fonts

MakeFont = Callable[..., Path]


@pytest.fixture
def attention() -> Callable[..., np.ndarray]:
    """A causal map (T, T) whose rows sum to 1: a sink on the first key and a band on the diagonal."""

    def make(tokens: int, sink: float = 0.6, seed: int = 0) -> np.ndarray:
        scores = np.random.default_rng(seed).normal(size=(tokens, tokens))
        scores -= np.abs(np.subtract.outer(np.arange(tokens), np.arange(tokens))) / 3
        weights = np.tril(np.exp(scores))
        weights *= (1 - sink) / weights.sum(axis=1, keepdims=True)
        weights[:, 0] += sink
        return weights

    return make


@pytest.fixture
def make_font(tmp_path: Path) -> MakeFont:
    """Write a font of one square glyph for each character: TrueType, CFF (.otf), or with empty outlines."""

    def make(family: str, characters: str, *, cff: bool = False, empty: bool = False) -> Path:
        names = [".notdef", *(f"u{ord(c):X}" for c in characters)]
        builder = FontBuilder(1000, isTTF=not cff)
        builder.setupGlyphOrder(names)
        builder.setupCharacterMap({ord(c): f"u{ord(c):X}" for c in characters})
        glyphs = {}
        for name in names:
            pen = T2CharStringPen(800, None) if cff else TTGlyphPen(None)
            if not empty:
                pen.moveTo((100, 0))
                for corner in ((100, 700), (700, 700), (700, 0)):
                    pen.lineTo(corner)
                pen.closePath()
            glyphs[name] = pen.getCharString() if cff else pen.glyph()
        if cff:
            builder.setupCFF(family.replace(" ", ""), {"FullName": family}, glyphs, {})
        else:
            builder.setupGlyf(glyphs)
        builder.setupHorizontalMetrics({name: (800, 100) for name in names})
        builder.setupHorizontalHeader(ascent=800, descent=-200)
        builder.setupNameTable({"familyName": family, "styleName": "Regular", "psName": family.replace(" ", "")})
        builder.setupOS2(sTypoAscender=800, sTypoDescender=-200, usWinAscent=800, usWinDescent=200)
        builder.setupPost()
        path = tmp_path / f"{family}{'.otf' if cff else '.ttf'}"
        builder.save(path)
        return path

    return make


@pytest.fixture
def only_dejavu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server without fonts: what matplotlib brings along, and what the test adds."""
    bundled = [entry for entry in fontManager.ttflist if entry.name == fonts.BASE_FAMILY]
    monkeypatch.setattr(fontManager, "ttflist", bundled)
    fonts._forget()
    yield
    monkeypatch.undo()
    fonts._forget()

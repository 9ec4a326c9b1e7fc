from __future__ import annotations

import colorsys
import itertools

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.matrix import Bar
from gattn_viz.figures.scale import ColorScale
from gattn_viz.figures.shaded_text import WIDTH, TextBlock, ink_on, place_tokens, shaded_text
from gattn_viz.figures.style import map_colormap
from gattn_viz.figures.text import text_width

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*deprecated(,| -) use:DeprecationWarning")

FONT = ["DejaVu Sans"]


def draw(*blocks: TextBlock, high: float = 0.5) -> Figure:
    return shaded_text(blocks, Bar(ColorScale("linear", 0, high), "gate score"), title="title", footnote="note")


def shades(figure: Figure, block: int = 0) -> np.ndarray:
    """(pieces, 4)"""
    [collection] = (one for one in figure.axes[block].collections if isinstance(one, PolyCollection))
    collection.update_scalarmappable()
    return collection.get_facecolor()


def test_a_shade_is_the_colormap_at_the_score() -> None:
    values = np.array([0.0, 0.1, 0.5, 0.9, np.nan])
    found = shades(draw(TextBlock(["a", " b", " c", " d", " e"], values)))
    colours = map_colormap()
    # above the range the last colour, without a value none
    np.testing.assert_allclose(found[:4], [colours(0.0), colours(0.2), colours(1.0), colours(1.0)])
    assert found[4, 3] == 0


def test_the_text_is_there_in_ink_that_can_be_read() -> None:
    figure = draw(TextBlock(["a", " b", " ", " c"], np.array([0.0, 0.5, 0.2, np.nan]), "layer 21, head 3"))
    ax = figure.axes[0]
    assert [text.get_text() for text in ax.texts] == ["a", "b", "c"]  # the space has a shade of its own
    assert len(shades(figure)) == 4
    assert [text.get_color() for text in ax.texts] == ["black", "white", "black"]
    assert ax.get_title(loc="left") == "layer 21, head 3"
    assert figure.axes[-1].get_xlabel() == "gate score"
    assert figure.get_suptitle() == "title"


def contrast(one: float, other: float) -> float:
    low, high = sorted((one, other))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: tuple[float, ...]) -> float:
    """Of sRGB, channel by channel, as WCAG 2.2 defines it."""
    total = 0.0
    for channel, weight in zip(colour[:3], (0.2126, 0.7152, 0.0722), strict=True):
        total += weight * (channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4)
    return total


def test_ink_on_every_shade() -> None:
    every = [map_colormap()(x) for x in np.linspace(0, 1, 256)]
    every += [
        (*colorsys.hsv_to_rgb(h, s, v), 1.0) for h in (0, 0.3, 0.6) for s in (0, 0.5, 1) for v in (0, 0.4, 1)
    ]
    for shade in every:
        ink = ink_on(shade)
        ours = contrast(luminance(shade), luminance(to_rgba(ink)))
        assert ours >= 4.5
        other = contrast(luminance(shade), luminance(to_rgba("white" if ink == "black" else "black")))
        assert ours >= other


def lines(tokens: list[str], width: float = WIDTH) -> list[str]:
    """The text of each line, and a check that each piece has its room."""
    pieces = place_tokens(tokens, FONT, width)
    for one, two in itertools.pairwise(pieces):
        assert (two.line == one.line and two.x == pytest.approx(one.x + one.width)) or (
            two.line > one.line and two.x == 0
        )
    assert all(piece.x + piece.width <= width + 1e-9 or len(piece.text) == 1 for piece in pieces)
    return ["".join(piece.text for piece in pieces if piece.line == line) for line in range(pieces[-1].line + 1)]


def test_line_breaks_are_kept_and_seen() -> None:
    assert lines(["a:", "\n", "  b", "\n\n", "c\nd", "\n"]) == ["a:↵", "  b↵", "↵", "c↵", "d↵"]


def test_lines_break_before_words_and_not_inside() -> None:
    tokens = [" one", " un", "break", "able", " two"]
    whole = text_width(" unbreakable", 8.5, FONT)
    assert lines(tokens, whole + 0.15) == [" one", " unbreakable", " two"]
    # a word wider than a line breaks between its tokens, a token wider than that inside
    assert lines(tokens, whole * 0.7) == [" one un", "break", "able two"]
    assert "".join(lines(["x" * 500])) == "x" * 500
    assert len(lines(["x" * 500])) > 3


def test_text_without_spaces_fills_its_lines() -> None:
    found = lines(["ab"] * 300)
    assert len({len(line) for line in found[:-1]}) == 1
    assert "".join(found) == "ab" * 300


def test_the_parts_of_a_token_have_its_shade() -> None:
    found = shades(draw(TextBlock(["x" * 200, "y"], np.array([0.5, 0.0]))))
    assert len(found) > 2
    np.testing.assert_allclose(found[:-1], [map_colormap()(1.0)] * (len(found) - 1))
    np.testing.assert_allclose(found[-1], map_colormap()(0.0))


def test_a_space_is_as_wide_as_in_text() -> None:
    [one, two] = place_tokens(["a", " b"], FONT)
    whole = text_width("|a b|", 8.5, FONT) - text_width("||", 8.5, FONT)
    assert two.x + two.width == pytest.approx(whole, abs=0.02)
    assert one.width < two.width


def test_no_formula_no_missing_character(only_dejavu: None) -> None:
    figure = draw(TextBlock(["$\\frac{", "$", " 東", " کتاب", " 🌧"], np.linspace(0, 0.5, 5)))
    figure.canvas.draw()
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts[:3] == ["$\\frac{", "$", "U+6771"]
    assert texts[4] == "U+1F327"
    assert not any(text.get_parse_math() for text in figure.axes[0].texts)


def test_blocks_are_below_each_other_with_one_range() -> None:
    block = TextBlock([" word"] * 60, np.linspace(0, 0.3, 60), "layer 1, head 1")
    figure = draw(block, TextBlock(["a"], np.ones(1), "layer 1, head 2"))
    tops = [ax.get_position().y1 for ax in figure.axes]
    assert tops == sorted(tops, reverse=True)
    norms = {(c.norm.vmin, c.norm.vmax) for ax in figure.axes[:2] for c in ax.collections}  # type: ignore[attr-defined]
    assert norms == {(0, 0.5)}
    assert figure.axes[0].get_ylim()[0] == pytest.approx(
        figure.axes[1].get_ylim()[0] * (place_tokens(block.tokens, FONT)[-1].line + 1)
    )


def test_errors() -> None:
    with pytest.raises(GattnVizError, match="no text"):
        draw()
    with pytest.raises(GattnVizError, match="2 values for 1 tokens"):
        TextBlock(["a"], np.ones(2))
    with pytest.raises(GattnVizError, match="0 values for 0 tokens"):
        TextBlock([], np.ones(0))

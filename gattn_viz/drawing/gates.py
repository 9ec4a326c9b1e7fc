"""From captured gate scores to figures: a token x head heatmap, and the text itself with its tokens shaded."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure

from gattn_viz.drawing.maps import Look, footnote, heads_in_words, layers_in_words
from gattn_viz.errors import GattnVizError
from gattn_viz.figures.matrix import Bar, Matrix, matrix_grid
from gattn_viz.figures.scale import ColorScale, shared_range
from gattn_viz.figures.shaded_text import TextBlock, shaded_text
from gattn_viz.pipeline.gate_scores import GateMaps

MOST_SHADED = 2000
"""Tokens of a text, and twice as many in all of a figure: more is no figure to read."""

_LABEL = "gate score"
_PANELS_IN_A_ROW = 7


def gate_color_scale(sets: Iterable[GateMaps], look: Look = Look()) -> ColorScale:
    """One colour range for the scores of these models, from 0 to the largest, so that figures can be compared."""
    return ColorScale(look.scale, *shared_range((np.ma.masked_invalid(maps.scores) for maps in sets), look.vmax))


def draw_gate_maps(maps: GateMaps, *, look: Look = Look(), scale: ColorScale | None = None) -> Figure:
    """One model's gate scores: a panel a layer, tokens down and heads across.

    Args:
        scale: a colour range to share with other figures, see `gate_color_scale`; None is this figure's own.
    """
    scale = scale or gate_color_scale([maps], look)
    heads = ["mean"] if maps.heads is None else [str(head) for head in maps.heads]
    columns = () if maps.heads == tuple(range(1, len(heads) + 1)) else heads
    panels = [
        Matrix(scores, f"layer {layer}", maps.tokens, columns)
        for layer, scores in zip(maps.layers, maps.scores, strict=True)
    ]
    rows = -(-len(panels) // _PANELS_IN_A_ROW)
    wide = -(-len(panels) // rows)
    return matrix_grid(
        [panels[start : start + wide] for start in range(0, len(panels), wide)],
        [Bar(scale, _LABEL)],
        names=("token", "head"),
        title=_title(maps),
        footnote=f"{footnote(maps)}{_gate(maps)} Rows are tokens. One {scale.describe()}.",
        font=look.font,
    )


def draw_gate_text(maps: GateMaps, *, look: Look = Look(), scale: ColorScale | None = None) -> Figure:
    """The prompt itself, each token shaded by a head's gate: a text for each layer and head.

    Raises:
        GattnVizError: more than `MOST_SHADED` tokens, or twice as many in all texts together.
    """
    blocks = [
        TextBlock(maps.texts, scores[:, column], _block_title(maps, layer, column))
        for layer, scores in zip(maps.layers, maps.scores, strict=True)
        for column in range(scores.shape[1])
    ]
    tokens = len(maps.tokens)
    if tokens > MOST_SHADED:
        raise GattnVizError(
            f"prompt {maps.prompt!r} has {tokens:,} tokens; expected at most {MOST_SHADED:,} in a text: cut it "
            f"with --max-tokens {MOST_SHADED}, or leave out --text"
        )
    if tokens * len(blocks) > 2 * MOST_SHADED:
        raise GattnVizError(
            f"{len(blocks)} texts of {tokens:,} tokens, one for each layer and head; expected at most "
            f"{2 * MOST_SHADED:,} tokens in a figure: ask for fewer --layers or --heads, or cut with --max-tokens "
            f"{max(2 * MOST_SHADED // len(blocks), 1)}"
        )
    scale = scale or gate_color_scale([maps], look)
    return shaded_text(
        blocks,
        Bar(scale, _LABEL),
        title=_title(maps),
        footnote=f"{footnote(maps)}{_gate(maps)} A shade covers a token. One {scale.describe()}.",
        font=look.font,
    )


def _gate(maps: GateMaps) -> str:
    return f" Gate: {maps.gate}." if maps.gate is not None else ""


def _title(maps: GateMaps) -> str:
    every = maps.heads == tuple(range(1, maps.n_heads + 1)) and maps.n_heads > 1
    heads = f"all {maps.n_heads} heads" if every else heads_in_words(maps)
    channels = f", mean over {maps.channels} channels" if maps.channels > 1 else ""
    return f"{maps.model}: gate score, {layers_in_words(maps)}, {heads}{channels}, T = {len(maps.tokens)}"


def _block_title(maps: GateMaps, layer: int, column: int) -> str:
    return f"layer {layer}, " + ("mean over heads" if maps.heads is None else f"head {maps.heads[column]}")

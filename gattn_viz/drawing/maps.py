"""From captured maps to figures: which panels, and the words around them.

Everything a reader must know to trust a map is in its title and footnote: model, layers, how heads are combined,
T, the prompt, the checkpoint and the colour range.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from gattn_viz.drawing.words import counts_in_words
from gattn_viz.errors import GattnVizError
from gattn_viz.figures.by_layer import x_axis, x_column
from gattn_viz.figures.curve_sheet import curve_sheet
from gattn_viz.figures.curves import Curve
from gattn_viz.figures.grid import map_grid, wrap_panels
from gattn_viz.figures.panel import Panel, Positions, map_title
from gattn_viz.figures.scale import ColorScale, ScaleKind, shared_range
from gattn_viz.metrics.measures import sink_keys
from gattn_viz.metrics.pooling import Buckets
from gattn_viz.pipeline import AttentionMaps, GateMaps
from gattn_viz.pipeline.captions import DEPTH, LEARNED_SINKS


@dataclass(frozen=True)
class Look:
    """How maps are drawn.

    Attributes:
        scale: `linear`, `sqrt` or `log`.
        vmax: the value that takes the last colour; None is the largest that is drawn.
        font: a font family or file to prefer for tokens.
    """

    scale: ScaleKind = "linear"
    vmax: float | None = None
    font: str | None = None


def color_scale(sets: Iterable[AttentionMaps], look: Look = Look()) -> ColorScale:
    """One colour range for all maps of these models, so that their figures can be compared."""
    panels = (_panel(maps, n, one) for maps in sets for n, layer, _ in _layers(maps) for one in layer)
    vmin, vmax = shared_range((panel.shown for panel in panels), look.vmax)
    return ColorScale(look.scale, vmin, vmax)


def draw_maps(maps: AttentionMaps, *, look: Look = Look(), scale: ColorScale | None = None) -> Figure:
    """One model's maps: a panel a layer, or a row of panels a layer with one for each head.

    Args:
        scale: a colour range to share with other figures, see `color_scale`; None is this figure's own.
    """
    if maps.heads is None:
        rows = wrap_panels(_mean_panels(maps))
    else:
        panels = [
            _panel(maps, n, one, map_title(f"L{n} H{head}", sink))
            for n, layer, sinks in _layers(maps)
            for head, one, sink in zip(maps.heads, layer, sinks, strict=True)
        ]
        # a row a layer while a row can be read
        rows = wrap_panels(panels, len(maps.heads) if len(maps.heads) <= 8 and not panels[0].is_strip else None)
    scale = scale or color_scale([maps], look)
    return map_grid(
        rows,
        title=f"{maps.model}: {maps.quantity.title}, {layers_in_words(maps)}, {heads_in_words(maps)}, "
        f"{maps.cells.in_words()}",
        footnote=f"{footnote(maps)} {_range_in_words([maps], scale)}{_formulas([maps])}"
        f"{_sinks_in_words([maps])}{_windows_in_words([maps])}",
        colorbar_label=_unit([maps]),
        scale=scale,
        font=look.font,
    )


def draw_grid(sets: Sequence[AttentionMaps], *, look: Look = Look(), scale: ColorScale | None = None) -> Figure:
    """Several models on one prompt: a row a model, a column a layer, the mean over the captured heads.

    Models of different depth have the layers that were captured for each; a panel says which it is.
    """
    if not sets:
        raise GattnVizError("no maps to draw; expected at least one model's")
    rows = [_mean_panels(maps) for maps in sets]
    scale = scale or color_scale(sets, look)
    heads = {heads_in_words(maps, mean=True) for maps in sets}
    views = {maps.cells.in_words() for maps in sets}
    view = views.pop() if len(views) == 1 else "; ".join(f"{maps.model}: {maps.cells.in_words()}" for maps in sets)
    checkpoints = "; ".join(f"{maps.model}: {maps.checkpoint}, {maps.dtype} on {maps.device}" for maps in sets)
    return map_grid(
        rows,
        title=f"{' or '.join(dict.fromkeys(maps.quantity.title for maps in sets))}, "
        f"{heads.pop() if len(heads) == 1 else 'mean over heads'}, {view}",
        footnote=f"{_prompt(sets[0])}. {checkpoints}. {_range_in_words(sets, scale)}{_formulas(sets)}"
        f"{_order_in_words(sets)}{_sinks_in_words(sets)}{_windows_in_words(sets)}",
        colorbar_label=_unit(sets),
        row_labels=[maps.model for maps in sets],
        scale=scale,
        font=look.font,
    )


def _layers(maps: AttentionMaps) -> Iterable[tuple[int, NDArray[np.float32], NDArray[np.float64]]]:
    """Each layer with its maps and what a learned sink takes from them, NaN for nothing."""
    sinks = maps.learned_sink
    if sinks is None:
        sinks = np.full(maps.probabilities.shape[:2], np.nan)
    return zip(maps.layers, maps.probabilities, sinks, strict=True)


def _mean_panels(maps: AttentionMaps) -> list[Panel]:
    return [
        _panel(maps, n, layer.mean(0), map_title(f"layer {n}", sinks.mean())) for n, layer, sinks in _layers(maps)
    ]


def _panel(maps: AttentionMaps, layer: int, one: NDArray[np.float32], title: str = "") -> Panel:
    queries, keys = (_positions(axis, maps.tokens) for axis in (maps.cells.queries, maps.cells.keys))
    return Panel(one, queries, keys, title, _sinks(maps, layer, one))


def _positions(axis: Buckets, tokens: Sequence[str]) -> Positions:
    """An axis with its tokens, where each has a row or column of its own."""
    labels = tokens[axis.first - 1 : axis.last] if axis.size == 1 else ()
    return Positions(axis.first, axis.last, axis.size, labels)


def _sinks(maps: AttentionMaps, layer: int, one: NDArray[np.float32]) -> list[int]:
    """The positions of the sinks that a whole, exact map shows, its first key drawn or not.

    A sink is one by its probabilities: a map of anything else has none.
    """
    cells = maps.cells
    if maps.weight != "probability":
        return []
    if cells.pool is not None or one.shape[0] < cells.tokens or one.shape[1] < cells.tokens - 1:
        return []
    whole = np.pad(one, ((0, 0), (cells.keys.first - 1, cells.tokens - cells.keys.last)))
    queries_of_key = None if maps.queries_of_key is None else maps.queries_of_key[maps.layers.index(layer)]
    return [int(key) + 1 for key in sink_keys(whole, queries_of_key)]


def layers_in_words(maps: AttentionMaps | GateMaps) -> str:
    if maps.layers == tuple(range(1, maps.n_layers + 1)):
        return f"all {maps.n_layers} layers" if maps.n_layers > 1 else "layer 1 of 1"
    return f"layer{'s' * (len(maps.layers) > 1)} {_numbers(maps.layers)} of {maps.n_layers}"


def heads_in_words(maps: AttentionMaps | GateMaps, *, mean: bool = False) -> str:
    if maps.heads is None or (mean and len(maps.heads) == maps.n_heads > 1):
        return f"mean over {maps.n_heads or 'all'} heads{_weighted(maps)}"
    plural = "s" * (len(maps.heads) > 1)
    if mean and plural:
        return f"mean over heads {_numbers(maps.heads)} of {maps.n_heads}{_weighted(maps)}"
    return f"head{plural} {_numbers(maps.heads)} of {maps.n_heads}"


def _weighted(maps: AttentionMaps | GateMaps) -> str:
    is_plain = not isinstance(maps, AttentionMaps) or maps.weight == "probability"
    return "" if is_plain or maps.n_heads == 1 else ", each weighted first"


def _numbers(numbers: Sequence[int]) -> str:
    """1, 4, 5, 6 as `1, 4-6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def footnote(maps: AttentionMaps | GateMaps) -> str:
    return f"{_prompt(maps)}. {maps.checkpoint}, {maps.dtype} on {maps.device}."


def _prompt(maps: AttentionMaps | GateMaps) -> str:
    return f"Prompt {maps.prompt}" + (" in the chat template" if maps.chat else "")


def _range_in_words(sets: Sequence[AttentionMaps], scale: ColorScale) -> str:
    pooled = any(maps.cells.pool is not None for maps in sets)
    after = "are blank or do not count" if pooled else "are blank"
    return f"Rows are queries; keys after the query {after}. One {scale.describe()}."


def _formulas(sets: Sequence[AttentionMaps]) -> str:
    """What the cells hold, where that is not p itself."""
    formulas = dict.fromkeys(maps.quantity.formula for maps in sets if maps.quantity.formula)
    return f" Cells: {'; '.join(formulas)}; p the attention probability." if formulas else ""


def _unit(sets: Sequence[AttentionMaps]) -> str:
    """What a colour stands for."""
    quantities = dict.fromkeys(maps.quantity.label for maps in sets)
    pools = {maps.cells.pool for maps in sets} - {None}
    words = {"max": "largest of a cell", "mean": "mean of a cell"}
    return " or ".join(quantities) + "".join(f", {words[pool]}" for pool in sorted(filter(None, pools)))


def _sinks_in_words(sets: Sequence[AttentionMaps]) -> str:
    return f" {LEARNED_SINKS}" if any(maps.learned_sink is not None for maps in sets) else ""


def _windows_in_words(sets: Sequence[AttentionMaps]) -> str:
    """In which layers a window or a chunk hides the first token from some queries."""
    said = ""
    for maps in sets:
        if maps.queries_of_key is None:
            continue
        by_share: dict[str, list[int]] = {}
        for layer, queries in zip(maps.layers, maps.queries_of_key, strict=True):
            if queries[0] < len(queries):
                by_share.setdefault(f"{queries[0] / len(queries):.0%}", []).append(layer)
        model = f" of {maps.model}" if len(sets) > 1 else ""
        for share, layers in by_share.items():
            of_layers = f"layer{'s' * (len(layers) > 1)} {_numbers(layers)}{model}"
            said += f" The first token is visible to {share} of the queries in {of_layers}."
    return said


def _order_in_words(sets: Sequence[AttentionMaps]) -> str:
    """A mean of largest values is not the largest value of a mean."""
    late = any(maps.cells.pool == "max" and maps.heads is not None and len(maps.heads) > 1 for maps in sets)
    return " Each head was pooled before the mean over heads." if late else ""


def draw_first_token(layers: pd.DataFrame, *, font: str | None = None) -> Figure:
    """First-token mass against the layer, a curve a model, beside what uniform attention would give.

    Args:
        layers: `compare(...).layers`, or `sink_stats(by="layer")`; a band is the interval, if it has any. Over its
            column `depth`, if it has that.
        font: a family or font file to prefer for names.
    """
    curves = []
    for model, rows in layers.groupby("model", sort=False):
        low, high = (rows.get(f"first_token_mass_ci_{end}") for end in ("low", "high"))
        curves.append(Curve(str(model), rows[x_column(layers)], rows["first_token_mass"], low, high))
    first = layers.iloc[0]
    prompts = "1 prompt" if first["n_prompts"] == 1 else f"{first['n_prompts']} prompts"
    prompts += " in the chat template" if layers.attrs.get("chat") else ""
    tokens = counts_in_words(layers, "tokens")
    by_depth = x_column(layers) == "depth"
    depth = f" {DEPTH}" if by_depth else ""
    few = ", too narrow: the prompts are few" if first["n_prompts"] < 10 else ""
    band = f" Bands are {100 * first['ci']:g}% intervals over prompts{few}." if curves[0].low is not None else ""
    return curve_sheet(
        curves,
        title=f"first-token mass by {'relative depth' if by_depth else 'layer'}, mean over heads, {prompts}",
        footnote=f"{tokens} tokens together; first query {first['first_row']}d.{band}{depth}",
        **x_axis(layers),
        y_label="attention to the first token",
        null=list(dict.fromkeys(layers["uniform_null"])),
        font=font,
    )

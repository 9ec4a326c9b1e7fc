"""From a table of heads to a figure: a layer x head heatmap of each measure, a row a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from gattn_viz.drawing.words import counts_in_words
from gattn_viz.errors import GattnVizError
from gattn_viz.figures.matrix import Bar, Matrix, matrix_grid
from gattn_viz.figures.scale import ColorScale, ScaleKind, shared_range
from gattn_viz.metrics.gate_measures import GATE_MEASURES, WITHOUT_GATE
from gattn_viz.metrics.measures import SINK_MEASURES

DEFAULT_MEASURES = ("first_token_mass", "gate_mean")

# Empty where a model has no gate, and for no other reason but one prompt of one token.
_OF_A_GATE = {one.name for one in GATE_MEASURES} - {*WITHOUT_GATE, "gate_channels_shut"}

_MOST = 4096
"""Layers, and heads, beyond which a table is not one of heads."""


def draw_heads(
    table: pd.DataFrame,
    measures: Sequence[str] = DEFAULT_MEASURES,
    *,
    scale: ScaleKind = "linear",
    font: str | None = None,
) -> Figure:
    """Draw measures of heads: a panel each, layers down and heads across, models below each other.

    Each measure has one colour range for all models, from its smallest value to its largest; where these are the
    same, it starts at 0. Layers and heads that a model lacks are blank.

    Args:
        table: a row for each model, layer and head, as `sink_stats`, `gate_stats` and `head_table` give it.
        measures: columns of it.
        scale: how values become colours, `linear`, `sqrt` or `log`.
        font: a font family or file to prefer.

    Raises:
        GattnVizError: the table has no such columns, is by layer or model, or has several rows for a head.
    """
    values = heads_of(table, measures)
    models = list(values)
    scales = {name: _scale([values[model][name] for model in models], scale) for name in measures}
    panels = [
        [
            Matrix(values[model][name], name, instead=_blank(table[table["model"] == model], name))
            for name in measures
        ]
        for model in models
    ]
    bars = [Bar(scales[name], f"{name}{_unit(name)}: {_ends(scales[name])}") for name in measures]
    return matrix_grid(
        panels,
        bars,
        names=("layer", "head"),
        title=f"{', '.join(measures)} of each head{f': {models[0]}' if len(models) == 1 else ''}{_data(table)}",
        footnote="Layer 1 is at the top; blank is no value. Each measure has one "
        f"{scale} colour range{' for all models' * (len(models) > 1)}, as its bar says"
        f"{'; what is below has its first colour' * (scale == 'log')}."
        f"{_policies(table, measures)}",
        row_names=models if len(models) > 1 else (),
        font=font,
    )


def heads_of(table: pd.DataFrame, measures: Sequence[str]) -> dict[str, dict[str, NDArray[np.float64]]]:
    """For each model and measure the values as (layers, heads), NaN where there is none.

    Raises:
        GattnVizError: see `draw_heads`.
    """
    _check(table, measures)
    found: dict[str, dict[str, NDArray[np.float64]]] = {}
    for model, rows in table.groupby("model", sort=False):
        layers, heads = rows["layer"].to_numpy(int), rows["head"].to_numpy(int)
        found[str(model)] = {}
        for name in measures:
            values = np.full((layers.max(), heads.max()), np.nan)
            values[layers - 1, heads - 1] = rows[name].to_numpy(float)
            if np.isinf(values).any():
                raise GattnVizError(f"{name} of {model} is infinite for a head; expected finite numbers")
            found[str(model)][name] = values
    return found


def _check(table: pd.DataFrame, measures: Sequence[str]) -> None:
    by_head = "expected a row for each model, layer and head, as sink-stats and gate-stats write it"
    if not len(measures):
        raise GattnVizError("no measure was given; expected at least one column of the table")
    for key in ("model", "layer", "head"):
        if key not in table:
            raise GattnVizError(f"the table has no column {key}; {by_head}: write it without --by layer or model")
    if table.empty:
        raise GattnVizError(f"the table has no rows; {by_head}")
    known = [name for name in table.select_dtypes("number") if name not in ("layer", "head")]
    for name in measures:
        if name not in known:
            raise GattnVizError(
                f"the table has no column {name!r} of numbers; expected {', '.join(map(str, known)) or 'one'}: "
                "add it to the --measures of the command that writes the table"
            )
    for key in ("layer", "head"):
        numbers = pd.to_numeric(table[key], errors="coerce")
        wrong = ~(numbers.between(1, _MOST) & (numbers % 1 == 0))
        if wrong.any():
            raise GattnVizError(f"the table has {key} {table[key][wrong].iloc[0]}; expected whole numbers from 1")
    twice = table.duplicated(["model", "layer", "head"])
    if twice.any():
        model, layer, head = table.loc[twice, ["model", "layer", "head"]].iloc[0]
        raise GattnVizError(
            f"the table has several rows for {model}, layer {layer}, head {head}; expected one: write it without "
            "--per-prompt, or choose a prompt's rows"
        )


def _scale(values: Sequence[NDArray[np.float64]], kind: ScaleKind) -> ColorScale:
    shown = [np.ma.masked_invalid(one) for one in values]
    low = min((float(one.min()) for one in shown if one.count()), default=0.0)
    high = max((float(one.max()) for one in shown if one.count()), default=0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # one value alone: rounding is no range
        low, high = shared_range(shown)
    return ColorScale(kind, low, high)


def _blank(rows: pd.DataFrame, measure: str) -> str:
    """Why a model has no value of a measure."""
    of_a_gate = [name for name in rows if name in _OF_A_GATE]
    needs_one = measure in _OF_A_GATE or (measure == "gate_channels_shut" and of_a_gate)
    return "no gate" if needs_one and not rows[of_a_gate].notna().any(axis=None) else "no values"


def _unit(measure: str) -> str:
    units = {one.name: one.unit for one in (*SINK_MEASURES, *GATE_MEASURES)}
    return f" ({units[measure]})" if measure in units else ""


def _ends(scale: ColorScale) -> str:
    return f"{scale.low:.3g} to {scale.vmax:.3g}"


def _data(table: pd.DataFrame) -> str:
    """`, 16 prompts, 2,094 tokens`, as far as the table says it; models differ in tokens where tokenizers do."""
    said = ""
    for column, one, many in (("n_prompts", "prompt", "prompts"), ("tokens", "token", "tokens")):
        if column in table:
            said += f", {counts_in_words(table, column)} {one if (table[column] == 1).all() else many}"
            said += " in the chat template" if column == "n_prompts" and table.attrs.get("chat") else ""
    return said


def _policies(table: pd.DataFrame, measures: Sequence[str]) -> str:
    said = ""
    if "first_token_mass" in measures and "first_row" in table:
        policy = {"exclude": "left out", "include": "counted"}
        rows = " or ".join(policy.get(str(word), str(word)) for word in dict.fromkeys(table["first_row"]))
        said += f" First query {rows}."
    for column, names, words in (
        ("below_threshold", ("gate_below", "gate_channels_shut"), "Shut is a score below"),
        ("above_threshold", ("gate_above",), "Open is a score above"),
    ):
        if column in table and set(names) & set(measures):
            said += f" {words} {' or '.join(f'{value:g}' for value in dict.fromkeys(table[column]))}."
    return said

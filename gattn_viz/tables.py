"""From measures to tidy tables: one row for each model, prompt, layer and head, and its summaries.

How values combine is said by the table of measures (`Measure.combine`): a layer is the mean over its heads, a
model the mean over its layers, and prompts weigh by what was counted in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gattn_viz.metrics.layer import LayerSums
from gattn_viz.metrics.measures import SINK_MEASURES, Options, count_queries

By = Literal["head", "layer", "model"]

COUNTS = ["n_prompts", "n_queries", "tokens"]
POSITIONS = ["top_sink_position", "max_activation_position", "max_activation_channel"]


def layer_rows(
    model: str, prompt: str, layer: int, sums: LayerSums, options: Options = Options()
) -> dict[str, NDArray[Any]]:
    """The rows of one prompt at one layer, column by column: a row for each head.

    Args:
        model: the model's name.
        prompt: the prompt's id.
        layer: from 1.
    """
    columns = {
        "model": model,
        "prompt": prompt,
        "layer": layer,
        "head": np.arange(1, sums.heads + 1),
        **{measure.name: measure.function(sums, options) for measure in SINK_MEASURES},
        "n_prompts": 1,
        "n_queries": count_queries(sums.tokens, options),
        "tokens": sums.tokens,
        "first_row": options.first_row,
    }
    return {name: np.broadcast_to(np.asarray(value), (sums.heads,)) for name, value in columns.items()}


def to_frame(rows: Sequence[Mapping[str, NDArray[Any]]]) -> pd.DataFrame:
    """Put the rows of many layers and prompts under each other."""
    return _whole_positions(pd.DataFrame({name: np.concatenate([row[name] for row in rows]) for name in rows[0]}))


def summarise(rows: pd.DataFrame, by: By = "head", *, per_prompt: bool = False) -> pd.DataFrame:
    """Combine the rows of `to_frame` over prompts, heads and layers.

    Args:
        rows: one row for each model, prompt, layer and head.
        by: what a row of the result stands for. `layer` takes the mean over heads, `model` the mean over layers
            of that.
        per_prompt: keep prompts apart.

    Returns:
        rows in the models' order of first appearance, with the columns of `rows` that still have a meaning.
    """
    prompt = ["prompt"] if per_prompt else []
    levels = {"head": ["layer", "head"], "layer": ["layer"], "model": []}[by]
    counts = _counts(rows, per_prompt)

    heads = _combine_prompts(rows, ["model", *prompt, "layer", "head"])
    layers = heads.drop(columns="head").groupby(["model", *prompt, "layer"], sort=False).mean()
    if by == "head":
        values = heads.set_index(["model", *prompt, *levels])
    elif by == "layer":
        values = layers
    else:
        values = layers.groupby(["model", *prompt], sort=False).mean()
    keys = ["model", *prompt, *levels]
    values = values.join(_picked(rows, keys)).join(counts, on=["model", *prompt])
    if by == "model":  # as the maximum itself
        ratio = _picked(rows, ["model", *prompt, "layer"])["max_activation_ratio"]
        values["max_activation_ratio"] = ratio.groupby(["model", *prompt], sort=False).mean()
    values["first_row"] = rows["first_row"].iloc[0]
    return _whole_positions(
        values.reset_index()[[column for column in rows if column in {*keys, *values.columns}]]
    )


def _combine_prompts(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The measures that are means or maxima, one row for each of the keys."""
    weights = {
        "queries": rows["n_queries"],
        "tokens": rows["tokens"],
        "other tokens": rows["tokens"] - 1,
        "prompts": pd.Series(1, index=rows.index),
    }
    groups = [rows[key] for key in keys]
    columns = {}
    for measure in SINK_MEASURES:
        value = rows[measure.name]
        if measure.combine == "largest":
            columns[measure.name] = value.groupby(groups, sort=False).max()
        elif measure.combine in weights:
            weight = weights[measure.combine].where(value.notna(), 0)
            total = (value.fillna(0) * weight).groupby(groups, sort=False).sum()
            columns[measure.name] = total / weight.groupby(groups, sort=False).sum().replace(0, np.nan)
    return pd.DataFrame(columns).reset_index()


def _picked(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The measures that are no means: where the maximum is, and the most frequent sink."""
    groups = rows.groupby(keys, sort=False)
    at_max = [measure.name for measure in SINK_MEASURES if measure.combine == "at largest"]
    largest = rows.loc[groups["max_activation"].idxmax(), [*keys, *at_max]].set_index(keys)
    for measure in SINK_MEASURES:
        if measure.combine == "most frequent":  # of equally frequent positions, the earliest
            largest[measure.name] = groups[measure.name].agg(lambda values: values.mode().iloc[0])
    return largest


def _counts(rows: pd.DataFrame, per_prompt: bool) -> pd.DataFrame:
    """Prompts, queries and tokens behind a row: each prompt once, however many layers and heads it has."""
    keys = ["model", "prompt"] if per_prompt else ["model"]
    prompts = rows.drop_duplicates(["model", "prompt"])
    return prompts.groupby(keys, sort=False)[COUNTS].sum()


def _whole_positions(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.astype({column: "int64" for column in POSITIONS})

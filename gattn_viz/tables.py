"""From sums over prompts to tidy tables: a row for each model and layer and head.

A layer is the mean over its heads, a model the mean over its layers; what is no mean is said at each column in the
table of measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.bootstrap import Bootstrap
from gattn_viz.metrics.measures import Measure
from gattn_viz.metrics.over_prompts import Array, ModelSums, Rows

By = Literal["head", "layer", "model"]
X = Literal["layer", "depth"]
"""What a figure by layer has on its x axis."""

POSITIONS = ["top_sink_position", "max_activation_position", "max_activation_channel"]


def summarise(sums: Iterable[ModelSums], by: By = "head") -> pd.DataFrame:
    """A table of some models, in their order.

    Args:
        by: what a row stands for. `layer` takes the mean over heads, `model` the mean over layers of that.
    """
    return to_frame([table_rows(one, by) for one in sums])


def to_frame(rows: Sequence[Rows]) -> pd.DataFrame:
    """Rows under each other."""
    frame = pd.DataFrame({name: np.concatenate([part[name] for part in rows]) for name in rows[0]})
    return frame.astype({name: "int64" for name in POSITIONS if name in frame})


def check_x(x: str) -> None:
    """Raise if this is no x axis."""
    if x not in get_args(X):
        raise GattnVizError(f"x is {x!r}; expected {' or '.join(get_args(X))}")


def with_depth(frame: pd.DataFrame, n_layers: Mapping[str, int]) -> pd.DataFrame:
    """A table by layer with the column `depth` after it, so that models of different depth share an axis.

    Relative depth is (layer - 1)/(layers - 1): 0 at the first layer, 1 at the last, and 0 where there is one only.

    Args:
        n_layers: how many layers each model has, those without softmax attention too.
    """
    layers = frame["model"].map(n_layers)
    found = frame.copy()
    found.insert(list(frame).index("layer") + 1, "depth", (frame["layer"] - 1) / (layers - 1).clip(lower=1))
    return found


def table_rows(sums: ModelSums, by: By = "head", prompt: str | None = None) -> Rows:
    """The rows of one model, column by column.

    Args:
        prompt: the prompt's id, if the sums are those of one prompt alone; it becomes a column.
    """
    layers, row_of_unit = np.unique(sums.layer, return_inverse=True)
    if by == "head":
        row_of_unit = np.arange(len(sums.layer))
    elif by == "model":
        row_of_unit = np.zeros(len(sums.layer), int)
    keys = {"head": {"layer": sums.layer, "head": sums.head}, "layer": {"layer": layers}, "model": {}}[by]

    columns: dict[str, Any] = {"model": sums.model} | ({} if prompt is None else {"prompt": prompt}) | keys
    for measure in sums.measures:
        if measure.is_mean:
            columns |= _mean_columns(sums, measure, by)
        elif measure.combine == "most frequent":
            columns[measure.name] = _most_frequent(sums, measure.name, row_of_unit)
        elif measure.combine == "largest":
            columns[measure.name] = _of_layers(sums.largest.values(), sums.layer, by)
        elif measure.combine == "mean at largest":
            columns[measure.name] = _of_layers(sums.largest.mean(measure.name), sums.layer, by)
        elif measure.combine == "most frequent at largest":
            columns[measure.name] = (
                sums.largest.most_frequent_of_all_layers(measure.name)
                if by == "model"
                else _of_layers(sums.largest.most_frequent(measure.name), sums.layer, by)
            )
        elif measure.combine == "pooled":
            assert measure.function is not None
            values = [measure.function(sums.pooled[layer], sums.options) for layer in layers]
            columns[measure.name] = _over_heads(np.concatenate(values)[:, None], sums.layer, by)[:, 0]
    columns |= sums.options.columns(sums.n_prompts, sums.n_queries, sums.tokens)
    if sums.bootstrap is not None:
        columns |= {
            "ci": sums.bootstrap.level,
            "ci_seed": sums.bootstrap.seed,
            "ci_resamples": sums.bootstrap.resamples,
        }
    rows = row_of_unit[-1] + 1
    return {name: np.broadcast_to(np.asarray(column), (rows,)) for name, column in columns.items()}


def paired_interval(sums: ModelSums, other: ModelSums, measure: Measure) -> tuple[float, float]:
    """The ends of the interval of a model's measure less another model's, over the same prompts.

    Both have the same resamples of the prompts: what a resample's prompts do to both is not in the difference.
    Each model's prompts weigh by its own tokens. NaN where a model has no value, or one prompt only. Of a largest
    value the interval is a rough one: a resample's is never larger than that of all prompts.

    Raises:
        ValueError: they are not sums over the same resamples.
    """
    if sums.bootstrap is None or (sums.bootstrap, sums.all_prompts) != (other.bootstrap, other.all_prompts):
        raise ValueError("a paired interval needs the same resamples of the same prompts for both")
    difference = _resamples(sums, measure, sums.bootstrap) - _resamples(other, measure, sums.bootstrap)
    low, high = _interval(difference, sums.bootstrap)[:, 0].tolist()
    return low, high


def _resamples(sums: ModelSums, measure: Measure, bootstrap: Bootstrap) -> Array:
    """(1, S): a model's value of each resample."""
    if measure.combine == "largest":
        values = sums.largest.model_resamples(bootstrap, sums.all_prompts)
        return np.where(sums.all_prompts > 1, values, np.nan)[None]
    return _mean_samples(sums, measure, "model")[:, 1:]


def _mean_samples(sums: ModelSums, measure: Measure, by: By) -> Array:
    """(rows, S): a mean over the prompts as they are, then over each resample."""
    mean = sums.means[measure.name]
    values = mean.values()
    values[:, 1:] = np.where(mean.prompts > 1, values[:, 1:], np.nan)  # one prompt says nothing about chance
    return np.exp(values) if measure.combine == "predictions" else _over_heads(values, sums.layer, by)


def _mean_columns(sums: ModelSums, measure: Measure, by: By) -> dict[str, Array]:
    """A mean, and the ends of its interval if that is wanted."""
    values = _mean_samples(sums, measure, by)
    columns = {measure.name: values[:, 0]}
    if sums.bootstrap is not None and measure.has_interval:
        ends = _interval(values[:, 1:], sums.bootstrap)
        columns |= {f"{measure.name}_ci_low": ends[0], f"{measure.name}_ci_high": ends[1]}
    return columns


def _over_heads(values: Array, layer: NDArray[np.int64], by: By) -> Array:
    """(U, S) values as (rows, S): means over heads, and of those over layers."""
    if by == "head":
        return values
    _, first_heads = np.unique(layer, return_index=True)
    of_layers = _means(values, first_heads)
    return of_layers if by == "layer" else _means(of_layers, np.array([0]))


def _of_layers(values: Array, layer: NDArray[np.int64], by: By) -> Array:
    """(L,) values, the same for all heads of a layer, as (rows,)."""
    _, layer_of_unit = np.unique(layer, return_inverse=True)
    return _over_heads(values[layer_of_unit, None], layer, by)[:, 0]


def _means(values: Array, starts: NDArray[np.int64]) -> Array:
    """The means of runs of rows, each from its start to the next one. A NaN does not count."""
    present = ~np.isnan(values)
    total = np.add.reduceat(np.where(present, values, 0), starts)
    count = np.add.reduceat(present.astype(int), starts)
    return total / np.where(count == 0, np.nan, count)


def _interval(resampled: Array, bootstrap: Bootstrap) -> Array:
    """(2, rows), the ends of the percentile interval of (rows, resamples). A NaN does not count."""
    outside = (1 - bootstrap.level) / 2
    return pd.DataFrame(resampled).quantile([outside, 1 - outside], axis=1).to_numpy()


def _most_frequent(sums: ModelSums, name: str, row_of_unit: NDArray[np.int64]) -> Array:
    """(rows,): the position that came most often; of equally frequent ones, the earliest."""
    seen = [(row_of_unit[unit], position, count) for (unit, position), count in sums.positions[name].items()]
    counts = pd.DataFrame(seen, columns=["row", "position", "count"])
    counts = counts.groupby(["row", "position"], as_index=False).sum()
    by_count = counts.sort_values(["row", "count", "position"], ascending=[True, False, True])
    return by_count.drop_duplicates("row")["position"].to_numpy()

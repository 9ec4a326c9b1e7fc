"""Many prompts as one: sums over the prompts of a model.

Their size does not depend on how many there are, but for four numbers a layer of each prompt where it is asked at
which prompts the residual stream is largest: that is known at the end only.

    sums = ModelSums("baseline", measures, options, rows["layer"], rows["head"])
    sums.add(0, tokens, rows)       # a prompt; in any order
    merge(sums, others)             # with the sums of other prompts of the same model

Axis letters: U heads of all layers, S samples: the prompts as they are, then each resample of the bootstrap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.bootstrap import Bootstrap
from gattn_viz.metrics.gate_measures import GateOptions
from gattn_viz.metrics.largest import LARGEST, Largest
from gattn_viz.metrics.layer import LayerSums
from gattn_viz.metrics.measures import Measure, Options

Array = NDArray[np.float64]
Rows = dict[str, NDArray[Any]]
"""Columns of equal length."""
Pools = dict[int, LayerSums]
"""Of each layer, from 1, what adds up over prompts."""

POOLED = ("gates", "output_before", "output_after")

SomeOptions = Options | GateOptions

CHOICES = "queries_with_a_choice"
"""The column of how many queries see two keys or more, in the rows of a measure that weighs by them."""


def layer_rows(layer: int, sums: LayerSums, measures: Iterable[Measure], options: SomeOptions) -> Rows:
    """The measures of one prompt at one layer, a row for each head; but those that need all prompts together.

    Args:
        layer: from 1.
        measures: those asked for. What "at largest" measures go by, and what others weigh by, is added.
    """
    measures = list(measures)
    if LARGEST not in measures and any(measure.at_largest for measure in measures):
        measures.append(LARGEST)
    by_choices = any(measure.combine == "queries with a choice" for measure in measures)
    return {
        "layer": np.full(sums.heads, layer),
        "head": np.arange(1, sums.heads + 1),
        **{
            measure.name: measure.function(sums, options)
            for measure in measures
            if measure.function is not None and measure.combine != "pooled"
        },
        **({CHOICES: np.full(sums.heads, sums.ratio_queries)} if by_choices else {}),
    }


def poolable(sums: LayerSums) -> LayerSums:
    """What of a layer's sums adds up over prompts, and no more."""
    parts: dict[str, Any] = {name: getattr(sums, name) for name in POOLED}
    return LayerSums(tokens=sums.tokens, heads=sums.heads, **parts)


def pool(a: LayerSums, b: LayerSums) -> LayerSums:
    """The sums of one layer over the prompts of both, of what adds up."""
    parts: dict[str, Any] = {}
    for name in POOLED:
        of_a, of_b = getattr(a, name), getattr(b, name)
        parts[name] = None if of_a is None or of_b is None else of_a + of_b
    return LayerSums(tokens=a.tokens + b.tokens, heads=a.heads, **parts)


def join_layers(rows: Iterable[Rows]) -> Rows:
    """The rows of a prompt's layers under each other, by layer."""
    ordered = sorted(rows, key=lambda row: row["layer"][0])
    return {name: np.concatenate([row[name] for row in ordered]) for name in ordered[0]}


@dataclass
class WeightedMean:
    """A mean over prompts for each head, while it is summed. A NaN does not count.

    Attributes:
        total: (U, S), values by weight.
        weight: (U, S), or (1, S) while it is the same for all heads.
        prompts: (U, 1) or (1, 1), how many have a value.
    """

    total: Array
    weight: Array
    prompts: NDArray[np.int64]

    @classmethod
    def empty(cls, units: int, samples: int) -> WeightedMean:
        return cls(np.zeros((units, samples)), np.zeros((1, samples)), np.zeros((1, 1), int))

    def add(self, value: Array, weight: float | NDArray[np.int64], times: NDArray[np.int64]) -> None:
        """Add a prompt's (U,) values, (S,) times; the weight is one for all heads, or (U,)."""
        present = ~np.isnan(value)
        weights = present * weight
        self.total += np.outer(np.where(present, value, 0) * weights, times)
        self.weight = self.weight + np.outer(_one_if_alike(weights), times)
        self.prompts = self.prompts + _one_if_alike(present)[:, None]

    def merge(self, other: WeightedMean) -> None:
        self.total += other.total
        self.weight = self.weight + other.weight
        self.prompts = self.prompts + other.prompts

    def values(self) -> Array:
        """(U, S); NaN where nothing counts."""
        return self.total / np.where(self.weight == 0, np.nan, self.weight)


def _one_if_alike(values: NDArray[Any]) -> NDArray[Any]:
    """(1,) of (U,) equal values, else as they are."""
    return values[:1] if (values == values[:1]).all() else values


@dataclass
class ModelSums:
    """All that a table needs to know of some prompts of one model. New, it is that of no prompt.

    Attributes:
        model: its label.
        measures: those asked for.
        layer, head: (U,), from 1, in ascending order.
        bootstrap: the intervals wanted.
        all_prompts: how many prompts there will be in all; for the bootstrap.
        means: for each measure that is a mean; that of `perplexity` is of the loss, and U is 1.
        largest: of `max_activation`, if that is measured.
        pooled: the layers' sums over all prompts, for the measures that need them.
        positions: how often each (index in U, position) came, for each measure that is the most frequent one.
        prompts: the indices of those that were added.
        n_queries, tokens: what was added.
    """

    model: str
    measures: tuple[Measure, ...]
    options: SomeOptions
    layer: NDArray[np.int64]
    head: NDArray[np.int64]
    bootstrap: Bootstrap | None = None
    all_prompts: int = 0
    means: dict[str, WeightedMean] = field(init=False)
    largest: Largest = field(default_factory=Largest, init=False)
    positions: dict[str, Counter[tuple[int, int]]] = field(init=False)
    pooled: Pools = field(default_factory=dict, init=False)
    prompts: set[int] = field(default_factory=set, init=False)
    n_queries: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.means = {measure.name: self._no_mean(measure) for measure in self.measures if measure.is_mean}
        self.positions = {
            measure.name: Counter() for measure in self.measures if measure.combine == "most frequent"
        }

    @property
    def n_prompts(self) -> int:
        return len(self.prompts)

    def _no_mean(self, measure: Measure) -> WeightedMean:
        resamples = self.bootstrap.resamples if self.bootstrap is not None and measure.has_interval else 0
        return WeightedMean.empty(1 if measure.function is None else len(self.layer), 1 + resamples)

    def add(
        self, prompt: int, tokens: int, rows: Rows, loss: float | None = None, pools: Pools | None = None
    ) -> None:
        """Add one prompt.

        Args:
            prompt: its index among all prompts, from 0.
            rows: those of all its layers.
            loss: the sum over its T - 1 predictions of -log p(next token), in nats.
            pools: what adds up of its layers, if a measure needs it.

        Raises:
            GattnVizError: it was added before.
        """
        self._add_prompts({prompt})
        queries = self.options.queries(tokens)
        weights: dict[str, int | NDArray[np.int64]] = {
            "queries": queries,
            "tokens": tokens,
            "other tokens": tokens - 1,
            "queries with a choice": rows.get(CHOICES, 0),
            "predictions": tokens - 1,
            "prompts": 1,
        }
        times = np.ones(1, int)
        if self.bootstrap is not None:
            times = np.append(times, self.bootstrap.counts(prompt, self.all_prompts))
        for measure in self.measures:
            if measure.is_mean:
                mean = self.means[measure.name]
                value = rows[measure.name] if measure.function is not None else _mean_loss(loss, tokens)
                mean.add(value, weights[measure.combine], times[: mean.total.shape[1]])
            elif measure.combine == "most frequent":
                self.positions[measure.name].update(enumerate(rows[measure.name].astype(int).tolist()))
        if LARGEST.name in rows:
            _, first_heads = np.unique(self.layer, return_index=True)
            names = [LARGEST.name, *(measure.name for measure in self.measures if measure.at_largest)]
            self.largest.prompts[prompt] = {name: rows[name][first_heads] for name in names}
        self._pool(pools or {})
        self.n_queries += queries
        self.tokens += tokens

    def _add_prompts(self, prompts: set[int]) -> None:
        twice = sorted(self.prompts & prompts)
        if twice:
            some = ", ".join(map(str, twice[:3])) + (", ..." if len(twice) > 3 else "")
            raise GattnVizError(
                f"prompts of index {some} would count twice; expected each once: give every prompt an index of "
                "its own, and merge sums that share none"
            )
        self.prompts |= prompts

    def _pool(self, pools: Pools) -> None:
        for layer, sums in pools.items():
            self.pooled[layer] = pool(self.pooled[layer], sums) if layer in self.pooled else sums


def merge(a: ModelSums, b: ModelSums) -> ModelSums:
    """The sums of the prompts of both, which share none.

    Raises:
        ValueError: they are not sums of the same thing.
        GattnVizError: a prompt is in both.
    """
    for name in ("model", "measures", "options", "bootstrap", "all_prompts"):
        if getattr(a, name) != getattr(b, name):
            raise ValueError(f"sums of a different {name} do not merge: {getattr(a, name)}, {getattr(b, name)}")
    if not (np.array_equal(a.layer, b.layer) and np.array_equal(a.head, b.head)):
        raise ValueError("sums of different layers or heads do not merge")
    both = deepcopy(a)
    both._add_prompts(b.prompts)
    for name, mean in b.means.items():
        both.means[name].merge(mean)
    both.largest.prompts |= b.largest.prompts
    for name, counts in b.positions.items():
        both.positions[name].update(counts)
    both._pool(b.pooled)
    both.n_queries += b.n_queries
    both.tokens += b.tokens
    return both


def _mean_loss(loss: float | None, tokens: int) -> Array:
    """(1,); NaN if nothing is predicted."""
    assert loss is not None
    return np.array([loss / (tokens - 1) if tokens > 1 else np.nan])

"""The table of measures: what each is, its unit and range, what it needs, where it comes from.

One entry feeds the columns of the CSV, the command's choices, the README's table and the tests. A measure's
function takes the sums of one prompt at one layer (`LayerSums`) and gives one number for each head, (H,);
`perplexity` alone is of the whole model. Positions are 1-based.

p[i, k] is the attention of query i to key k, T the prompt's tokens, alpha_k the mean of p[i, k] over the queries i
that see key k: with full attention i >= k, as Gu et al. have it. Under a sliding window theirs would fall with T
whatever the model does, for most of these queries cannot attend to k. Ours, of the first token under a window of W
tokens, is theirs on the prompt's first W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.layer import LayerSums, Need

FirstRow = Literal["exclude", "include"]
Combine = Literal[
    "queries", "tokens", "other tokens", "queries with a choice", "prompts", "predictions", "largest",
    "mean at largest", "most frequent at largest", "most frequent", "pooled",
]  # fmt: skip
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Options:
    """What a person may choose about the measures.

    Attributes:
        first_row: whether query 1, which can only attend to itself, counts in `first_token_mass` and in what goes
            with it: `uniform_null`, `first_token_visible`, `learned_sink_mass`.
        sink_threshold: the eps of `sink_rate`.
    """

    first_row: FirstRow = "exclude"
    sink_threshold: float = 0.3

    def __post_init__(self) -> None:
        if self.first_row not in get_args(FirstRow):
            raise GattnVizError(f"first_row is {self.first_row!r}; expected {' or '.join(get_args(FirstRow))}")
        if not 0 <= self.sink_threshold <= 1:
            raise GattnVizError(f"sink_threshold is {self.sink_threshold}; expected a number from 0 to 1")

    def queries(self, tokens: int) -> int:
        """How many queries of a prompt count in `first_token_mass`."""
        return tokens if self.first_row == "include" else tokens - 1

    def columns(self, n_prompts: int, n_queries: int, tokens: int) -> dict[str, int | str]:
        """What stands behind the measures: over what they are, and the policy."""
        return {"n_prompts": n_prompts, "n_queries": n_queries, "tokens": tokens, "first_row": self.first_row}


@dataclass(frozen=True)
class Measure:
    """One column.

    Attributes:
        name: the column.
        function: (sums, options) -> (H,). None: it is of the model's next-token loss, not of a layer.
        unit: what a value counts in.
        low, high: the range, None where there is no bound.
        needs: what has to be taken out of a layer; None is nothing but the number of tokens.
        combine: how the values of several prompts become one. A mean weighs each prompt by its queries (those
            that count under the first-row policy), its tokens, its tokens but the first, its queries that see two
            keys or more, or 1; `predictions` is exp of the mean of log, by predictions; else it is the largest
            value, or the most frequent one. `at largest`: over the prompts at which `max_activation` is largest,
            see `largest`. `pooled`: the function takes the sums of all prompts together.
        definition: one line for the README.
        source: where the definition comes from.
    """

    name: str
    function: Callable[[LayerSums, Any], Array] | None
    unit: str
    low: float | None
    high: float | None
    needs: Need | None
    combine: Combine
    definition: str
    source: str

    @property
    def is_mean(self) -> bool:
        """Whether prompts are averaged."""
        return not self.at_largest and self.combine not in ("largest", "most frequent", "pooled")

    @property
    def at_largest(self) -> bool:
        """Whether only the prompts count at which `max_activation` is largest."""
        return self.combine.endswith("at largest")

    @property
    def has_interval(self) -> bool:
        """Whether it gets a confidence interval: a mean, and not one of the prompts' lengths alone."""
        return self.is_mean and (self.needs is not None or self.function is None)


def alpha(sums: LayerSums) -> Array:
    """(H, T): for each key, the mean attention it gets from the queries that see it."""
    assert sums.received is not None
    return _probability(sums.received / np.maximum(queries_of_key(sums), 1))


def queries_of_key(sums: LayerSums) -> Array:
    """(T,): how many queries see each key."""
    return np.arange(sums.tokens, 0.0, -1) if sums.queries_of_key is None else sums.queries_of_key


def first_token_mass(sums: LayerSums, options: Options) -> Array:
    """Mean over queries of p[i, 1]; NaN if no query counts."""
    assert sums.first_token is not None
    assert sums.first_row is not None
    received = sums.first_token
    if options.first_row == "include":
        received = received + sums.first_row
    return _probability(_divide(received, options.queries(sums.tokens)))


def uniform_null(sums: LayerSums, options: Options) -> Array:
    """`first_token_mass` if each query attended equally to all tokens that it sees.

    With full attention (H_T - 1)/(T - 1) without the first row, H_T/T with it, H_T the T-th harmonic number.
    """
    each = uniform_first(sums)
    total = float(each.sum())
    if options.first_row == "exclude":
        total -= each[0]
    return np.full(sums.heads, _divide(total, options.queries(sums.tokens)))


def first_token_visible(sums: LayerSums, options: Options) -> Array:
    """The share of the queries of `first_token_mass` that see the first token: 1 with full attention."""
    counted = uniform_first(sums)[0 if options.first_row == "include" else 1 :]
    return np.full(sums.heads, _divide(float((counted > 0).sum()), len(counted)))


def uniform_first(sums: LayerSums) -> Array:
    """(T,): what each query would give the first token if it attended equally to all that it sees."""
    return 1 / np.arange(1, sums.tokens + 1) if sums.uniform_first is None else sums.uniform_first


def learned_sink_mass(sums: LayerSums, options: Options) -> Array:
    """Mean over queries of the probability of a learned sink, 1 - sum_k p[i, k]; NaN without one."""
    if sums.learned_sink is None or sums.learned_sink_first_row is None:
        return np.full(sums.heads, np.nan)
    taken = sums.learned_sink
    if options.first_row == "include":
        taken = taken + sums.learned_sink_first_row
    return _probability(_divide(taken, options.queries(sums.tokens)))


def sink_rate(sums: LayerSums, options: Options) -> Array:
    """1 where alpha of the first token exceeds the threshold, else 0."""
    assert sums.first_token is not None
    assert sums.first_row is not None
    alpha_first = _probability((sums.first_token + sums.first_row) / max(queries_of_key(sums)[0], 1))
    return (alpha_first > options.sink_threshold).astype(float)


def _top_sink(sums: LayerSums) -> NDArray[np.intp]:
    """(H,): the key of largest alpha, 0-based, among those that enough queries see."""
    return np.where(_seen_enough(queries_of_key(sums)), alpha(sums), -np.inf).argmax(1)


def _seen_enough(queries: Array) -> NDArray[np.bool_]:
    """Which keys a quarter as many queries see as the one that most see: T/4 with full attention."""
    return queries >= queries.max() / 4


def top_sink_position(sums: LayerSums, options: Options) -> Array:
    """The position, from 1, of the key with the largest alpha among those that enough queries see."""
    return (_top_sink(sums) + 1).astype(float)


def top_sink_mass(sums: LayerSums, options: Options) -> Array:
    """The alpha of that key."""
    return alpha(sums)[np.arange(sums.heads), _top_sink(sums)].astype(float)


def sink_keys(
    probabilities: NDArray[np.float32], queries_of_key: Array | None = None, threshold: float = 0.3
) -> NDArray[np.intp]:
    """The keys of a (T, T) map that are sinks, 0-based: alpha above the threshold, and enough queries that see it.

    Args:
        queries_of_key: (T,), how many do; None is full attention.
    """
    queries = np.arange(len(probabilities), 0.0, -1) if queries_of_key is None else queries_of_key
    queries = np.maximum(queries, 1)
    return np.flatnonzero((probabilities.sum(0) / queries > threshold) & _seen_enough(queries))


def entropy(sums: LayerSums, options: Options) -> Array:
    """Mean over queries of -sum_k p log p."""
    assert sums.entropy is not None
    return sums.entropy / sums.tokens


def entropy_ratio(sums: LayerSums, options: Options) -> Array:
    """Mean over queries that see two keys or more of entropy / log(keys seen); NaN if there is none."""
    assert sums.entropy_ratio is not None
    return _divide(sums.entropy_ratio, sums.ratio_queries)


def row_max(sums: LayerSums, options: Options) -> Array:
    """Mean over queries of max_k p[i, k]."""
    assert sums.row_max is not None
    return sums.row_max / sums.tokens


def gate_mean(sums: LayerSums, options: Options) -> Array:
    """Mean gate score over tokens and channels; NaN without a gate."""
    return np.full(sums.heads, np.nan) if sums.gate_mean is None else sums.gate_mean


def value_norm_first(sums: LayerSums, options: Options) -> Array:
    """L2 norm of the first token's value."""
    return np.full(sums.heads, np.nan) if sums.value_norm is None else sums.value_norm[:, 0]


def value_norm_rest(sums: LayerSums, options: Options) -> Array:
    """Mean L2 norm of the other tokens' values; NaN if there is none."""
    if sums.value_norm is None:
        return np.full(sums.heads, np.nan)
    return _divide(sums.value_norm[:, 1:].sum(1), sums.tokens - 1)


def max_activation(sums: LayerSums, options: Options) -> Array:
    """Max abs of the residual stream after the layer, the same for all its heads."""
    return np.full(sums.heads, sums.max_activation)


def max_activation_ratio(sums: LayerSums, options: Options) -> Array:
    """The same over the median abs of that prompt at that layer; NaN if that is 0."""
    return np.full(sums.heads, _divide(sums.max_activation, sums.median_activation))


def max_activation_position(sums: LayerSums, options: Options) -> Array:
    """The position, from 1, of the token where it is."""
    return np.full(sums.heads, sums.max_activation_position + 1.0)


def max_activation_channel(sums: LayerSums, options: Options) -> Array:
    """The channel of the residual stream where it is, from 1."""
    return np.full(sums.heads, sums.max_activation_channel + 1.0)


def _probability(mean: Array) -> Array:
    """At most 1: a row that is all on one key may sum to 1 + 6e-8 in float32, which exceeds a threshold of 1."""
    return np.minimum(mean, 1)


def _divide(total: Array | float, count: float) -> Array:
    """A mean, NaN where there is nothing to take it over."""
    return np.asarray(total) / count if count else np.full_like(np.asarray(total, float), np.nan)


_QIU = "Qiu et al. 2025, arXiv 2505.06708"
_GU = "Gu et al., ICLR 2025, arXiv 2410.10781"
_SUN = "Sun et al. 2024, arXiv 2402.17762"
_GPT_OSS = "gpt-oss model card 2025, arXiv 2508.10925"
_GUO = "Guo et al. 2024, arXiv 2410.13835"

SINK_MEASURES: tuple[Measure, ...] = (
    Measure(
        "first_token_mass", first_token_mass, "probability", 0, 1, "first_token", "queries",
        "mean over queries i >= 2 of the attention to the first token (`--first-row include`: i >= 1)",
        f"F-Attn of {_QIU}",
    ),
    Measure(
        "uniform_null", uniform_null, "probability", 0, 1, None, "queries",
        "first_token_mass if every query attended equally to all tokens that it sees. Full attention: "
        "(H_T - 1)/(T - 1); H_T/T with the first row",
        "H_T is the T-th harmonic number",
    ),
    Measure(
        "first_token_visible", first_token_visible, "share of queries", 0, 1, None, "queries",
        "share of the same queries that see the first token: 1 with full attention; under a sliding window or in "
        "chunks the others give it 0",
        "this project",
    ),
    Measure(
        "learned_sink_mass", learned_sink_mass, "probability", 0, 1, "learned_sink", "queries",
        "mean over the same queries of the attention that a learned sink takes (gpt-oss and others): what is "
        "missing from 1 in the sum over keys. Empty where a layer has none; of a model: the mean over the layers "
        "that have one",
        _GPT_OSS,
    ),
    Measure(
        "sink_rate", sink_rate, "share of prompts", 0, 1, "first_token", "prompts",
        "share of prompts with alpha_first > .3 (`--sink-threshold`), alpha_k the mean of p[i, k] over the "
        "queries i that see key k (full attention: i >= k)",
        _GU,
    ),
    Measure(
        "top_sink_position", top_sink_position, "position", 1, None, "received", "most frequent",
        "the key with the largest alpha among keys that a quarter as many queries see as see the most seen one "
        "(full attention: T/4); the most frequent one over prompts, heads and layers, of several the earliest",
        _GU,
    ),
    Measure(
        "top_sink_mass", top_sink_mass, "probability", 0, 1, "received", "tokens",
        "the alpha of each prompt's and head's own top sink; local attention raises it for late keys",
        _GU,
    ),
    Measure(
        "entropy", entropy, "nats", 0, None, "entropy", "tokens",
        "mean over queries of -sum p log p, the first row included",
        "Shannon 1948",
    ),
    Measure(
        "entropy_ratio", entropy_ratio, "share", 0, 1, "entropy", "queries with a choice",
        "mean over queries that see two keys or more of their entropy over log(number of keys they see)",
        "1 is uniform attention",
    ),
    Measure(
        "row_max", row_max, "probability", 0, 1, "row_max", "tokens",
        "mean over queries of the largest probability max_k p[i, k], the first row included",
        "1 is one-hot attention",
    ),
    Measure(
        "gate_mean", gate_mean, "gate score", 0, 1, "gate", "tokens",
        "mean gate score over tokens and channels; empty without a gate",
        _QIU,
    ),
    Measure(
        "max_activation", max_activation, "abs", 0, None, "residual", "largest",
        "max abs of the residual stream after the layer, over prompts, tokens and channels; of a model: the "
        "mean over its layers",
        f"M-Act of {_QIU}; {_SUN}",
    ),
    Measure(
        "max_activation_ratio", max_activation_ratio, "ratio", 1, None, "residual", "mean at largest",
        "the prompt's max abs over its median abs at that layer, where its max is within 1% of max_activation; "
        "empty where the median is 0; of a model: the mean over its layers",
        f"massive: max > 100 and ratio >= 1000; {_SUN}",
    ),
    Measure(
        "max_activation_position", max_activation_position, "position", 1, None, "residual",
        "most frequent at largest",
        "the first token at which it is, within 1%; of a model: over the layers within 1% of its largest, too",
        _SUN,
    ),
    Measure(
        "max_activation_channel", max_activation_channel, "channel", 1, None, "residual",
        "most frequent at largest",
        "the channel in which it is at that token; of a model: over the layers within 1% of its largest, too",
        _SUN,
    ),
    Measure(
        "value_norm_first", value_norm_first, "L2 norm", 0, None, "values", "prompts",
        "norm of the first token's value; a query head has its KV head's",
        f"value drain, {_GUO}",
    ),
    Measure(
        "value_norm_rest", value_norm_rest, "L2 norm", 0, None, "values", "other tokens",
        "mean norm of the other tokens' values",
        _GUO,
    ),
    Measure(
        "perplexity", None, "perplexity", 1, None, None, "predictions",
        "exp of the mean of -log p(next token) over all predictions of all prompts; one value a model",
        "PPL of " + _QIU,
    ),
)  # fmt: skip


def choose_measures(
    names: Sequence[str] | str = "all", table: tuple[Measure, ...] = SINK_MEASURES
) -> tuple[Measure, ...]:
    """The measures of these names, in the table's order; `uniform_null` comes with `first_token_mass`.

    Args:
        names: a list, or one text with commas; `all` is every measure.
        table: where they stand.

    Raises:
        GattnVizError: a name that no measure has, or no name.
    """
    wanted = {name.strip() for name in (names.split(",") if isinstance(names, str) else names)}
    known = [measure.name for measure in table]
    unknown = sorted(wanted - {*known, "all"})
    if unknown or not wanted:
        what = f"no measure {unknown[0]!r}" if unknown else "no measure was given"
        raise GattnVizError(f"{what}; expected all, or some of {', '.join(known)}")
    if "all" in wanted:
        return table
    if "first_token_mass" in wanted:
        wanted.add("uniform_null")
    return tuple(measure for measure in table if measure.name in wanted)

"""What is compared between models: sizes, what they cost, and some of the measures. One table feeds all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gattn_viz.metrics.gate_measures import GATE_MEASURES, GateOptions
from gattn_viz.metrics.measures import SINK_MEASURES, Measure, Options


@dataclass(frozen=True)
class CompareOptions(Options, GateOptions):
    """The choices of `Options` and of `GateOptions`."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        GateOptions.__post_init__(self)

    def columns(self, n_prompts: int, n_queries: int, tokens: int) -> dict[str, Any]:
        """Those of both."""
        counts = n_prompts, n_queries, tokens
        return {**Options.columns(self, *counts), **GateOptions.columns(self, *counts)}


@dataclass(frozen=True)
class Quantity:
    """A row of the table for each model.

    Attributes:
        name: in the column `quantity`.
        title: for people.
        digits: the format of a value, for people.
        measured: whether it is of the machine and its mood, so that no other run gives the same number.
    """

    name: str
    title: str
    unit: str
    digits: str
    definition: str
    measured: bool = False


_TITLES = {
    "first_token_mass": ("first-token mass", ".3f"),
    "uniform_null": ("of uniform attention", ".3f"),
    "sink_rate": ("sink rate", ".3f"),
    "gate_mean": ("gate mean", ".3f"),
    "gate_below": ("gate scores that are shut", ".3f"),
    "max_activation": ("max activation, mean over layers", ",.1f"),
    "perplexity": ("perplexity", ".2f"),
}

COMPARED_MEASURES: tuple[Measure, ...] = tuple(
    next(measure for measure in (*SINK_MEASURES, *GATE_MEASURES) if measure.name == name) for name in _TITLES
)

QUANTITIES: tuple[Quantity, ...] = (
    Quantity("tokens", "tokens of all prompts", "tokens", ",.0f", "T of all prompts together"),
    Quantity("longest_prompt", "tokens of the longest", "tokens", ",.0f", "T of the longest prompt"),
    Quantity("parameters", "parameters", "parameters", ",.0f", "all of them, tied ones once"),
    Quantity(
        "gate_parameters", "of the gate", "parameters", ",.0f",
        "those that compute the gate, biases included; empty where no gate of the family is known",
    ),
    Quantity("gate_share", "share of the gate", "share of parameters", ".2%", "gate_parameters over parameters"),
    Quantity(
        "multiply_adds", "multiply-adds per token", "multiply-adds", ",.0f",
        "the weights of all linear layers once, the language-model head with them and embeddings without, and in "
        "each layer H x D for q k^T and for p v at each key that a query sees: (T + 1)/2 on average, T being that "
        "of the timed prompt, one for all models. Products element by element, the gate's own too, do not count",
    ),
    Quantity(
        "gate_memory", "gate scores per token", "bytes", ",.0f",
        "L x H scores headwise, L x H x D elementwise, in the model's dtype: all there at once when training; in "
        "a forward pass those of one layer. Nothing of it is in the KV cache",
    ),
    Quantity(
        "forward_time", "forward pass", "seconds", ".4f",
        "a plain pass of one prompt (SDPA, no KV cache, nothing captured) without the language-model head: the "
        "median over rounds with its quartiles",
        measured=True,
    ),
    Quantity(
        "forward_time_ratio", "ratio to the baseline's", "ratio", ".3f",
        "forward_time over the baseline's in the same round: median and quartiles",
        measured=True,
    ),
    Quantity(
        "peak_memory", "memory of a pass", "MiB", ".2f",
        "the most that torch has allocated at once during such a pass, beyond what it had before",
        measured=True,
    ),
    Quantity(
        "peak_memory_ratio", "ratio to the baseline's", "ratio", ".3f", "peak_memory over the baseline's",
        measured=True,
    ),
    *(
        Quantity(measure.name, title, measure.unit, digits, measure.definition)
        for measure, (title, digits) in zip(COMPARED_MEASURES, _TITLES.values(), strict=True)
    ),
)  # fmt: skip

"""The table of gate measures, as `measures` is that of attention sinks.

A measure's function takes the sums of one prompt at one layer, or, where prompts are pooled, those of all prompts,
and gives one number for each head, (H,). What needs a gate is NaN without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.gate_sums import GATE_BINS, SMALL, OutputSums
from gattn_viz.metrics.layer import LayerSums, Need
from gattn_viz.metrics.measures import Combine, Measure, gate_mean

Array = NDArray[np.float64]
Function = Callable[[LayerSums, "GateOptions"], Array]


@dataclass(frozen=True)
class GateOptions:
    """What a person may choose about the gate measures.

    Attributes:
        below: a score is shut below it.
        above: a score is open above it.
    """

    below: float = 0.1
    above: float = 0.9

    def __post_init__(self) -> None:
        for name, value in (("below", self.below), ("above", self.above)):
            if not 0 <= value <= 1:
                raise GattnVizError(f"{name} is {value}; expected a gate score, from 0 to 1")

    def queries(self, tokens: int) -> int:
        """How many queries of a prompt count: all."""
        return tokens

    def columns(self, n_prompts: int, n_queries: int, tokens: int) -> dict[str, int | float]:
        """What stands behind the measures: over what they are, and the thresholds."""
        return {
            "n_prompts": n_prompts,
            "tokens": tokens,
            "below_threshold": self.below,
            "above_threshold": self.above,
        }


def gate_std(sums: LayerSums, options: GateOptions) -> Array:
    """Standard deviation over tokens and channels."""
    if sums.gates is None:
        return _none(sums)
    return np.sqrt(np.maximum(sums.gates.squares / sums.gates.count - sums.gates.mean**2, 0))


def gate_quantile(percent: int) -> Function:
    """The measure that is this quantile."""

    def quantile(sums: LayerSums, options: GateOptions) -> Array:
        return _none(sums) if sums.gates is None else sums.gates.quantile(percent)

    return quantile


def gate_below(sums: LayerSums, options: GateOptions) -> Array:
    """Share of scores below the threshold."""
    return _none(sums) if sums.gates is None else sums.gates.below / sums.gates.count


def gate_above(sums: LayerSums, options: GateOptions) -> Array:
    """Share of scores above the threshold."""
    return _none(sums) if sums.gates is None else sums.gates.above / sums.gates.count


def gate_first_token(sums: LayerSums, options: GateOptions) -> Array:
    """Mean over channels of the first token's score."""
    return _none(sums) if sums.gates is None else sums.gates.first


def gate_rest(sums: LayerSums, options: GateOptions) -> Array:
    """Mean score of the other tokens; NaN if there is none."""
    if sums.gates is None or sums.tokens == 1:
        return _none(sums)
    return (sums.gates.total / sums.gates.channels - sums.gates.first) / (sums.tokens - 1)


def gate_channels_shut(sums: LayerSums, options: GateOptions) -> Array:
    """Share of channels none of whose scores reaches the threshold; NaN of a headwise gate: it has no channels."""
    if sums.gates is None or sums.gates.channels == 1:
        return _none(sums)
    return (sums.gates.largest < options.below).mean(1)


def output_before(sums: LayerSums, options: GateOptions) -> Array:
    """Mean abs over tokens and head_dim, before the gate."""
    return _absolute(sums, sums.output_before)


def output_after(sums: LayerSums, options: GateOptions) -> Array:
    """The same after it."""
    return _absolute(sums, sums.output_after)


def output_before_below(which: int) -> Function:
    """The measure that is the share of elements below `SMALL[which]`, before the gate."""
    return lambda sums, options: _small(sums, sums.output_before, which)


def output_after_below(which: int) -> Function:
    """The same after it."""
    return lambda sums, options: _small(sums, sums.output_after, which)


def output_scaled_below(which: int) -> Function:
    """The same of the output before the gate times the head's mean score: |x| g < t is |x| < t / g."""

    def share(sums: LayerSums, options: GateOptions) -> Array:
        if sums.gates is None or sums.output_before is None:
            return _none(sums)
        with np.errstate(divide="ignore"):  # a head whose scores are all 0
            return sums.output_before.share_below(SMALL[which] / np.minimum(sums.gates.mean, MOST_SCALED))

    return share


def honor_before(sums: LayerSums, options: GateOptions) -> Array:
    """The head's mean output norm over the mean of its layer's heads, before the gate; NaN if all are 0."""
    return _honor(sums, sums.output_before)


def honor_after(sums: LayerSums, options: GateOptions) -> Array:
    """The same after it."""
    return _honor(sums, sums.output_after)


def _absolute(sums: LayerSums, output: OutputSums | None) -> Array:
    return _none(sums) if output is None else output.absolute / output.count


def _small(sums: LayerSums, output: OutputSums | None, which: int) -> Array:
    return _none(sums) if output is None else output.small[which] / output.count


def _honor(sums: LayerSums, output: OutputSums | None) -> Array:
    if output is None or not output.norm.any():
        return _none(sums)
    return output.norm / output.norm.mean()


def _none(sums: LayerSums) -> Array:
    return np.full(sums.heads, np.nan)


_QIU = "Qiu et al. 2025, arXiv 2505.06708"
_HONOR = "Sandoval-Segura et al. 2025, arXiv 2504.03889"


def _score(name: str, function: Function, needs: Need, combine: Combine, definition: str) -> Measure:
    return Measure(name, function, "gate score", 0, 1, needs, combine, definition, _QIU)


def _share(
    name: str, function: Function, of: str, needs: Need, combine: Combine, definition: str, source: str
) -> Measure:
    return Measure(name, function, f"share of {of}", 0, 1, needs, combine, definition, source)


GATE_MEASURES: tuple[Measure, ...] = (
    Measure(
        "gate_mean", gate_mean, "gate score", 0, 1, "gate", "tokens",
        "mean gate score over tokens and channels, as in `sink-stats`",
        f"Fig. 3 of {_QIU}",
    ),
    _score(
        "gate_std", gate_std, "gate_scores", "pooled",
        "standard deviation of the scores of all tokens and channels",
    ),
    *(
        _score(
            f"gate_q{percent:02}", gate_quantile(percent), "gate_histogram", "pooled",
            f"the score that {percent}% of those of all tokens and channels do not exceed; to 1/128 of it, below "
            "2^-15 to 2^-16",
        )
        for percent in (5, 25, 50, 75, 95)
    ),
    _share(
        "gate_below", gate_below, "scores", "gate_scores", "tokens",
        "share of scores < .1 (`--below`)", _QIU,
    ),
    _share(
        "gate_above", gate_above, "scores", "gate_scores", "tokens",
        "share of scores > .9 (`--above`)", _QIU,
    ),
    _score(
        "gate_first_token", gate_first_token, "gate_scores", "prompts",
        "mean over channels of the first token's score",
    ),
    _score("gate_rest", gate_rest, "gate_scores", "other tokens", "mean score of the other tokens"),
    _share(
        "gate_channels_shut", gate_channels_shut, "channels", "gate_scores", "pooled",
        "share of channels whose score is < .1 (`--below`) at every token of every prompt; empty if headwise",
        "this project",
    ),
    Measure(
        "output_before", output_before, "abs", 0, None, "output_before", "tokens",
        "mean abs of the head's attention output before the gate",
        f"Fig. 4 of {_QIU}",
    ),
    Measure(
        "output_after", output_after, "abs", 0, None, "output_after", "tokens",
        "the same after the gate: what the output projection receives",
        f"Fig. 4 of {_QIU}",
    ),
    *(
        _share(
            f"output_before_below_{digits}", output_before_below(which), "elements", "output_before", "tokens",
            f"share of the elements of the output before the gate with abs < {text}",
            f"Fig. 5 of {_QIU}",
        )
        for which, (digits, text) in enumerate((("01", ".01"), ("001", ".001")))
    ),
    *(
        _share(
            f"output_after_below_{digits}", output_after_below(which), "elements", "output_after", "tokens",
            f"the same after the gate, abs < {text}",
            f"Fig. 5 of {_QIU}",
        )
        for which, (digits, text) in enumerate((("01", ".01"), ("001", ".001")))
    ),
    *(
        _share(
            f"output_scaled_below_{digits}", output_scaled_below(which), "elements", "output_histogram", "pooled",
            f"the same of the output before the gate times the head's gate_mean, abs < {text}: what a constant "
            "gate would give; the threshold is met to 1/64",
            f"Fig. 5 of {_QIU}",
        )
        for which, (digits, text) in enumerate((("01", ".01"), ("001", ".001")))
    ),
    Measure(
        "honor_before", honor_before, "ratio", 0, None, "output_before", "tokens",
        "the head's output norm before the gate, mean over tokens, over the mean of that of the layer's heads on "
        "the same prompt; near 0 is a dormant head, and a layer's is always 1",
        _HONOR,
    ),
    Measure(
        "honor_after", honor_after, "ratio", 0, None, "output_after", "tokens",
        "the same after the gate",
        _HONOR,
    ),
)  # fmt: skip

MOST_SCALED = 2.0**GATE_BINS.high
"""The largest mean score that `output_scaled_below_*` heeds: so far down go the bins of output elements."""

WITHOUT_GATE = tuple(measure.name for measure in GATE_MEASURES if measure.needs == "output_before")
"""Those that a model without a gate has too."""

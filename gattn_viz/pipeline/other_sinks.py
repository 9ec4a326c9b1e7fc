"""The sink of a model where it is not the first token."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from gattn_viz import tables
from gattn_viz.metrics.measures import Options
from gattn_viz.metrics.over_prompts import ModelSums
from gattn_viz.prompts import EncodedPrompt
from gattn_viz.tokens import token_labels

NEEDED = {"first_token_mass", "top_sink_position", "top_sink_mass"}

MOST_TOKENS = 3
"""Different tokens at the sink that are written out."""


@dataclass(frozen=True)
class OtherSink:
    """A sink behind the first token.

    Attributes:
        position: from 2, the top sink of most heads and prompts.
        tokens: what stands there, as it is read, over all prompts.
        heads: how many have theirs there, of `n_heads` of all layers.
        mass, first_token_mass: mean over these heads of their `top_sink_mass` and `first_token_mass`.
    """

    position: int
    tokens: tuple[str, ...]
    heads: int
    n_heads: int
    mass: float
    first_token_mass: float

    def in_words(self) -> str:
        tokens = f" ({' or '.join(self.tokens)})" if len(self.tokens) <= MOST_TOKENS else ""
        return (
            f"the sink is not the first token but position {self.position}{tokens}: top sink of {self.heads} of "
            f"{self.n_heads} heads, with {self.mass:.2f} of their attention, the first token with "
            f"{self.first_token_mass:.2f}"
        )


def other_sink(sums: ModelSums, encoded: Sequence[EncodedPrompt], tokenizer: Any) -> OtherSink | None:
    """The sink that most heads have, if it is not the first token and takes more than that.

    None too where the heads that have it give it no more than the threshold of `sink_rate`: not all heads have a
    sink, but all have a top one; and where the measures `NEEDED` are not among those of `sums`.
    """
    if not {measure.name for measure in sums.measures} >= NEEDED:
        return None
    assert isinstance(sums.options, Options)
    plain = copy(sums)
    plain.bootstrap = None  # no intervals are needed
    heads = tables.summarise([plain], "head")
    position = int(tables.summarise([plain], "model")["top_sink_position"].iloc[0])
    with_it = heads[heads["top_sink_position"] == position]
    mass, first = with_it["top_sink_mass"].mean(), with_it["first_token_mass"].mean()
    if position == 1 or with_it.empty or not mass > max(first, sums.options.sink_threshold):
        return None
    ids = dict.fromkeys(prompt.ids[position - 1] for prompt in encoded if len(prompt.ids) >= position)
    return OtherSink(position, tuple(token_labels(tokenizer, list(ids))), len(with_it), len(heads), mass, first)

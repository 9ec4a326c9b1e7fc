"""A sink behind the first token: heads whose numbers are written out."""

from __future__ import annotations

import numpy as np
import pytest

from gattn_viz.metrics.bootstrap import Bootstrap
from gattn_viz.metrics.measures import Options, choose_measures
from gattn_viz.metrics.over_prompts import ModelSums
from gattn_viz.pipeline.other_sinks import OtherSink, other_sink
from gattn_viz.prompts import EncodedPrompt, Prompt
from tests.conftest import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MEASURES = "first_token_mass,top_sink_position,top_sink_mass"


def encoded(*texts: str) -> list[EncodedPrompt]:
    ids = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [EncodedPrompt(Prompt(text, text), one, False, False) for text, one in zip(texts, ids, strict=True)]


def sums_of(
    positions: list[int], top: list[float], first: list[float], names: str = MEASURES, **options: float
) -> ModelSums:
    """One layer with a head for each entry, the same in two prompts of 6 tokens."""
    measures = choose_measures(names)
    heads = np.ones(len(top), int), np.arange(1, len(top) + 1)
    sums = ModelSums("m", measures, Options(**options), *heads, Bootstrap(0.9, 0, 10), 2)
    values = {"top_sink_position": positions, "top_sink_mass": top, "first_token_mass": first}
    values["uniform_null"] = [0.3] * len(top)  # goes with it
    rows = {"layer": heads[0], "head": heads[1], **{name: np.array(column) for name, column in values.items()}}
    for prompt in range(2):
        sums.add(prompt, 6, rows, None, None)
    return sums


def test_where_most_heads_have_theirs() -> None:
    sums = sums_of([3, 3, 1, 5], [0.6, 0.4, 0.9, 0.2], [0.1, 0.3, 0.9, 0.0])
    found = other_sink(sums, encoded("the cat sat on the mat", "the cat sat on the log"), TOKENIZER)
    assert found == OtherSink(3, ("␣sat",), 2, 4, pytest.approx(0.5), pytest.approx(0.2))
    assert found is not None
    assert found.in_words() == (
        "the sink is not the first token but position 3 (␣sat): top sink of 2 of 4 heads, with 0.50 of their "
        "attention, the first token with 0.20"
    )


@pytest.mark.parametrize(
    ("positions", "top", "first", "options"),
    [
        ([1, 1, 3], [0.9, 0.9, 0.9], [0.9, 0.9, 0.0], {}),  # it is the first token
        ([3, 3, 1], [0.3, 0.2, 0.9], [0.0, 0.0, 0.9], {}),  # a top one, but no sink
        ([3, 3, 1], [0.5, 0.5, 0.9], [0.5, 0.6, 0.9], {}),  # the first token takes more
        ([3, 3, 1], [0.6, 0.6, 0.9], [0.1, 0.1, 0.9], {"sink_threshold": 0.7}),
    ],
)
def test_no_other_sink(
    positions: list[int], top: list[float], first: list[float], options: dict[str, float]
) -> None:
    assert other_sink(sums_of(positions, top, first, **options), encoded("the cat sat on"), TOKENIZER) is None


def test_tokens_of_many_prompts() -> None:
    sums = sums_of([2, 2], [0.6, 0.6], [0.1, 0.1])
    found = other_sink(sums, encoded("the cat", "the dog", "the cat", "the"), TOKENIZER)
    assert found is not None
    assert "position 2 (␣cat or ␣dog): top" in found.in_words()
    found = other_sink(sums, encoded("the cat", "the dog", "the log", "the mat"), TOKENIZER)
    assert found is not None
    assert "position 2: top" in found.in_words()


def test_it_is_not_looked_for_without_its_measures() -> None:
    names = "first_token_mass,top_sink_mass"
    assert other_sink(sums_of([3], [0.9], [0.1], names), encoded("the cat sat"), TOKENIZER) is None

"""The largest values against a sort of all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn_viz.metrics.extremes import Extreme, Extremes


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 8), st.randoms(use_true_random=False))
def test_equals_a_sort_of_everything(lengths: list[int], count: int, random: object) -> None:
    generator = np.random.default_rng(random.randrange(2**32))  # type: ignore[attr-defined]
    prompts = [generator.integers(0, 4, (2, tokens)).astype(float) for tokens in lengths]  # with many ties
    order = list(range(len(prompts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    extremes = Extremes(count, heads=2)
    for prompt in order:
        extremes.add(prompt, prompts[prompt])
    for head in range(2):
        everything = [
            Extreme(value, prompt, position)
            for prompt, values in enumerate(prompts)
            for position, value in enumerate(values[head].tolist())
        ]
        everything.sort(key=lambda one: (-one.value, one.prompt, one.position))
        assert extremes.of(head) == everything[:count]


def test_no_more_is_kept_than_asked_for() -> None:
    extremes = Extremes(3, heads=1)
    for prompt in range(10):
        extremes.add(prompt, np.zeros((1, 100)))
    assert extremes._values.shape == (1, 3)

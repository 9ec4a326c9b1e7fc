from __future__ import annotations

from typing import get_args

from gattn_viz.metrics.weights import Weight, quantity


def test_every_weight_has_words_and_but_for_p_itself_a_formula() -> None:
    for gate in ("headwise", "elementwise"):
        words = {weight: quantity(weight, gate) for weight in get_args(Weight)}
        assert len({one.title for one in words.values()}) == len({one.label for one in words.values()}) == 4
        assert [weight for weight, one in words.items() if not one.formula] == ["probability"]


def test_only_the_gate_s_words_depend_on_it() -> None:
    for weight in get_args(Weight):
        assert (quantity(weight, "headwise") != quantity(weight, "elementwise")) == (weight == "gate")
        assert weight == "gate" or quantity(weight, None) == quantity(weight, "headwise")

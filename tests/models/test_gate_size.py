"""The size of a gate from the modules, against what a run of a few tokens finds."""

from __future__ import annotations

import pytest

from gattn_viz.capture.anatomy import anatomy
from gattn_viz.models.costs import count_costs
from gattn_viz.models.gate_size import gate_size
from tests.capture.families import family_model
from tests.capture.gated_families import GATED, gated_model, present
from tests.conftest import GATES


@pytest.mark.parametrize("name", [name for name, family in GATED.items() if family.gate and present(name)])
def test_of_other_families(name: str) -> None:
    model = gated_model(name)
    gates = anatomy(model).gates
    size = gate_size(model)
    assert size.kind == GATED[name].gate
    assert size.place is not None
    assert size.place.startswith(f"{GATED[name].activation} of {gates[0].adapter.source}")
    assert size.scores == sum(gate.channels * gate.shape.heads for gate in gates)
    expected = 0.0
    for gate in gates:
        source = gate.module(gate.adapter.source)
        share = gate.channels * gate.shape.heads / source.out_features  # type: ignore[operator]
        expected += share * sum(parameter.numel() for parameter in source.parameters())
    assert size.parameters == pytest.approx(expected)
    assert count_costs(model).gate_parameters == size.parameters
    assert count_costs(model).gate_bytes == 4 * size.scores


@pytest.mark.parametrize("variant", GATES)
def test_of_the_paper_s(variant: str) -> None:
    model = family_model(variant)
    scores = {"baseline": 0, "gate_headwise": 3 * 4, "gate_elementwise": 3 * 4 * 8}[variant]
    assert gate_size(model).scores == scores
    assert gate_size(model).parameters == scores * (32 + 1)  # with biases


def test_without_one_that_is_known() -> None:
    size = gate_size(family_model("llama"))
    assert (size.kind, size.place, size.scores, size.parameters) == (None, None, 0, 0)

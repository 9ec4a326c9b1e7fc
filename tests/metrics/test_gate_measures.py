"""Gate measures and their sums against numbers worked out by hand and naive loops."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.gate_measures import GATE_MEASURES, MOST_SCALED, WITHOUT_GATE, GateOptions
from gattn_viz.metrics.gate_sums import OUTPUT_BINS, SMALL, GateSums, OutputSums
from gattn_viz.metrics.layer import LayerSums
from gattn_viz.metrics.measures import choose_measures

MEASURES = {measure.name: measure for measure in GATE_MEASURES}


def layer(
    scores: torch.Tensor | None, before: torch.Tensor | None = None, options: GateOptions = GateOptions()
) -> LayerSums:
    """What capture would give of (T, H, C) scores and (T, H, D) outputs."""
    some = scores if scores is not None else before
    assert some is not None
    gates = after = None
    if scores is not None:
        gates = GateSums.of(scores, (options.below, options.above), histogram=True)
        after = None if before is None else OutputSums.of(before * scores)
    return LayerSums(
        tokens=some.shape[0],
        heads=some.shape[1],
        gate_mean=None if scores is None else scores.double().mean((0, 2)).numpy(),
        gates=gates,
        output_before=None if before is None else OutputSums.of(before, histogram=True),
        output_after=after,
    )


def value(name: str, sums: LayerSums, options: GateOptions = GateOptions()) -> list[float]:
    function = MEASURES[name].function
    assert function is not None
    return function(sums, options).tolist()


class TestByHand:
    # two heads, three tokens, headwise
    scores = torch.tensor([[0.05, 0.5], [0.25, 0.95], [0.6, 0.95]])[:, :, None]

    def test_scores(self) -> None:
        sums = layer(self.scores)
        assert value("gate_mean", sums) == pytest.approx([0.3, 0.8])
        assert value("gate_std", sums) == pytest.approx([math.sqrt(0.155 / 3), math.sqrt(0.045)])
        assert value("gate_q50", sums) == pytest.approx([0.25, 0.95], rel=1 / 128)
        assert value("gate_q05", sums) == pytest.approx([0.05, 0.5], rel=1 / 128)
        assert value("gate_q95", sums) == pytest.approx([0.6, 0.95], rel=1 / 128)
        assert value("gate_below", sums) == pytest.approx([1 / 3, 0])
        assert value("gate_above", sums) == pytest.approx([0, 2 / 3])
        assert value("gate_first_token", sums) == pytest.approx([0.05, 0.5])
        assert value("gate_rest", sums) == pytest.approx([0.425, 0.95])
        assert np.isnan(value("gate_channels_shut", sums)).all()  # it has no channels

    def test_thresholds_are_strict_and_can_be_moved(self) -> None:
        options = GateOptions(below=0.25, above=0.5)
        sums = layer(self.scores, options=options)
        assert value("gate_below", sums, options) == pytest.approx([1 / 3, 0])
        assert value("gate_above", sums, options) == pytest.approx([1 / 3, 2 / 3])

    def test_channels(self) -> None:
        # channel 1 is always shut, 2 once open, 3 always at the threshold
        scores = torch.tensor([[0.01, 0.02, 0.125], [0.03, 0.9, 0.125]])[:, None]
        options = GateOptions(below=0.125)
        assert value("gate_channels_shut", layer(scores, options=options), options) == pytest.approx([1 / 3])
        assert value("gate_first_token", layer(scores)) == pytest.approx([0.155 / 3])

    def test_outputs(self) -> None:
        # 3, 4 has norm 5; 0, -1 has norm 1: of two heads and one token, the mean is 3
        before = torch.tensor([[[3.0, 4.0], [0.0, -1.0]]])
        sums = layer(torch.tensor([[[0.5], [0.002]]]), before)
        assert value("output_before", sums) == pytest.approx([3.5, 0.5])
        assert value("output_after", sums) == pytest.approx([1.75, 0.001])
        assert value("output_before_below_01", sums) == [0, 0.5]
        assert value("output_after_below_01", sums) == [0, 1]
        assert value("output_after_below_001", sums) == [0, 0.5]
        assert value("honor_before", sums) == pytest.approx([5 / 3, 1 / 3])
        assert value("honor_after", sums) == pytest.approx([2.5 / 1.251, 0.002 / 1.251])

    def test_the_output_times_the_mean_score(self) -> None:
        # the mean is .5: three of four elements are below .01 when halved. The gate itself is shut at the first
        # token, and leaves the second as it is: the two elements of .012 are small only if scaled.
        before = torch.tensor([[[0.012, 0.5]], [[0.012, 0.0005]]])
        sums = layer(torch.tensor([[[0.0]], [[1.0]]]), before)
        assert value("output_before_below_01", sums) == [0.25]
        assert value("output_scaled_below_01", sums) == [0.75]
        assert value("output_after_below_01", sums) == [0.75]
        assert value("output_scaled_below_001", sums) == [0.25]
        assert value("output_after_below_001", sums) == [0.75]

    def test_a_gate_that_is_shut_for_good(self) -> None:
        sums = layer(torch.zeros(2, 1, 1), torch.full((2, 1, 3), 5e5))
        assert value("output_scaled_below_001", sums) == [1]
        assert np.isnan(value("honor_after", sums)).all()  # no head of the layer writes anything

    def test_one_token_has_no_rest(self) -> None:
        sums = layer(torch.tensor([[[0.5]]]))
        assert np.isnan(value("gate_rest", sums)).all()
        assert value("gate_std", sums) == [0]


@st.composite
def layers(draw: st.DrawFn, bounded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (T, H, C) and outputs (T, H, D), C 1 or D."""
    tokens, heads, width = draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    channels = draw(st.sampled_from([1, width]))
    logits = torch.randn(tokens, heads, channels, generator=generator) * draw(st.sampled_from([0.01, 2, 6]))
    size = draw(st.sampled_from([1e-3, 1e-2, 1, 30]))
    activations = [torch.sigmoid] if bounded else [torch.sigmoid, torch.nn.functional.softplus]
    scores = draw(st.sampled_from(activations))(logits)
    return scores, torch.randn(tokens, heads, width, generator=generator) * size


@settings(deadline=None, max_examples=60)
@given(layers())
def test_against_naive_loops(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    scores, before = case
    sums = layer(scores, before)
    tokens, heads, channels = scores.shape
    after = (before * scores).double().tolist()
    g, b = scores.double().tolist(), before.double().tolist()
    norms = {name: [0.0] * heads for name in ("before", "after")}
    for name, output in (("before", b), ("after", after)):
        for head in range(heads):
            norms[name][head] = sum(math.sqrt(sum(x * x for x in output[t][head])) for t in range(tokens))
    for head in range(heads):
        of_head = [x for t in range(tokens) for x in g[t][head]]
        mean = sum(of_head) / len(of_head)
        expected = {
            "gate_mean": mean,
            "gate_std": statistics.pstdev(of_head),
            "gate_below": sum(x < 0.1 for x in of_head) / len(of_head),
            "gate_above": sum(x > 0.9 for x in of_head) / len(of_head),
            "gate_first_token": sum(g[0][head]) / channels,
        }
        if tokens > 1:
            expected["gate_rest"] = sum(sum(g[t][head]) for t in range(1, tokens)) / (tokens - 1) / channels
        if channels > 1:
            shut = [all(g[t][head][c] < 0.1 for t in range(tokens)) for c in range(channels)]
            expected["gate_channels_shut"] = sum(shut) / channels
        for name, output in (("before", b), ("after", after)):
            elements = [abs(x) for t in range(tokens) for x in output[t][head]]
            expected[f"output_{name}"] = sum(elements) / len(elements)
            expected[f"output_{name}_below_01"] = sum(x < 0.01 for x in elements) / len(elements)
            expected[f"output_{name}_below_001"] = sum(x < 0.001 for x in elements) / len(elements)
            expected[f"honor_{name}"] = norms[name][head] / (sum(norms[name]) / heads)
        for name, number in expected.items():
            assert value(name, sums)[head] == pytest.approx(number, rel=1e-5, abs=1e-7), name

        elements = [abs(x) for t in range(tokens) for x in b[t][head]]
        for name, threshold in (("output_scaled_below_01", 0.01), ("output_scaled_below_001", 0.001)):
            low, high = (
                sum(x * mean < threshold * f for x in elements) / len(elements) for f in (63 / 64, 65 / 64)
            )
            assert low - 1e-9 <= value(name, sums)[head] <= high + 1e-9
        for percent in (5, 25, 50, 75, 95):
            exact = float(np.quantile(of_head, percent / 100, method="inverted_cdf"))
            assert value(f"gate_q{percent:02}", sums)[head] == pytest.approx(exact, rel=1 / 127, abs=2.0**-16)


@settings(deadline=None, max_examples=40)
@given(layers(), st.data())
def test_sums_of_parts_are_those_of_the_whole(
    case: tuple[torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    scores, before = case
    cut = data.draw(st.integers(0, len(scores) - 1))
    gates = GateSums.of(scores, histogram=True)
    outputs = OutputSums.of(before, histogram=True)
    if cut:
        parts = GateSums.of(scores[:cut], histogram=True), GateSums.of(scores[cut:], begins=False, histogram=True)
        assert_same_sums(parts[0] + parts[1], gates)
        assert_same_sums(
            OutputSums.of(before[:cut], histogram=True) + OutputSums.of(before[cut:], histogram=True), outputs
        )


def assert_same_sums(one: object, other: object) -> None:
    for name, expected in vars(other).items():
        np.testing.assert_allclose(getattr(one, name), expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_bins_reach_as_far_down_as_is_asked() -> None:
    assert OUTPUT_BINS.edges[1] <= min(SMALL) / MOST_SCALED


def test_a_small_deviation_is_not_lost() -> None:
    # of squares of about .25 in float32, the variance of 1e-8 would be noise
    scores = 0.5 + 1e-4 * torch.randn(5000, 1, 1, generator=torch.Generator().manual_seed(0))
    parts = GateSums.of(scores[:1000]) + GateSums.of(scores[1000:], begins=False)
    found = value("gate_std", LayerSums(tokens=5000, heads=1, gates=parts))[0]
    assert found == pytest.approx(scores.double().std(correction=0).item(), rel=1e-3)


def test_counts_in_half_precision_are_exact() -> None:
    scores = torch.full((3000, 1, 2), 0.05, dtype=torch.bfloat16)
    assert value("gate_below", LayerSums(tokens=3000, heads=1, gates=GateSums.of(scores))) == [1]


@settings(deadline=None, max_examples=40)
@given(layers(bounded=True))
def test_values_are_in_the_range_that_the_table_states(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    sums = layer(*case)
    for measure in GATE_MEASURES:
        assert measure.function is not None
        values = measure.function(sums, GateOptions())
        assert values.shape == (sums.heads,)
        present = values[~np.isnan(values)]
        if measure.low is not None:
            assert (present >= measure.low).all(), measure.name
        if measure.high is not None:
            assert (present <= measure.high + 1e-6).all(), measure.name


def test_without_a_gate() -> None:
    sums = layer(None, torch.ones(2, 3, 4))
    given = {name for name in MEASURES if not np.isnan(value(name, sums)).any()}
    assert given == set(WITHOUT_GATE)
    assert given == {"output_before", "output_before_below_01", "output_before_below_001", "honor_before"}


def test_options() -> None:
    for options, said in (({"below": 1.5}, "below is 1.5"), ({"above": -1}, "above is -1")):
        with pytest.raises(GattnVizError, match=f"{said}; expected a gate score, from 0 to 1"):
            GateOptions(**options)  # type: ignore[arg-type]


def test_names_are_of_this_table() -> None:
    assert [one.name for one in choose_measures("honor_after,gate_mean", GATE_MEASURES)] == [
        "gate_mean",
        "honor_after",
    ]
    assert choose_measures("all", GATE_MEASURES) == GATE_MEASURES
    with pytest.raises(GattnVizError, match="no measure 'entropy'; expected all, or some of gate_mean, gate_std"):
        choose_measures("entropy", GATE_MEASURES)
    assert len(MEASURES) == len(GATE_MEASURES)

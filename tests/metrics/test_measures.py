"""Each measure against numbers worked out by hand, uniform and one-hot attention, and naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.gate_measures import GATE_MEASURES
from gattn_viz.metrics.layer import NEEDS, LayerSums
from gattn_viz.metrics.measures import SINK_MEASURES, Options, choose_measures, sink_keys
from gattn_viz.metrics.sums import AttentionSums, sum_map

MEASURES = {measure.name: measure for measure in SINK_MEASURES}
INCLUDE = Options(first_row="include")

# One head, three tokens. By hand:
#   first_token_mass        (.5 + .2) / 2 = .35; with the first row (1 + .5 + .2) / 3
#   alpha                   (1 + .5 + .2) / 3, (.5 + .3) / 2, .5
#   uniform null            (1/2 + 1/3) / 2 = 5/12; with the first row (1 + 1/2 + 1/3) / 3 = 11/18
HAND = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]


def layer(probabilities: torch.Tensor, **more: object) -> LayerSums:
    sums = sum_map(probabilities)
    return LayerSums(
        tokens=probabilities.shape[-1],
        heads=probabilities.shape[0],
        first_token=sums.first_token.double().numpy(),
        received=sums.received.double().numpy(),
        first_row=sums.first_row.double().numpy(),
        entropy=sums.entropy.double().numpy(),
        entropy_ratio=sums.entropy_ratio.double().numpy(),
        ratio_queries=sums.ratio_queries,
        row_max=sums.row_max.double().numpy(),
        **more,  # type: ignore[arg-type]
    )


def value(name: str, sums: LayerSums, options: Options = Options()) -> list[float]:
    return MEASURES[name].function(sums, options).tolist()


def uniform(tokens: int) -> torch.Tensor:
    return (torch.ones(tokens, tokens).tril() / torch.arange(1, tokens + 1)[:, None])[None]


def one_hot(tokens: int, key: int) -> torch.Tensor:
    """Every query that can attends to `key` alone (0-based), the ones before it to themselves."""
    p = torch.zeros(1, tokens, tokens)
    for query in range(tokens):
        p[0, query, min(query, key)] = 1
    return p


class TestByHand:
    sums = layer(torch.tensor([HAND]))

    def test_first_token_mass(self) -> None:
        assert value("first_token_mass", self.sums) == pytest.approx([0.35])
        assert value("first_token_mass", self.sums, INCLUDE) == pytest.approx([1.7 / 3])

    def test_uniform_null(self) -> None:
        assert value("uniform_null", self.sums) == pytest.approx([5 / 12])
        assert value("uniform_null", self.sums, INCLUDE) == pytest.approx([11 / 18])

    def test_sink_rate_has_the_first_row_in_and_is_strict(self) -> None:
        assert value("sink_rate", self.sums) == [1]
        assert value("sink_rate", self.sums, Options(sink_threshold=0.56)) == [1]
        assert value("sink_rate", self.sums, Options(sink_threshold=0.57)) == [0]
        all_on_first = layer(one_hot(4, 0))
        assert value("sink_rate", all_on_first, Options(sink_threshold=1.0)) == [0]  # 1 > 1 is false

    def test_a_probability_is_at_most_1_whatever_rounding_does(self) -> None:
        rounded = layer(one_hot(4, 0) * (1 + 6e-8))
        for name in ("first_token_mass", "top_sink_mass"):
            assert value(name, rounded) == value(name, rounded, INCLUDE) == [1]
        assert value("sink_rate", rounded, Options(sink_threshold=1.0)) == [0]

    def test_first_token_mass_next_to_0_keeps_its_digits(self) -> None:
        """Beside the 1 of the first row float32 has none left for it; nor have sums of a million queries."""
        sums = AttentionSums.zeros(1, 1_000_001, {"first_token"})
        p = torch.full((1, 1_000_001), 1.2345678e-9)
        p[0, 0] = 1
        for first in (0, 400_000):  # in two blocks
            sums.add_first_token(slice(0, 1), first, p[:, first : 400_000 if first == 0 else None])
        found = LayerSums(1_000_001, 1, sums.first_token.double().numpy(), sums.first_row.double().numpy())
        assert value("first_token_mass", found) == pytest.approx([float(p[0, 1])], rel=1e-9, abs=0)
        assert value("first_token_mass", found, INCLUDE) == pytest.approx([(1 + 1e6 * float(p[0, 1])) / 1_000_001])
        assert value("sink_rate", found, Options(sink_threshold=0.99e-6)) == [1]
        assert value("sink_rate", found, Options(sink_threshold=1.01e-6)) == [0]

    def test_learned_sink_mass(self) -> None:
        """Two heads of two tokens: the second head's sink takes .25 of the first query and .75 of the second."""
        sums = AttentionSums.zeros(2, 2, {"learned_sink"})
        for query, taken in enumerate(([0.0, 0.25], [1.0, 0.75])):
            sums.add_learned_sink(slice(0, 2), query, torch.tensor(taken)[:, None])
        assert sums.learned_sink is not None
        assert sums.learned_sink_first_row is not None
        rows = {
            "learned_sink": sums.learned_sink.numpy(),
            "learned_sink_first_row": sums.learned_sink_first_row.numpy(),
        }
        found = LayerSums(2, 2, **rows)
        assert value("learned_sink_mass", found) == [1, 0.75]
        assert value("learned_sink_mass", found, INCLUDE) == [0.5, 0.5]
        assert np.isnan(value("learned_sink_mass", LayerSums(1, 2, **rows))).all()

    def test_a_block_of_no_queries(self) -> None:
        sums = AttentionSums.zeros(1, 3, {"first_token"})
        sums.add_first_token(slice(0, 1), 0, torch.zeros(1, 0))
        assert sums.first_token.tolist() == sums.first_row.tolist() == [0]

    def test_top_sink(self) -> None:
        assert value("top_sink_position", self.sums) == [1]
        assert value("top_sink_mass", self.sums) == pytest.approx([1.7 / 3])

    def test_entropy(self) -> None:
        third = -(0.2 * math.log(0.2) + 0.3 * math.log(0.3) + 0.5 * math.log(0.5))
        assert value("entropy", self.sums) == pytest.approx([(math.log(2) + third) / 3])
        assert value("entropy_ratio", self.sums) == pytest.approx([(1 + third / math.log(3)) / 2])

    def test_row_max(self) -> None:
        assert value("row_max", self.sums) == pytest.approx([(1 + 0.5 + 0.5) / 3])


class TestKnownMaps:
    @pytest.mark.parametrize("tokens", [2, 3, 8, 64, 512])
    def test_uniform(self, tokens: int) -> None:
        sums = layer(uniform(tokens))
        for options in (Options(), INCLUDE):
            assert value("first_token_mass", sums, options) == pytest.approx(value("uniform_null", sums, options))
        assert value("entropy_ratio", sums) == pytest.approx([1])
        assert value("entropy", sums) == pytest.approx([sum(math.log(i) for i in range(1, tokens + 1)) / tokens])
        assert value("row_max", sums) == pytest.approx([sum(1 / i for i in range(1, tokens + 1)) / tokens])

    def test_the_null_at_8_and_512_tokens(self) -> None:
        # the figures that design and README quote
        assert value("uniform_null", layer(uniform(8))) == pytest.approx([0.2454], abs=1e-4)
        assert value("uniform_null", layer(uniform(512))) == pytest.approx([0.01138], abs=1e-5)

    def test_all_on_the_first_token(self) -> None:
        sums = layer(one_hot(12, 0))
        assert value("first_token_mass", sums) == [1]
        assert value("top_sink_position", sums) == [1]
        assert value("entropy", sums) == [0]
        assert value("entropy_ratio", sums) == [0]
        assert value("row_max", sums) == [1]

    def test_sink_on_another_token(self) -> None:
        # 12 tokens, all on the 4th: alpha of the 4th is 1, of the 1st 1/12, of the 2nd 1/11, of the 3rd 1/10
        sums = layer(one_hot(12, 3))
        assert value("first_token_mass", sums) == [0]
        assert value("sink_rate", sums) == [0]
        assert value("top_sink_position", sums) == [4]
        assert value("top_sink_mass", sums) == [1]

    def test_keys_that_few_queries_see_are_no_top_sink(self) -> None:
        # each token to itself alone: alpha_k = 1 / (T - k + 1) grows to 1 at the last key, seen by one query;
        # of 12 tokens the last key with 12/4 = 3 queries is the 10th, with alpha 1/3
        sums = layer(torch.eye(12)[None])
        assert value("top_sink_position", sums) == [10]
        assert value("top_sink_mass", sums) == pytest.approx([1 / 3])

    def test_one_token(self) -> None:
        sums = layer(torch.ones(1, 1, 1))
        assert value("first_token_mass", sums, INCLUDE) == [1]
        assert value("uniform_null", sums, INCLUDE) == [1]
        assert math.isnan(value("first_token_mass", sums)[0])
        assert math.isnan(value("entropy_ratio", sums)[0])
        assert value("top_sink_position", sums) == [1]


@st.composite
def maps(draw: st.DrawFn) -> torch.Tensor:
    heads, tokens = draw(st.integers(1, 3)), draw(st.integers(2, 17))
    seed, sharpness = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.1, 1.0, 10.0]))
    scores = torch.randn(heads, tokens, tokens, generator=torch.Generator().manual_seed(seed)) * sharpness
    return scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)


@settings(deadline=None, max_examples=50)
@given(maps())
def test_against_naive_loops(p: torch.Tensor) -> None:
    sums = layer(p)
    tokens = p.shape[-1]
    for head, rows in enumerate(p.double().tolist()):
        first = sum(rows[i][0] for i in range(1, tokens)) / (tokens - 1)
        assert value("first_token_mass", sums)[head] == pytest.approx(first, abs=1e-6)
        alphas = []
        for k in range(tokens):
            alphas.append(sum(rows[i][k] for i in range(k, tokens)) / (tokens - k))
        wide = [k for k in range(tokens) if tokens - k >= tokens / 4]
        best = max(wide, key=lambda k: alphas[k])
        assert value("top_sink_mass", sums)[head] == pytest.approx(alphas[best], abs=1e-6)
        if sorted(alphas[k] for k in wide)[-2] < alphas[best] - 1e-5:  # no tie within rounding
            assert value("top_sink_position", sums)[head] == best + 1
        entropies = [-sum(x * math.log(x) for x in row if x > 0) for row in rows]
        assert value("entropy", sums)[head] == pytest.approx(sum(entropies) / tokens, abs=1e-5)
        assert value("row_max", sums)[head] == pytest.approx(sum(map(max, rows)) / tokens, abs=1e-6)
        ratios = [entropies[i] / math.log(i + 1) for i in range(1, tokens)]
        assert value("entropy_ratio", sums)[head] == pytest.approx(sum(ratios) / len(ratios), abs=1e-5)


@settings(deadline=None, max_examples=50)
@given(maps(), st.data())
def test_sums_of_blocks_are_those_of_the_whole(p: torch.Tensor, data: st.DataObject) -> None:
    heads, tokens, _ = p.shape
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens - 1), max_size=4)))
    blocks = list(zip([0, *cuts], [*cuts, tokens], strict=True))
    groups = [slice(0, 1), slice(1, heads)] if heads > 1 else [slice(0, 1)]
    sums = AttentionSums.zeros(heads, tokens)
    for (first, last), some in data.draw(st.permutations([(b, g) for b in blocks for g in groups])):
        block, visible = p[some, first:last], torch.arange(first + 1, last + 1)
        sums.add_first_token(some, first, block[:, :, 0])
        sums.add_received(some, 0, block[:, :, :last].sum(1))
        sums.add_entropy(some, torch.special.entr(block).sum(-1), visible)
        sums.add_row_max(some, block.amax(-1))
    whole = sum_map(p)
    for name in ("first_token", "received", "first_row", "entropy", "entropy_ratio", "row_max"):
        torch.testing.assert_close(getattr(sums, name), getattr(whole, name), atol=1e-5, rtol=1e-5)
    assert sums.ratio_queries == whole.ratio_queries == tokens - 1


@settings(deadline=None, max_examples=50)
@given(maps())
def test_values_are_in_the_range_that_the_table_states(p: torch.Tensor) -> None:
    heads, tokens, _ = p.shape
    sums = layer(
        p,
        learned_sink=np.full(heads, 0.3 * (tokens - 1)),
        learned_sink_first_row=np.full(heads, 1.0),
        gate_mean=np.full(heads, 0.3),
        value_norm=np.ones((heads, tokens)),
        max_activation=2.0,
        max_activation_position=0,
        max_activation_channel=0,
        median_activation=0.5,
    )
    for measure in SINK_MEASURES:
        if measure.function is None:
            continue  # perplexity, which is of no layer
        for options in (Options(), INCLUDE):
            values = measure.function(sums, options)
            assert values.shape == (heads,)
            if measure.low is not None:
                assert (values >= measure.low - 1e-6).all(), measure.name
            if measure.high is not None:
                assert (values <= measure.high + 1e-6).all(), measure.name


def test_gate_values_and_activations() -> None:
    sums = layer(
        uniform(3).repeat(2, 1, 1),
        gate_mean=np.array([0.25, 0.75]),
        value_norm=np.array([[1.0, 2.0, 4.0], [3.0, 5.0, 5.0]]),
        max_activation=120.0,
        max_activation_position=0,
        max_activation_channel=6,
        median_activation=0.5,
    )
    assert value("gate_mean", sums) == [0.25, 0.75]
    assert value("value_norm_first", sums) == [1, 3]
    assert value("value_norm_rest", sums) == [3, 5]
    assert value("max_activation", sums) == [120, 120]
    assert value("max_activation_ratio", sums) == [240, 240]
    assert value("max_activation_position", sums) == [1, 1]
    assert value("max_activation_channel", sums) == [7, 7]


def test_what_was_not_captured_is_nan() -> None:
    sums = layer(uniform(3))
    for name in (
        "learned_sink_mass",
        "gate_mean",
        "value_norm_first",
        "value_norm_rest",
        "max_activation",
        "max_activation_ratio",
    ):
        assert all(map(math.isnan, value(name, sums))), name


def test_sink_keys() -> None:
    assert sink_keys(one_hot(12, 3)[0].numpy()).tolist() == [3]
    assert sink_keys(uniform(12)[0].numpy()).tolist() == []


def test_the_table_is_complete() -> None:
    assert len(MEASURES) == len(SINK_MEASURES)
    for measure in SINK_MEASURES + GATE_MEASURES:
        assert measure.unit
        assert measure.definition
        assert measure.source
    every = {measure.needs for measure in SINK_MEASURES + GATE_MEASURES}
    assert every == {*NEEDS, None} - {"gate_tokens"}  # those of `gate_tokens` are no measure
    assert [measure.name for measure in SINK_MEASURES if measure.function is None] == ["perplexity"]


class TestChooseMeasures:
    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            (["entropy"], ["entropy"]),
            ("row_max, entropy", ["entropy", "row_max"]),  # in the order of the table
            (["first_token_mass"], ["first_token_mass", "uniform_null"]),
            (["perplexity", "uniform_null", "perplexity"], ["uniform_null", "perplexity"]),
            (("entropy", "all"), list(MEASURES)),
            ("all", list(MEASURES)),
        ],
    )
    def test_names(self, asked: str | list[str], expected: list[str]) -> None:
        assert [measure.name for measure in choose_measures(asked)] == expected

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            (["entropy", "entrpy"], "no measure 'entrpy'"),
            ("entropy,", "no measure ''"),
            ([], "no measure was given"),
        ],
    )
    def test_names_that_are_none(self, asked: str | list[str], said: str) -> None:
        with pytest.raises(GattnVizError, match=f"^{said}; expected all, or some of .*perplexity$"):
            choose_measures(asked)

    def test_intervals_are_for_means_of_what_is_measured(self) -> None:
        without = {measure.name for measure in SINK_MEASURES if not measure.has_interval}
        assert without == {
            "uniform_null", "first_token_visible", "top_sink_position", "max_activation", "max_activation_ratio",
            "max_activation_position", "max_activation_channel",
        }  # fmt: skip

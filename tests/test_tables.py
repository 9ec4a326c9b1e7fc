"""Tables of many prompts against plain loops over all of them, and intervals against a naive bootstrap."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn_viz import GattnVizError, tables
from gattn_viz.metrics.bootstrap import Bootstrap
from gattn_viz.metrics.layer import LayerSums
from gattn_viz.metrics.measures import SINK_MEASURES, Measure, Options, choose_measures
from gattn_viz.metrics.over_prompts import CHOICES, ModelSums, Rows, join_layers, layer_rows, merge

INCLUDE = Options(first_row="include")


def random_sums(
    tokens: int, heads: int = 2, seed: int = 0, gate: bool = True, learned_sink: bool = False
) -> LayerSums:
    random = np.random.default_rng(seed)
    p = np.tril(random.random((heads, tokens, tokens)))
    p /= p.sum(-1, keepdims=True)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
    return LayerSums(
        tokens=tokens,
        heads=heads,
        first_token=p[:, 1:, 0].sum(1),
        first_row=p[:, 0, 0],
        learned_sink=random.random(heads) * (tokens - 1) if learned_sink else None,
        learned_sink_first_row=random.random(heads) if learned_sink else None,
        received=p.sum(1),
        entropy=entropy.sum(-1),
        entropy_ratio=(entropy[:, 1:] / np.log(np.arange(2, tokens + 1))).sum(-1),
        ratio_queries=int(random.integers(1, tokens)) if tokens > 2 else tokens - 1,
        row_max=p.max(-1).sum(-1),
        gate_mean=random.random(heads) if gate else None,
        value_norm=random.random((heads, tokens)),
        max_activation=float(random.integers(1, 4)) * (1 + 1e-3 * random.random()),  # the same but for rounding
        max_activation_position=int(random.integers(tokens)),
        max_activation_channel=int(random.integers(50)),
        median_activation=float(random.random() + 0.1),
    )


@dataclass
class Case:
    """What is known of one prompt."""

    tokens: int
    rows: Rows
    loss: float


def make_case(
    tokens: int,
    seed: int = 0,
    gate: Sequence[bool] = (True, True, True),
    options: Options = Options(),
    measures: tuple[Measure, ...] = SINK_MEASURES,
    learned_sinks: Collection[int] = (),
) -> Case:
    """A prompt of random numbers: layers of 2, 3, 2, ... heads, the n-th with a gate if `gate[n]`.

    `learned_sinks` are the layers, from 1, that have one.
    """
    layers = []
    for n, has_gate in enumerate(gate, start=1):
        sums = random_sums(tokens, 3 - n % 2, 1000 * seed + n, has_gate, n in learned_sinks)
        layers.append(layer_rows(n, sums, measures, options))
    return Case(tokens, join_layers(reversed(layers)), (tokens - 1) * np.random.default_rng(seed).uniform(1, 5))


def sums_of(
    cases: Sequence[Case],
    model: str = "a",
    options: Options = Options(),
    bootstrap: Bootstrap | None = None,
    only: Sequence[int] | None = None,
    measures: tuple[Measure, ...] = SINK_MEASURES,
) -> ModelSums:
    """The sums of some of the prompts, in the order given."""
    rows = cases[0].rows
    sums = ModelSums(model, measures, options, rows["layer"], rows["head"], bootstrap, len(cases))
    for prompt in range(len(cases)) if only is None else only:
        sums.add(prompt, cases[prompt].tokens, cases[prompt].rows, cases[prompt].loss)
    return sums


def naive_table(cases: Sequence[Case], by: tables.By, options: Options = Options()) -> list[dict[str, float]]:
    """The table's rows by the words of the README, a loop at a time."""
    units = list(zip(cases[0].rows["layer"].tolist(), cases[0].rows["head"].tolist(), strict=True))
    groups: dict[object, list[int]] = {}
    for index, (layer, head) in enumerate(units):
        groups.setdefault({"head": (layer, head), "layer": layer, "model": ()}[by], []).append(index)
    return [naive_row(cases, group, units, by, options) for group in groups.values()]


def naive_row(
    cases: Sequence[Case], group: list[int], units: list[tuple[int, int]], by: str, options: Options
) -> dict[str, float]:
    row: dict[str, float] = {}
    queries = [case.tokens - (options.first_row == "exclude") for case in cases]
    for measure in SINK_MEASURES:
        name = measure.name
        if name == "perplexity":
            predictions = sum(case.tokens - 1 for case in cases)
            losses = sum(case.loss for case in cases if case.tokens > 1)
            row[name] = math.exp(losses / predictions) if predictions else math.nan
            continue
        values = [case.rows[name] for case in cases]
        if measure.combine == "most frequent":
            seen = Counter(int(of_prompt[index]) for of_prompt in values for index in group)
            row[name] = min(position for position, count in seen.items() if count == max(seen.values()))
        elif measure.combine == "most frequent at largest":
            seen = Counter(naive_at_largest(cases, group, name))
            row[name] = min(position for position, count in seen.items() if count == max(seen.values()))
        elif measure.combine == "mean at largest":
            layers = sorted({units[index][0] for index in group})
            by_layer = [[index for index in group if units[index][0] == layer] for layer in layers]
            row[name] = mean_of([mean_of(naive_at_largest(cases, indices, name)) for indices in by_layer])
        else:
            of_head = {}
            for index in group:
                total = weights = 0.0
                for prompt, of_prompt in enumerate(values):
                    weight = {
                        "queries": queries[prompt],
                        "tokens": cases[prompt].tokens,
                        "other tokens": cases[prompt].tokens - 1,
                        "queries with a choice": cases[prompt].rows[CHOICES][index],
                        "prompts": 1,
                        "largest": 1,
                    }[measure.combine]
                    if not math.isnan(of_prompt[index]):
                        total += of_prompt[index] * weight
                        weights += weight
                of_head[index] = total / weights if weights else math.nan
                if measure.combine == "largest":
                    of_head[index] = max(of_prompt[index] for of_prompt in values)
            of_layer: dict[int, list[float]] = {}
            for index, value in of_head.items():
                of_layer.setdefault(units[index][0], []).append(value)
            row[name] = mean_of([mean_of(heads) for heads in of_layer.values()])
    row["n_prompts"] = len(cases)
    row["n_queries"] = sum(queries)
    row["tokens"] = sum(case.tokens for case in cases)
    return row


def naive_at_largest(cases: Sequence[Case], group: list[int], name: str) -> list[float]:
    """The values where the activation is within 1 % of the largest; a layer counts once a prompt."""
    layer = cases[0].rows["layer"]
    first_heads = [index for index in group if index == 0 or layer[index] != layer[index - 1] or len(group) == 1]
    largest = max(case.rows["max_activation"][index] for case in cases for index in first_heads)
    return [
        float(case.rows[name][index])
        for case in cases
        for index in first_heads
        if case.rows["max_activation"][index] >= 0.99 * largest
    ]


def mean_of(values: list[float]) -> float:
    there = [value for value in values if not math.isnan(value)]
    return sum(there) / len(there) if there else math.nan


@st.composite
def prompt_sets(draw: st.DrawFn) -> tuple[list[Case], Options]:
    options = draw(st.sampled_from([Options(), INCLUDE]))
    shortest = 1 if options is INCLUDE else 2
    lengths = draw(st.lists(st.integers(shortest, 9), min_size=1, max_size=6))
    gate = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    seed = draw(st.integers(0, 10**6))
    return [make_case(tokens, seed + n, gate, options) for n, tokens in enumerate(lengths)], options


class TestSummarise:
    @settings(deadline=None, max_examples=40)
    @given(prompt_sets(), st.sampled_from(["head", "layer", "model"]))
    def test_against_plain_loops(self, prompts: tuple[list[Case], Options], by: tables.By) -> None:
        cases, options = prompts
        table = tables.summarise([sums_of(cases, options=options)], by)
        expected = pd.DataFrame(naive_table(cases, by, options))
        pd.testing.assert_frame_equal(table[expected.columns], expected, check_dtype=False, rtol=1e-10)

    def test_prompts_weigh_by_what_was_counted_in_them(self) -> None:
        cases = [make_case(4, 1), make_case(20, 2)]
        short, long = (case.rows for case in cases)
        row = tables.summarise([sums_of(cases)], "head").iloc[2]  # layer 2, head 1
        assert (row.layer, row["head"]) == (2, 1)

        def weighted(name: str, of_short: int, of_long: int) -> float:
            return (of_short * short[name][2] + of_long * long[name][2]) / (of_short + of_long)

        # the first query of each prompt is left out: 3 and 19 remain
        assert row.first_token_mass == pytest.approx(weighted("first_token_mass", 3, 19))
        assert row.entropy == pytest.approx(weighted("entropy", 4, 20))
        assert row.row_max == pytest.approx(weighted("row_max", 4, 20))
        assert row.sink_rate == pytest.approx(weighted("sink_rate", 1, 1))
        assert row.value_norm_first == pytest.approx(weighted("value_norm_first", 1, 1))
        assert row.value_norm_rest == pytest.approx(weighted("value_norm_rest", 3, 19))
        assert row.perplexity == pytest.approx(math.exp((cases[0].loss + cases[1].loss) / 22))
        assert (row.n_prompts, row.n_queries, row.tokens) == (2, 22, 24)

    @pytest.mark.parametrize(
        ("by", "keys", "count"),
        [("head", ["model", "layer", "head"], 14), ("layer", ["model", "layer"], 6), ("model", ["model"], 2)],
    )
    def test_shape_of_each_summary(self, by: tables.By, keys: list[str], count: int) -> None:
        cases = [make_case(4), make_case(7, 1)]
        table = tables.summarise([sums_of(cases, "b"), sums_of(cases, "a")], by)
        names = [measure.name for measure in SINK_MEASURES]
        assert list(table.columns) == [*keys, *names, "n_prompts", "n_queries", "tokens", "first_row"]
        assert len(table) == count
        assert table.model.unique().tolist() == ["b", "a"]
        assert table.first_row.unique().tolist() == ["exclude"]
        whole = ["top_sink_position", "max_activation_position", "max_activation_channel", "n_queries", "tokens"]
        assert all(table[name].dtype == "int64" for name in whole)

    def test_one_prompt_by_head_is_its_rows(self) -> None:
        case = make_case(6, 3)
        rows = tables.table_rows(sums_of([case]), "head", "it")
        assert list(rows)[:4] == ["model", "prompt", "layer", "head"]
        assert rows["prompt"].tolist() == ["it"] * 7
        for name in case.rows.keys() - {CHOICES}:
            np.testing.assert_allclose(rows[name], case.rows[name], rtol=1e-15)
        np.testing.assert_allclose(rows["perplexity"], math.exp(case.loss / 5))

    def test_a_one_token_prompt_weighs_nothing_in_what_it_has_no_value_for(self) -> None:
        long, one = make_case(20, 1, options=INCLUDE), make_case(1, 2, options=INCLUDE)
        before, after = (tables.summarise([sums_of(c, options=INCLUDE)]) for c in ([long], [long, one]))
        for name in ("entropy_ratio", "value_norm_rest", "perplexity"):
            pd.testing.assert_series_equal(before[name], after[name])
        assert (after.first_token_mass > before.first_token_mass).all()
        assert (after.n_prompts == 2).all()
        alone = tables.summarise([sums_of([one], options=INCLUDE)])
        assert alone[["entropy_ratio", "value_norm_rest", "perplexity"]].isna().all(axis=None)

    def test_only_the_columns_asked_for(self) -> None:
        for names in (["entropy"], ["perplexity"], ["max_activation_position"], ["top_sink_position", "row_max"]):
            chosen = choose_measures(names)
            cases = [make_case(5, n, measures=chosen) for n in range(3)]
            sums = sums_of(cases, measures=chosen)
            everything = sums_of([make_case(5, n) for n in range(3)])
            for by in ("head", "layer", "model"):
                table = tables.summarise([sums], by)
                of_measures = [name for name in table if name in {measure.name for measure in SINK_MEASURES}]
                assert sorted(of_measures) == sorted(names)
                pd.testing.assert_frame_equal(table, tables.summarise([everything], by)[table.columns])


class TestMerge:
    @settings(deadline=None, max_examples=40)
    @given(prompt_sets(), st.sampled_from(["head", "layer", "model"]), st.data())
    def test_equals_computing_at_once(
        self, prompts: tuple[list[Case], Options], by: tables.By, data: st.DataObject
    ) -> None:
        cases, options = prompts
        bootstrap = data.draw(st.sampled_from([None, Bootstrap(0.9, seed=3, resamples=20)]))
        order = data.draw(st.permutations(range(len(cases))))
        cut = data.draw(st.integers(0, len(cases)))
        a, b = (sums_of(cases, "a", options, bootstrap, only) for only in (order[:cut], order[cut:]))
        at_once = tables.summarise([sums_of(cases, "a", options, bootstrap)], by)
        for _ in range(2):  # neither is changed by it
            pd.testing.assert_frame_equal(tables.summarise([merge(a, b)], by), at_once, rtol=1e-10)

    def test_sums_of_different_things(self) -> None:
        cases = [make_case(4), make_case(5, 1)]
        one = sums_of(cases, only=[0])
        others = {
            "model": sums_of(cases, "b", only=[1]),
            "options": sums_of(cases, options=INCLUDE, only=[1]),
            "bootstrap": sums_of(cases, bootstrap=Bootstrap(0.5), only=[1]),
            "all_prompts": sums_of(cases[:1], only=[0]),
            "layers or heads": sums_of([make_case(4, gate=[True])] * 2, only=[1]),
        }
        for what, other in others.items():
            with pytest.raises(ValueError, match=f"different {what} do not merge"):
                merge(one, other)

    def test_no_prompt_counts_twice(self) -> None:
        cases = [make_case(4), make_case(5, 1), make_case(6, 2)]
        a, b = sums_of(cases, only=[0, 1]), sums_of(cases, only=[1, 2])
        with pytest.raises(
            GattnVizError, match=r"^prompts of index 1 would count twice; expected each once: give"
        ):
            merge(a, b)
        with pytest.raises(GattnVizError, match=r"^prompts of index 0 would"):
            a.add(0, cases[0].tokens, cases[0].rows, cases[0].loss)
        assert tables.summarise([merge(a, sums_of(cases, only=[2]))]).n_prompts.unique().tolist() == [3]

    def test_the_size_hardly_depends_on_the_number_of_prompts(self) -> None:
        def size(count: int) -> tuple[int, int]:
            cases = [make_case(4, n) for n in range(count)]
            sums = sums_of(cases, bootstrap=Bootstrap(0.9, resamples=10))
            arrays = [array for mean in sums.means.values() for array in (mean.total, mean.weight, mean.prompts)]
            kept = [array.size for prompt in sums.largest.prompts.values() for array in prompt.values()]
            return sum(array.nbytes for array in arrays) + sum(map(len, sums.positions.values())), sum(kept)

        most_positions = 7 * 4
        (few, kept), (many, more_kept) = size(3), size(60)
        assert many <= few + most_positions
        assert (kept, more_kept) == (3 * 3 * 4, 60 * 3 * 4)  # 3 layers, 4 numbers


class TestAtLargest:
    """The largest activation of prompts that begin alike is the same but for rounding."""

    def cases(self, noise: float = 0, seed: int = 0) -> list[Case]:
        random = np.random.default_rng(seed)
        cases = [make_case(4, n) for n in range(6)]
        for n, case in enumerate(cases):
            case.rows["max_activation"] = np.array([300.0, 300, 301, 301, 301, 20, 20])
            case.rows["max_activation_ratio"] = np.repeat([10.0 + n, 100 + n, 5 + n], [2, 3, 2])
            case.rows["max_activation_position"] = np.repeat([1.0, 1 + n % 3, 2 + n // 3], [2, 3, 2])
            case.rows["max_activation_channel"] = np.repeat([7.0, 8, 9], [2, 3, 2])
            if n == 5:  # far from the largest: does not count
                case.rows["max_activation"] = case.rows["max_activation"] * 0.9
            case.rows["max_activation"] = case.rows["max_activation"] * (1 + noise * random.standard_normal())
        return cases

    def test_by_hand(self) -> None:
        by_layer = tables.summarise([sums_of(self.cases())], "layer")
        assert by_layer.max_activation_ratio.tolist() == [12, 102, 7]  # of prompts 0 to 4
        # layer 2: 1 2 3 1 2, of two equally frequent ones the smallest; layer 3: 2 2 2 3 3
        assert by_layer.max_activation_position.tolist() == [1, 1, 2]
        assert by_layer.max_activation_channel.tolist() == [7, 8, 9]
        model = tables.summarise([sums_of(self.cases())], "model")
        assert model.max_activation_ratio.item() == pytest.approx((12 + 102 + 7) / 3)
        # layers 1 and 2 are as large: 1 five times, and 1 2 3 1 2; channels 7 and 8 five times each
        assert model.max_activation_position.item() == 1
        assert model.max_activation_channel.item() == 7

    @pytest.mark.parametrize("by", ["head", "layer", "model"])
    @pytest.mark.parametrize("noise", [1e-6, 1e-3])
    def test_rounding_and_order_decide_nothing(self, by: tables.By, noise: float) -> None:
        names = ["max_activation_ratio", "max_activation_position", "max_activation_channel"]
        expected = tables.summarise([sums_of(self.cases())], by)[names]
        for seed in range(5):
            cases = self.cases(noise, seed)
            order = np.random.default_rng(seed).permutation(len(cases))
            for sums in (sums_of(cases, only=order.tolist()), sums_of([cases[n] for n in order])):
                pd.testing.assert_frame_equal(tables.summarise([sums], by)[names], expected, rtol=1e-12)

    def test_of_no_size_at_all(self) -> None:
        cases = self.cases()
        for case in cases:
            case.rows["max_activation"] = np.zeros(7)
            case.rows["max_activation_ratio"] = np.full(7, np.nan)
        for by in ("head", "layer", "model"):
            table = tables.summarise([sums_of(cases)], by)
            assert table.max_activation_ratio.isna().all()
            assert (table.max_activation == 0).all()
            assert (table.max_activation_position >= 1).all()


def test_entropy_ratio_weighs_by_the_queries_that_see_two_keys() -> None:
    """Layers differ in these where attention is local; 2 and 1 of layer 1, 1 and 3 of layer 2."""
    sums = [[replace(random_sums(4, 2, n), ratio_queries=count) for count in counts] for n, counts in
            enumerate([(2, 1), (1, 3)])]  # fmt: skip
    cases = [
        Case(4, join_layers(layer_rows(n, one, SINK_MEASURES, Options()) for n, one in enumerate(of_prompt, 1)), 1)
        for of_prompt in sums
    ]
    table = tables.summarise([sums_of(cases)], "head")
    total = [sums[0][n].entropy_ratio + sums[1][n].entropy_ratio for n in (0, 1)]
    np.testing.assert_allclose(table.entropy_ratio, np.concatenate([total[0] / 3, total[1] / 4]))


def assert_same_interval(table: pd.DataFrame, name: str, low: np.ndarray, high: np.ndarray) -> None:
    """The same ends within chance: those of 4,000 resamples have a standard deviation of 1 % of the width."""
    for expected, end in ((low, "low"), (high, "high")):
        found = table[f"{name}_ci_{end}"]
        off = abs(found - expected) / (high - low)
        assert (found.isna() == np.isnan(expected)).all()
        assert off.isna().all() or off.max() < 0.06, (name, end)


def test_relative_depth() -> None:
    frame = pd.DataFrame({"model": ["a", "a", "hybrid", "one"], "layer": [1, 3, 4, 1], "value": 1.0})
    found = tables.with_depth(frame, {"a": 3, "hybrid": 8, "one": 1})
    assert list(found) == ["model", "layer", "depth", "value"]
    assert found.depth.tolist() == [0, 1, 3 / 7, 0]
    assert "depth" not in frame


class TestIntervals:
    def test_where_they_stand(self) -> None:
        cases = [make_case(4, n) for n in range(3)]
        table = tables.summarise([sums_of(cases, bootstrap=Bootstrap(0.8, 5, 30))], "model")
        without = tables.summarise([sums_of(cases)], "model")
        columns = list(table.columns)
        have = [name.removesuffix("_ci_low") for name in columns if name.endswith("_ci_low")]
        assert have == [
            "first_token_mass", "learned_sink_mass", "sink_rate", "top_sink_mass", "entropy", "entropy_ratio",
            "row_max", "gate_mean", "value_norm_first", "value_norm_rest", "perplexity",
        ]  # fmt: skip
        for name in have:
            at = columns.index(name)
            assert columns[at : at + 3] == [name, f"{name}_ci_low", f"{name}_ci_high"]
            if name == "learned_sink_mass":  # none of these has one
                assert table[columns[at : at + 3]].isna().all(axis=None)
                continue
            assert table[f"{name}_ci_low"].item() <= table[name].item() <= table[f"{name}_ci_high"].item()
        assert columns[-3:] == ["ci", "ci_seed", "ci_resamples"]
        assert table[columns[-3:]].to_numpy().tolist() == [[0.8, 5, 30]]
        pd.testing.assert_frame_equal(table[without.columns], without)

    @pytest.mark.parametrize("by", ["head", "layer", "model"])
    def test_against_a_naive_bootstrap(self, by: tables.By) -> None:
        random = np.random.default_rng(0)
        # a layer without a gate, and prompts of very different lengths, which are the weights
        lengths = random.integers(2, 30, 40)
        cases = [make_case(int(tokens), seed, [True, False]) for seed, tokens in enumerate(lengths)]
        table = tables.summarise([sums_of(cases, bootstrap=Bootstrap(0.9, resamples=4000))], by)
        layer = cases[0].rows["layer"]
        drawn = random.integers(len(cases), size=(4000, len(cases)))  # prompts, with replacement

        weights = {"first_token_mass": lengths - 1, "top_sink_mass": lengths, "gate_mean": lengths}
        for name, weight in weights.items():
            values = np.stack([case.rows[name] for case in cases])  # (prompts, U)
            of_heads = (values * weight[:, None])[drawn].sum(1) / weight[drawn].sum(1)[:, None]
            of_layers = np.stack([of_heads[:, layer == n].mean(1) for n in (1, 2)], 1)
            of_model = np.nanmean(of_layers, 1, keepdims=True)
            replicates = {"head": of_heads, "layer": of_layers, "model": of_model}[by]
            assert_same_interval(table, name, *np.percentile(replicates, [5, 95], axis=0))

        loss = np.array([case.loss for case in cases])
        replicates = np.exp(loss[drawn].sum(1) / (lengths - 1)[drawn].sum(1))
        assert_same_interval(table, "perplexity", *np.percentile(replicates, [5, 95]))

    def test_models_get_the_same_resamples(self) -> None:
        cases = [make_case(5, n) for n in range(6)]
        tops = [tables.summarise([sums_of(cases, m, bootstrap=Bootstrap(0.9, 7, 50))]) for m in ("a", "b")]
        pd.testing.assert_frame_equal(tops[0].drop(columns="model"), tops[1].drop(columns="model"))
        other = tables.summarise([sums_of(cases, "a", bootstrap=Bootstrap(0.9, 8, 50))])
        assert not other.first_token_mass_ci_low.equals(tops[0].first_token_mass_ci_low)

    def test_one_prompt_has_none(self) -> None:
        table = tables.summarise([sums_of([make_case(5)], bootstrap=Bootstrap(0.95, resamples=10))])
        ends = [name for name in table if name.endswith(("_ci_low", "_ci_high"))]
        assert len(ends) == 22
        assert table[ends].isna().all(axis=None)
        assert table.first_token_mass.notna().all()

    def test_nor_has_what_one_prompt_alone_has_a_value_of(self) -> None:
        cases = [make_case(5, options=INCLUDE), make_case(1, 1, options=INCLUDE)]
        table = tables.summarise([sums_of(cases, options=INCLUDE, bootstrap=Bootstrap(0.95, resamples=50))])
        for name in ("value_norm_rest", "entropy_ratio", "perplexity"):
            assert table[name].notna().all()
            assert table[f"{name}_ci_low"].isna().all()
        assert table.value_norm_first_ci_low.notna().all()


def test_a_paired_interval_needs_the_same_resamples() -> None:
    cases = [make_case(5, 1), make_case(7, 2)]
    measure = SINK_MEASURES[0]
    sums = sums_of(cases, bootstrap=Bootstrap(0.9, 1, 20))
    assert tables.paired_interval(sums, sums, measure) == (0, 0)
    for other in (
        sums_of(cases),
        sums_of(cases, bootstrap=Bootstrap(0.9, 2, 20)),
        sums_of([*cases, make_case(3, 3)], bootstrap=Bootstrap(0.9, 1, 20)),
    ):
        with pytest.raises(ValueError, match="the same resamples"):
            tables.paired_interval(sums, other, measure)
    with pytest.raises(ValueError, match="the same resamples"):
        tables.paired_interval(sums_of(cases), sums_of(cases), measure)

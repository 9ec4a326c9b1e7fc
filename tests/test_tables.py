"""Rows and their summaries against sums written out."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn_viz import tables
from gattn_viz.metrics.layer import LayerSums
from gattn_viz.metrics.measures import SINK_MEASURES, Options


def random_sums(tokens: int, heads: int = 2, seed: int = 0, gate: bool = True) -> LayerSums:
    random = np.random.default_rng(seed)
    p = np.tril(random.random((heads, tokens, tokens)))
    p /= p.sum(-1, keepdims=True)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
    return LayerSums(
        tokens=tokens,
        received=p.sum(1),
        first_row=p[:, 0, 0],
        entropy=entropy.sum(-1),
        entropy_ratio=(entropy[:, 1:] / np.log(np.arange(2, tokens + 1))).sum(-1),
        ratio_queries=tokens - 1,
        gate_mean=random.random(heads) if gate else None,
        value_norm=random.random((heads, tokens)),
        max_activation=float(random.random() * 100),
        max_activation_position=int(random.integers(tokens)),
        max_activation_channel=int(random.integers(50)),
        median_activation=0.5,
    )


def make_rows(prompts: dict[str, int], layers: int = 3, models: tuple[str, ...] = ("a",)) -> pd.DataFrame:
    rows = []
    for m, model in enumerate(models):
        for p, (prompt, tokens) in enumerate(prompts.items()):
            for layer in range(1, layers + 1):
                sums = random_sums(tokens, seed=100 * m + 10 * p + layer, gate=model != "baseline")
                rows.append(tables.layer_rows(model, prompt, layer, sums))
    return tables.to_frame(rows)


ROWS = make_rows({"short": 4, "long": 20}, models=("a", "baseline"))


def test_rows_are_one_for_each_model_prompt_layer_and_head() -> None:
    assert len(ROWS) == 2 * 2 * 3 * 2
    assert not ROWS.duplicated(["model", "prompt", "layer", "head"]).any()
    assert list(ROWS.columns) == [
        "model", "prompt", "layer", "head", *(measure.name for measure in SINK_MEASURES),
        "n_prompts", "n_queries", "tokens", "first_row",
    ]  # fmt: skip


def test_prompts_weigh_by_their_queries() -> None:
    one = tables.summarise(ROWS, "head")
    row = one[(one.model == "a") & (one.layer == 2) & (one["head"] == 1)].iloc[0]
    part = ROWS[(ROWS.model == "a") & (ROWS.layer == 2) & (ROWS["head"] == 1)]
    short, long = part.iloc[0], part.iloc[1]
    # the first query of each prompt is left out: 3 and 19 remain
    expected = (3 * short.first_token_mass + 19 * long.first_token_mass) / 22
    assert row.first_token_mass == pytest.approx(expected)
    assert row.uniform_null == pytest.approx((3 * short.uniform_null + 19 * long.uniform_null) / 22)
    assert row.entropy == pytest.approx((4 * short.entropy + 20 * long.entropy) / 24)
    assert row.gate_mean == pytest.approx((4 * short.gate_mean + 20 * long.gate_mean) / 24)
    assert row.sink_rate == pytest.approx((short.sink_rate + long.sink_rate) / 2)
    assert row.value_norm_first == pytest.approx((short.value_norm_first + long.value_norm_first) / 2)
    assert row.value_norm_rest == pytest.approx((3 * short.value_norm_rest + 19 * long.value_norm_rest) / 22)
    assert (row.n_prompts, row.n_queries, row.tokens) == (2, 22, 24)


def test_max_activation_is_the_largest_and_says_where() -> None:
    one = tables.summarise(ROWS, "layer")
    for (model, layer), part in ROWS.groupby(["model", "layer"]):
        row = one[(one.model == model) & (one.layer == layer)].iloc[0]
        largest = part.loc[part.max_activation.idxmax()]
        for name in (
            "max_activation",
            "max_activation_position",
            "max_activation_channel",
            "max_activation_ratio",
        ):
            assert row[name] == largest[name]


def test_layers_are_means_over_heads_and_models_over_layers() -> None:
    heads, layers, models = (tables.summarise(ROWS, by) for by in ("head", "layer", "model"))
    for name in ("first_token_mass", "entropy_ratio", "sink_rate", "value_norm_rest", "top_sink_mass"):
        for layer in (1, 2, 3):
            of_heads = heads[(heads.model == "a") & (heads.layer == layer)][name]
            of_layer = layers[(layers.model == "a") & (layers.layer == layer)][name]
            assert of_layer.item() == pytest.approx(of_heads.mean())
        of_model = models[models.model == "a"][name]
        assert of_model.item() == pytest.approx(layers[layers.model == "a"][name].mean())
    # the paper's M-Act: the mean over layers of each layer's maximum
    of_layers = layers[layers.model == "a"].max_activation
    assert models[models.model == "a"].max_activation.item() == pytest.approx(of_layers.mean())
    # and beside it the mean of the layers' own ratios, not that of the layer with the largest maximum
    ratios = layers[layers.model == "a"].max_activation_ratio
    assert models[models.model == "a"].max_activation_ratio.item() == pytest.approx(ratios.mean())


def test_top_sink_position_is_the_most_frequent() -> None:
    rows = ROWS[ROWS.model == "a"].copy()
    rows["top_sink_position"] = [7, 7, 1, 1, 2, 3, 7, 2, 2, 1, 3, 2]
    layers = tables.summarise(rows, "layer").set_index("layer").top_sink_position
    # layer 1 has 7, 7, 7, 2; layer 2 has 1, 1, 2, 1; layer 3 has 2, 3, 3, 2: the earlier of the two
    assert layers.to_dict() == {1: 7, 2: 1, 3: 2}


@pytest.mark.parametrize(
    ("by", "per_prompt", "keys", "count"),
    [
        ("head", False, ["model", "layer", "head"], 12),
        ("layer", False, ["model", "layer"], 6),
        ("model", False, ["model"], 2),
        ("head", True, ["model", "prompt", "layer", "head"], 24),
        ("layer", True, ["model", "prompt", "layer"], 12),
        ("model", True, ["model", "prompt"], 4),
    ],
)
def test_shape_of_each_summary(by: tables.By, per_prompt: bool, keys: list[str], count: int) -> None:
    table = tables.summarise(ROWS, by, per_prompt=per_prompt)
    assert list(table.columns[: len(keys)]) == keys
    assert set(ROWS.columns) - set(table.columns) == {"prompt", "layer", "head"} - set(keys)
    assert len(table) == count
    assert table.model.unique().tolist() == ["a", "baseline"]
    whole = ["top_sink_position", "max_activation_position", "max_activation_channel", "n_queries", "tokens"]
    assert all(table[name].dtype == "int64" for name in whole)


def test_per_prompt_by_head_is_the_rows_themselves() -> None:
    pd.testing.assert_frame_equal(tables.summarise(ROWS, "head", per_prompt=True), ROWS)


def test_a_model_without_a_gate_has_an_empty_gate_mean() -> None:
    for by in ("head", "layer", "model"):
        table = tables.summarise(ROWS, by)
        assert table[table.model == "baseline"].gate_mean.isna().all()
        assert table[table.model == "a"].gate_mean.notna().all()


def test_a_one_token_prompt_weighs_nothing_in_what_it_has_no_value_for() -> None:
    alone = make_rows({"long": 20})
    with_one = pd.concat(
        [alone, *[tables.to_frame([tables.layer_rows("a", "one", n, random_sums(1))]) for n in (1, 2, 3)]],
        ignore_index=True,
    )
    before, after = (tables.summarise(rows, "head") for rows in (alone, with_one))
    for name in ("first_token_mass", "entropy_ratio", "value_norm_rest"):
        pd.testing.assert_series_equal(before[name], after[name])
    assert (after.n_prompts == 2).all()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=5), st.randoms())
def test_the_order_of_prompts_does_not_matter(lengths: list[int], random: object) -> None:
    rows = make_rows({f"p{i}": tokens for i, tokens in enumerate(lengths)})
    order = [f"p{i}" for i in range(len(lengths))]
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = pd.concat([rows[rows.prompt == prompt] for prompt in order], ignore_index=True)
    for by in ("head", "layer", "model"):
        pd.testing.assert_frame_equal(tables.summarise(rows, by), tables.summarise(shuffled, by))


def test_first_row_policy_is_a_column() -> None:
    rows = tables.to_frame([tables.layer_rows("a", "p", 1, random_sums(5), Options(first_row="include"))])
    table = tables.summarise(rows, "model")
    assert table.first_row.tolist() == ["include"]
    assert table.n_queries.tolist() == [5]

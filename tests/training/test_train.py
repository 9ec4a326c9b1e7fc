"""The training script on a tiny corpus: it learns, and a stopped and resumed run equals an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from training.data import Corpus, batch, held_out_batch, insert_operators
from training.measure import measure
from training.recipe import VARIANTS, Recipe, Stage
from training.train import initialise, learning_rate, make_config, train

BOS, OPERATORS, STOP, VOCAB = 0, np.array([2, 3]), 4, 24


@pytest.fixture
def corpus() -> Corpus:
    rng = np.random.default_rng(0)
    tokens = rng.integers(STOP, VOCAB, 2000)
    return Corpus.make(tokens[:1500], tokens[1500:], np.array([STOP]), BOS, OPERATORS, VOCAB)


@pytest.fixture
def recipe() -> Recipe:
    stage = {"warmup": 2, "length": 17, "prose": 0.5}
    return Recipe(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, head_dim=8, copy_operators=2,
        tokens_per_step=64, stages=(Stage(1, 5, **stage), Stage(3, 5, **stage)),
        evaluate_every=4, checkpoint_every=3,
    )  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_run_equals_uninterrupted(variant: str, corpus: Corpus, recipe: Recipe, tmp_path: Path) -> None:
    whole = train(variant, recipe, corpus, tmp_path / "whole", fast=False)
    for stop in (2, 5, 7):  # within a stage, at the growth, after it
        train(variant, recipe, corpus, tmp_path / "parts", fast=False, until=stop)
    parts = train(variant, recipe, corpus, tmp_path / "parts", fast=False)
    assert whole.config.num_hidden_layers == 3
    for (name, one), (_, other) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_other_recipe_is_refused(corpus: Corpus, recipe: Recipe, tmp_path: Path) -> None:
    train("baseline", recipe, corpus, tmp_path, fast=False, until=2)
    other = Recipe.from_dict({**recipe.to_dict(), "clip": 2.0})
    with pytest.raises(SystemExit, match="another recipe"):
        train("baseline", other, corpus, tmp_path, fast=False)


def test_learns(corpus: Corpus, recipe: Recipe, tmp_path: Path) -> None:
    values = {**recipe.to_dict(), "stages": [{"layers": 1, "steps": 40, "warmup": 4, "length": 17}]}
    train("baseline", Recipe.from_dict(values), corpus, tmp_path, fast=False, until=4)
    train("baseline", Recipe.from_dict(values), corpus, tmp_path, fast=False)
    losses = [float(line.split('"loss": ')[1].split(",")[0]) for line in (tmp_path / "log.jsonl").open()]
    assert losses[-1] < losses[0]


def test_variants_share_initial_values(corpus: Corpus, recipe: Recipe) -> None:
    from gattn_viz.models.attention import split_query_and_gate
    from gattn_viz.models.modeling import GatedQwen3ForCausalLM

    models = {}
    for variant in VARIANTS:
        models[variant] = GatedQwen3ForCausalLM(make_config(recipe, variant, 2, 0, 1))
        initialise(models[variant], recipe)
    baseline = dict(models["baseline"].named_parameters())
    x = torch.randn(1, 3, recipe.hidden_size)
    for variant in VARIANTS[1:]:
        for name, parameter in models[variant].named_parameters():
            if "q_proj" not in name:
                assert torch.equal(parameter, baseline[name]), name
        queries = [
            split_query_and_gate(m.model.layers[1].self_attn.q_proj(x), m.config)[0]
            for m in (models["baseline"], models[variant])
        ]
        torch.testing.assert_close(*queries)


def test_insert_operators() -> None:
    text = np.arange(10, 42).reshape(2, 16)
    corpus = Corpus.make(text.ravel(), text.ravel(), np.array([10]), BOS, OPERATORS, 64)
    for seed in range(5):
        out = insert_operators(text, 0.2, corpus, np.random.default_rng(seed))
        for row in out:
            places = np.flatnonzero(np.isin(row[:-1], OPERATORS))
            assert all(row[place + 1] == row[place - (row[place] - 1)] for place in places)
            kept = np.delete(row, np.concatenate([places, places + 1]))
            kept = kept[~np.isin(kept, OPERATORS)]
            assert np.array_equal(kept, np.arange(row[0], row[0] + len(kept)))


def test_batches_depend_on_seed_and_step_alone(corpus: Corpus, recipe: Recipe) -> None:
    stage = recipe.stages[0]
    first, again, next_one = (batch(corpus, recipe, stage, step) for step in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, next_one)
    assert (first[:, 0] == BOS).all()
    assert first.shape == (recipe.tokens_per_step // (stage.length - 1), stage.length)


def test_learning_rate_warms_up_and_falls() -> None:
    recipe = Recipe(stages=(Stage(1, 10, lr=(1e-2, 1e-2), warmup=4), Stage(2, 10, lr=(1e-2, 0.0), warmup=1)))
    rates = [learning_rate(recipe, step) for step in range(20)]
    assert rates[:5] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])
    assert rates[10:] == pytest.approx([1e-2 * (10 - i) / 10 for i in range(10)])


def test_measure_matches_hand_count(corpus: Corpus, recipe: Recipe) -> None:
    """With all queries zero attention is uniform: the first-token mass is the null."""
    from gattn_viz.models.modeling import GatedQwen3ForCausalLM

    model = GatedQwen3ForCausalLM(make_config(recipe, "gate_headwise", 2, 0, 1))
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    figures = measure(model, torch.from_numpy(held_out_batch(corpus, 4, 16)))
    assert figures.layers == pytest.approx([figures.uniform_null] * 2, abs=1e-6)
    assert figures.uniform_null == pytest.approx(sum(1 / i for i in range(2, 17)) / 15)
    assert figures.gate_mean.mean() == pytest.approx(0.5)

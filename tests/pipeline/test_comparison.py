"""A comparison against the tables of single models, and its intervals against a naive bootstrap over prompts."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from gattn_viz import (
    CompareOptions,
    Comparison,
    GattnVizError,
    Prompt,
    Run,
    caption,
    compare,
    draw_first_token,
    gate_stats,
    paper_data,
    sink_stats,
)
from gattn_viz.metrics.bootstrap import Bootstrap
from gattn_viz.metrics.compared import COMPARED_MEASURES, QUANTITIES
from gattn_viz.pipeline import comparison
from tests.conftest import tiny_model, tiny_tokenizer

PROMPTS = [
    Prompt("a", "the cat sat on the mat"),
    Prompt("b", "the dog"),
    Prompt("c", "rain fell on the roof of the house and the log"),
]
BOOTSTRAP = {"ci": 0.8, "seed": 3, "resamples": 40}


def compared(tiny_trio: Path, models: Sequence[str], **options: object) -> Comparison:
    arguments: dict = {"rounds": 0, "run": Run(checkpoints=str(tiny_trio)), "prompts": PROMPTS, **BOOTSTRAP}
    return compare(models, **{**arguments, **options})


def row(found: Comparison, model: str, quantity: str) -> pd.Series:
    [index] = found.table.index[(found.table.model == model) & (found.table.quantity == quantity)]
    return found.table.loc[index]


@pytest.fixture(scope="module")
def gated(tiny_trio: Path) -> Comparison:
    return compared(tiny_trio, ["gate_headwise", "baseline", "gate_elementwise"])


def test_values_are_those_of_the_statistics(gated: Comparison, tiny_trio: Path) -> None:
    models, run = ["gate_headwise", "baseline", "gate_elementwise"], Run(checkpoints=str(tiny_trio))
    sinks = sink_stats(models, PROMPTS, by="model", run=run).set_index("model")
    gates = gate_stats(models, PROMPTS, by="model", run=run).set_index("model")
    assert gated.table.model.unique().tolist() == models
    for model in models:
        for measure in COMPARED_MEASURES:
            expected = (gates if measure.name == "gate_below" else sinks).loc[model, measure.name]
            found = row(gated, model, measure.name)
            assert found.value == pytest.approx(expected, rel=1e-6, nan_ok=True)
            assert found.unit == measure.unit
            if model != "gate_headwise" and measure.name != "uniform_null":
                first = row(gated, "gate_headwise", measure.name).value
                assert found.difference == pytest.approx(found.value - first, nan_ok=True)
            else:
                assert np.isnan([found.difference, found.ci_low, found.ci_high]).all()


def test_the_table_s_counts(gated: Comparison) -> None:
    names = [quantity.name for quantity in QUANTITIES if not quantity.measured]
    assert gated.table.quantity.tolist() == names * 3
    assert row(gated, "baseline", "parameters").difference == -12 * 32
    assert row(gated, "gate_elementwise", "gate_parameters").value == 3 * 4 * 8 * 32
    share = row(gated, "gate_headwise", "gate_parameters").value / row(gated, "gate_headwise", "parameters").value
    assert row(gated, "gate_headwise", "gate_share").value == share
    assert row(gated, "baseline", "gate_memory").value == 0
    longest = row(gated, "baseline", "longest_prompt").value
    assert row(gated, "baseline", "multiply_adds").note == f"T = {longest:.0f}"
    added = row(gated, "gate_elementwise", "multiply_adds").difference
    assert added == (3 * 4 * 8 - 3 * 4) * 32  # a gate's weights are used once a token


def test_a_baseline_has_no_gate_to_compare_with(tiny_trio: Path) -> None:
    found = compared(tiny_trio, ["gate_headwise", "baseline"], baseline="baseline")
    gate_mean = row(found, "gate_headwise", "gate_mean")
    assert 0 < gate_mean.value < 1
    assert np.isnan([gate_mean.difference, gate_mean.ci_low, row(found, "baseline", "gate_mean").value]).all()
    assert (
        row(found, "gate_headwise", "first_token_mass").ci_low
        < row(found, "gate_headwise", "first_token_mass").ci_high
    )
    assert found.table.attrs["baseline"] == "baseline"


def naive(tiny_trio: Path, model: str, measure: str, weight: Callable[[int], float]) -> list[float]:
    """The measure over each resample of the prompts, taken apart: prompts, then heads, then layers."""
    run = Run(checkpoints=str(tiny_trio))
    table = sink_stats([model], PROMPTS, per_prompt=True, run=run)
    bootstrap = Bootstrap(BOOTSTRAP["ci"], int(BOOTSTRAP["seed"]), int(BOOTSTRAP["resamples"]))
    counts = [bootstrap.counts(prompt, 3) for prompt in range(3)]
    values = []
    for resample in range(bootstrap.resamples):
        drawn = [prompt for prompt in range(3) for _ in range(counts[prompt][resample])]
        assert len(drawn) == 3
        of_layers = []
        for _, layer in table.groupby("layer"):
            of_heads = []
            for _, head in layer.groupby("head"):
                total = weights = 0.0
                for prompt in drawn:
                    one = head[head.prompt == PROMPTS[prompt].id].iloc[0]
                    value = math.log(one[measure]) if measure == "perplexity" else one[measure]
                    total += value * weight(one.tokens)
                    weights += weight(one.tokens)
                of_heads.append(total / weights)
            of_layers.append(sum(of_heads) / len(of_heads))
        mean = sum(of_layers) / len(of_layers)
        values.append(math.exp(mean) if measure == "perplexity" else mean)
    return values


@pytest.mark.parametrize(
    ("measure", "weight"),
    [
        ("first_token_mass", lambda tokens: tokens - 1),
        ("sink_rate", lambda tokens: 1),
        ("gate_mean", lambda tokens: tokens),
        ("perplexity", lambda tokens: tokens - 1),
    ],
)
def test_intervals_are_those_of_paired_resamples(
    gated: Comparison, tiny_trio: Path, measure: str, weight: Callable[[int], float]
) -> None:
    of_both = [naive(tiny_trio, model, measure, weight) for model in ("gate_elementwise", "gate_headwise")]
    differences = [one - other for one, other in zip(*of_both, strict=True)]
    found = row(gated, "gate_elementwise", measure)
    assert [found.ci_low, found.ci_high] == pytest.approx(np.quantile(differences, [0.1, 0.9]).tolist(), rel=1e-5)
    # resamples of their own would give another
    apart = [one - other for one, other in zip(of_both[0], of_both[1][1:] + of_both[1][:1], strict=True)]
    if measure != "sink_rate":
        assert np.quantile(apart, 0.1) != pytest.approx(found.ci_low, rel=1e-3)


def test_the_interval_of_the_largest(gated: Comparison, tiny_trio: Path) -> None:
    """Of each resample the mean over layers of the largest of its prompts; both models have the same prompts."""
    bootstrap = Bootstrap(BOOTSTRAP["ci"], int(BOOTSTRAP["seed"]), int(BOOTSTRAP["resamples"]))
    counts = [bootstrap.counts(prompt, 3) for prompt in range(3)]
    of_both = []
    for model in ("gate_elementwise", "gate_headwise"):
        run = Run(checkpoints=str(tiny_trio))
        table = sink_stats([model], PROMPTS, measures=["max_activation"], by="layer", per_prompt=True, run=run)
        values = table.pivot_table("max_activation", "layer", "prompt")
        values_of = [values[prompt.id].to_numpy() for prompt in PROMPTS]
        of_both.append(
            [
                np.max([values_of[prompt] for prompt in range(3) if counts[prompt][n]], axis=0).mean()
                for n in range(bootstrap.resamples)
            ]
        )
    differences = np.subtract(*of_both)
    found = row(gated, "gate_elementwise", "max_activation")
    assert np.ptp(differences) > 0
    assert [found.ci_low, found.ci_high] == pytest.approx(np.quantile(differences, [0.1, 0.9]).tolist(), rel=1e-5)
    assert "rough" in found.note


def test_a_count_has_no_interval(gated: Comparison) -> None:
    found = row(gated, "baseline", "parameters")
    assert np.isfinite(found.difference)
    assert np.isnan([found.ci_low, found.ci_high]).all()


def test_equal_models_differ_by_nothing(tiny_trio: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_trio / "gate_headwise", tmp_path / "twin")
    found = compared(tiny_trio, ["gate_headwise", str(tmp_path / "twin")])
    for quantity in QUANTITIES:
        if not quantity.measured:
            assert row(found, "twin", quantity.name).value == row(found, "gate_headwise", quantity.name).value
    for measure in COMPARED_MEASURES:
        one = row(found, "twin", measure.name)
        assert one.difference == 0 or measure.name == "uniform_null"
        assert [one.ci_low, one.ci_high] == [0, 0] or not measure.has_interval


def test_one_prompt_has_no_interval(tiny_trio: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = compared(tiny_trio, ["baseline", "gate_headwise"], prompts=["the cat sat"])
    one = row(found, "gate_headwise", "first_token_mass")
    assert np.isfinite(one.difference)
    assert np.isnan([one.ci_low, one.ci_high]).all()


def test_layers_are_those_of_sink_stats(gated: Comparison, tiny_trio: Path) -> None:
    run = Run(checkpoints=str(tiny_trio))
    expected = sink_stats(["gate_headwise"], PROMPTS, by="layer", run=run, **BOOTSTRAP)  # type: ignore[arg-type]
    layers = gated.layers[gated.layers.model == "gate_headwise"]
    for name in ("layer", "first_token_mass", "first_token_mass_ci_low", "uniform_null", "tokens"):
        np.testing.assert_allclose(layers[name], expected[name])


def test_options(tiny_trio: Path) -> None:
    options = CompareOptions(first_row="include", sink_threshold=0, below=1)
    found = compared(tiny_trio, ["baseline", "gate_headwise"], options=options)
    assert row(found, "gate_headwise", "gate_below").value == 1
    assert row(found, "gate_headwise", "sink_rate").value == 1
    assert row(found, "baseline", "first_token_mass").note == "first query included"
    for wrong in ({"below": 2}, {"first_row": "some"}):
        with pytest.raises(GattnVizError, match="expected"):
            CompareOptions(**wrong)  # type: ignore[arg-type]


def test_time_and_memory(tiny_trio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own: each call of a model takes as many seconds as the model's place, from 1."""
    lengths: dict[str, set[int]] = {}

    def time_rounds(calls: dict, rounds: int, on_round: Callable[[int], None]) -> dict[str, list[float]]:
        for name, call in calls.items():
            lengths.setdefault(name, set()).add(call().last_hidden_state.shape[1])
        on_round(rounds)
        return {name: [place * n for n in range(1, rounds + 1)] for place, name in enumerate(calls, start=1)}

    monkeypatch.setattr(comparison, "time_rounds", time_rounds)
    done: list[tuple[str, int, int]] = []
    found = compared(
        tiny_trio,
        ["baseline", "gate_headwise"],
        rounds=3,
        time_tokens=30,
        progress=lambda *step: done.append(step),
    )
    assert lengths == {"baseline": {30}, "gate_headwise": {30}}  # the longest prompt, repeated
    assert ("timing", 3, 3) in done
    time, ratio = row(found, "gate_headwise", "forward_time"), row(found, "gate_headwise", "forward_time_ratio")
    assert (time.value, time.q1, time.q3) == (4, 3, 5)
    assert (ratio.value, ratio.q1, ratio.q3) == (2, 2, 2)
    assert time.note == "3 rounds, T = 30, float32 on cpu, 1 thread, sdpa attention"
    memory = row(found, "gate_headwise", "peak_memory")
    assert memory.value > 30 * 32 * 4 / 2**20  # the residual stream at least
    expected = memory.value / row(found, "baseline", "peak_memory").value
    assert row(found, "gate_headwise", "peak_memory_ratio").value == expected
    assert row(found, "baseline", "multiply_adds").note == "T = 30"


def test_what_a_forward_pass_costs_is_the_same_each_time(tiny_trio: Path) -> None:
    models = ["baseline", "gate_elementwise"]
    one, other = (compared(tiny_trio, models, rounds=1) for _ in range(2))
    for model in models:
        assert row(one, model, "peak_memory").value == row(other, model, "peak_memory").value > 0
        assert row(one, model, "forward_time").value > 0


@pytest.fixture
def other_family(tmp_path: Path) -> Path:
    """A llama whose tokenizer knows no merges: a token a byte."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer = tiny_tokenizer()
    text = tokenizer.backend_tokenizer.to_str()
    start = text.index('"merges":')
    without_merges = text[:start] + '"merges":[]' + text[text.index("]]", start) + 2 :]
    tokenizer._tokenizer = Tokenizer.from_str(without_merges)
    tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_other_tokens_and_a_family_of_which_no_gate_is_known(
    tiny_trio: Path, other_family: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("gattn_viz"), "propagate", True)
    found = compared(tiny_trio, ["gate_headwise", str(other_family)])
    assert "llama cut the prompts into other tokens than gate_headwise: perplexity is per token" in caplog.text
    lengths = [row(found, model, "longest_prompt").value for model in ("gate_headwise", "llama")]
    assert lengths[0] < lengths[1]
    perplexity = row(found, "llama", "perplexity")
    assert perplexity.value > 1
    assert np.isnan([perplexity.difference, perplexity.ci_low]).all()
    assert "not comparable" in perplexity.note
    assert np.isfinite(row(found, "llama", "first_token_mass").ci_low)
    assert np.isnan(
        [row(found, "llama", name).value for name in ("gate_parameters", "gate_memory", "gate_mean")]
    ).all()
    assert row(found, "llama", "gate_memory").note == "no gate is known of this family"


def test_models_of_other_tokens_and_another_depth_share_figures(tiny_trio: Path, other_family: Path) -> None:
    models = ["gate_headwise", str(other_family)]
    found = compared(tiny_trio, models, x="depth")
    lengths = {model: f"{row(found, model, 'tokens').value:,.0f}" for model in ("gate_headwise", "llama")}
    assert found.layers.layer.tolist() == [1, 2, 3, 1, 2]
    assert found.layers.depth.tolist() == [0, 0.5, 1, 0, 1]
    figure = draw_first_token(found.layers)
    assert [np.asarray(line.get_xdata()).tolist() for line in figure.axes[0].lines[:2]] == [[0, 0.5, 1], [0, 1]]
    words = " ".join(" ".join(text.get_text() for text in figure.texts).split())
    assert f"{lengths['gate_headwise']} (gate_headwise), {lengths['llama']} (llama) tokens together" in words
    assert "depth" not in compared(tiny_trio, models).layers

    figures = ["first_token_by_layer", "attention_maps", "output_magnitude", "gate_by_layer"]
    data = paper_data(models, PROMPTS, figures=figures, x="depth", run=Run(checkpoints=str(tiny_trio)))
    for name, frame in data.frames.items():
        assert ("depth" in frame) == (name != "attention_maps")
    assert data.frames["first_token_by_layer"].depth.tolist() == [0, 0.5, 1, 0, 1]
    assert data.frames["gate_by_layer"].depth.tolist() == [0, 0.5, 1]
    said = caption("first_token_by_layer", data)
    assert "The x axis is relative depth, (layer - 1)/(layers - 1)" in said
    nulls = data.frames["first_token_by_layer"].groupby("model", sort=False).uniform_null.first()
    assert f"would give {nulls.iloc[0]:.3g} (gate_headwise), {nulls.iloc[1]:.3g} (llama) on the same" in said
    one, other = (run.lengths[0] for run in data.models)
    assert f"T = {one} (gate_headwise), {other} (llama);" in caption("attention_maps", data)


@pytest.mark.parametrize("function", [compare, paper_data])
def test_an_x_axis_that_is_none(tiny_trio: Path, function: Callable[..., object]) -> None:
    with pytest.raises(GattnVizError, match="x is 'heads'; expected layer or depth"):
        function(["baseline", "gate_headwise"], x="heads", run=Run(checkpoints=str(tiny_trio)))


@pytest.mark.parametrize(
    ("models", "options", "said"),
    [
        (["baseline"], {}, "one model was given, baseline; expected two or more to compare: add another"),
        ("baseline", {}, "one model was given, baseline"),
        (
            ["baseline", "gate_headwise"],
            {"baseline": "gate"},
            "'gate' is none of the models; expected one of base",
        ),
        (["baseline", "baseline"], {}, "a model is given twice"),
        (["baseline", "gate_headwise"], {"rounds": -1}, "rounds is -1; expected 1 or more"),
        (["baseline", "gate_headwise"], {"time_tokens": 0}, "time_tokens is 0; expected 1 or more"),
        (["baseline", "gate_headwise"], {"time_tokens": 65}, "65 tokens are to be timed, but baseline takes 64"),
        (["baseline", "gate_headwise"], {"ci": 95}, "ci is 95; expected a level"),
    ],
)
def test_bad_input(tiny_trio: Path, models: Sequence[str], options: dict, said: str) -> None:
    with pytest.raises(GattnVizError, match=said):
        compared(tiny_trio, models, **options)


def test_models_stay_in_memory_only_to_be_timed(tiny_trio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    seen = comparison._Seen
    monkeypatch.setattr(comparison, "_Seen", lambda *given: kept.append(given[-1]) or seen(*given))
    compared(tiny_trio, ["baseline", "gate_headwise"])
    assert kept == [None, None]


def test_the_baseline_by_its_path(tiny_trio: Path, tmp_path: Path) -> None:
    tiny_model("baseline", seed=1).save_pretrained(tmp_path / "mine")
    tiny_tokenizer().save_pretrained(tmp_path / "mine")
    path = str(tmp_path / "mine")
    assert compared(tiny_trio, ["baseline", path], baseline=path).table.attrs["baseline"] == "mine"
    assert compared(tiny_trio, ["baseline", path], baseline="mine").table.attrs["baseline"] == "mine"

"""`gate_stats` and `gate_tokens` on tiny checkpoints, against naive loops over captured scores and outputs."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn_viz import GateOptions, GattnVizError, Prompt, Run, gate_stats, gate_tokens, sink_stats, tables
from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.run import capture, capture_batch, stream
from gattn_viz.metrics.bootstrap import Bootstrap
from gattn_viz.metrics.gate_measures import GATE_MEASURES, WITHOUT_GATE
from gattn_viz.metrics.gate_sums import GateSums, OutputSums
from gattn_viz.metrics.layer import LayerSums
from gattn_viz.metrics.over_prompts import ModelSums, join_layers, layer_rows, merge
from gattn_viz.models.loading import load
from gattn_viz.models.names import resolve
from tests.conftest import tiny_model

TEXTS = ["the cat sat on the mat", "the dog", "the rain fell on the roof of the house and on the log"]
GATED = ["gate_headwise", "gate_elementwise"]
EVERY = frozenset({1, 2, 3})


@pytest.fixture
def run(tiny_trio: Path) -> Run:
    return Run(checkpoints=str(tiny_trio))


def captured(trio: Path, model: str) -> list[dict[int, LayerCapture]]:
    """The scores and outputs themselves, a prompt at a time."""
    loaded = load(resolve(model, str(trio)))
    ids = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
    return capture(loaded.model, ids, Request(gates=EVERY, outputs=EVERY))


def naive(prompts: list[dict[int, LayerCapture]], layer: int, head: int) -> dict[str, float]:
    """A head's row but for `below_threshold` and the like, all prompts' tokens in lists."""
    scores, before, after, firsts, rest, honors = [], [], [], [], [], {"before": [], "after": []}  # type: ignore[var-annotated]
    for prompt in prompts:
        taken = prompt[layer]
        g = taken.gate_scores[:, head].double().tolist()  # type: ignore[index]
        scores += g
        firsts.append(np.mean(g[0]))
        rest += [np.mean(row) for row in g[1:]]
        for name, output, elements in (
            ("before", taken.output_before, before), ("after", taken.output_after, after),
        ):  # fmt: skip
            elements += output[:, head].double().flatten().abs().tolist()  # type: ignore[index]
            norms = output.double().norm(dim=-1).mean(0)  # type: ignore[union-attr]
            honors[name] += [(norms[head] / norms.mean()).item()] * len(g)
    channels = np.array(scores)  # (tokens, C)
    every = channels.ravel()
    row = {
        "gate_mean": every.mean(), "gate_std": every.std(),
        "gate_below": (every < 0.1).mean(), "gate_above": (every > 0.9).mean(),
        "gate_first_token": np.mean(firsts), "gate_rest": np.mean(rest),
        "gate_channels_shut": (channels.max(0) < 0.1).mean() if channels.shape[1] > 1 else math.nan,
        "honor_before": np.mean(honors["before"]), "honor_after": np.mean(honors["after"]),
    }  # fmt: skip
    for percent in (5, 25, 50, 75, 95):
        row[f"gate_q{percent:02}"] = np.quantile(every, percent / 100, method="inverted_cdf")
    for name, values in (("before", np.array(before)), ("after", np.array(after))):
        row[f"output_{name}"] = values.mean()
        row[f"output_{name}_below_01"] = (values < 0.01).mean()
        row[f"output_{name}_below_001"] = (values < 0.001).mean()
    return row


@pytest.mark.parametrize("model", GATED)
def test_equals_loops_over_what_is_captured(tiny_trio: Path, run: Run, model: str) -> None:
    table = gate_stats(model, TEXTS, run=run)
    prompts = captured(tiny_trio, model)
    assert list(table) == [
        "model", "layer", "head", *(measure.name for measure in GATE_MEASURES),
        "n_prompts", "tokens", "below_threshold", "above_threshold",
    ]  # fmt: skip
    assert table.tokens.unique().tolist() == [sum(len(prompt[1].gate_scores) for prompt in prompts)]  # type: ignore[arg-type]
    for _, row in table.iterrows():
        expected = naive(prompts, row.layer, row["head"] - 1)
        for name, number in expected.items():
            loose = {"rel": 1 / 127, "abs": 2.0**-16} if name.startswith("gate_q") else {"rel": 1e-5, "abs": 1e-7}
            assert row[name] == pytest.approx(number, nan_ok=True, **loose), name
        before = torch.cat(
            [prompt[row.layer].output_before[:, row["head"] - 1].double().abs() for prompt in prompts]
        )  # type: ignore[index]
        for name, threshold in (("output_scaled_below_01", 0.01), ("output_scaled_below_001", 0.001)):
            scaled = before * expected["gate_mean"]
            assert (scaled < threshold * 63 / 64).double().mean() <= row[name] + 1e-9
            assert row[name] <= (scaled < threshold * 65 / 64).double().mean() + 1e-9
    # what is tested has something to say
    assert table.output_after_below_01.max() > 0
    assert table.gate_below.between(0.01, 0.99).any()


def test_a_layer_is_the_mean_of_its_heads_and_a_model_of_its_layers(run: Run) -> None:
    by_head, by_layer, by_model = (gate_stats(GATED, TEXTS, by=by, run=run) for by in ("head", "layer", "model"))  # type: ignore[arg-type]
    names = [measure.name for measure in GATE_MEASURES]
    of_layers = by_head.groupby(["model", "layer"], sort=False)[names].mean()
    np.testing.assert_allclose(by_layer[names], of_layers, rtol=1e-10)
    np.testing.assert_allclose(by_model[names], of_layers.groupby("model", sort=False).mean(), rtol=1e-10)
    np.testing.assert_allclose(by_layer[["honor_before", "honor_after"]], 1)


@pytest.mark.parametrize("changes", [{"batch_size": 2}, {"batch_size": 3, "chunk": 4}, {"chunk": 1}])
def test_batches_padding_and_chunks_change_nothing(run: Run, changes: dict[str, int]) -> None:
    other = Run(run.checkpoints, **changes)  # type: ignore[arg-type]
    for options in ({"per_prompt": True}, {"ci": 0.9, "resamples": 20}):
        one, two = (gate_stats(GATED, TEXTS, run=how, **options) for how in (run, other))  # type: ignore[arg-type]
        pd.testing.assert_frame_equal(one, two, rtol=1e-4, atol=1e-6)
    # all prompts begin alike: which of equal tokens comes first is a matter of rounding
    where = ["model", "layer", "head", "end", "rank", "score"]
    one, two = (gate_tokens(GATED, TEXTS, count=2, run=how)[where] for how in (run, other))
    pd.testing.assert_frame_equal(one, two, rtol=1e-4, atol=1e-6)


def test_padding_on_the_left_does_not_count_either() -> None:
    model = tiny_model("gate_elementwise")
    prompt = [5, 6, 7, 8, 9]
    needs = frozenset(measure.needs for measure in GATE_MEASURES if measure.needs) | {"gate_tokens"}
    request = Request(needs=needs)
    [alone] = capture(model, [prompt], request)
    padded: dict[int, LayerSums] = {}

    def keep(sequence: int, layer: LayerCapture) -> None:
        if sequence == 0 and layer.sums is not None:
            padded[layer.layer] = layer.sums

    input_ids = torch.tensor([[0, 0, *prompt], [1, 2, *prompt]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    capture_batch(model, input_ids, mask, request, keep, chunk=3)
    for layer, one in alone.items():
        assert one.sums is not None
        np.testing.assert_allclose(padded[layer].gate_tokens, one.sums.gate_tokens, rtol=1e-4)  # type: ignore[arg-type]
        for name in ("gates", "output_before", "output_after"):
            for field, expected in vars(getattr(one.sums, name)).items():
                found = getattr(getattr(padded[layer], name), field)
                if expected is None:
                    assert found is None
                elif field == "histogram":  # a rounding error may move one over an edge
                    assert abs(found - expected).sum() <= 2
                else:
                    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_prompt_apart_is_that_prompt_alone(run: Run) -> None:
    apart = gate_stats("gate_elementwise", TEXTS, per_prompt=True, run=run)
    assert list(apart)[:4] == ["model", "prompt", "layer", "head"]
    for number, text in enumerate(TEXTS, start=1):
        alone = gate_stats("gate_elementwise", [text], run=run)
        of_prompt = apart[apart.prompt == f"prompt-{number}"].drop(columns="prompt").reset_index(drop=True)
        pd.testing.assert_frame_equal(of_prompt, alone, rtol=1e-10)


def test_the_gate_means_of_both_tables_are_the_same(run: Run) -> None:
    for options in ({}, {"by": "layer", "ci": 0.9, "resamples": 20}):
        gates, sinks = (
            f(GATED, TEXTS, measures=["gate_mean"], run=run, **options) for f in (gate_stats, sink_stats)
        )  # type: ignore[operator]
        shared = [name for name in gates if name in sinks and name != "n_queries"]
        assert "gate_mean" in shared
        pd.testing.assert_frame_equal(gates[shared], sinks[shared], check_exact=True)


@pytest.mark.parametrize(
    ("names", "needs"),
    [
        (["gate_mean", "gate_rest"], {"gate", "gate_scores"}),
        (["gate_q50"], {"gate_histogram"}),
        (["output_scaled_below_01"], {"output_histogram"}),
        (["honor_after", "output_before"], {"output_before", "output_after"}),
    ],
)
def test_only_what_is_asked_is_captured(
    run: Run, monkeypatch: pytest.MonkeyPatch, names: list[str], needs: set[str]
) -> None:
    requests = []

    def noting(model: Any, ids: Any, request: Request, *rest: Any, **options: Any) -> None:
        requests.append(request)
        stream(model, ids, request, *rest, **options)

    monkeypatch.setattr("gattn_viz.pipeline.stats.stream", noting)
    options = GateOptions(below=0.3, above=0.6)
    everything = gate_stats("gate_elementwise", TEXTS, by="layer", options=options, run=run)
    some = gate_stats("gate_elementwise", TEXTS, measures=names, by="layer", options=options, run=run)
    pd.testing.assert_frame_equal(some, everything[some.columns], rtol=1e-6)
    assert requests[-1] == Request(needs=frozenset(needs), gate_thresholds=(0.3, 0.6))  # type: ignore[arg-type]


def test_thresholds(run: Run) -> None:
    half = gate_stats("gate_headwise", TEXTS, options=GateOptions(below=0.5, above=0.5), run=run)
    np.testing.assert_allclose(half.gate_below + half.gate_above, 1)
    assert half.below_threshold.unique() == half.above_threshold.unique() == [0.5]


class TestWithoutAGate:
    def test_beside_others_it_has_empty_columns(self, run: Run) -> None:
        table = gate_stats(["baseline", "gate_headwise"], TEXTS, by="model", run=run).set_index("model")
        present = table.loc["baseline"].dropna().index
        assert set(present) - {"n_prompts", "tokens", "below_threshold", "above_threshold"} == set(WITHOUT_GATE)
        assert table.loc["gate_headwise"].drop("gate_channels_shut").notna().all()

    def test_its_output_is_what_it_writes(self, tiny_trio: Path, run: Run) -> None:
        table = gate_stats("baseline", TEXTS, measures="output_before,honor_before", run=run)
        prompts = captured(tiny_trio, "baseline")
        for _, row in table.iterrows():
            outputs = [prompt[row.layer].output_before.double() for prompt in prompts]  # type: ignore[union-attr]
            mean = torch.cat([output[:, row["head"] - 1] for output in outputs]).abs().mean()
            assert row.output_before == pytest.approx(mean.item(), rel=1e-5)

    @pytest.mark.parametrize("call", [gate_stats, gate_tokens])
    def test_alone_it_is_an_error_before_any_weights_are_read(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, call: Any
    ) -> None:
        monkeypatch.setattr("gattn_viz.pipeline.run.load", None)
        with pytest.raises(GattnVizError, match=r"^no gate in baseline; expected a model with a gate .*: add one"):
            call(["baseline"], TEXTS, run=run)


def test_broken_weights_are_an_error(run: Run, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    loaded = load(resolve("gate_headwise", run.checkpoints))
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.q_proj.weight.fill_(float("nan"))
    loaded.model.save_pretrained(broken)
    loaded.tokenizer.save_pretrained(broken)
    for call in (gate_stats, gate_tokens):
        with pytest.raises(
            GattnVizError, match=r"layer 2 of .*broken.* gives NaN or infinity on prompt 'prompt-1'"
        ):
            call([str(broken)], TEXTS[:1])
    for measure in ("gate_q50", "output_after", "output_scaled_below_01"):
        with pytest.raises(GattnVizError, match=r"layer 2 of .* gives NaN"):
            gate_stats([str(broken)], TEXTS[:1], measures=measure)


def test_intervals(run: Run) -> None:
    table = gate_stats(GATED, TEXTS, ci=0.9, resamples=50, run=run)
    have = {name.removesuffix("_ci_low") for name in table if name.endswith("_ci_low")}
    assert have == {measure.name for measure in GATE_MEASURES if measure.combine != "pooled"}
    inside = table.honor_after.between(table.honor_after_ci_low, table.honor_after_ci_high)
    assert inside.all()
    with pytest.raises(GattnVizError, match="ci is given, but gate_q50 has no interval"):
        gate_stats(GATED, TEXTS, measures="gate_q50", ci=0.9, run=run)


def random_prompt(tokens: int, seed: int) -> dict[int, LayerSums]:
    """Two layers of two heads; the second has no gate."""
    generator = torch.Generator().manual_seed(seed)
    scores, output = (torch.rand(tokens, 2, 3, generator=generator) for _ in range(2))
    before = OutputSums.of(output, histogram=True)
    gates = GateSums.of(scores, histogram=True)
    mean = scores.double().mean((0, 2)).numpy()
    after = OutputSums.of(output * scores)
    return {
        1: LayerSums(tokens, 2, gate_mean=mean, gates=gates, output_before=before, output_after=after),
        2: LayerSums(tokens, 2, output_before=before),
    }


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.sampled_from(["head", "layer", "model"]), st.data())
def test_merged_sums_are_those_of_all_prompts(lengths: list[int], by: tables.By, data: st.DataObject) -> None:
    prompts = [random_prompt(tokens, seed) for seed, tokens in enumerate(lengths)]
    options, bootstrap = GateOptions(), Bootstrap(0.9, resamples=10)

    def sums_of(some: list[int]) -> ModelSums:
        layer, head = np.array([1, 1, 2, 2]), np.array([1, 2, 1, 2])
        sums = ModelSums("a", GATE_MEASURES, options, layer, head, bootstrap, len(lengths))
        for prompt in some:
            rows = join_layers(layer_rows(n, one, GATE_MEASURES, options) for n, one in prompts[prompt].items())
            sums.add(prompt, lengths[prompt], rows, pools=prompts[prompt])
        return sums

    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    a, b = sums_of(order[:cut]), sums_of(order[cut:])
    at_once = tables.summarise([sums_of(list(range(len(lengths))))], by)
    for _ in range(2):  # neither is changed by it
        pd.testing.assert_frame_equal(tables.summarise([merge(a, b)], by), at_once, rtol=1e-10)
    assert at_once.gate_std.notna().any()


class TestTokens:
    @pytest.mark.parametrize("model", GATED)
    def test_are_those_of_a_sort(self, tiny_trio: Path, run: Run, model: str) -> None:
        prompts = captured(tiny_trio, model)
        table = gate_tokens(model, TEXTS, count=3, layers=[1, 3], heads=[4, 2], run=run)
        assert list(table) == [
            "model", "prompt", "layer", "head", "end", "rank", "position", "token", "score", "context",
        ]  # fmt: skip
        assert len(table) == 2 * 2 * 2 * 3
        for (layer, head, end), group in table.groupby(["layer", "head", "end"]):
            everything = [
                (score, number, position)
                for number, prompt in enumerate(prompts, start=1)
                for position, score in enumerate(prompt[layer].gate_scores[:, head - 1].mean(-1).tolist(), start=1)  # type: ignore[index]
            ]
            everything.sort(key=lambda one: -one[0] if end == "open" else one[0])
            np.testing.assert_allclose(group.score, [score for score, *_ in everything[:3]], rtol=1e-5)
            assert group["rank"].tolist() == [1, 2, 3]
            for _, row in group.iterrows():
                found = prompts[int(row.prompt[-1]) - 1][layer].gate_scores[row.position - 1, head - 1].mean()  # type: ignore[index]
                assert row.score == pytest.approx(found.item(), rel=1e-5)

    def test_context(self, run: Run) -> None:
        table = gate_tokens("gate_headwise", ["the cat sat on the mat"], count=50, layers=[1], heads=[1], run=run)
        opened = table[table.end == "open"].set_index("position").sort_index()
        assert opened.token.tolist()[0] == "<s>"
        assert opened.context.iloc[0].startswith("[<s>]")
        assert len(opened) < 50  # no more than there are
        # brackets aside, every context is a part of the text
        for position, row in opened.iterrows():
            assert row.context.replace("[", "").replace("]", "") in "<s>the cat sat on the mat"
            assert f"[{row.token}]".replace("␣", " ") in row.context, position

    def test_a_model_without_a_gate_is_left_out(self, run: Run, caplog: pytest.LogCaptureFixture) -> None:
        logging.getLogger("gattn_viz").propagate = True  # the command line turns it off
        table = gate_tokens(["baseline", "gate_headwise"], TEXTS, count=1, run=run)
        assert table.model.unique().tolist() == ["gate_headwise"]
        assert len(table) == 3 * 4 * 2
        assert "baseline has no gate: left out" in caplog.text

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"count": 0}, "count is 0 tokens; expected 1 or more"),
            ({"layers": [4]}, "no layer 4: gate_headwise has 3 layers; expected 1 to 3"),
            ({"heads": [0]}, "no head 0: gate_headwise has 4 heads a layer; expected 1 to 4"),
        ],
    )
    def test_what_is_not_there(self, run: Run, options: dict[str, Any], said: str) -> None:
        with pytest.raises(GattnVizError, match=said):
            gate_tokens("gate_headwise", [Prompt("a", "the cat")], run=run, **options)

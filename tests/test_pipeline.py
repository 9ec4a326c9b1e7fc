"""What a notebook calls, on tiny checkpoints, against the models' own eager weights."""

from __future__ import annotations

import gc
import logging
import math
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd
import pytest
import torch

import gattn_viz
from gattn_viz import GattnVizError, Options, Prompt, Run, attention_maps, sink_stats
from gattn_viz.capture import collector
from gattn_viz.capture import run as capture_run
from gattn_viz.capture.collector import Request
from gattn_viz.capture.run import stream
from gattn_viz.metrics.layer import LayerSums
from gattn_viz.metrics.measures import SINK_MEASURES
from gattn_viz.metrics.over_prompts import layer_rows
from gattn_viz.metrics.pooling import MapView
from gattn_viz.models.loading import load
from gattn_viz.models.names import resolve
from gattn_viz.pipeline.stats import IN_WORDS
from tests.conftest import GATES, tiny_model

PROMPTS = [Prompt("cats", "the cat sat on the mat", None, None), Prompt("dogs", "the dog and the log", None, None)]


@pytest.fixture
def run(tiny_trio: Path) -> Run:
    return Run(checkpoints=str(tiny_trio))


def eager_maps(trio: Path, variant: str, text: str) -> list[np.ndarray]:
    """(H, T, T) of each layer, straight from the model."""
    loaded = load(resolve(variant, str(trio)))
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        out = loaded.model(torch.tensor([loaded.tokenizer(text)["input_ids"]]), output_attentions=True)
    return [weights[0].double().numpy() for weights in out.attentions]


class TestSinkStats:
    def test_equals_what_the_eager_weights_give(self, tiny_trio: Path, run: Run) -> None:
        table = sink_stats(prompts=PROMPTS, run=run)
        assert len(table) == 3 * 3 * 4
        assert table.model.unique().tolist() == list(GATES)
        for variant in GATES:
            maps = [eager_maps(tiny_trio, variant, prompt.text) for prompt in PROMPTS]
            for layer in range(3):
                for head in range(4):
                    # every query but the first of every prompt, to the first key
                    mass = np.concatenate([of_prompt[layer][head][1:, 0] for of_prompt in maps])
                    row = table[
                        (table.model == variant) & (table.layer == layer + 1) & (table["head"] == head + 1)
                    ]
                    assert row.first_token_mass.item() == pytest.approx(mass.mean(), abs=2e-6)
                    rate = np.mean([of_prompt[layer][head][:, 0].mean() > 0.3 for of_prompt in maps])
                    assert row.sink_rate.item() == rate
                    assert row.n_queries.item() == len(mass)

    @pytest.mark.parametrize("changes", [{"batch_size": 2}, {"batch_size": 3, "chunk": 4}])
    def test_batches_chunks_and_prompts_apart_agree(self, run: Run, changes: dict[str, int]) -> None:
        prompts = [*PROMPTS, "the", Prompt("long", "the rain fell on the roof of the house and on the log")]
        other = Run(checkpoints=run.checkpoints, **changes)  # type: ignore[arg-type]
        one, two = (sink_stats("gate_headwise", prompts, per_prompt=True, run=how) for how in (run, other))
        pd.testing.assert_frame_equal(one, two, rtol=1e-3, atol=1e-5)
        assert one.prompt.unique().tolist() == ["cats", "dogs", "prompt-1", "long"]

        one, two = (sink_stats("gate_headwise", prompts, ci=0.9, resamples=50, run=how) for how in (run, other))
        pd.testing.assert_frame_equal(one, two, rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("by", ["head", "layer", "model"])
    def test_the_order_of_prompts_changes_nothing(self, run: Run, by: Literal["head", "layer", "model"]) -> None:
        """They begin alike, so that the largest activation is that of several but for rounding."""
        prompts = [*PROMPTS, Prompt("long", "the rain fell on the roof of the house and on the log")]
        other = replace(run, batch_size=2, chunk=3)
        one, two = (
            sink_stats("gate_headwise", texts, by=by, run=how)
            for texts, how in ((prompts, run), (prompts[::-1], other))
        )
        pd.testing.assert_frame_equal(one, two, rtol=1e-4, atol=1e-6)

    def test_a_model_whose_weights_are_all_zero(self, tiny_trio: Path, tmp_path: Path) -> None:
        shutil.copytree(tiny_trio / "baseline", tmp_path / "baseline")
        model = tiny_model("baseline")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.save_pretrained(tmp_path / "baseline")
        whole, parts = (
            sink_stats("baseline", PROMPTS, by="layer", run=Run(str(tmp_path), chunk=chunk)) for chunk in (None, 3)
        )
        pd.testing.assert_frame_equal(whole, parts, rtol=1e-6)
        assert whole.max_activation_ratio.isna().all()
        assert (whole.max_activation == 0).all()
        assert (whole.max_activation_position == 1).all()
        np.testing.assert_allclose(whole.first_token_mass, whole.uniform_null, rtol=1e-6)
        np.testing.assert_allclose(whole.entropy_ratio, 1, rtol=1e-6)

    def test_perplexity_is_that_of_the_models_own_loss(self, tiny_trio: Path, run: Run) -> None:
        losses, predictions = [], []
        loaded = load(resolve("gate_headwise", str(tiny_trio)))
        for prompt in PROMPTS:
            ids = torch.tensor([loaded.tokenizer(prompt.text)["input_ids"]])
            with torch.no_grad():
                losses.append(loaded.model(ids, labels=ids).loss.item())
            predictions.append(ids.shape[1] - 1)
        apart = sink_stats("gate_headwise", PROMPTS, measures="perplexity", per_prompt=True, by="layer", run=run)
        np.testing.assert_allclose(apart.perplexity, np.repeat(np.exp(losses), 3), rtol=1e-5)
        together = sink_stats("gate_headwise", PROMPTS, measures="perplexity", run=run)
        np.testing.assert_allclose(together.perplexity, np.exp(np.average(losses, weights=predictions)), rtol=1e-5)
        assert len(together) == 12
        first_alone = sink_stats(
            "gate_headwise", ["the"], measures="perplexity", options=Options(first_row="include"),
            run=Run(checkpoints=run.checkpoints, max_tokens=1),
        )  # fmt: skip
        assert first_alone.perplexity.isna().all()

    def test_only_what_is_asked_is_captured(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        requests = []

        def noting(model: object, ids: object, request: Request, *rest: object, **options: object) -> None:
            requests.append(request)
            stream(model, ids, request, *rest, **options)  # type: ignore[arg-type]

        monkeypatch.setattr("gattn_viz.pipeline.stats.stream", noting)
        everything = sink_stats("gate_headwise", PROMPTS, by="layer", run=run)
        for names, needs, loss in [
            (["gate_mean", "row_max"], {"gate", "row_max"}, False),
            (["max_activation_channel"], {"residual"}, False),
            (["entropy", "perplexity"], {"entropy"}, True),
            (["perplexity"], {"first_token"}, True),  # so that layers show
        ]:
            table = sink_stats("gate_headwise", PROMPTS, measures=names, by="layer", run=run)
            assert requests[-1] == Request(needs=frozenset(needs), loss=loss)
            pd.testing.assert_frame_equal(table, everything[table.columns], rtol=1e-4, atol=1e-5)
        every = frozenset(measure.needs for measure in SINK_MEASURES if measure.needs is not None)
        assert requests[0] == Request(needs=every, loss=True)

    def test_how_attention_was_computed(self, run: Run, caplog: pytest.LogCaptureFixture) -> None:
        logging.getLogger("gattn_viz").propagate = True  # the command line turns it off
        for names, path, words in [
            ("all", "blocks", "blocks of rows, float32"),
            ("gate_mean", "fused", "fused kernel"),
        ]:
            with caplog.at_level(logging.INFO, "gattn_viz"):
                table = sink_stats(["gate_headwise", "baseline"], PROMPTS, measures=names, run=run)
            assert table.attrs["attention_path"] == {"gate_headwise": [path], "baseline": [path]}
            assert table.attrs["chat"] is False
            for model in ("gate_headwise", "baseline"):
                assert f"{model} attention: {words}\n" in caplog.text

    def test_each_way_has_words(self) -> None:
        assert set(IN_WORDS) == set(get_args(collector.Path))

    def test_no_prompt_is_kept(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        taken: list[weakref.ref[LayerSums]] = []
        alive = []

        def noting(layer: int, sums: LayerSums, *rest: object) -> object:
            taken.append(weakref.ref(sums))
            alive.append(sum(one() is not None for one in taken))
            return layer_rows(layer, sums, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr("gattn_viz.pipeline.stats.layer_rows", noting)
        sink_stats("baseline", ["the cat"] * 6, run=Run(run.checkpoints, batch_size=2))
        assert len(alive) == 18
        assert max(alive) <= 2

    def test_intervals_are_of_the_prompts(self, run: Run, caplog: pytest.LogCaptureFixture) -> None:
        # two prompts: of the four equally likely resamples two hold both, and one each holds one twice
        table = sink_stats("baseline", PROMPTS, by="model", measures="perplexity", ci=0.9, run=run)
        alone = sink_stats("baseline", PROMPTS, by="model", measures="perplexity", per_prompt=True, run=run)
        assert table.perplexity_ci_low.item() == pytest.approx(alone.perplexity.min())
        assert table.perplexity_ci_high.item() == pytest.approx(alone.perplexity.max())
        # the same resamples for all models: two names of one checkpoint have one interval
        twice = sink_stats(["baseline", f"{run.checkpoints}/baseline"], PROMPTS, ci=0.9, by="layer", run=run)
        one, other = (group.drop(columns="model").reset_index(drop=True) for _, group in twice.groupby("model"))
        pd.testing.assert_frame_equal(one, other)

        logging.getLogger("gattn_viz").propagate = True  # the command line turns it off
        caplog.clear()
        single = sink_stats(["baseline", "gate_headwise"], PROMPTS[:1], ci=0.9, run=run)
        assert single.first_token_mass_ci_low.isna().all()
        assert caplog.text.count("there is one prompt only, which says nothing about chance") == 1
        assert "too narrow" not in caplog.text

    def test_intervals_of_few_prompts_are_too_narrow(self, run: Run, caplog: pytest.LogCaptureFixture) -> None:
        logging.getLogger("gattn_viz").propagate = True  # the command line turns it off
        for count, times in ((2, 1), (9, 1), (10, 0)):
            caplog.clear()
            texts = [f"the cat sat {'on ' * n}" for n in range(count)]
            sink_stats(["baseline", "gate_headwise"], texts, measures="row_max", ci=0.9, resamples=5, run=run)
            said = f"there are {count} prompts only: the intervals of fewer than 10 are too narrow"
            assert caplog.text.count(said) == times

    def test_what_does_not_go_together(self) -> None:
        for options, said in [
            ({"ci": 1.0}, "ci is 1.0; expected a level between 0 and 1"),
            ({"ci": 0.9, "per_prompt": True}, "a row that is one prompt has no interval"),
            ({"ci": 0.9, "measures": ["uniform_null"]}, "uniform_null has no interval"),
            ({"measures": ["nonsense"]}, "no measure 'nonsense'; expected all, or some of first_token_mass"),
        ]:
            with pytest.raises(GattnVizError, match=said):
                sink_stats(**options)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"chunk": 0}, "chunk is 0; expected a whole number, 1 or more"),
            ({"max_tokens": 0}, "max_tokens is 0; expected a whole number, 1 or more"),
            ({"max_tokens": "9"}, "max_tokens is '9'; expected"),
            ({"batch_size": None}, "batch_size is None; expected"),
            ({"batch_size": 1.5}, "batch_size is 1.5; expected"),
            ({"device": 0}, "device is 0; expected a text, such as 'auto'"),
            ({"dtype": float}, "dtype is <class 'float'>; expected a text, such as 'auto'"),
        ],
    )
    def test_runs_that_are_none(self, options: dict[str, object], said: str) -> None:
        with pytest.raises(GattnVizError, match=said):
            Run(**options)  # type: ignore[arg-type]

    def test_many_prompts_that_are_cut_are_said_once(self, run: Run, caplog: pytest.LogCaptureFixture) -> None:
        logging.getLogger("gattn_viz").propagate = True  # the command line turns it off
        short = Run(run.checkpoints, max_tokens=3)
        texts = ["the cat sat", "the dog sat", "a cat sat", "a dog sat"]
        for count, warnings in ((3, 3), (4, 1)):
            caplog.clear()
            sink_stats("baseline", [*texts[:count], "a"], measures="entropy", run=short)
            assert len([message for message in caplog.messages if "cut to 3 tokens" in message]) == warnings
        assert "baseline: 4 of 5 prompts cut to 3 tokens" in caplog.text

    def test_a_prompt_longer_than_the_model_s_positions(self, run: Run) -> None:
        with pytest.raises(GattnVizError, match=r"but the model has 64 positions; expected .*--max-tokens 64"):
            sink_stats("baseline", "the cat sat on the log " * 30, run=Run(run.checkpoints, chunk=8))

    def test_gate_mean_only_where_there_is_a_gate(self, run: Run) -> None:
        table = sink_stats(prompts=PROMPTS, by="model", run=run).set_index("model")
        assert np.isnan(table.gate_mean["baseline"])
        assert 0 < table.gate_mean["gate_headwise"] < 1
        assert 0 < table.gate_mean["gate_elementwise"] < 1

    def test_plain_texts_are_prompts(self, run: Run) -> None:
        table = sink_stats(["baseline"], ["the cat", PROMPTS[0]], per_prompt=True, by="model", run=run)
        assert table.prompt.tolist() == ["prompt-1", "cats"]

    def test_bos_and_max_tokens(self, run: Run, caplog: pytest.LogCaptureFixture) -> None:
        def tokens(**changes: object) -> int:
            options = Run(checkpoints=run.checkpoints, **changes)  # type: ignore[arg-type]
            return int(sink_stats(["baseline"], PROMPTS[:1], by="model", run=options).tokens.item())

        assert tokens() == tokens(bos="never") + 1
        logging.getLogger("gattn_viz").propagate = True  # the command line turns it off
        assert tokens(max_tokens=4) == 4
        assert "baseline: prompt 'cats' cut to 4 tokens" in caplog.text

    def test_a_one_token_prompt(self, run: Run) -> None:
        with pytest.raises(
            GattnVizError, match=r"^prompt 'cats' has one token, .* use a larger --max-tokens, --first-row"
        ):
            sink_stats(["baseline"], PROMPTS, run=Run(checkpoints=run.checkpoints, max_tokens=1))
        table = sink_stats(
            ["baseline"],
            PROMPTS,
            by="model",
            options=Options(first_row="include"),
            run=Run(checkpoints=run.checkpoints, max_tokens=1),
        )
        assert table.first_token_mass.item() == table.uniform_null.item() == 1

    def test_two_checkpoints_of_one_name_stay_apart(self, tiny_trio: Path, run: Run) -> None:
        table = sink_stats(["baseline", str(tiny_trio / "baseline")], PROMPTS, by="model", run=run)
        assert len(table) == 2
        assert table.model.nunique() == 2

    def test_progress(self, run: Run) -> None:
        calls: list[tuple[str, int, int]] = []
        sink_stats(["baseline"], PROMPTS, run=run, progress=lambda *call: calls.append(call))
        assert calls == [("baseline", done, 6) for done in range(1, 7)]

    def test_prompts_and_models_that_are_given_twice(self, run: Run) -> None:
        twice = [PROMPTS[0], Prompt("cats", "another text", None, None)]
        with pytest.raises(GattnVizError, match=r"^2 prompts have the id 'cats'; expected an id of its own"):
            sink_stats(["baseline"], twice, run=run)
        with pytest.raises(GattnVizError, match=r"^a model is given twice in baseline, baseline; expected"):
            sink_stats(["baseline", "baseline"], PROMPTS, run=run)

    def test_one_model_and_one_prompt_need_no_list(self, run: Run) -> None:
        table = sink_stats("baseline", "the cat sat", by="model", run=run)
        assert table.model.tolist() == ["baseline"]
        assert table.n_prompts.tolist() == [1]

    def test_weights_that_give_nan(self, tiny_trio: Path, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        for variant in ("baseline", "gate_headwise"):
            shutil.copytree(tiny_trio / variant, tmp_path / variant)
            file = tmp_path / variant / "model.safetensors"
            weights = load_file(file)
            weights["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
            save_file(weights, file, {"format": "pt"})
            with pytest.raises(
                GattnVizError, match=rf"^layer 2 of {variant} gives NaN or infinity on prompt '(cats|dogs)'"
            ):
                sink_stats([variant], PROMPTS, run=Run(checkpoints=str(tmp_path)))
            for names in ("first_token_mass", "received,entropy", "gate_mean", "value_norm_rest", "perplexity"):
                measures = names.replace("received", "top_sink_mass")
                if measures != "gate_mean" or variant == "gate_headwise":
                    with pytest.raises(GattnVizError, match=r"^layer 3 of"):
                        sink_stats([variant], PROMPTS, measures=measures, run=Run(checkpoints=str(tmp_path)))
        with pytest.raises(GattnVizError, match=r"^layer 3 of baseline gives NaN"):
            attention_maps(["baseline"], PROMPTS, layers=[3], run=Run(checkpoints=str(tmp_path)))

    def test_a_tokenizer_of_another_model(self, tiny_trio: Path, tmp_path: Path) -> None:
        shutil.copytree(tiny_trio / "baseline", tmp_path / "small")
        tiny_model("baseline", vocab_size=40).save_pretrained(tmp_path / "small")
        with pytest.raises(GattnVizError, match=r"^the tokenizer of small gives token \d+, but the model has 40"):
            sink_stats([str(tmp_path / "small")], PROMPTS)

    @pytest.mark.parametrize(
        "wrong", [{"first_row": "maybe"}, {"sink_threshold": 2}, {"sink_threshold": float("nan")}]
    )
    def test_options_that_are_none(self, wrong: dict[str, object]) -> None:
        with pytest.raises(GattnVizError, match="expected"):
            Options(**wrong)  # type: ignore[arg-type]
        with pytest.raises(GattnVizError, match="by is 'token'; expected head, layer, model"):
            sink_stats(by="token")  # type: ignore[arg-type]

    def test_nothing_to_do(self, run: Run) -> None:
        with pytest.raises(GattnVizError, match="no model was given"):
            sink_stats([], PROMPTS, run=run)
        with pytest.raises(GattnVizError, match="no prompt was given"):
            sink_stats(["baseline"], [], run=run)


class TestAttentionMaps:
    def test_are_the_eager_weights(self, tiny_trio: Path, run: Run) -> None:
        sets = attention_maps(prompts=PROMPTS, layers=[3, 1], heads="all", run=run)
        assert [(one.model, one.prompt) for one in sets] == [(v, p.id) for v in GATES for p in PROMPTS]
        for one in sets:
            text = {prompt.id: prompt.text for prompt in PROMPTS}[one.prompt]
            weights = eager_maps(tiny_trio, one.model, text)
            assert one.layers == (3, 1)
            assert one.heads == (1, 2, 3, 4)
            np.testing.assert_allclose(one.probabilities[0], weights[2], atol=2e-6)
            np.testing.assert_allclose(one.probabilities[1], weights[0], atol=2e-6)
            assert len(one.tokens) == weights[0].shape[-1]
            assert one.tokens[0] == "<s>"

    def test_mean_and_chosen_heads(self, run: Run) -> None:
        [all_heads] = attention_maps(["baseline"], PROMPTS[:1], layers=[2], heads="all", run=run)
        [mean] = attention_maps(["baseline"], PROMPTS[:1], layers=[2], run=run)
        [some] = attention_maps(["baseline"], PROMPTS[:1], layers=[2], heads=[4, 1], run=run)
        assert mean.heads is None
        np.testing.assert_allclose(mean.probabilities[:, 0], all_heads.probabilities.mean(1), atol=1e-6)
        assert some.heads == (4, 1)
        np.testing.assert_array_equal(some.probabilities, all_heads.probabilities[:, [3, 0]])

    def test_default_layers(self, run: Run) -> None:
        [maps] = attention_maps(["baseline"], PROMPTS[:1], run=run)
        assert maps.layers == (1, 2, 3)
        [maps] = attention_maps(["baseline"], PROMPTS[:1], layers="all", run=run)
        assert maps.layers == (1, 2, 3)
        from gattn_viz.pipeline.maps import choose_layers

        assert choose_layers(None, range(1, 29)) == (1, 7, 21, 28)
        assert choose_layers(None, [1]) == (1,)
        assert choose_layers(None, range(1, 81)) == (1, 20, 60, 80)
        assert choose_layers(None, [4, 8, 12, 16, 20]) == (4, 12, 20)  # a hybrid model's
        assert choose_layers("all", [4, 8]) == (4, 8)

    def test_a_layer_that_is_not_there(self, run: Run) -> None:
        with pytest.raises(GattnVizError, match="no layer 4: baseline has 3 layers; expected 1 to 3"):
            attention_maps(["baseline"], PROMPTS[:1], layers=[4], run=run)

    @pytest.mark.parametrize("pool", ["max", "mean"])
    @pytest.mark.parametrize("heads", ["mean", "all", (4, 1)])
    @pytest.mark.parametrize("chunk", [None, 5])
    def test_views_are_those_of_the_eager_weights(
        self,
        tiny_trio: Path,
        run: Run,
        pool: Literal["max", "mean"],
        heads: Literal["mean", "all"] | tuple[int, ...],
        chunk: int | None,
    ) -> None:
        """13 tokens, all queries in buckets of two, all keys but the first in buckets of three."""
        text = "the rain fell on the roof of the house"
        view = MapView(keys=(2, None), max_cells=7, pool=pool)
        [maps] = attention_maps(
            ["gate_headwise"], [text], layers=[2], heads=heads, view=view, run=replace(run, chunk=chunk)
        )
        weights = eager_maps(tiny_trio, "gate_headwise", text)[1]
        weights = {"mean": weights.mean(0, keepdims=True), "all": weights}.get(str(heads), weights[[3, 0]])
        tokens = weights.shape[-1]
        assert tokens == len(maps.tokens) == maps.cells.tokens
        expected = np.full((len(weights), len(maps.cells.queries), len(maps.cells.keys)), np.nan)
        q_size, k_size = math.ceil(tokens / 7), math.ceil((tokens - 1) / 7)
        for head, r, c in np.ndindex(*expected.shape):
            queries = range(r * q_size, min((r + 1) * q_size, tokens))
            keys = range(1 + c * k_size, min(1 + (c + 1) * k_size, tokens))
            seen = [weights[head, q, k] for q in queries for k in keys if k <= q]
            if seen:
                expected[head, r, c] = max(seen) if pool == "max" else sum(seen) / len(seen)
        assert np.isnan(expected).any()
        np.testing.assert_allclose(maps.probabilities[0], expected, atol=2e-6)
        assert (maps.cells.queries.size, maps.cells.keys.size, maps.cells.pool) == (q_size, k_size, pool)

    def test_a_part_is_exact(self, run: Run) -> None:
        [whole] = attention_maps(["baseline"], PROMPTS[:1], run=run)
        [part] = attention_maps(["baseline"], PROMPTS[:1], view=MapView((3, 5), (2, 4), 512), run=run)
        assert part.probabilities.shape[-2:] == (3, 3)
        np.testing.assert_allclose(part.probabilities, whole.probabilities[..., 2:5, 1:4], atol=1e-6)
        assert part.cells.pool is None
        assert part.tokens == whole.tokens

    def test_a_position_beyond_a_prompt_is_said_before_anything_is_run(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        [long] = attention_maps(["baseline"], PROMPTS[:1], run=run)
        monkeypatch.setattr("gattn_viz.pipeline.maps.capture", None)
        tokens = len(long.tokens)
        with pytest.raises(
            GattnVizError,
            match=rf"^no queries {tokens}-{tokens + 1}: prompt 'cats' has T = {tokens}; expected positions 1 to",
        ):
            attention_maps(["baseline"], PROMPTS[:1], view=MapView((tokens, tokens + 1)), run=run)

    @pytest.mark.parametrize("weight", ["q_proj", "k_proj", "v_proj"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_nan_of_an_earlier_layer_is_said(
        self, weight: str, dtype: str, tiny_trio: Path, tmp_path: Path
    ) -> None:
        """The kernel gives 0 for a short prompt whose scores are all NaN, which would be a plausible map later."""
        from safetensors.torch import load_file, save_file

        shutil.copytree(tiny_trio / "baseline", tmp_path / "baseline")
        file = tmp_path / "baseline" / "model.safetensors"
        weights = load_file(file)
        weights[f"model.layers.0.self_attn.{weight}.weight"].fill_(torch.nan)
        save_file(weights, file, {"format": "pt"})
        run = Run(checkpoints=str(tmp_path), dtype=dtype)
        with pytest.raises(GattnVizError, match=r"^layer 3 of baseline gives NaN"):
            attention_maps(["baseline"], PROMPTS, layers=[3], run=run)
        with pytest.raises(GattnVizError, match=r"^layer [12] of baseline gives NaN"):
            sink_stats(["baseline"], PROMPTS, measures="value_norm_first", run=run)

    def test_weights_that_give_nan_are_said_of_pooled_maps(self, tiny_trio: Path, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        shutil.copytree(tiny_trio / "baseline", tmp_path / "baseline")
        file = tmp_path / "baseline" / "model.safetensors"
        weights = load_file(file)
        weights["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
        save_file(weights, file, {"format": "pt"})
        for pool in ("max", "mean"):
            with pytest.raises(GattnVizError, match=r"^layer 3 of baseline gives NaN"):
                attention_maps(
                    ["baseline"],
                    PROMPTS,
                    layers=[3],
                    view=MapView(max_cells=3, pool=pool),  # type: ignore[arg-type]
                    run=Run(checkpoints=str(tmp_path)),
                )

    def test_one_token(self, run: Run) -> None:
        [maps] = attention_maps(["baseline"], PROMPTS[:1], run=Run(checkpoints=run.checkpoints, max_tokens=1))
        assert maps.probabilities.tolist() == [[[[1.0]]]] * 3


def test_the_checkpoint_is_always_said(tiny_trio: Path, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("gattn_viz").propagate = True  # the command line turns it off
    with caplog.at_level(logging.INFO, "gattn_viz"):
        sink_stats(["gate_headwise"], PROMPTS, run=run)
    said = f"gate_headwise -> directory {tiny_trio / 'gate_headwise'}, float32 on cpu, 3 layers of 4 heads"
    assert said in caplog.text


def test_a_prompt_far_longer_than_the_demo_was_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("gattn_viz").propagate = True
    for tokens, said in ((512, False), (513, True)):
        caplog.clear()
        attention_maps(["baseline"], ["the cat " * 600], layers=[1], run=Run(max_tokens=tokens))
        assert (f"baseline: {tokens} tokens, but the demo was trained on 129 at most" in caplog.text) == said


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"models": []}, "no model was given"),
        ({"models": [None]}, "a model is None; expected its name"),
        ({"prompts": []}, "no prompt was given"),
        ({"layers": []}, r"layers are \[\]; expected all, or a list of one or more numbers from 1"),
        ({"layers": 3}, "layers are 3; expected all"),
        ({"layers": "3"}, "layers are '3'; expected all"),
        ({"layers": [1.5]}, r"layers are \[1.5\]; expected all"),
        ({"heads": []}, r"heads are \[\]; expected mean or all"),
        ({"heads": "each"}, "heads are 'each'; expected mean or all"),
    ],
)
def test_maps_that_are_none(run: Run, asked: dict[str, object], said: str) -> None:
    with pytest.raises(GattnVizError, match=said):
        attention_maps(**{"models": ["baseline"], "prompts": ["the cat"], "run": run, **asked})  # type: ignore[arg-type]


def test_layers_may_be_an_array(run: Run) -> None:
    [maps] = attention_maps(["baseline"], ["the cat"], layers=np.array([1, 3]), heads=range(1, 3), run=run)  # type: ignore[arg-type]
    assert maps.probabilities.shape[:2] == (2, 2)


def test_a_model_is_let_go_before_the_next_is_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:

    alive: list[weakref.ref[torch.nn.Module]] = []

    def load_and_look(*args: object, **options: object) -> object:
        gc.collect()
        assert [model() for model in alive] == [None] * len(alive)
        loaded = load(*args, **options)  # type: ignore[arg-type]
        alive.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr("gattn_viz.pipeline.run.load", load_and_look)
    sink_stats(prompts=PROMPTS, run=run)
    attention_maps(prompts=PROMPTS, run=run)
    assert len(alive) == 6


def test_public_names_exist() -> None:
    for name in gattn_viz.__all__:
        assert getattr(gattn_viz, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gattn_viz.nonsense


def test_projections_are_looked_up_once_a_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    original = capture_run.output_projections
    monkeypatch.setattr(capture_run, "output_projections", lambda *of: looked.append(1) or original(*of))
    steps: list[tuple[str, int, int]] = []
    texts = ["the cat", "the cat sat on the mat", "rain"]
    models = ["baseline", "gate_headwise"]
    maps = attention_maps(models, texts, weight="output", run=run, progress=lambda *step: steps.append(step))
    assert len(looked) == len(models)
    assert steps == [(model, done, 3) for model in models for done in (1, 2, 3)]
    # and each prompt has its own maps, whatever order they ran in
    for text, one in zip(texts, maps[:3], strict=True):
        [alone] = attention_maps(["baseline"], [text], weight="output", run=run)
        np.testing.assert_array_equal(one.probabilities, alone.probabilities)

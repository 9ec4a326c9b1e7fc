"""What a notebook calls, on tiny checkpoints, against the models' own eager weights."""

from __future__ import annotations

import gc
import logging
import shutil
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import gattn_viz
from gattn_viz import GattnVizError, Options, Prompt, Run, attention_maps, sink_stats
from gattn_viz.models.loading import load
from gattn_viz.models.names import resolve
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

    def test_batches_and_prompts_apart_agree(self, run: Run) -> None:
        one = sink_stats(prompts=PROMPTS, run=run, per_prompt=True)
        two = sink_stats(prompts=PROMPTS, run=Run(checkpoints=run.checkpoints, batch_size=2), per_prompt=True)
        pd.testing.assert_frame_equal(one, two, rtol=1e-4, atol=1e-5)
        assert one.prompt.unique().tolist() == ["cats", "dogs"]

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
            GattnVizError, match=r"^prompt 'cats' has one token, .* use a longer prompt or --first-row"
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
                GattnVizError, match=rf"^layer 2 of {variant} gives NaN or infinity on prompt 'cats'"
            ):
                sink_stats([variant], PROMPTS, run=Run(checkpoints=str(tmp_path)))
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
        from gattn_viz.pipeline.maps import _choose_layers

        assert _choose_layers(None, 28) == (1, 7, 21, 28)
        assert _choose_layers(None, 1) == (1,)
        assert _choose_layers(None, 80) == (1, 20, 60, 80)

    def test_a_layer_that_is_not_there(self, run: Run) -> None:
        with pytest.raises(GattnVizError, match="no layer 4: baseline has 3 layers; expected 1 to 3"):
            attention_maps(["baseline"], PROMPTS[:1], layers=[4], run=run)

    def test_one_token(self, run: Run) -> None:
        [maps] = attention_maps(["baseline"], PROMPTS[:1], run=Run(checkpoints=run.checkpoints, max_tokens=1))
        assert maps.probabilities.tolist() == [[[[1.0]]]] * 3


def test_the_checkpoint_is_always_said(tiny_trio: Path, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("gattn_viz").propagate = True  # the command line turns it off
    with caplog.at_level(logging.INFO, "gattn_viz"):
        sink_stats(["gate_headwise"], PROMPTS, run=run)
    said = f"gate_headwise -> directory {tiny_trio / 'gate_headwise'}, float32 on cpu, 3 layers of 4 heads"
    assert said in caplog.text


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

"""The effect in a model that no one here trained, against transformers' own eager weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gattn_viz import Run, sink_stats
from gattn_viz.models.gguf import place
from gattn_viz.models.names import resolve
from gattn_viz.prompts import read_prompts

pytestmark = pytest.mark.weights

ROOT = Path(__file__).parents[1]
TEXT = read_prompts(ROOT / "sample_prompts" / "long_english.jsonl")[0].text
T = 104


@pytest.fixture(scope="module", autouse=True)
def _cache(converted_once: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATTN_VIZ_CACHE", str(converted_once))
        yield


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> pd.DataFrame:
    measures = ["first_token_mass", "max_activation", "max_activation_position", "top_sink_position", "perplexity"]
    run = Run(max_tokens=T, dtype="float32", device="cpu")
    return sink_stats([str(smollm2)], [TEXT], measures=measures, by="layer", run=run)


def test_the_sink_and_the_massive_activation(ours: pd.DataFrame) -> None:
    assert ours["tokens"].unique().tolist() == [T]
    assert ours["model"].unique().tolist() == ["SmolLM2-135M-Instruct.Q4_1"]
    assert ours["first_token_mass"].mean() == pytest.approx(0.475, abs=0.01)
    assert ours["first_token_mass"].idxmax() + 1 == 24
    assert ours["first_token_mass"].max() == pytest.approx(0.808, abs=0.01)
    largest = ours.set_index("layer")["max_activation"]
    assert largest.loc[:11].max() < 800
    assert largest.loc[12:28].between(22_500, 23_500).all()
    assert (ours["max_activation_position"][11:] == 1).all()  # the first token, from layer 12 on


def test_eager_weights_say_the_same(ours: pd.DataFrame, smollm2: Path) -> None:
    directory = place(resolve(str(smollm2)))
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory)(TEXT)["input_ids"][:T]])
    assert ids[0, 0] != model.config.bos_token_id
    with torch.no_grad():
        out = model(ids, labels=ids, output_attentions=True, output_hidden_states=True)
    mass = [float(layer[0, :, 1:, 0].double().mean()) for layer in out.attentions]
    assert ours["first_token_mass"].tolist() == pytest.approx(mass, rel=1e-4)
    # the last hidden state is that after the final norm
    largest = [float(layer.abs().max()) for layer in out.hidden_states[1:-1]]
    assert ours["max_activation"].tolist()[:-1] == pytest.approx(largest, rel=1e-4)
    tops = [int(torch.mode(layer[0].mean(0).argmax(-1))[0]) + 1 for layer in out.attentions[12:]]
    assert tops == ours["top_sink_position"].tolist()[12:] == [1] * 18
    assert ours["perplexity"].iloc[0] == pytest.approx(float(out.loss.exp()), rel=1e-4)


def test_the_figures_of_the_readme_are_its(smollm2: Path) -> None:
    drawn = pd.read_csv(ROOT / "figs" / "smollm2" / "sinks_and_activations.csv")
    measures = ["first_token_mass", "uniform_null", "max_activation"]
    again = sink_stats([str(smollm2)], measures=measures, by="layer", run=Run(dtype="float32", device="cpu"))
    pd.testing.assert_frame_equal(again[list(drawn.columns)], drawn, rtol=1e-3)
    [paper] = pd.read_csv(ROOT / "figs" / "smollm2" / "summary.csv").query("source == 'this run'").itertuples()
    assert paper.first_token_mass == pytest.approx(drawn["first_token_mass"].mean(), rel=1e-5)


def test_its_chat_template_has_a_system_turn_of_its_own(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gattn_viz")
    measures = ["first_token_mass", "top_sink_position"]
    model, text = [str(smollm2)], ["Why is the sky blue?"]
    table = sink_stats(model, text, measures=measures, by="model", run=Run(chat=True, device="cpu"))
    written = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    )
    by_hand = sink_stats(model, [written], measures=measures, by="model", run=Run(device="cpu"))
    pd.testing.assert_frame_equal(table, by_hand)
    assert "which puts '<|im_start|>system\\nYou are a helpful AI" in caplog.text

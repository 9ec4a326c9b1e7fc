"""Other families from a checkpoint on disk to tables and figures."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from gattn_viz.drawing.gates import draw_gate_maps
from gattn_viz.drawing.maps import draw_maps
from gattn_viz.errors import GattnVizError
from gattn_viz.pipeline.captions import caption
from gattn_viz.pipeline.gate_scores import gate_maps
from gattn_viz.pipeline.gates import gate_stats, gate_tokens
from gattn_viz.pipeline.maps import attention_maps
from gattn_viz.pipeline.paper import paper_data
from gattn_viz.pipeline.stats import sink_stats
from tests.capture.families import family_model
from tests.capture.gated_families import gated_model, present
from tests.models.checkpoints import save

TEXTS = ["the cat sat on the mat", "colourless green ideas"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories by family."""
    root = tmp_path_factory.mktemp("families")
    families = [name for name in ("qwen3_next", "laguna", "gpt_oss") if present(name)]
    found = {name: save(gated_model(name), root / name) for name in families}
    found["llama"] = save(family_model("llama"), root / "llama")
    return {name: str(directory) for name, directory in found.items()}


def test_a_hybrid_model(checkpoints: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    model = [checkpoints["qwen3_next"]]
    with caplog.at_level(logging.INFO, "gattn_viz"):
        table = gate_stats(model, TEXTS, by="layer")
    assert "qwen3_next: gate: elementwise, sigmoid of q_proj" in caplog.text
    assert table["layer"].tolist() == [4]
    assert 0 < table["gate_mean"][0] < 1
    assert sink_stats(model, TEXTS, by="layer")["gate_mean"][0] == pytest.approx(table["gate_mean"][0], rel=1e-5)
    message = (
        "^layer 1 of qwen3_next has no softmax attention but linear_attention, and so no map; expected one of 4$"
    )
    with pytest.raises(GattnVizError, match=message):
        attention_maps(model, TEXTS, layers=[1])
    [maps] = attention_maps(model, TEXTS[:1], weight="gate")
    assert maps.layers == (4,)
    assert (maps.n_layers, maps.gate, maps.weight) == (4, "elementwise", "gate")


def test_a_layer_without_a_gate(checkpoints: dict[str, str]) -> None:
    model = [checkpoints["qwen3_next"]]
    for call in (gate_maps, gate_tokens):
        with pytest.raises(GattnVizError, match=r"^layer 1 of qwen3_next has no gate; expected one of 4$"):
            call(model, TEXTS[:1], layers=[1])  # type: ignore[operator]


@pytest.mark.skipif(not present("laguna"), reason="not in this version of transformers")
def test_a_gate_that_is_not_bounded(checkpoints: dict[str, str]) -> None:
    """Softplus: scores above 1 keep their value in every measure, and figures say what they are."""
    model = [checkpoints["laguna"]]
    [maps] = gate_maps(model, TEXTS[:1], layers=[2])
    scores = maps.scores[0].astype(float)  # (T, H)
    assert scores.max() > 1
    table = gate_stats(model, TEXTS[:1], by="head")
    of_layer = table[table["layer"] == 2]
    np.testing.assert_allclose(of_layer["gate_mean"], scores.mean(0), rtol=1e-5)
    exact = np.quantile(scores, 0.95, axis=0, method="inverted_cdf")
    np.testing.assert_allclose(of_layer["gate_q95"], exact, rtol=1 / 127)
    words = "headwise, softplus of g_proj, which has no upper bound"
    assert maps.gate == words
    texts = [text.get_text().replace("\n", " ") for text in draw_gate_maps(maps).texts]
    assert any(f"Gate: {words}." in text for text in texts)
    data = paper_data(model, TEXTS[:1], figures=["gate_distribution", "gate_by_layer"])
    frame = data.frames["gate_distribution"]
    assert frame["high"].max() == 2 ** np.ceil(np.log2(table_largest(model)))
    assert frame["count"].sum() == len(maps.tokens) * (2 + 4)
    assert f"Gate of laguna: {words}." in caption("gate_by_layer", data)


@pytest.mark.skipif(not present("laguna"), reason="not in this version of transformers")
def test_layers_of_different_numbers_of_heads(checkpoints: dict[str, str]) -> None:
    model = [checkpoints["laguna"]]
    [maps] = attention_maps(model, TEXTS[:1], heads="mean")
    assert (maps.layers, maps.n_heads) == ((1, 2), 0)
    assert "mean over all heads" in draw_maps(maps).texts[0].get_text()
    for call in (attention_maps, gate_maps):
        with pytest.raises(GattnVizError, match=r"layers 1, 2 of laguna have 2 or 4 heads; expected one number"):
            call(model, TEXTS[:1], heads="all")  # type: ignore[operator]
        with pytest.raises(GattnVizError, match=r"^no head 3: layer 1 of laguna has 2 heads; expected 1 to 2$"):
            call(model, TEXTS[:1], heads=[3])  # type: ignore[operator]
    table = gate_tokens(model, TEXTS[:1], count=1)
    assert table.groupby("layer")["head"].nunique().tolist() == [2, 4]


def table_largest(model: list[str]) -> float:
    return float(gate_tokens(model, TEXTS[:1], count=1)["score"].max())


def test_without_a_gate(checkpoints: dict[str, str]) -> None:
    """It shows when the model is loaded: its configuration says nothing."""
    for call in (gate_stats, gate_tokens, gate_maps):
        with pytest.raises(GattnVizError, match=r"^no gate in llama; expected a model with a gate"):
            call([checkpoints["llama"]], TEXTS)  # type: ignore[operator]
    table = gate_stats([checkpoints["llama"], "gate_headwise"], TEXTS[:1], by="model")
    assert table["gate_mean"].isna().tolist() == [True, False]

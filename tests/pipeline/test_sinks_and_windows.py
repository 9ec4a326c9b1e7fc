"""A model with learned sinks and a window of 6 tokens in layer 1, from checkpoint to table and figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gattn_viz import Run, attention_maps, draw_maps, draw_paper_figure, paper_data, sink_stats
from gattn_viz.drawing.maps import draw_grid
from gattn_viz.pipeline.captions import caption
from tests.capture.test_learned_sinks import FAMILIES, model_of
from tests.conftest import tiny_tokenizer

TEXT = ["the cat sat on the mat and the dog sat on the log"]


@pytest.fixture(scope="module", params=["gpt_oss", "mimo_v2_flash"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(name: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("sinks") / name
    model_of(name).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def test_the_table(name: str, checkpoint: str) -> None:
    heads = sink_stats([checkpoint], TEXT)
    [maps] = attention_maps([checkpoint], TEXT, heads="all", layers="all")
    lacks = 1 - maps.probabilities[:, :, 1:].astype(float).sum(-1).mean(-1)  # of the queries after the first
    for layer in (1, 2):
        of_layer = heads[heads.layer == layer].learned_sink_mass.to_numpy()
        if layer in FAMILIES[name][2]:
            np.testing.assert_allclose(of_layer, lacks[layer - 1], atol=1e-6)
        else:
            assert np.isnan(of_layer).all()
    model = sink_stats([checkpoint], TEXT, by="model").learned_sink_mass.item()
    assert model == pytest.approx(np.nanmean(heads.groupby("layer").learned_sink_mass.mean()))


def above(name: str, share: float) -> str:
    """The title of a map whose rows lack a share."""
    return f"{name}, sink <0.01" if share < 0.005 else f"{name}, sink {share:.2f}"


def test_maps_say_what_their_rows_lack(name: str, checkpoint: str) -> None:
    [every] = attention_maps([checkpoint], TEXT, heads="all", layers=[2, 1])
    [some] = attention_maps([checkpoint], TEXT, heads=[4, 1], layers=[1])
    [mean] = attention_maps([checkpoint], TEXT, layers=[1])
    lacks = 1 - every.probabilities.astype(float).sum(-1).mean(-1)
    assert every.learned_sink is not None
    np.testing.assert_allclose(np.nan_to_num(every.learned_sink), lacks, atol=1e-6)
    assert some.learned_sink is not None
    np.testing.assert_allclose(some.learned_sink, every.learned_sink[1:, [3, 0]], rtol=1e-6)

    titles = [ax.get_title().replace("\n", " ") for ax in draw_maps(every).axes[:8]]
    without = 2 not in FAMILIES[name][2]
    expected = "L2 H1" if without else above("L2 H1", lacks[0, 0])
    assert titles[0] == expected
    assert titles[7] == above("L1 H4", lacks[1, 3])
    for figure in (draw_maps(mean), draw_grid([every, mean])):
        words = " ".join(text.get_text() for text in figure.texts).replace("\n", " ")
        assert "rows sum below 1" in words
        shown = [ax.get_title().replace("\n", " ") for ax in figure.axes]
        assert above("layer 1", lacks[1].mean()) in shown


def test_the_paper_s_maps(name: str, checkpoint: str) -> None:
    data = paper_data([checkpoint], TEXT, figures=["attention_maps"])
    frame = data.frames["attention_maps"]
    [maps] = attention_maps([checkpoint], TEXT)
    assert maps.learned_sink is not None
    of_layer = frame.groupby("layer").learned_sink_mass.first()
    np.testing.assert_allclose(of_layer, maps.learned_sink[:, 0], rtol=1e-6)
    assert "rows sum below 1" in caption("attention_maps", data)
    figure = draw_paper_figure("attention_maps", frame)
    titles = [ax.get_title().replace("\n", " ") for ax in figure.axes]
    assert above("layer 1", maps.learned_sink[0, 0]) in titles


def test_which_queries_see_the_first_token(checkpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    table = sink_stats([checkpoint], TEXT, by="layer")
    tokens = int(table.tokens[0])
    assert table.first_token_visible.tolist() == pytest.approx([5 / (tokens - 1), 1])
    nulls = [sum(1 / i for i in range(2, seen + 1)) / (tokens - 1) for seen in (6, tokens)]
    assert table.uniform_null.tolist() == pytest.approx(nulls)
    said = (
        f"in 1 of 2 layers a window or chunk lets only {5 / (tokens - 1):.0%} of the queries see the first token"
    )
    assert said in caplog.text
    both = sink_stats([checkpoint], [TEXT[0], "the cat"], by="layer", run=Run(batch_size=2))
    short = int(both.tokens[0]) - tokens  # shorter than the window
    assert short <= 6
    share_of_both = (5 + short - 1) / (tokens - 1 + short - 1)
    assert both.first_token_visible.tolist() == pytest.approx([share_of_both, 1])

    [maps] = attention_maps([checkpoint], TEXT)
    words = " ".join(text.get_text() for text in draw_maps(maps).texts).replace("\n", " ")
    assert f"The first token is visible to {6 / tokens:.0%} of the queries in layer 1." in words
    assert maps.queries_of_key is not None
    assert maps.queries_of_key[:, 0].tolist() == [6, tokens]


def test_the_paper_s_curves(checkpoint: str, tiny_trio: Path) -> None:
    data = paper_data([checkpoint, str(tiny_trio / "baseline")], TEXT, figures=["first_token_by_layer"])
    frame = data.frames["first_token_by_layer"]
    share = frame.first_token_visible[0]
    assert share < 1
    assert frame.first_token_visible[1:].tolist() == [1] * 4
    said = caption("first_token_by_layer", data)
    assert f"The first token is visible to {share:.0%} of the queries in layer 1 of {frame.model[0]}." in said


def test_a_model_without_one_has_nothing_of_it(tiny_trio: Path) -> None:
    checkpoint = str(tiny_trio / "baseline")
    [maps] = attention_maps([checkpoint], TEXT)
    assert maps.learned_sink is None
    data = paper_data([checkpoint], TEXT, figures=["attention_maps"])
    assert "learned_sink_mass" not in data.frames["attention_maps"]
    assert "below 1" not in caption("attention_maps", data)
    assert sink_stats([checkpoint], TEXT).learned_sink_mass.isna().all()
    assert maps.queries_of_key is None
    data = paper_data([checkpoint], TEXT, figures=["first_token_by_layer"])
    assert "first_token_visible" not in data.frames["first_token_by_layer"]
    assert "visible" not in caption("first_token_by_layer", data)

"""The numbers of the paper's figures on the tiny trio, against `sink_stats`, `gate_stats` and naive numpy."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from gattn_viz import (
    GattnVizError,
    Options,
    PaperData,
    Run,
    attention_maps,
    caption,
    draw_paper_figure,
    gate_stats,
    paper_data,
    read_paper_table,
    sink_stats,
)
from gattn_viz.capture.collector import Request
from gattn_viz.capture.run import capture
from gattn_viz.drawing.paper import PAPER_FIGURES
from gattn_viz.models.loading import load
from gattn_viz.models.names import resolve
from gattn_viz.pipeline.captions import captions
from gattn_viz.pipeline.paper import FRAMES, PAPER_ROWS
from gattn_viz.pipeline.summary import to_latex, to_markdown

TEXTS = ["the cat sat on the mat", "the dog", "the rain fell on the roof of the house and on the log"]
GATED = ["gate_headwise", "gate_elementwise"]
TRIO = ["baseline", *GATED]


@pytest.fixture(scope="module")
def run(tiny_trio: Path) -> Run:
    return Run(checkpoints=str(tiny_trio))


@pytest.fixture(scope="module")
def data(run: Run) -> PaperData:
    return paper_data(prompts=TEXTS, run=run)


def same(a: pd.DataFrame, b: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(a.reset_index(drop=True), b.reset_index(drop=True), rtol=1e-5, check_dtype=False)


def test_every_figure_has_a_table_and_a_drawing(data: PaperData) -> None:
    assert list(FRAMES) == list(PAPER_FIGURES) == list(data.frames)
    assert all(figure.draw is not None for name, figure in PAPER_FIGURES.items() if name != "summary")


def test_sinks_are_those_of_sink_stats(data: PaperData, run: Run) -> None:
    table = sink_stats(prompts=TEXTS, by="layer", run=run)
    columns = ["model", "layer", "first_token_mass", "uniform_null"]
    same(data.frames["first_token_by_layer"], table[columns])
    same(data.frames["sinks_and_activations"], table[[*columns, "max_activation"]])
    gates = table[table["model"] != "baseline"]
    same(data.frames["gate_by_layer"], gates[["model", "layer", "gate_mean"]])


def test_the_first_row_policy(run: Run) -> None:
    included = paper_data(GATED[:1], TEXTS, figures=["first_token_by_layer"], first_row="include", run=run)
    table = sink_stats(GATED[:1], TEXTS, by="layer", options=Options(first_row="include"), run=run)
    same(included.frames["first_token_by_layer"], table[["model", "layer", "first_token_mass", "uniform_null"]])
    assert "sees itself alone, is included" in caption("first_token_by_layer", included)


def test_outputs_are_those_of_gate_stats(data: PaperData, run: Run) -> None:
    table = gate_stats(prompts=TEXTS, by="layer", run=run).set_index(["model", "layer"])
    magnitude = data.frames["output_magnitude"]
    assert set(magnitude.loc[magnitude["stage"] == "after", "model"]) == set(GATED)
    assert len(magnitude) == 3 * 3 + 2 * 3
    for row in magnitude.itertuples():
        assert row.mean_abs == pytest.approx(table.loc[(row.model, row.layer), f"output_{row.stage}"])
    sparsity = data.frames["output_sparsity"]
    assert len(sparsity) == 2 * (3 * 3 + 2 * 3 + 2 * 3)
    for row in sparsity.itertuples():
        stage = {"before": "before", "after": "after", "before x mean gate": "scaled"}[row.stage]
        digits = {0.01: "01", 0.001: "001"}[row.threshold]
        assert row.share_below == pytest.approx(
            table.loc[(row.model, row.layer), f"output_{stage}_below_{digits}"]
        )


def test_the_histogram_counts_scores(data: PaperData, tiny_trio: Path) -> None:
    frame = data.frames["gate_distribution"]
    assert set(frame["model"]) == set(GATED)
    every = frozenset({1, 2, 3})
    for model, rows in frame.groupby("model"):
        loaded = load(resolve(str(model), str(tiny_trio)))
        ids = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
        prompts = capture(loaded.model, ids, Request(gates=every))
        scores = np.concatenate([prompt[n].gate_scores.numpy().ravel() for prompt in prompts for n in every])
        expected, edges = np.histogram(scores, bins=64, range=(0, 1))
        assert rows["count"].tolist() == expected.tolist()
        np.testing.assert_array_equal(rows["low"], edges[:-1])
        np.testing.assert_array_equal(rows["high"], edges[1:])
        assert rows["count"].sum() == len(scores)

        by_layer = data.frames["gate_distribution_by_layer"].query("model == @model")
        for n, of_layer in by_layer.groupby("layer"):
            scores = np.concatenate([prompt[n].gate_scores.numpy().ravel() for prompt in prompts])
            assert of_layer["count"].tolist() == np.histogram(scores, bins=64, range=(0, 1))[0].tolist()
        assert by_layer["layer"].unique().tolist() == [1, 2, 3]


def test_maps_are_those_of_attention_maps(data: PaperData, run: Run) -> None:
    frame = data.frames["attention_maps"]
    for maps in attention_maps(prompts=TEXTS[:1], run=run):
        for layer, one in zip(maps.layers, maps.probabilities, strict=True):
            rows = frame[(frame["model"] == maps.model) & (frame["layer"] == layer)]
            tokens = len(maps.tokens)
            assert len(rows) == tokens * (tokens + 1) // 2
            np.testing.assert_allclose(rows["probability"], one[0][rows["query"] - 1, rows["key"] - 1], atol=1e-6)
            assert rows["key_token"].tolist() == [maps.tokens[key - 1] for key in rows["key"]]
    assert set(frame["prompt"]) == {attention_maps(["baseline"], TEXTS[:1], run=run)[0].prompt}


def test_long_maps_are_pooled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gattn_viz.pipeline.paper.MAP_CELLS", 4)
    pooled = paper_data(["baseline"], TEXTS[:1], figures=["attention_maps"], layers=[2], run=run)
    [whole] = attention_maps(["baseline"], TEXTS[:1], layers=[2], run=run)
    frame, one = pooled.frames["attention_maps"], whole.probabilities[0, 0]
    size = -(-len(one) // 4)
    for row in frame.itertuples():
        part = one[row.query - 1 : row.query - 1 + size, row.key - 1 : row.key - 1 + size]
        assert row.probability == pytest.approx(part.max(), abs=1e-6)
    assert f"a cell is the largest of up to {size} x {size}" in caption("attention_maps", pooled)
    assert pooled.attention == {"baseline": "none"}


def test_the_summary_stands_beside_the_paper_s(data: PaperData, run: Run) -> None:
    frame = data.frames["summary"]
    table = sink_stats(prompts=TEXTS, by="model", run=run)
    ours = frame[frame["source"] == "this run"].drop(columns="source")
    same(ours, table[list(ours.columns)])
    papers = frame[frame["source"] == "paper, Table 4"]
    assert papers[["model", "gate_mean", "max_activation", "first_token_mass", "perplexity"]].to_numpy().tolist()[
        1:
    ] == [["gate_headwise", 0.172, 98, 0.073, 5.792], ["gate_elementwise", 0.116, 94, 0.048, 5.761]]
    assert papers.iloc[0]["max_activation"] == 1053
    assert len(papers) == len(PAPER_ROWS)


def test_the_summary_as_text(data: PaperData) -> None:
    frame = data.frames["summary"].assign(model=lambda one: one["model"].replace("baseline", "a|b_c%"))
    markdown = to_markdown(frame).splitlines()
    assert len(markdown) == 2 + 6
    assert markdown[3].split(" | ")[:2] == ["| gate_headwise", "this run"]
    assert markdown[-1].startswith(
        "| gate_elementwise | paper, Table 4 (15A2B MoE, other data) | 0.116 | 94 | 0.048 |"
    )
    assert "a\\|b_c%" in markdown[2]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in markdown}) == 1
    latex = to_latex(frame).splitlines()
    assert r"a|b\_c\% & this run &  & " in latex[4]
    assert latex[-3].startswith(
        r"gate\_elementwise & paper, Table 4 (15A2B MoE, other data) & 0.116 & 94 & 0.048 &"
    )
    assert [line.count("&") for line in latex if line.endswith(r"\\")] == [6] * 7
    assert latex.count(r"\midrule") == 2


def test_captions_say_what_was_measured(data: PaperData) -> None:
    text = captions(data, {name: figure.number for name, figure in PAPER_FIGURES.items()})
    assert re.findall(r"^## (\w+)(?: \((.+) of the paper\))?$", text, re.M) == [
        (name, figure.number.strip("-")) for name, figure in PAPER_FIGURES.items()
    ]
    lengths = data.models[0].lengths
    assert lengths[0] != lengths[1]
    for name in set(FRAMES) - {"attention_maps"}:
        body = caption(name, data)
        assert f"T = {min(lengths)} to {max(lengths)}, {sum(lengths)} tokens together" in body
        assert "3 prompts (" in body
        assert "3 layers of 4 heads, float32 on cpu" in body
    null = data.frames["first_token_by_layer"]["uniform_null"].iloc[0]
    for name in ("first_token_by_layer", "sinks_and_activations", "summary"):
        assert f"{null:.3g} on the same prompts" in caption(name, data)
        assert "the first query, which sees itself alone, is left out" in caption(name, data)
    assert "Without a gate, and so left out: baseline." in caption("gate_by_layer", data)
    assert "No gate: baseline, on the left only." in caption("output_magnitude", data)
    assert f"T = {lengths[0]};" in caption("attention_maps", data)
    total = data.frames["gate_distribution"].groupby("model")["count"].sum()
    assert f"gate_headwise {total['gate_headwise']:,}" in caption("gate_distribution", data)


def test_captions_say_the_chat_template(data: PaperData) -> None:
    in_chat = replace(data, models=[replace(model, chat=True) for model in data.models])
    assert "3 prompts in the chat template (" in caption("first_token_by_layer", in_chat)
    assert f"Prompt {data.models[0].prompts[0]} in the chat template, T = " in caption("attention_maps", in_chat)


@pytest.mark.parametrize("name", [name for name in PAPER_FIGURES if name != "summary"])
def test_a_csv_draws_the_same_figure(data: PaperData, name: str, tmp_path: Path) -> None:
    frame = data.frames[name]
    frame.to_csv(tmp_path / "figure.csv", index=False, float_format="%.7g")
    before, after = (draw_paper_figure(name, one) for one in (frame, read_paper_table(tmp_path / "figure.csv")))
    for a, b in zip(before.axes, after.axes, strict=True):
        for one, other in zip(a.get_lines(), b.get_lines(), strict=True):
            np.testing.assert_allclose(one.get_xydata(), other.get_xydata(), rtol=1e-5)
        for one, other in zip(a.get_images(), b.get_images(), strict=True):
            np.testing.assert_allclose(one.get_array().filled(0), other.get_array().filled(0), rtol=1e-5)
        assert [t.get_text() for t in a.get_xticklabels()] == [t.get_text() for t in b.get_xticklabels()]


def test_a_model_looks_the_same_in_every_panel_of_every_figure(data: PaperData) -> None:
    """Of models that have no colours of their own, the first without a gate: it is not in each figure or panel."""
    renamed = {"baseline": "plain", "gate_headwise": "one", "gate_elementwise": "two"}
    colours: dict[str, set[str]] = {name: set() for name in renamed.values()}
    panels = 0
    for name in PAPER_FIGURES:
        if name in ("summary", "attention_maps", "gate_distribution_by_layer"):  # no lines
            continue
        frame = data.frames[name].replace({"model": renamed})
        for ax in draw_paper_figure(name, frame, models=list(renamed.values())).axes:
            lines = [(str(line.get_label()), line.get_color()) for line in ax.get_lines()]
            lines += [(str(step.get_label()), step.get_edgecolor()) for step in ax.patches]
            panels += 1
            for label, color in lines:
                if label in colours:
                    colours[label].add(to_hex(color))
    assert panels == 17
    assert [len(found) for found in colours.values()] == [1, 1, 1]
    assert len(set.union(*colours.values())) == 3


def test_a_model_or_a_token_may_be_called_na(data: PaperData, tmp_path: Path) -> None:
    frame = data.frames["attention_maps"].assign(model="NA", key_token="1")
    frame.to_csv(tmp_path / "figure.csv", index=False)
    assert set(read_paper_table(tmp_path / "figure.csv")["model"]) == {"NA"}
    assert set(read_paper_table(tmp_path / "figure.csv")["key_token"]) == {"1"}


def test_figures_of_gates_without_a_gate(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        GattnVizError, match="no gate in baseline, and nothing else was asked for than gate_by_layer"
    ):
        paper_data(["baseline"], TEXTS, figures=["gate_by_layer"], run=run)
    log = logging.getLogger("gattn_viz")
    monkeypatch.setattr(log, "propagate", True)  # the command line turns it off, and may have been quiet
    monkeypatch.setattr(log, "level", logging.INFO)
    mixed = paper_data(["baseline"], TEXTS, figures=["gate_by_layer", "gate_distribution", "summary"], run=run)
    assert list(mixed.frames) == ["summary"]
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "gate_distribution: no model has a gate: left out",
        "gate_by_layer: no model has a gate: left out",
    ]


def test_models_are_run_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt once, and the first once more for its maps."""
    from gattn_viz.capture import run as capture_run

    lengths: list[int] = []
    original = capture_run._run_batch

    def counted(model, parts, input_ids, *arguments, **options):  # type: ignore[no-untyped-def]
        lengths.append(input_ids.shape[1])
        return original(model, parts, input_ids, *arguments, **options)

    monkeypatch.setattr(capture_run, "_run_batch", counted)
    data = paper_data(["gate_headwise"], TEXTS, run=run)
    assert sorted(lengths) == sorted([*data.models[0].lengths, data.models[0].lengths[0]])


@pytest.mark.parametrize(
    ("figures", "message"),
    [(["fig3"], "no figure 'fig3'; expected some of first_token_by_layer, attention_maps"), ([], "no figure was")],
)
def test_wrong_figures(figures: list[str], message: str, run: Run) -> None:
    with pytest.raises(GattnVizError, match=message):
        paper_data(["baseline"], TEXTS, figures=figures, run=run)


def test_wrong_tables(data: PaperData) -> None:
    with pytest.raises(GattnVizError, match="no figure 'summary' to draw; expected one of first_token_by_layer"):
        draw_paper_figure("summary", data.frames["summary"])
    with pytest.raises(GattnVizError, match="gate_by_layer has no column 'gate_mean', but model, layer"):
        draw_paper_figure("gate_by_layer", data.frames["first_token_by_layer"])
    with pytest.raises(GattnVizError, match="gate_by_layer has no rows"):
        draw_paper_figure("gate_by_layer", data.frames["gate_by_layer"].iloc[:0])

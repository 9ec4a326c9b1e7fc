"""Gate scores token by token, and tables of heads, against what is captured."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gattn_viz import GattnVizError, Run, gate_map_table, gate_maps, gate_stats, head_table, sink_stats
from gattn_viz.capture.collector import Request
from gattn_viz.capture.run import capture
from gattn_viz.models.loading import load
from gattn_viz.models.names import resolve

TEXTS = ["the cat sat on the mat", "the dog"]


@pytest.fixture
def run(tiny_trio: Path) -> Run:
    return Run(checkpoints=str(tiny_trio))


def naive(trio: Path, model: str, text: str, layer: int) -> np.ndarray:
    """(T, H), the captured scores averaged over their channels one by one."""
    loaded = load(resolve(model, str(trio)))
    ids = loaded.tokenizer(text)["input_ids"]
    [layers] = capture(loaded.model, [ids], Request(gates=frozenset({layer})))
    scores = layers[layer].gate_scores
    assert scores is not None
    tokens, heads, channels = scores.shape
    return np.array(
        [
            [sum(scores[t, h, c].item() for c in range(channels)) / channels for h in range(heads)]
            for t in range(tokens)
        ]
    )


@pytest.mark.parametrize(("model", "channels"), [("gate_headwise", 1), ("gate_elementwise", 8)])
@pytest.mark.parametrize("chunk", [None, 3])
def test_equals_what_is_captured(tiny_trio: Path, model: str, channels: int, chunk: int | None) -> None:
    sets = gate_maps([model], TEXTS, layers=[3, 1], heads=[4, 1], run=Run(str(tiny_trio), chunk=chunk))
    assert [maps.prompt for maps in sets] == ["prompt-1", "prompt-2"]
    for maps, text in zip(sets, TEXTS, strict=True):
        assert (maps.layers, maps.heads, maps.n_layers, maps.n_heads) == ((3, 1), (4, 1), 3, 4)
        assert maps.channels == channels
        assert len(maps.tokens) == len(maps.texts) == maps.scores.shape[1]
        assert "".join(maps.texts) == "<s>" + text
        for index, layer in enumerate(maps.layers):
            expected = naive(tiny_trio, model, text, layer)[:, [3, 0]]
            np.testing.assert_allclose(maps.scores[index], expected, rtol=1e-5)
    assert sets[0].scores.std() > 0.01


def test_mean_over_heads_and_default_layers(tiny_trio: Path, run: Run) -> None:
    [mean] = gate_maps(["gate_elementwise"], TEXTS[:1], heads="mean", run=run)
    assert (mean.layers, mean.heads) == ((1, 2, 3), None)
    for index in range(3):
        expected = naive(tiny_trio, "gate_elementwise", TEXTS[0], index + 1).mean(1, keepdims=True)
        np.testing.assert_allclose(mean.scores[index], expected, rtol=1e-5)


def test_a_model_without_a_gate_is_left_out(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gattn_viz"):
        sets = gate_maps(prompts=TEXTS[:1], run=run)
    assert [maps.model for maps in sets] == ["gate_headwise", "gate_elementwise"]
    assert "baseline has no gate: left out" in caplog.text
    with pytest.raises(GattnVizError, match=r"no gate in baseline; .*such as gate_headwise: add one$"):
        gate_maps(["baseline"], TEXTS, run=run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": [4]}, "no layer 4: gate_headwise has 3 layers"),
        ({"heads": [5]}, "no head 5: gate_headwise has 4"),
    ],
)
def test_what_is_not_there(run: Run, changes: dict[str, list[int]], said: str) -> None:
    with pytest.raises(GattnVizError, match=said):
        gate_maps(["gate_headwise"], TEXTS, run=run, **changes)  # type: ignore[arg-type]


def test_the_table_is_tidy(run: Run) -> None:
    sets = gate_maps(["gate_headwise"], TEXTS, layers=[1, 3], heads=[2, 4], run=run)
    table = gate_map_table(sets)
    assert list(table) == ["model", "prompt", "layer", "head", "position", "token", "score"]
    assert len(table) == sum(maps.scores.size for maps in sets)
    for maps in sets:
        for _, row in table[table.prompt == maps.prompt].iterrows():
            place = maps.layers.index(row.layer), row.position - 1, (2, 4).index(row["head"])
            assert row.score == maps.scores[place]
            assert row.token == maps.tokens[row.position - 1]
    [mean] = gate_maps(["gate_headwise"], TEXTS[:1], heads="mean", run=run)
    assert set(gate_map_table([mean])["head"]) == {"mean"}


class TestHeadTable:
    def test_measures_of_both_kinds_in_the_order_asked_for(self, run: Run) -> None:
        names = ["honor_after", "gate_mean", "entropy", "gate_below"]
        table = head_table(prompts=TEXTS, measures=names, run=run)
        assert list(table)[:7] == ["model", "layer", "head", *names]
        assert {"n_prompts", "tokens", "below_threshold", "first_row"} <= set(table)
        sinks = sink_stats(prompts=TEXTS, measures=["gate_mean", "entropy"], run=run)
        gates = gate_stats(prompts=TEXTS, measures=["honor_after", "gate_below"], run=run)
        for name, other in zip(names, (gates, sinks, sinks, gates), strict=True):
            pd.testing.assert_series_equal(table[name], other[name])
        assert table.attrs["attention_path"].keys() == {"baseline", "gate_headwise", "gate_elementwise"}

    def test_default(self, run: Run) -> None:
        table = head_table(["baseline"], TEXTS, run=run)
        assert list(table)[3:5] == ["first_token_mass", "gate_mean"]
        assert table.gate_mean.isna().all()

    @pytest.mark.parametrize(
        ("measures", "said"),
        [
            (["perplexity"], "perplexity is one number a model"),
            (["nothing"], "no measure 'nothing'; expected all, or some of gate_mean"),
            ([], "no measure was given"),
            (["gate_mean", "output_after"], "no gate in baseline"),
        ],
    )
    def test_errors(self, run: Run, measures: list[str], said: str) -> None:
        with pytest.raises(GattnVizError, match=said):
            head_table(["baseline"], TEXTS, measures=measures, run=run)

    def test_what_needs_no_gate_is_had_without(self, run: Run) -> None:
        assert head_table(["baseline"], TEXTS, measures=["output_before"], run=run).output_before.notna().all()

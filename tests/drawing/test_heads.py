"""Tables of heads as heatmaps: where each value stands, ranges, words, and what is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from gattn_viz import GattnVizError, draw_heads
from gattn_viz.drawing.heads import heads_of

MEASURES = ["first_token_mass", "gate_mean"]


def make_table(**changes: object) -> pd.DataFrame:
    """Two models of 2 layers of 3 heads; the first has no gate."""
    rows = [(model, layer, head) for model in ("baseline", "gated") for layer in (1, 2) for head in (1, 2, 3)]
    table = pd.DataFrame(rows, columns=["model", "layer", "head"])
    table["first_token_mass"] = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.15, 0.25, 0.35]
    table["gate_mean"] = [np.nan] * 6 + [0.02, 0.04, 0.06, 0.08, 0.1, 0.12]
    return table.assign(**{"n_prompts": 16, "tokens": 2094, "first_row": "exclude", **changes})


def panels(figure: Figure) -> list[np.ma.MaskedArray]:
    return [ax.images[0].get_array() for ax in figure.axes[:4]]


def words(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


def bar_labels(figure: Figure) -> list[str]:
    return [" ".join(ax.get_ylabel().split()) for ax in figure.axes if ax.get_ylabel() not in ("", "layer")]


def test_each_value_has_its_place() -> None:
    figure = draw_heads(make_table().sample(frac=1, random_state=1).sort_values("model", kind="stable"))
    mass, no_gate, gated_mass, gate = panels(figure)
    assert mass.tolist() == [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]]
    assert gated_mass.tolist() == [[0.3, 0.2, 0.1], [0.15, 0.25, 0.35]]
    assert gate.tolist() == [[0.02, 0.04, 0.06], [0.08, 0.1, 0.12]]
    assert no_gate.count() == 0
    names = [[text.get_text() for text in ax.texts] for ax in figure.axes[:4]]
    assert names == [["baseline"], ["no gate"], ["gated"], []]


def test_one_range_a_measure_over_models_which_is_said() -> None:
    figure = draw_heads(make_table())
    assert [ax.images[0].get_clim() for ax in figure.axes[:4]] == [(0.1, 0.9), (0.02, 0.12)] * 2
    assert bar_labels(figure) == [
        "first_token_mass (probability): 0.1 to 0.9",
        "gate_mean (gate score): 0.02 to 0.12",
    ]
    said = words(figure)
    assert "first_token_mass, gate_mean of each head, 16 prompts, 2,094 tokens" in said
    assert "one linear colour range for all models, as its bar says. First query left out." in said


def test_the_chat_template_is_said() -> None:
    table = make_table()
    table.attrs["chat"] = True
    assert "16 prompts in the chat template, 2,094 tokens" in words(draw_heads(table))


def test_what_a_logarithmic_scale_cannot_show_is_said() -> None:
    assert "what is below has its first colour" in words(draw_heads(make_table(), scale="log"))


def test_an_infinite_value_is_an_error() -> None:
    table = make_table()
    table.loc[0, "gate_mean"] = np.inf
    with pytest.raises(GattnVizError, match=r"gate_mean of .* is infinite for a head; expected finite numbers"):
        draw_heads(table)


def test_layers_that_a_hybrid_model_lacks_are_blank_rows_with_their_index() -> None:
    table = make_table()
    table["layer"] = table["layer"] * 4
    figure = draw_heads(table)
    shown = panels(figure)[0]
    assert shown.shape == (8, 3)
    assert np.ma.getmaskarray(shown).all(1).tolist() == [True, True, True, False, True, True, True, False]
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == [str(n) for n in range(1, 9)]


@pytest.mark.parametrize(("value", "range_"), [(0.25, (0, 0.25)), (0.0, (0, 1)), (np.nan, (0, 1))])
def test_values_that_are_all_equal(value: float, range_: tuple[float, float]) -> None:
    figure = draw_heads(make_table(first_token_mass=value))
    assert figure.axes[0].images[0].get_clim() == range_
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert ("no values" in texts) == np.isnan(value)


def test_a_single_nan_is_blank() -> None:
    table = make_table()
    table.loc[1, "first_token_mass"] = np.nan
    assert np.ma.getmaskarray(panels(draw_heads(table))[0]).tolist() == [[False, True, False], [False] * 3]


def test_no_channels_is_not_no_gate() -> None:
    """Of a headwise gate, the share of channels shut is empty too."""
    table = make_table(gate_channels_shut=np.nan)
    figure = draw_heads(table, ["gate_channels_shut"])
    assert [[t.get_text() for t in ax.texts] for ax in figure.axes[:2]] == [
        ["no gate", "baseline"],
        ["no values", "gated"],
    ]


def test_a_model_alone_is_in_the_title() -> None:
    table = make_table(n_prompts=1, below_threshold=0.1, gate_below=0.5)
    figure = draw_heads(table[table.model == "gated"], ["gate_below"], scale="log")
    said = words(figure)
    assert "gate_below of each head: gated, 1 prompt, 2,094 tokens" in said
    assert "one log colour range" in said
    assert "Shut is a score below 0.1." in said
    assert "in any model" not in said
    assert [text.get_text() for text in figure.axes[0].texts] == []


def test_columns_that_are_no_measure_of_ours() -> None:
    figure = draw_heads(make_table(mine=np.arange(12) / 7), ["mine"])
    assert bar_labels(figure) == ["mine: 0 to 1.57"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (make_table().drop(columns="head"), "no column head; expected a row for each model, layer and head"),
        (make_table().drop(columns=["head", "layer"]), "no column layer"),
        (make_table().drop(columns="gate_mean"), "no column 'gate_mean' of numbers; expected first_token_mass"),
        (make_table(gate_mean="x"), "no column 'gate_mean' of numbers"),
        (
            pd.concat([make_table()] * 2),
            "several rows for baseline, layer 1, head 1; expected one: write it without",
        ),
        (make_table()[:0], "no rows"),
        (make_table(layer=0), "layer 0; expected whole numbers from 1"),
        (make_table(head=1.5), "head 1.5; expected whole numbers"),
        (make_table(layer=10**9), "layer 1000000000"),
        (make_table(layer="x"), "layer x"),
    ],
)
def test_what_is_no_table_of_heads(table: pd.DataFrame, said: str) -> None:
    with pytest.raises(GattnVizError, match=said):
        heads_of(table, MEASURES)


def test_no_measure() -> None:
    with pytest.raises(GattnVizError, match="no measure"):
        draw_heads(make_table(), [])

"""Which panels a figure has and what it says of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from gattn_viz.drawing.maps import Look, color_scale, draw_first_token, draw_grid, draw_maps
from gattn_viz.metrics.pooling import MapView
from gattn_viz.metrics.weights import Weight
from gattn_viz.pipeline import AttentionMaps


def make_maps(
    model: str = "baseline",
    layers: tuple[int, ...] = (1, 7, 21, 28),
    heads: tuple[int, ...] | None = None,
    tokens: int = 6,
    top: float = 0.5,
    view: MapView = MapView(),
    weight: Weight = "probability",
    gate: str | None = None,
) -> AttentionMaps:
    count = len(heads) if heads else 1
    cells = view.cells(tokens)
    p = np.zeros((len(layers), count, len(cells.queries), len(cells.keys)), np.float32)
    p[:] = np.where(cells.causal_pairs() > 0, 0.1, np.nan if cells.pool else 0)
    p[..., -1, 0] = top
    return AttentionMaps(
        model=model,
        checkpoint=f"bundled demo {model}",
        prompt="opening",
        tokens=[f"t{i}" for i in range(tokens)],
        layers=layers,
        heads=heads,
        n_layers=28,
        n_heads=4,
        cells=cells,
        probabilities=p,
        dtype="float32",
        device="cpu",
        attention_path="blocks",
        weight=weight,
        gate=gate,
    )


def titles(figure: Figure) -> list[str]:
    return [ax.get_title() for ax in figure.axes if ax.get_title()]


def words(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


def title(figure: Figure) -> str:
    return " ".join(figure.get_suptitle().split())


def ranges(figure: Figure) -> set[tuple[float, ...]]:
    return {
        tuple(round(float(end or 0), 6) for end in image.get_clim()) for ax in figure.axes for image in ax.images
    }


def test_a_panel_a_layer_and_what_it_says() -> None:
    figure = draw_maps(make_maps())
    assert titles(figure) == ["layer 1", "layer 7", "layer 21", "layer 28"]
    assert title(figure) == ("baseline: attention, layers 1, 7, 21, 28 of 28, mean over 4 heads, T = 6")
    said = words(figure)
    assert "Prompt opening. bundled demo baseline, float32 on cpu." in said
    assert "Rows are queries; keys after the query are blank. One linear scale from 0 to 0.5." in said


def test_the_chat_template_is_said_where_the_prompt_is_named() -> None:
    maps = replace(make_maps(), chat=True)
    for figure in (draw_maps(maps), draw_grid([maps])):
        assert "Prompt opening in the chat template. " in words(figure)


def test_a_panel_a_head() -> None:
    figure = draw_maps(make_maps(layers=(3, 4), heads=(1, 4)))
    assert titles(figure) == ["L3 H1", "L3 H4", "L4 H1", "L4 H4"]
    assert "layers 3, 4 of 28, heads 1, 4 of 4" in title(figure)


def test_runs_of_numbers_are_short() -> None:
    figure = draw_maps(make_maps(layers=(1, 2, 3, 4, 9)))
    assert "layers 1-4, 9 of 28" in title(figure)


def test_all_layers() -> None:
    figure = draw_maps(make_maps(layers=tuple(range(1, 29))))
    assert len(titles(figure)) == 28
    assert "all 28 layers" in title(figure)


def test_the_grid_has_one_row_a_model_and_one_range() -> None:
    sets = [make_maps("baseline", top=0.9), make_maps("gate_headwise", top=0.2)]
    figure = draw_grid(sets)
    assert ranges(figure) == {(0, 0.9)}
    assert len([ax for ax in figure.axes if ax.images]) == 8
    said = words(figure)
    assert "baseline: bundled demo baseline, float32 on cpu; gate_headwise: bundled demo gate_headwise" in said
    assert title(figure) == "attention, mean over 4 heads, T = 6"


def test_the_grid_takes_the_mean_over_the_chosen_heads() -> None:
    maps = make_maps(layers=(1,), heads=(1, 4))
    maps.probabilities[0, 0, 5, 5] = 0.3
    figure = draw_grid([maps, maps])
    image = next(image for ax in figure.axes for image in ax.images)
    assert image.get_array()[5, 5] == pytest.approx(0.2)
    assert "mean over heads 1, 4 of 4" in title(figure)


def test_tokenizers_that_differ() -> None:
    figure = draw_grid([make_maps("a", tokens=6), make_maps("b", tokens=4)])
    assert title(figure) == "attention, mean over 4 heads, a: T = 6; b: T = 4"


def test_figures_share_a_range_when_told() -> None:
    sets = [make_maps("a", top=0.9), make_maps("b", top=0.2)]
    scale = color_scale(sets)
    assert ranges(draw_maps(sets[1], scale=scale)) == {(0, 0.9)}


def test_look() -> None:
    figure = draw_maps(make_maps(), look=Look(scale="sqrt", vmax=0.25))
    assert "One sqrt scale from 0 to 0.25." in words(figure)
    assert ranges(figure) == {(0, 0.25)}


def axes_of(figure: Figure) -> tuple[list[str], list[str]]:
    """The labels of the first map's key and query axis."""
    figure.canvas.draw()
    ax = figure.axes[0]
    return [t.get_text() for t in ax.get_xticklabels()], [t.get_text() for t in ax.get_yticklabels()]


@pytest.mark.parametrize(
    ("view", "said"),
    [
        (MapView(), "T = 600"),
        (MapView(max_cells=512), "T = 600, max over 2 x 2 cells"),
        (MapView(max_cells=100, pool="mean"), "T = 600, mean over 6 x 6 cells"),
        (MapView(keys=(2, None), max_cells=200), "T = 600, first key left out, max over 3 x 3 cells"),
        (MapView((300, 320), (1, 20)), "T = 600, queries 300-320, keys 1-20"),
        (MapView((300, 300), None, 200, "mean"), "T = 600, query 300, mean over 1 x 3 cells"),
        (MapView(None, (5, 5)), "T = 600, key 5"),
        (MapView((1, 600), (1, 600)), "T = 600"),
    ],
)
def test_the_view_is_said(view: MapView, said: str) -> None:
    figure = draw_maps(make_maps(layers=(1,), tokens=600, view=view))
    assert title(figure) == f"baseline: attention, layer 1 of 28, mean over 4 heads, {said}"
    assert ("keys after the query are blank or do not count." in words(figure)) == ("over" in said.split("T")[1])


def test_a_pooled_map_has_positions_and_a_part_its_tokens() -> None:
    keys, queries = axes_of(draw_maps(make_maps(tokens=150, layers=(1,), view=MapView(None, (2, 149), 50))))
    assert (keys[0], queries[0]) == ("2", "1")
    assert all(text.isdecimal() for text in keys + queries)
    keys, queries = axes_of(draw_maps(make_maps(tokens=150, layers=(1,), view=MapView((100, 103), (1, 3)))))
    assert keys == ["t0", "t1", "t2"]
    assert queries == ["t99 100", "t100 101", "t101 102", "t102 103"]
    keys, queries = axes_of(draw_maps(make_maps(layers=(1,), tokens=150, view=MapView((100, 101), None, 50))))
    assert keys[0] == "1"
    assert queries == ["t99 100", "t100 101"]


@pytest.mark.parametrize(
    ("view", "kept"),
    [
        (MapView(), True),
        (MapView(keys=(2, None)), True),
        (MapView((1, 399)), False),
        (MapView(keys=(3, None)), False),
        (MapView(max_cells=100), False),
    ],
)
def test_sinks_keep_their_ticks_on_whole_maps(view: MapView, kept: bool) -> None:
    """Key 124 is a sink, which the thinned ticks would pass over."""
    maps = make_maps(layers=(1,), tokens=400, view=view)
    if maps.cells.pool is None:
        maps.probabilities[:] = 0
        maps.probabilities[..., 123:, 124 - maps.cells.keys.first] = 0.9
    keys, queries = axes_of(draw_maps(maps))
    assert ("t123 124" in keys) == kept
    assert ("t123 124" in queries) == kept


@pytest.mark.parametrize(
    ("weight", "gate", "said", "label", "formula"),
    [
        ("probability", "headwise", "attention", "attention probability", None),
        ("value", None, "attention x value norm", "probability x value norm (L2)", "p |v|: v the key's value"),
        (
            "gate",
            "headwise",
            "attention x gate score",
            "probability x gate score",
            "p g: g the query's gate score",
        ),
        (
            "gate",
            "elementwise",
            "attention x norm of the gated value",
            "probability x norm of gate * value (L2)",
            "p |g * v|: g the query's gate scores, v the key's value",
        ),
        (
            "output",
            None,
            "norm of what a key adds to the residual stream",
            "norm added to the residual stream (L2)",
            "p |W (g * v)|: v the key's value, g the query's gate if there is one, W",
        ),
    ],
)
def test_the_weight_is_said(weight: Weight, gate: str | None, said: str, label: str, formula: str | None) -> None:
    maps = make_maps(layers=(1,), weight=weight, gate=gate, top=30.0)
    weighted = "" if weight == "probability" else ", each weighted first"
    one, grid = draw_maps(maps), draw_grid([maps, maps])
    assert title(one) == f"baseline: {said}, layer 1 of 28, mean over 4 heads{weighted}, T = 6"
    assert title(grid) == f"{said}, mean over 4 heads{weighted}, T = 6"
    for figure in (one, grid):
        assert " ".join(figure.axes[-1].get_ylabel().split()) == label
        assert ranges(figure) == {(0, 30)}
        assert ("Cells: " in words(figure)) == (formula is not None)
        assert formula is None or f"Cells: {formula}" in words(figure)
        assert (
            formula is None
            or words(figure).endswith("L2 norm; p the attention probability.")
            or gate == "headwise"
        )


def test_the_weight_of_heads_apart_and_of_their_mean() -> None:
    maps = make_maps(layers=(1,), heads=(1, 4), weight="value")
    assert title(draw_maps(maps)) == "baseline: attention x value norm, layer 1 of 28, heads 1, 4 of 4, T = 6"
    assert title(draw_grid([maps, maps])) == (
        "attention x value norm, mean over heads 1, 4 of 4, each weighted first, T = 6"
    )


def test_gates_of_both_kinds_in_one_grid() -> None:
    sets = [make_maps("a", weight="gate", gate="headwise"), make_maps("b", weight="gate", gate="elementwise")]
    figure = draw_grid(sets)
    assert title(figure).startswith("attention x gate score or attention x norm of the gated value, mean")
    label = " ".join(figure.axes[-1].get_ylabel().split())
    assert label == "probability x gate score or probability x norm of gate * value (L2)"


def test_sinks_are_those_of_probabilities_only() -> None:
    """A value of .9 in a map of something else is no share of attention."""
    for weight in ("probability", "value"):
        maps = make_maps(layers=(1,), tokens=400, weight=weight)  # type: ignore[arg-type]
        maps.probabilities[:] = 0
        maps.probabilities[..., 123:, 123] = 0.9
        keys, _ = axes_of(draw_maps(maps))
        assert ("t123 124" in keys) == (weight == "probability")


def test_without_the_first_key_the_range_is_that_of_the_others() -> None:
    whole = make_maps()
    rest = replace(whole, cells=MapView(keys=(2, None)).cells(6), probabilities=whole.probabilities[..., 1:])
    assert ranges(draw_maps(whole)) == {(0, 0.5)}
    assert ranges(draw_maps(rest)) == {(0, 0.1)}
    image = draw_maps(rest).axes[0].images[0].get_array()
    expected = np.tri(6, dtype=bool)[:, 1:]
    assert (~np.ma.getmaskarray(image)).tolist() == expected.tolist()


def test_a_grid_of_pooled_heads() -> None:
    """The mean over heads of cells, blank where they are blank, and the order of the two said."""
    maps = make_maps(layers=(1,), heads=(1, 4), tokens=6, view=MapView(max_cells=3))
    maps.probabilities[0, 0, 2, 1] = 0.3
    figure = draw_grid([maps, maps])
    shown = figure.axes[0].images[0].get_array()
    assert shown[2, 1] == pytest.approx(0.2)
    assert np.ma.getmaskarray(shown).tolist() == [[False, True, True], [False, False, True], [False] * 3]
    assert "mean over heads 1, 4 of 4, T = 6, max over 2 x 2 cells" in title(figure)
    assert "Each head was pooled before the mean over heads." in words(figure)
    alone = make_maps(layers=(1,), tokens=6, view=MapView(max_cells=3))
    assert "pooled" not in words(draw_grid([alone, alone]))


def test_models_of_different_length_have_views_of_their_own() -> None:
    view = MapView(max_cells=5)
    figure = draw_grid([make_maps("a", tokens=4, view=view), make_maps("b", tokens=6, view=view)])
    assert title(figure) == "attention, mean over 4 heads, a: T = 4; b: T = 6, max over 2 x 2 cells"
    shapes = [image.get_array().shape for ax in figure.axes for image in ax.images]
    assert shapes[:8] == [(4, 4)] * 4 + [(3, 3)] * 4
    assert [ax.get_xlabel() for ax in figure.axes[:8]] == ["key"] * 4 + ["key position"] * 4


def test_maps_of_one_query_stand_below_each_other() -> None:
    view = MapView((40, 40))
    for heads in (None, (1, 2)):
        figure = draw_maps(make_maps(layers=(1, 2), heads=heads, tokens=40, view=view))
        lefts = {round(ax.get_position().x0, 6) for ax in figure.axes[:-1]}
        assert len(lefts) == 1


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_any_length(tokens: int) -> None:
    figure = draw_maps(make_maps(tokens=tokens))
    assert f"T = {tokens}" in title(figure)


def layers_of(model: str, depth: int, **columns: object) -> pd.DataFrame:
    mass = np.linspace(0.1, 0.5, depth)
    values = {"uniform_null": 0.03, "n_prompts": 2, "tokens": 1234, "first_row": "exclude", **columns}
    return pd.DataFrame({"model": model, "layer": range(1, depth + 1), "first_token_mass": mass, **values})


def test_a_curve_a_model_and_the_uniform_null() -> None:
    layers = pd.concat([layers_of("baseline", 4), layers_of("deep", 6, uniform_null=0.04, tokens=1300)])
    figure = draw_first_token(layers)
    [axes] = figure.axes
    baseline, deep, *nulls = axes.lines
    assert [line.get_label() for line in (baseline, deep)] == ["baseline", "deep"]
    np.testing.assert_allclose(baseline.get_xydata(), layers_of("baseline", 4)[["layer", "first_token_mass"]])
    assert len(deep.get_xdata()) == 6  # type: ignore[arg-type]
    assert [line.get_ydata()[0] for line in nulls] == [0.03, 0.04]  # type: ignore[index]
    assert len(axes.collections) == 0
    assert "mean over heads, 2 prompts" in words(figure)
    assert "1,234 (baseline), 1,300 (deep) tokens together; first query excluded." in words(figure)
    assert "Bands" not in words(figure)


def test_curves_say_the_chat_template() -> None:
    layers = layers_of("baseline", 4)
    layers.attrs["chat"] = True
    assert "mean over heads, 2 prompts in the chat template" in words(draw_first_token(layers))


def test_curves_over_relative_depth() -> None:
    layers = pd.concat([layers_of("baseline", 3), layers_of("one", 1)]).assign(depth=[0, 0.5, 1, 0])
    figure = draw_first_token(layers)
    [axes] = figure.axes
    assert axes.lines[0].get_xdata().tolist() == [0, 0.5, 1]  # type: ignore[union-attr]
    assert axes.get_xlabel() == "relative depth"
    assert axes.get_xlim() == pytest.approx((-0.03, 1.03))
    assert axes.get_xticks().tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert "first-token mass by relative depth, mean over heads" in words(figure)
    assert "relative depth, (layer - 1)/(layers - 1): 0 is a model's first layer, 1 its last." in words(figure)


def test_intervals_are_bands() -> None:
    ends = {"first_token_mass_ci_low": 0.05, "first_token_mass_ci_high": 0.6, "ci": 0.9}
    figure = draw_first_token(layers_of("baseline", 3, n_prompts=1, first_row="include", **ends))
    assert len(figure.axes[0].collections) == 1
    assert "1 prompt" in words(figure)
    assert "first query included. Bands are 90% intervals over prompts, too narrow: the prompts are few." in words(
        figure
    )


@pytest.mark.parametrize(
    ("view", "label"),
    [
        (MapView(), "attention probability"),
        (MapView(max_cells=3), "attention probability, largest of a cell"),
        (MapView(max_cells=3, pool="mean"), "attention probability, mean of a cell"),
    ],
)
def test_the_colour_bar_says_what_a_cell_is(view: MapView, label: str) -> None:
    maps = make_maps(tokens=9, view=view)
    for figure in (draw_maps(maps), draw_grid([maps])):
        assert " ".join(figure.axes[-1].get_ylabel().split()) == label

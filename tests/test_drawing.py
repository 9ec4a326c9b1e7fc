"""Which panels a figure has and what it says of them."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from gattn_viz.drawing import Look, color_scale, draw_grid, draw_maps
from gattn_viz.pipeline import AttentionMaps


def make_maps(
    model: str = "baseline",
    layers: tuple[int, ...] = (1, 7, 21, 28),
    heads: tuple[int, ...] | None = None,
    tokens: int = 6,
    top: float = 0.5,
) -> AttentionMaps:
    count = len(heads) if heads else 1
    p = np.zeros((len(layers), count, tokens, tokens), np.float32)
    p[:] = np.tril(np.full((tokens, tokens), 0.1))
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
        probabilities=p,
        dtype="float32",
        device="cpu",
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
    assert "T = 4 or 6" in title(figure)


def test_figures_share_a_range_when_told() -> None:
    sets = [make_maps("a", top=0.9), make_maps("b", top=0.2)]
    scale = color_scale(sets)
    assert ranges(draw_maps(sets[1], scale=scale)) == {(0, 0.9)}


def test_look() -> None:
    look = Look(scale="sqrt", vmax=0.25, drop_first=True)
    figure = draw_maps(make_maps(), look=look)
    assert "first key left out" in title(figure)
    assert "One sqrt scale from 0 to 0.25." in words(figure)
    assert ranges(figure) == {(0, 0.25)}
    # without the first column the largest value is .1
    assert ranges(draw_maps(make_maps(), look=Look(drop_first=True))) == {(0, 0.1)}


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_any_length(tokens: int) -> None:
    figure = draw_maps(make_maps(tokens=tokens))
    assert f"T = {tokens}" in title(figure)

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from gattn_viz import GateMaps, GattnVizError, draw_gate_maps, draw_gate_text
from gattn_viz.drawing.gates import gate_color_scale
from gattn_viz.drawing.maps import Look
from gattn_viz.figures.style import map_colormap


def make_maps(
    tokens: int = 6,
    layers: tuple[int, ...] = (1, 21),
    heads: tuple[int, ...] | None = (1, 2, 3, 4),
    channels: int = 1,
    top: float = 0.5,
) -> GateMaps:
    scores = np.linspace(0, top, len(layers) * tokens * len(heads or [0])).astype(np.float32)
    return GateMaps(
        model="gate_headwise",
        checkpoint="bundled demo gate_headwise",
        prompt="opening",
        tokens=[f"␣t{n}" for n in range(1, tokens + 1)],
        texts=[f" t{n}" for n in range(1, tokens + 1)],
        layers=layers,
        heads=heads,
        n_layers=28,
        n_heads=4,
        channels=channels,
        scores=scores.reshape(len(layers), tokens, -1),
        dtype="float32",
        device="cpu",
        attention_path="fused",
    )


def title(figure: Figure) -> str:
    return " ".join(figure.get_suptitle().split())


def words(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


def test_a_panel_a_layer() -> None:
    maps = make_maps()
    figure = draw_gate_maps(maps)
    for ax, scores in zip(figure.axes, maps.scores, strict=False):
        np.testing.assert_array_equal(ax.images[0].get_array(), scores)
        assert ax.images[0].get_clim() == (0, 0.5)
    assert [ax.get_title() for ax in figure.axes[:2]] == ["layer 1", "layer 21"]
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == maps.tokens
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("head", "token")
    assert figure.axes[-1].get_ylabel() == "gate score"


@pytest.mark.parametrize(
    ("maps", "said"),
    [
        (make_maps(), "gate_headwise: gate score, layers 1, 21 of 28, all 4 heads, T = 6"),
        (make_maps(heads=(1, 3)), "heads 1, 3 of 4, T = 6"),
        (make_maps(heads=None), "layers 1, 21 of 28, mean over 4 heads, T = 6"),
        (make_maps(layers=(21,), channels=16), "layer 21 of 28, all 4 heads, mean over 16 channels, T = 6"),
    ],
)
def test_the_title_says_what_is_averaged(maps: GateMaps, said: str) -> None:
    for figure in (draw_gate_maps(maps), draw_gate_text(maps)):
        assert title(figure).endswith(said)
        assert "Prompt opening. bundled demo gate_headwise, float32 on cpu." in words(figure)
        assert "One linear scale from 0 to 0.5." in words(figure)


def test_chosen_heads_are_named() -> None:
    for heads, names in (((2, 4), ["2", "4"]), (None, ["mean"]), ((1, 2), ["1", "2"])):
        figure = draw_gate_maps(make_maps(heads=heads))
        assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == names


def test_many_layers_take_several_rows() -> None:
    figure = draw_gate_maps(make_maps(tokens=2, layers=tuple(range(1, 29))))
    tops = [round(ax.get_position().y1, 4) for ax in figure.axes[:28]]
    assert len(set(tops)) == 4
    assert [ax.get_title() for ax in figure.axes[:28]] == [f"layer {n}" for n in range(1, 29)]


def test_the_text_has_a_block_for_each_layer_and_head_in_the_score_s_colour() -> None:
    maps = make_maps(heads=(2, 4))
    figure = draw_gate_text(maps)
    blocks = figure.axes[:-1]
    assert [ax.get_title(loc="left") for ax in blocks] == [
        "layer 1, head 2", "layer 1, head 4", "layer 21, head 2", "layer 21, head 4",
    ]  # fmt: skip
    columns = [scores[:, column] for scores in maps.scores for column in (0, 1)]
    for ax, column in zip(blocks, columns, strict=True):
        [shades] = (one for one in ax.collections if isinstance(one, PolyCollection))
        shades.update_scalarmappable()
        np.testing.assert_allclose(shades.get_facecolor(), map_colormap()(column.astype(float) / 0.5))
        assert [text.get_text() for text in ax.texts] == [f"t{n}" for n in range(1, 7)]


def test_the_mean_over_heads_is_said_at_the_text() -> None:
    figure = draw_gate_text(make_maps(heads=None))
    assert [ax.get_title(loc="left") for ax in figure.axes[:-1]] == [
        "layer 1, mean over heads",
        "layer 21, mean over heads",
    ]


def test_figures_share_a_range_when_told() -> None:
    sets = [make_maps(top=0.9), make_maps(top=0.2)]
    scale = gate_color_scale(sets)
    assert (scale.vmin, scale.vmax) == (0, pytest.approx(0.9))
    assert draw_gate_maps(sets[1], scale=scale).axes[0].images[0].get_clim() == (0, pytest.approx(0.9))
    look = Look(scale="log", vmax=0.4)
    assert draw_gate_maps(sets[0], look=look).axes[0].images[0].get_clim() == (pytest.approx(4e-5), 0.4)
    assert "One log scale from 4e-05 to 0.4." in words(draw_gate_text(sets[0], look=look))


def test_texts_too_long_to_read() -> None:
    with pytest.raises(
        GattnVizError, match=r"'opening' has 2,001 tokens; expected at most 2,000 .* --max-tokens 2000"
    ):
        draw_gate_text(make_maps(tokens=2001, layers=(1,), heads=(1,)))
    with pytest.raises(GattnVizError, match=r"8 texts of 501 tokens.*at most 4,000.*--max-tokens 500"):
        draw_gate_text(make_maps(tokens=501))


@pytest.mark.parametrize("tokens", [1, 2])
def test_short_prompts(tokens: int) -> None:
    for draw in (draw_gate_maps, draw_gate_text):
        draw(make_maps(tokens=tokens)).canvas.draw()

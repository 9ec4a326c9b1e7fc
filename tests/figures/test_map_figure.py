from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.map_figure import draw_attention_maps


def cells(maps: dict[tuple[str, int], np.ndarray], size: int = 1, tokens: int | None = None) -> pd.DataFrame:
    """The lower triangles as the rows of a table."""
    parts = []
    for (model, layer), one in maps.items():
        query, key = np.tril_indices(len(one))
        columns = {"model": model, "layer": layer, "query": query * size + 1, "key": key * size + 1}
        names = [f"t{k + 1}" if size == 1 else "" for k in key]
        rest = {"key_token": names, "probability": one[query, key], "cell": size, "tokens": tokens or len(one)}
        parts.append(pd.DataFrame(columns | rest))
    return pd.concat(parts, ignore_index=True)


def test_a_row_a_model_and_a_column_a_layer(attention: Callable[..., np.ndarray]) -> None:
    maps = {(m, n): attention(5, seed=n) for m in ("baseline", "gate_headwise") for n in (1, 3)}
    figure = draw_attention_maps(cells(maps).sample(frac=1, random_state=0).sort_values("model", kind="stable"))
    images = [ax.images[0] for ax in figure.axes[:4]]
    shown = {ax.get_title() for ax in figure.axes[:2]}
    assert shown == {"layer 1", "layer 3"}
    for image, layer in zip(images[:2], [int(ax.get_title()[-1]) for ax in figure.axes[:2]], strict=True):
        np.testing.assert_allclose(image.get_array().filled(0), maps["baseline", layer])
    assert {image.get_clim() for image in images} == {(0, max(one.max() for one in maps.values()))}
    assert {"baseline", "gate_headwise"} <= {text.get_text() for text in figure.texts}
    assert figure.axes[0].get_yticklabels()[0].get_text().startswith("t1")
    assert figure.get_figwidth() == pytest.approx(6.75, abs=0.02)


def test_pooled_maps_have_positions(attention: Callable[..., np.ndarray]) -> None:
    figure = draw_attention_maps(cells({("m", 2): attention(10)}, size=4, tokens=39))
    assert figure.axes[0].images[0].get_array().shape == (10, 10)
    assert figure.axes[0].get_xlabel() == "key position"
    assert figure.get_figwidth() == pytest.approx(3.25, abs=0.02)  # one layer: one column


def test_no_room(attention: Callable[..., np.ndarray]) -> None:
    with pytest.raises(GattnVizError, match="no room"):
        draw_attention_maps(cells({("m", n): attention(3) for n in range(1, 41)}))

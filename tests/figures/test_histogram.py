from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import StepPatch

from gattn_viz.figures.histogram import draw_gate_distribution, draw_gate_distribution_by_layer


def table(counts: dict[str, list[int]]) -> pd.DataFrame:
    parts = []
    for model, values in counts.items():
        edges = np.linspace(0, 1, len(values) + 1)
        parts.append(pd.DataFrame({"model": model, "low": edges[:-1], "high": edges[1:], "count": values}))
    return pd.concat(parts)


def test_a_step_line_a_model_with_gaps_for_empty_bins() -> None:
    figure = draw_gate_distribution(table({"gate_headwise": [100, 0, 5, 1], "gate_elementwise": [9000, 20, 0, 3]}))
    [ax] = figure.axes
    headwise, elementwise = (patch for patch in ax.patches if isinstance(patch, StepPatch))
    np.testing.assert_array_equal(headwise.get_data().values, [100, np.nan, 5, 1])
    np.testing.assert_array_equal(elementwise.get_data().values, [9000, 20, np.nan, 3])
    np.testing.assert_array_equal(headwise.get_data().edges, [0, 0.25, 0.5, 0.75, 1])
    assert headwise.get_linestyle() != elementwise.get_linestyle()
    assert ax.get_yscale() == "log"
    assert ax.get_ylim()[0] < 1 < 9000 < ax.get_ylim()[1]
    assert ax.get_xlim() == (0, 1)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gate_headwise", "gate_elementwise"]


@pytest.mark.filterwarnings("error")
def test_counts_that_are_all_equal() -> None:
    figure = draw_gate_distribution(table({"gate_headwise": [7, 7]}))
    figure.draw_without_rendering()
    assert figure.axes[0].get_ylim() == (5, 10)


def test_of_each_layer() -> None:
    """Rows are layers, the first at the top, a missing one blank; empty bins are blank; one colour range."""
    counts = {("a", 1): [100, 0], ("a", 3): [1, 5], ("b", 1): [7, 9000], ("b", 3): [0, 0]}
    frame = pd.concat(
        pd.DataFrame({"model": model, "layer": layer, "low": [0.0, 0.5], "high": [0.5, 1.0], "count": of_bins})
        for (model, layer), of_bins in counts.items()
    )
    figure = draw_gate_distribution_by_layer(frame)
    first, second, bar = figure.axes
    assert [first.get_title(), second.get_title()] == ["a", "b"]
    meshes = [axes.collections[0] for axes in (first, second)]
    assert np.ma.filled(meshes[0].get_array().astype(float), -1).tolist() == [[100, -1], [-1, -1], [1, 5]]
    assert np.ma.filled(meshes[1].get_array().astype(float), -1).tolist() == [[7, 9000], [-1, -1], [-1, -1]]
    assert [mesh.get_clim() for mesh in meshes] == [(1, 9000), (1, 9000)]
    assert meshes[0].get_coordinates()[0, :, 0].tolist() == [0, 0.5, 1]
    assert first.get_ylim() == (3.5, 0.5)
    assert (first.get_xlabel(), first.get_ylabel(), bar.get_ylabel()) == ("gate score", "layer", "scores")


@pytest.mark.parametrize("count", [0, 1])
def test_one_layer_and_hardly_a_score(count: int) -> None:
    frame = pd.DataFrame({"model": "a", "layer": [7], "low": [0.0], "high": [1.0], "count": [count]})
    figure = draw_gate_distribution_by_layer(frame)
    axes = figure.axes[0]
    assert axes.get_ylim() == (7.5, 6.5)
    assert [tick for tick in axes.get_yticks() if 6.5 <= tick <= 7.5] == [7]

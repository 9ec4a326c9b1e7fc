"""The style, and its colours."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.style import map_colormap, settings, style, variant_colors

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*deprecated(,| -) use:DeprecationWarning")


def luminance(colours: np.ndarray) -> np.ndarray:
    return np.asarray(colours)[..., :3] @ [0.299, 0.587, 0.114]


def test_style_ends_with_its_block() -> None:
    before = dict(mpl.rcParams)
    with style("paper"):
        assert mpl.rcParams["pdf.fonttype"] == 42
        assert mpl.rcParams["xtick.labelsize"] == 6
    assert dict(mpl.rcParams) == before
    with style(), style("screen"):
        assert mpl.rcParams["xtick.labelsize"] == 7


def test_style_does_not_ask_a_matplotlibrc() -> None:
    with mpl.rc_context({"axes.facecolor": "red", "text.usetex": True}), style():
        assert mpl.rcParams["axes.facecolor"] == "white"
        assert mpl.rcParams["text.usetex"] is False


def test_unknown_names() -> None:
    with pytest.raises(GattnVizError, match="unknown figure style 'poster'; expected one of screen, paper"):
        settings("poster")  # type: ignore[arg-type]
    with pytest.raises(GattnVizError, match="unknown colormap 'nope'"):
        map_colormap("nope")


def test_map_colours_print_in_grey_and_tell_zero_from_blank() -> None:
    colormap = map_colormap()
    grey = luminance(colormap(np.linspace(0, 1, 64)))
    assert (np.diff(grey) < 0).all()  # darker with every step
    assert grey[0] < 0.97  # zero is tinted
    assert colormap(np.ma.masked_all(1))[0, 3] == 0  # blank is the paper
    assert map_colormap("cividis")(0.0) == mpl.colormaps["cividis"](0.0)


def test_variants_keep_their_colours() -> None:
    names = ["gate_elementwise", "mine", "baseline", "gate_headwise", "yours"]
    colours = variant_colors(names)
    assert list(colours) == names
    assert len(set(colours.values())) == len(names)
    assert colours["baseline"] == variant_colors(["baseline"])["baseline"]
    grey = sorted(
        luminance(np.array([mpl.colors.to_rgb(colours[n]) for n in names if "_" in n or n == "baseline"]))
    )
    assert (np.diff(grey) > 0.03).all()

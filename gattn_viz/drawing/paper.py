"""The paper's figures and its table: what each shows, and how it is drawn from its numbers.

from gattn_viz import draw_paper_figure, paper_data, read_paper_table

data = paper_data(figures=["first_token_by_layer"])
draw_paper_figure("first_token_by_layer", data.frames["first_token_by_layer"])     # a matplotlib Figure
draw_paper_figure("gate_by_layer", read_paper_table("figs/gate_by_layer.csv"))     # what the command wrote
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.by_layer import (
    draw_first_token_by_layer,
    draw_gate_by_layer,
    draw_output_magnitude,
    draw_output_sparsity,
    draw_sinks_and_activations,
)
from gattn_viz.figures.histogram import draw_gate_distribution, draw_gate_distribution_by_layer
from gattn_viz.figures.map_figure import draw_attention_maps
from gattn_viz.figures.style import StyleKind


@dataclass(frozen=True)
class PaperFigure:
    """One of the paper's figures.

    Attributes:
        number: where it is in arXiv 2505.06708; `-` is nowhere.
        shows: in a line.
        draw: its table to a figure; None of a table that is a table.
    """

    number: str
    shows: str
    draw: Callable[..., Figure] | None


OF_GATES = ("gate_distribution", "gate_by_layer")
"""Their lines are of the models with a gate, those of the others of all models."""

PAPER_FIGURES: dict[str, PaperFigure] = {
    "first_token_by_layer": PaperFigure(
        "Fig. 2, left", "attention to the first token by layer, and the uniform null", draw_first_token_by_layer
    ),
    "attention_maps": PaperFigure(
        "Fig. 2, right", "attention maps of some layers on the first prompt, mean over heads", draw_attention_maps
    ),
    "gate_distribution": PaperFigure("Fig. 3", "histogram of the gate scores, log count", draw_gate_distribution),
    "gate_distribution_by_layer": PaperFigure(
        "-", "the same for each layer, as a heatmap of counts", draw_gate_distribution_by_layer
    ),
    "output_magnitude": PaperFigure(
        "Fig. 4", "mean abs attention output before and after the gate by layer", draw_output_magnitude
    ),
    "output_sparsity": PaperFigure(
        "Fig. 5",
        "share of small outputs by layer: before the gate, after it, before it x its mean",
        draw_output_sparsity,
    ),
    "sinks_and_activations": PaperFigure(
        "Fig. 6",
        "first-token attention and largest activation by layer, a row a model",
        draw_sinks_and_activations,
    ),
    "gate_by_layer": PaperFigure("Fig. 7", "mean gate score by layer", draw_gate_by_layer),
    "summary": PaperFigure(
        "Table 4", "gate mean, M-Act, F-Attn and perplexity beside the paper's (CSV, Markdown, LaTeX)", None
    ),
}


def read_paper_table(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The CSV beside a figure, as `draw_paper_figure` takes it: a model or a token may be called NA or 1.

    Raises:
        OSError, ValueError: as pandas.
    """
    words = dict.fromkeys(["model", "prompt", "source", "stage", "key_token", "first_row"], str)
    return pd.read_csv(path, dtype=words, keep_default_na=False, na_values=[""])


def draw_paper_figure(
    name: str,
    frame: pd.DataFrame,
    *,
    models: Sequence[str] = (),
    kind: StyleKind = "paper",
    width: float | None = None,
    font: str | None = None,
) -> Figure:
    """Draw a figure from its table, as `paper_data` makes it or as it is read from its CSV.

    Args:
        name: in `PAPER_FIGURES`.
        models: of all figures that are to stand together: each looks the same in all of them, though those without
            a gate are not in each.
        kind: `paper`, the small type of a two-column paper, or `screen`.
        width: in inches; None is one or two columns of the style, by the figure.
        font: a family or font file to prefer.

    Raises:
        GattnVizError: no such figure, or a table that lacks a column or any row.
    """
    drawn = {known: figure.draw for known, figure in PAPER_FIGURES.items() if figure.draw is not None}
    if name not in drawn:
        raise GattnVizError(f"no figure {name!r} to draw; expected one of {', '.join(drawn)}")
    if frame.empty:
        raise GattnVizError(f"the table of {name} has no rows; expected a row for each thing that is drawn")
    try:
        shared = {"models": models} if name in OF_GATES else {}
        return drawn[name](frame, kind=kind, width=width, font=font, **shared)
    except KeyError as error:
        raise GattnVizError(
            f"the table of {name} has no column {error}, but {', '.join(map(str, frame.columns))}; expected it as "
            "paper_data makes it"
        ) from error

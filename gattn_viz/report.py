"""Tables for the terminal."""

from __future__ import annotations

import pandas as pd
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 20


def print_sink_report(layers: pd.DataFrame, models: pd.DataFrame, console: Console | None = None) -> None:
    """A table per model: a row a layer with a bar of its first-token mass, and the model's mean below.

    Args:
        layers: `sink_stats(by="layer")`.
        models: `sink_stats(by="model")`.
    """
    console = console or Console()
    for _, model in models.iterrows():
        console.print(sink_table(layers[layers["model"] == model["model"]], model))
        console.print()


def sink_table(layers: pd.DataFrame, model: pd.Series) -> Table:
    """One model's table."""
    first_row = "first query left out" if model["first_row"] == "exclude" else "first query included"
    table = Table(
        title=Text(str(model["model"]), style="bold"),
        caption=Text(
            f"mean over heads; {first_row}; {model['n_prompts']} prompts, {model['tokens']} tokens, "
            f"{model['n_queries']} queries; last row: mean over layers; uniform null {model['uniform_null']:.3f}"
        ),
        title_justify="left",
        caption_justify="left",
        show_footer=True,
    )
    has_gate = layers["gate_mean"].notna().any()
    table.add_column("layer", justify="right", footer="all")
    table.add_column("first-token mass", justify="right", footer=f"{model['first_token_mass']:.3f}")
    table.add_column("0 to 1", footer=Bar(1, 0, model["first_token_mass"], width=BAR_WIDTH))
    table.add_column("sink rate", justify="right", footer=f"{model['sink_rate']:.2f}")
    table.add_column("top sink", justify="right", footer=f"{model['top_sink_position']}")
    table.add_column("entropy ratio", justify="right", footer=f"{model['entropy_ratio']:.2f}")
    if has_gate:
        table.add_column("gate mean", justify="right", footer=f"{model['gate_mean']:.3f}")
    table.add_column("max activation", justify="right", footer=f"{model['max_activation']:.1f}")
    for _, row in layers.iterrows():
        cells: list[str | Bar] = [
            f"{row['layer']}",
            f"{row['first_token_mass']:.3f}",
            Bar(1, 0, row["first_token_mass"], width=BAR_WIDTH),
            f"{row['sink_rate']:.2f}",
            f"{row['top_sink_position']}",
            f"{row['entropy_ratio']:.2f}",
        ]
        if has_gate:
            cells.append(f"{row['gate_mean']:.3f}")
        cells.append(f"{row['max_activation']:.1f}")
        table.add_row(*cells)
    return table

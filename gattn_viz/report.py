"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 20

# What is shown unless columns are named; each with its heading and format.
USUAL = {
    "first_token_mass": ("first-token mass", ".3f"),
    "sink_rate": ("sink rate", ".2f"),
    "top_sink_position": ("top sink", ""),
    "entropy_ratio": ("entropy ratio", ".2f"),
    "gate_mean": ("gate mean", ".3f"),
    "max_activation": ("max activation", ".1f"),
}
USUAL_GATES = {
    "gate_mean": ("gate mean", ".3f"),
    "gate_q50": ("median", ".3f"),
    "gate_below": ("shut", ".2f"),
    "gate_above": ("open", ".2f"),
    "gate_first_token": ("first token", ".3f"),
    "gate_channels_shut": ("channels shut", ".2f"),
    "output_before": ("output before", ".3g"),
    "output_after": ("output after", ".3g"),
}
WITH_BAR = ("first_token_mass", "gate_below")
"""Shares that are drawn too."""
OF_THE_MODEL = ("uniform_null", "perplexity")


def print_sink_report(
    layers: pd.DataFrame,
    models: pd.DataFrame,
    columns: Sequence[str] | None = None,
    console: Console | None = None,
) -> None:
    """A table per model: a row a layer with a bar of its first-token mass, and the model's mean below.

    Args:
        layers: `sink_stats(by="layer")`.
        models: `sink_stats(by="model")`.
        columns: the measures to show; None is the usual ones.
    """
    _print_tables(layers, models, columns or list(USUAL), console)


def print_gate_report(
    layers: pd.DataFrame,
    models: pd.DataFrame,
    columns: Sequence[str] | None = None,
    console: Console | None = None,
) -> None:
    """The same of `gate_stats`, with a bar of the share of scores that are shut."""
    _print_tables(layers, models, columns or list(USUAL_GATES), console)


def _print_tables(
    layers: pd.DataFrame, models: pd.DataFrame, columns: Sequence[str], console: Console | None
) -> None:
    console = console or Console()
    for _, model in models.iterrows():
        console.print(layer_table(layers[layers["model"] == model["model"]], model, columns))
        console.print()


def layer_table(layers: pd.DataFrame, model: pd.Series, columns: Sequence[str]) -> Table:
    """One model's table."""
    table = Table(
        title=Text(str(model["model"]), style="bold"),
        caption=Text(_caption(model)),
        title_justify="left",
        caption_justify="left",
        show_footer=True,
    )
    shown = [name for name in columns if name not in OF_THE_MODEL and layers[name].notna().any()]
    rows = [row for _, row in layers.iterrows()]
    table.add_column("layer", justify="right", footer="all")
    cells: list[list[str | Bar]] = [[f"{row['layer']}" for row in rows]]
    for name in shown:
        heading, digits = (USUAL | USUAL_GATES).get(name, (name.replace("_", " "), ".4g"))
        table.add_column(heading, justify="right", footer=_value(model, name, digits))
        cells.append([_value(row, name, digits) for row in rows])
        if name in WITH_BAR:
            table.add_column("0 to 1", footer=Bar(1, 0, model[name], width=BAR_WIDTH))
            cells.append([Bar(1, 0, row[name], width=BAR_WIDTH) for row in rows])
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    return table


def _caption(model: pd.Series) -> str:
    """What the numbers stand for, and those that a layer has none of."""
    parts = ["mean over heads"]
    counted = f"{model['n_prompts']} prompts, {model['tokens']} tokens"
    if "first_row" in model:
        parts.append("first query left out" if model["first_row"] == "exclude" else "first query included")
        counted += f", {model['n_queries']} queries"
    parts += [counted, "last row: mean over layers"]
    if any(pd.notna(model.get(name)) for name in ("gate_below", "gate_above", "gate_channels_shut")):
        parts.append(f"shut: score < {model['below_threshold']:g}, open: > {model['above_threshold']:g}")
    if "ci" in model:
        parts.append(f"in brackets {100 * model['ci']:g}% intervals over prompts")
    if "uniform_null" in model:
        parts.append(f"uniform null {model['uniform_null']:.3f}")
    if "perplexity" in model:
        parts.append(f"perplexity {_value(model, 'perplexity', '.2f')}")
    return "; ".join(parts)


def _value(row: pd.Series, name: str, digits: str) -> str:
    """A value, and its interval if it has one."""
    text = f"{row[name]:{digits}}"
    if f"{name}_ci_low" in row:
        text += f" [{row[f'{name}_ci_low']:{digits}}, {row[f'{name}_ci_high']:{digits}}]"
    return text

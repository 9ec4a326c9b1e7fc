"""A comparison as a person reads it: a row a quantity, a column a model."""

from __future__ import annotations

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gattn_viz.metrics.compared import QUANTITIES

DIGITS = {quantity.name: quantity.digits for quantity in QUANTITIES}


def print_comparison(table: pd.DataFrame, ci: float, console: Console | None = None) -> None:
    """Show it in the terminal.

    Args:
        table: `compare(...).table`.
        ci: the level of its intervals.
    """
    shown = Table(caption=Text(_caption(table, ci)), caption_justify="left")
    shown.add_column("quantity")
    for model in table["model"].unique():
        shown.add_column(Text(str(model)), justify="right", overflow="fold")
    for title, cells in _rows(table):
        shown.add_row(title, *[Text("\n".join(part for part in cell if part)) for cell in cells])
    (console or Console()).print(shown)


def to_markdown(table: pd.DataFrame, ci: float) -> str:
    """The same for a document."""
    models = [str(model).replace("|", r"\|") for model in table["model"].unique()]
    lines = [f"| quantity | {' | '.join(models)} |", f"|---|{'--:|' * len(models)}"]
    for title, cells in _rows(table):
        lines.append(f"| {title} | {' | '.join(' '.join(part for part in cell if part) for cell in cells)} |")
    return "\n".join([*lines, "", _caption(table, ci), ""])


def _caption(table: pd.DataFrame, ci: float) -> str:
    """What has to be known to read it."""
    notes = table[table["model"] == table.attrs["baseline"]].set_index("quantity")["note"]
    parts = [
        f"In parentheses the difference to {table.attrs['baseline']}, in brackets its {100 * ci:g}% interval: a "
        f"paired bootstrap over prompts{_of_few(notes['tokens'])}",
        f"{notes['tokens']}, {notes['first_token_mass']}; sink: {notes['sink_rate']}; shut: {notes['gate_below']}",
        f"Multiply-adds: {notes['multiply_adds']}",
    ]
    if "forward_time" in notes:
        parts.append(f"Forward pass: median of {notes['forward_time']}, in brackets the quartiles")
    return ". ".join(parts) + "."


def _of_few(prompts: str) -> str:
    """What must be said of an interval from `16 prompts`."""
    few = int(prompts.split()[0]) < 10
    return f" ({prompts} only: it is too narrow)" if few else ""


def _rows(table: pd.DataFrame) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each quantity's title, and for each model its value and its difference to the baseline's, as texts."""
    found = []
    by_quantity = table.set_index(["quantity", "model"])
    models = table["model"].unique()
    for quantity in QUANTITIES:
        if quantity.name in by_quantity.index.get_level_values("quantity"):
            rows = [by_quantity.loc[(quantity.name, model)] for model in models]
            unit = f", {quantity.unit}" if quantity.unit in ("bytes", "seconds", "MiB") else ""
            found.append((quantity.title + unit, [_cell(row, quantity.digits) for row in rows]))
    return found


def _cell(row: pd.Series, digits: str) -> tuple[str, str]:
    if pd.isna(row["value"]):
        return "-", ""
    value = f"{row['value']:{digits}}"
    if pd.notna(row["q1"]):
        value += f" [{row['q1']:{digits}}, {row['q3']:{digits}}]"
    if pd.isna(row["difference"]):
        return value, ""
    interval = "" if pd.isna(row["ci_low"]) else f" [{row['ci_low']:+{digits}}, {row['ci_high']:+{digits}}]"
    return value, f"({row['difference']:+{digits}}{interval})"

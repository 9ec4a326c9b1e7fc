"""The results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from rich.table import Table

from benchmarks.contenders import CONTENDERS, PLAIN
from benchmarks.processes import OK
from benchmarks.shapes import SHAPES


def tables(frame: pd.DataFrame) -> Iterator[Table]:
    """For each shape, its time for each number of threads and its memory; a row a contender, a column a length."""
    for (shape, quantity, threads), part in frame.groupby(["shape", "quantity", "threads"], sort=False):
        what = f"time as a ratio to the plain forward, {threads} thread{'s' * (threads != 1)}: median (quartiles)"
        if quantity == "memory":
            what = f"extra memory, {threads} thread{'s' * (threads != 1)}"
        table = Table(title=f"{SHAPES[str(shape)].title}\n{what}", title_justify="left")
        lengths = sorted(part["tokens"].unique())
        table.add_column("tokens")
        for tokens in lengths:
            table.add_column(f"{tokens:,}", justify="right")
        for name, contender in CONTENDERS.items():
            own = part[part["contender"] == name].set_index("tokens")
            if len(own):
                cells = [cell(own.loc[tokens]) if tokens in own.index else "" for tokens in lengths]
                table.add_row(contender.title, *cells)
        yield table


def cell(row: pd.Series) -> str:
    """`1.05 (1.04-1.07)`, the plain forward's own seconds, `38 MiB`, or why there is no number."""
    if row["status"] != OK:
        return str(row["status"])
    if row["quantity"] == "memory":
        return f"{row['median']:,.0f} MiB"
    if row["contender"] == PLAIN:
        return f"{row['seconds']:.3g} s"
    return f"{row['median']:.2f} ({row['q1']:.2f}-{row['q3']:.2f})"

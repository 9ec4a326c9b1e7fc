"""python -m benchmarks.figure CSV -o FILE: time and extra memory against the prompt's length."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.contenders import CONTENDERS, PLAIN
from benchmarks.processes import DOES_NOT_FIT, OK
from benchmarks.results import SAME, read
from benchmarks.shapes import SHAPES
from gattn_viz.errors import GattnVizError
from gattn_viz.figures.save import save_figure
from gattn_viz.figures.style import INK, MUTED, OTHER_COLORS, VARIANT_COLORS, style

# Ours in blues and green, full lines, with hollow marks for numba; the others in warm colours, dashed; each with a
# mark of its own.
LOOKS = {
    PLAIN: (MUTED, "-", ""),
    "ours_first_token": (OTHER_COLORS[3], "-", "o"),
    "ours_all": (VARIANT_COLORS["gate_headwise"], "-", "s"),
    "ours_all_numba": (VARIANT_COLORS["gate_headwise"], "-", "s"),
    "ours_maps": (VARIANT_COLORS["gate_elementwise"], "-", "D"),
    "eager": (OTHER_COLORS[0], "--", "^"),
    "transformer_lens": (OTHER_COLORS[1], "--", "v"),
    "nnsight": (OTHER_COLORS[2], "--", "P"),
}


def draw(frame: pd.DataFrame, shape: str, threads: int) -> Figure:
    """Time over plain time on the left, extra memory on the right, both axes logarithmic.

    A line ends at the last length that fitted; a band is the quartiles of the rounds.

    Raises:
        GattnVizError: no measurement of that shape and number of threads.
    """
    frame = frame[frame["shape"] == shape]
    time = frame[(frame["quantity"] == "time") & (frame["threads"] == threads)]
    memory = frame[frame["quantity"] == "memory"]
    if not (time["status"] == OK).any():
        raise GattnVizError(f"no times of shape {shape!r} with {threads} threads; expected some in the CSV")
    with style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.5), layout="constrained")
        _lines(left, time)
        _lines(right, memory)
        left.set_ylabel("time / time of the plain forward")
        right.set_ylabel("extra memory, MiB")
        handles, labels = right.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(SHAPES[shape].title)
        left.set_title(f"time, {threads} thread{'s' * (threads != 1)}", loc="left", color=INK)
        right.set_title(_ends(memory), loc="left", color=INK)
    return figure


def _lines(axes: Axes, part: pd.DataFrame) -> None:
    for name, (colour, dashes, mark) in LOOKS.items():
        own = part[(part["contender"] == name) & (part["status"] == OK)].sort_values("tokens")
        if len(own):
            title = CONTENDERS[name].title
            face = "white" if CONTENDERS[name].package == "numba" else colour
            axes.plot(
                own["tokens"], own["median"], dashes, marker=mark, markersize=4, color=colour,
                markerfacecolor=face, label=title,
            )  # fmt: skip
            axes.fill_between(own["tokens"], own["q1"], own["q3"], color=colour, alpha=0.2, linewidth=0)
    number = FuncFormatter(lambda value, position: f"{value:,g}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(part["tokens"].unique()))
    axes.xaxis.set_major_formatter(number)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(number)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens")


def _ends(memory: pd.DataFrame) -> str:
    """The memory panel's title, with the limit if somebody met it."""
    if not (memory["status"] == DOES_NOT_FIT).any():
        return "memory"
    return f"memory; dashes end at the limit, {memory['limit_mib'].iloc[0] / 1024:.0f} GiB"


def main(
    csv: Annotated[Path, typer.Argument(help="What python -m benchmarks wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG, PDF or SVG.")],
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "model",
    threads: Annotated[int, typer.Option(help="Of the timed run.")] = 1,
) -> None:
    """Draw the benchmark."""
    try:
        frame = read(csv)
        if shape not in SHAPES:
            raise GattnVizError(f"--shape {shape!r}: expected one of {', '.join(SHAPES)}")
        figure = draw(frame, shape, threads)
        known = {column: str(frame[column].iloc[0]) for column in ["date", *SAME]}
        save_figure(figure, output, metadata=known | {"shape": shape, "threads": str(threads)})
    except GattnVizError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    typer.run(main)

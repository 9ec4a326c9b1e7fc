"""The options of commands that write figures, as those of `maps`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gattn_viz.cli import options

Layers = Annotated[
    str | None,
    typer.Option(
        help="Layers of maps, from 1, such as 1,7,21-28, or all. Default: the first, those at a quarter and three "
        "quarters, the last.",
        show_default=False,
    ),
]
Directory = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        file_okay=False,
        metavar="DIR",
        help="Where figures are written.",
        rich_help_panel=options.OUTPUT,
    ),
]
Format = Annotated[
    Literal["png", "pdf", "svg"],
    typer.Option("--format", help="Of the figures.", rich_help_panel=options.OUTPUT),
]
Dpi = Annotated[int, typer.Option(min=20, max=2400, help="Pixels per inch.", rich_help_panel=options.OUTPUT)]
WithCsv = Annotated[
    bool,
    typer.Option("--csv", help="Write what is drawn beside it too, as CSV.", rich_help_panel=options.OUTPUT),
]
Scale = Annotated[Literal["linear", "sqrt", "log"], typer.Option(help="How values become colours.")]
X = Annotated[
    Literal["layer", "depth"],
    typer.Option(
        "--x",
        help="Of figures by layer: the layer, or the relative depth (layer - 1)/(layers - 1), from 0 to 1, which "
        "models of different depth share.",
    ),
]
Vmax = Annotated[
    float | None,
    typer.Option(
        min=0, help="The value of the last colour. Default: the largest that is drawn.", show_default=False
    ),
]
Font = Annotated[
    str | None,
    typer.Option(help="A font family or file to prefer for tokens.", show_default=False),
]


def chosen_layers(layers: str | None) -> str | tuple[int, ...] | None:
    """What --layers says: None, `all`, or the numbers.

    Raises:
        typer.BadParameter: it says something else.
    """
    return layers if layers in (None, "all") else options.parse_numbers(layers, "all, or layers")

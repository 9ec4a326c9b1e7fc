"""`gattn-viz recipe`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from gattn_viz.cli import options

HELP = (
    "The recipe of a figure, a table or raw maps: the models, prompts, options and versions that made it.\n\n"
    "In a terminal as text, into a pipe as JSON. With --rerun the same command is run again, and what it writes "
    "is compared with FILE, but for measured times and memory: exit code 0 when the numbers agree, 1 when they do "
    "not."
)
EXAMPLE = "Example: gattn-viz recipe sinks.csv --rerun -o again.csv"

RERUN = "Run it again"


def recipe(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="As one of the commands wrote it.", show_default=False)
    ],
    output_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(
            "--format", help="Default: text in a terminal or with --rerun, else json.", show_default=False
        ),
    ] = None,
    rerun: Annotated[
        bool, typer.Option("--rerun", help="Run the command again and compare.", rich_help_panel=RERUN)
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="NEW",
            help="Where it writes: a new file for a table, a new or empty directory for maps, compare and "
            "figures. Nothing is overwritten.",
            rich_help_panel=RERUN,
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME=PATH",
            help="Where the recipe's local model NAME is here. Repeatable.",
            rich_help_panel=RERUN,
            show_default=False,
        ),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            envvar="GATTN_VIZ_CHECKPOINTS",
            help="Where the recipe's variants are here, if they were in a directory.",
            rich_help_panel=RERUN,
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Where its prompts file is here.", rich_help_panel=RERUN, show_default=False
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Where its local adapter is here.", rich_help_panel=RERUN, show_default=False
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="By how much numbers may differ, as a share of them. Default: .001, in half precision .02.",
            rich_help_panel=RERUN,
            show_default=False,
        ),
    ] = None,
    allow_changed: Annotated[
        bool,
        typer.Option(
            "--allow-changed",
            help="Run with other weights or prompts than the recipe's, to see which numbers change.",
            rich_help_panel=RERUN,
        ),
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run the code that comes with a checkpoint again, if the command ran it.",
            rich_help_panel=RERUN,
        ),
    ] = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    if rerun and output is None:
        raise typer.BadParameter("--rerun needs a place to write to; expected -o NEW beside it")
    if not rerun and (output, model, prompts, adapter, tolerance, allow_changed) != (*[None] * 5, False):
        raise typer.BadParameter(
            "-o, --model, --prompts, --adapter, --tolerance and --allow-changed go with --rerun: add it"
        )

    from gattn_viz.recipe.stored import read_recipe

    found = read_recipe(file)
    if not rerun:
        in_terminal = sys.stdout is not None and sys.stdout.isatty()
        if output_format == "text" or (output_format is None and in_terminal):
            from gattn_viz.report import print_recipe

            print_recipe(found)
        else:
            print(found.to_json(indent=2))
        return

    from gattn_viz.cli.rerun import Given, rerun_and_compare

    assert output is not None
    given = Given(options.named_paths(model), checkpoints, prompts, adapter, allow_changed, trust_remote_code)
    result, changed = rerun_and_compare(file, found, output, given, tolerance, quiet)
    if output_format == "json":
        entries = {
            "agrees": not result.different,
            "compared": result.compared,
            "tolerance": result.tolerance,
            "different": [[where, _in_json(old), _in_json(new)] for where, old, new in result.different],
            "changed": changed,
        }
        print(json.dumps(entries, indent=2))
    else:
        print(result.in_words())
        for what, before, now in changed:
            print(f"changed since: {what} {before} -> {now}")
    if result.different:
        raise typer.Exit(1)


def _in_json(value: float | str | None) -> float | str | None:
    """JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

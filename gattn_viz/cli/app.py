"""The application: the commands and what stands before them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from gattn_viz.cli import (
    compare,
    env,
    figures,
    gate_maps,
    gate_stats,
    heads,
    maps,
    models,
    options,
    recipe,
    sink_stats,
)

app = typer.Typer(
    name="gattn-viz",
    help="Attention maps, attention-sink statistics and gate scores of gated-attention language models.",
    epilog="Example: gattn-viz maps --model gate_headwise --layers 1,7,21,28",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_version(value: bool) -> None:
    if value:
        print(f"gattn-viz {version('gattn-viz')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: options.Debug = False,
) -> None:
    pass


COMMANDS = {
    "maps": maps,
    "sink-stats": sink_stats,
    "gate-stats": gate_stats,
    "heads": heads,
    "gate-maps": gate_maps,
    "compare": compare,
    "figures": figures,
    "models": models,
    "recipe": recipe,
    "env": env,
}

for name, command in COMMANDS.items():
    run = getattr(command, name.replace("-", "_"))
    app.command(name, help=command.HELP, epilog=command.EXAMPLE)(run)

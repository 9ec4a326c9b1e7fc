"""`gattn-viz env`."""

from __future__ import annotations

from typing import Annotated

import typer

from gattn_viz.cli import options

HELP = (
    "Versions, devices, caches and settings, to paste into a bug report.\n\n"
    "No token, password or name of your home directory is in it: of a variable that may be secret it says only "
    "that it is set."
)
EXAMPLE = "Example: gattn-viz env"


def env(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    debug: options.Debug = False,
) -> None:
    import json

    from gattn_viz.environment import environment

    found = environment()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for section, entries in found.items():
        print(f"{section}:")
        for name, value in entries.items():
            print(f"- {name}: {value}")
        print()

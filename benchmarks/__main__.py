"""python -m benchmarks: time and memory of attention statistics, as a table and as CSV. See README.md here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.contenders import CONTENDERS, PLAIN
from benchmarks.run import Settings, run
from benchmarks.shapes import SHAPES
from benchmarks.table import tables
from gattn_viz.errors import GattnVizError

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    shapes: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = ",".join(SHAPES),
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt; each shape has its own.")] = "",
    threads: Annotated[str, typer.Option(help="A timed run for each; memory with the last.")] = "1,2",
    contenders: Annotated[str, typer.Option(help=f"Of {', '.join(CONTENDERS)}.")] = ",".join(CONTENDERS),
    rounds: Annotated[int, typer.Option(min=1, help="At most; each runs every contender once.")] = 7,
    budget: Annotated[float, typer.Option(help="Seconds of calls after which a contender leaves.")] = 5.0,
    memory_limit: Annotated[float | None, typer.Option(help="GiB a contender may take; half of all.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "float32",
    quick: Annotated[bool, typer.Option("--quick", help="256 tokens, 2 rounds, 1 thread: does it run?")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="The CSV; goes on where it ends.")] = Path(
        "benchmark.csv"
    ),
) -> None:
    """Time and extra memory of attention statistics: a table on stdout, a CSV, progress on stderr."""
    started = perf_counter()

    def say(message: str) -> None:
        print(f"[{perf_counter() - started:6.0f} s] {message}", file=sys.stderr, flush=True)

    try:
        chosen = _names("--contenders", contenders, CONTENDERS)
        settings = Settings(
            shapes=[SHAPES[name] for name in _names("--shapes", shapes, SHAPES)],
            lengths=[256] if quick else _numbers("--lengths", lengths),
            threads=[1] if quick or device != "cpu" else _numbers("--threads", threads) or [1],
            contenders=chosen if PLAIN in chosen else [PLAIN, *chosen],
            rounds=2 if quick else rounds,
            budget=budget,
            limit=_memory(device) / 2 if memory_limit is None else memory_limit * 1024,
            device=device,
            dtype=DTYPES[_names("--dtype", dtype, DTYPES)[0]],
            output=output,
        )
        frame = run(settings, say)
    except GattnVizError as error:
        sys.exit(f"error: {error}")
    say(f"done: {output}")
    for table in tables(frame):
        Console(width=None if sys.stdout.isatty() else 160).print(table)


def _names(option: str, text: str, known: Mapping[str, object]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise GattnVizError(f"{option} {name!r}: expected one or more of {', '.join(known)}, with commas")
    return names


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")] if text else []
    except ValueError as error:
        raise GattnVizError(f"{option} {text!r}: expected whole numbers, with commas") from error
    if min(numbers, default=1) < 1:
        raise GattnVizError(f"{option} {text!r}: expected numbers from 1")
    return numbers


def _memory(device: str) -> float:
    """All memory there is, in MiB."""
    if device != "cpu":
        return torch.cuda.get_device_properties(device).total_memory / 2**20
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    app()

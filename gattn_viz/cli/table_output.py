"""Tables to stdout or a file, as CSV, JSON or Parquet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gattn_viz.cli import messages, options
from gattn_viz.errors import GattnVizError

if TYPE_CHECKING:
    import pandas as pd

    from gattn_viz.cli.recording import Recorder
    from gattn_viz.recipe.content import Recipe

Format = Literal["csv", "json", "parquet"]

OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the table to a file (.csv, .json, .parquet) instead of stdout; - is stdout.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]
OutputFormat = Annotated[
    Format | None,
    typer.Option(
        "--format",
        help="Default: by the file's suffix; on stdout csv.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]


class TableOutput:
    """Where a table goes, and in which format."""

    def __init__(self, file: Path | None, asked: Format | None) -> None:
        """`file` and `asked` are what --output and --format say.

        Raises:
            typer.BadParameter: the file's suffix is of no format, or it is a directory.
            GattnVizError: the format's library is not installed.
        """
        if file == Path("-"):
            file, asked = None, asked or "csv"
        if file is not None and file.is_dir():
            raise typer.BadParameter(f"--output {str(file)!r} is a directory; expected a file: name one in it")
        self._file, self._asked = file, asked
        self._format = _output_format(file, asked)

    @property
    def is_file(self) -> bool:
        return self._file is not None

    @property
    def shows_report(self) -> bool:
        """Whether a person is to be shown a report: stdout is a terminal, and no format was asked for on it."""
        in_terminal = sys.stdout is not None and sys.stdout.isatty()
        return in_terminal and self._file is None and self._asked is None

    def write(self, table: pd.DataFrame, recorder: Recorder, report: Callable[[], None] | None = None) -> None:
        """Write the table to the file, with its recipe, or to stdout; for a person `report` is called instead."""
        if self._file is not None:
            _write_file(table, self._file, self._format, recorder)
            messages.log.info("wrote %s: %d rows", self._file, len(table))
        elif report is not None and self.shows_report:
            report()
        else:
            _write_stdout(table, self._format)


def _output_format(output: Path | None, asked: Format | None) -> Format:
    """The format asked for, else that of the file's suffix.

    Raises:
        typer.BadParameter: the suffix is of no format.
        GattnVizError: the format's library is not installed.
    """
    by_suffix: dict[str, Format] = {"": "csv", ".csv": "csv", ".json": "json", ".parquet": "parquet"}
    suffix = output.suffix.lower() if output is not None else ""
    if asked is None and suffix not in by_suffix:
        raise typer.BadParameter(f"--output {output}: expected .csv, .json or .parquet, or --format beside it")
    chosen = asked or by_suffix[suffix]
    if chosen == "parquet" and find_spec("pyarrow") is None:
        raise GattnVizError("parquet needs pyarrow, which is not installed; install it with: pip install pyarrow")
    return chosen


def _write_file(table: pd.DataFrame, path: Path, output_format: Format, recorder: Recorder) -> None:
    from gattn_viz.files import replacing
    from gattn_viz.recipe.content import FileMade
    from gattn_viz.recipe.stored import with_recipe, write_with_sidecar

    paths = {model: " and ".join(used) for model, used in table.attrs["attention_path"].items()}
    recipe = recorder.recipe(FileMade("table", output_format, tuple(paths)), paths)
    content = _encode(table, output_format)
    if output_format != "parquet":
        write_with_sidecar(content, recipe, path)
        return
    with replacing(path) as temporary:
        temporary.write_bytes(with_recipe(content, recipe))


def write_csv(table: pd.DataFrame, path: Path, recipe: Recipe) -> Path:
    """Write a figure's numbers beside it, with their recipe."""
    from gattn_viz.recipe.stored import write_with_sidecar

    return write_with_sidecar(_encode(table, "csv"), recipe, path)


def _write_stdout(table: pd.DataFrame, output_format: Format) -> None:
    if sys.stdout is None:
        raise GattnVizError("standard output is closed; expected somewhere to write to: use --output FILE")
    sys.stdout.flush()
    sys.stdout.buffer.write(_encode(table, output_format))
    sys.stdout.flush()


def _encode(table: pd.DataFrame, output_format: Format) -> bytes:
    if output_format == "csv":
        return table.to_csv(index=False, float_format="%.7g").encode()
    if output_format == "json":
        return (table.to_json(orient="records", indent=2, double_precision=9) + "\n").encode()
    return table.to_parquet(index=False)

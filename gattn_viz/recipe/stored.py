"""Where a recipe is kept: in the file, or beside a table whose readers would trip over it.

| file | the recipe is in |
|---|---|
| PNG | the text chunk `gattn-viz`, with other metadata |
| PDF, SVG | `Keywords`, `Description` |
| safetensors, Parquet | the metadata `gattn_viz_recipe` |
| CSV, JSON, Markdown, LaTeX | FILE.recipe.json |
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from gattn_viz.errors import GattnVizError, first_line
from gattn_viz.files import is_stream, replacing
from gattn_viz.recipe.content import KEY, Recipe

log = logging.getLogger("gattn_viz")

SIDECAR = ".recipe.json"


def sidecar(path: str | os.PathLike[str]) -> Path:
    """The file of the recipe that belongs to a CSV or JSON file; beside what a symbolic link leads to."""
    target = Path(os.path.realpath(path))
    return target.with_name(target.name + SIDECAR)


def write_with_sidecar(content: bytes, recipe: Recipe, path: Path) -> Path:
    """Write a file that cannot hold its recipe, and the recipe beside it; its path."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    write_sidecar(recipe, path)
    return path


def write_sidecar(recipe: Recipe, path: str | os.PathLike[str]) -> None:
    """Write the recipe beside `path`, which has just been written; nothing beside a pipe or a device."""
    if is_stream(path):
        return
    recipe = replace(recipe, file=replace(recipe.file, sha256=file_sha256(path)))
    with replacing(sidecar(path)) as temporary:
        temporary.write_text(recipe.to_json(indent=2) + "\n", encoding="ascii")


def with_recipe(parquet_file: bytes, recipe: Recipe) -> bytes:
    """A Parquet file with the recipe in its metadata."""
    from io import BytesIO

    from pyarrow import parquet

    table = parquet.read_table(BytesIO(parquet_file))
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), KEY: recipe.to_json()})
    result = BytesIO()
    parquet.write_table(table, result)
    return result.getvalue()


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """The recipe of a file that gattn-viz wrote, whatever it is called; that of a sidecar is itself.

    Raises:
        GattnVizError: there is no such file, it has no recipe, or the recipe cannot be read.
    """
    source = Path(os.path.expanduser(path))
    try:
        with source.open("rb") as file:
            start = file.read(200)
        if source.name.endswith(SIDECAR):
            return Recipe.from_json(source.read_text(encoding="utf-8"), source.name)
        beside = sidecar(source)
        text = _embedded(source, start)
        if text is None and beside.is_file():
            text = beside.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise GattnVizError(
            f"cannot read {source}: {reason}; expected a file that gattn-viz wrote: check the path"
        ) from error
    if text is None:
        raise GattnVizError(
            f"{source.name} has no recipe; expected a file that gattn-viz wrote, CSV, "
            f"JSON, Markdown and LaTeX with {beside.name} beside them: name such a file"
        )
    recipe = Recipe.from_json(text, source.name)
    if recipe.file.sha256 is not None and recipe.file.sha256 != file_sha256(source):
        log.warning("%s is not as it was when its recipe was written", source.name)
    return recipe


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Of a file's content."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _embedded(path: Path, start: bytes) -> str | None:
    """The recipe inside a file, whose kind its first bytes tell; None if it has none."""
    if start.startswith(b"\x89PNG"):
        return _of_figure(path, "png")
    if start.startswith(b"%PDF"):
        return _of_figure(path, "pdf")
    if start.startswith(b"<?xml"):
        return _of_figure(path, "svg")
    if start.startswith(b"PAR1"):
        return _of_parquet(path)
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size:
        return _of_safetensors(path)
    return None


def _of_figure(path: Path, kind: str) -> str | None:
    from gattn_viz.figures.save import read_metadata

    return read_metadata(path, kind).get(KEY)


def _of_parquet(path: Path) -> str | None:
    if find_spec("pyarrow") is None:
        raise GattnVizError(
            f"{path.name} is Parquet, which needs pyarrow, and that is not installed; install it with: pip "
            "install pyarrow"
        )
    from pyarrow import ArrowException, parquet

    try:
        text = (parquet.read_schema(path).metadata or {}).get(KEY.encode())
    except ArrowException as error:
        raise GattnVizError(
            f"cannot read {path.name}: {first_line(error)}; expected a whole Parquet file"
        ) from error
    return None if text is None else text.decode()


def _of_safetensors(path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return (file.metadata() or {}).get(KEY)
    except SafetensorError as error:
        raise GattnVizError(
            f"cannot read {path.name}: {first_line(error)}; expected a whole safetensors file"
        ) from error

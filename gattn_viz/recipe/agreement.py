"""Whether the numbers of two files agree: tables and raw maps number by number, figures by what was noted of them.

The bytes never do: libraries and processors round differently. Two numbers agree when they differ by at most a
tolerance, as a share of the number, or of a hundredth of the largest number of its column or map where that is
more: below it, a small number is what rounding has left of large ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gattn_viz.errors import GattnVizError, first_line
from gattn_viz.recipe.content import MapSummary, Recipe

TOLERANCE = 1e-3
HALF_TOLERANCE = 2e-2
"""For bfloat16 and float16, of which a number has two or three digits."""

PARTS = 4
"""Rows and columns of a map's summary."""

FLOOR = 0.01

NAMES = (
    "source", "model", "prompt", "stage", "threshold", "layer", "head", "low", "query", "key", "quantity"
)  # fmt: skip
"""The columns that say what a table's row is about."""

MEASURED = ("forward_time", "forward_time_ratio", "peak_memory", "peak_memory_ratio")
"""Quantities of a comparison that are the machine's, and that no other run finds again: they are not compared."""

Place = tuple[str, float | str | None, float | str | None]
"""What differs, as it was and as it is."""


@dataclass(frozen=True)
class Agreement:
    """What the comparison of two files found.

    Attributes:
        compared: numbers (and words) of the older file.
        different: places that do not agree, each with both values.
    """

    tolerance: float
    compared: int
    different: list[Place]

    def in_words(self, limit: int = 10) -> str:
        """The verdict on one line, and below it the first differences."""
        within = f"{self.tolerance:.3%}".rstrip("0%").rstrip(".") + "%"
        if not self.different:
            return f"agrees: {self.compared} values are the same within {within}"
        lines = [f"differs: {len(self.different)} of {self.compared} values by more than {within}"]
        lines += [f"  {where}: {_shown(old)} -> {_shown(new)}" for where, old, new in self.different[:limit]]
        if len(self.different) > limit:
            lines.append(f"  ... and {len(self.different) - limit} more")
        return "\n".join(lines)


def default_tolerance(recipe: Recipe) -> float:
    """For the least precise of a recipe's models."""
    return TOLERANCE if all(model.dtype == "float32" for model in recipe.models) else HALF_TOLERANCE


def agreement(before: Path, old: Recipe, now: Path, new: Recipe, tolerance: float | None = None) -> Agreement:
    """Compare two files of one command. Models and prompts correspond by their order: names may have changed.

    Args:
        tolerance: see the module's docstring; None is 1e-3, and 2e-2 in half precision.

    Raises:
        GattnVizError: a file cannot be read.
    """
    tolerance = default_tolerance(old) if tolerance is None else tolerance
    if old.file.what in ("table", "layers"):
        older, newer = read_table(before, old.file.format), read_table(now, new.file.format)
        newer = _renamed(newer, "model", labels(new), labels(old))
        newer = _renamed(newer, "prompt", new.prompts.ids, old.prompts.ids)
        compare = _compare_each if "quantity" in older else compare_tables
        return compare(older, newer, tolerance)
    if old.file.what == "raw":
        return compare_maps(_read_maps(before), _read_maps(now), tolerance)
    found = compare_summaries(old.file.numbers, new.file.numbers, tolerance)
    ends = np.array(_color_ends(old)), np.array(_color_ends(new))
    return Agreement(
        tolerance,
        found.compared + len(ends[0]),
        found.different + list(_differences(["colours from", "colours to"], *ends, tolerance)),
    )


def labels(recipe: Recipe) -> list[str]:
    """Of its models, in order."""
    return [model.label for model in recipe.models]


def compare_tables(before: pd.DataFrame, now: pd.DataFrame, tolerance: float) -> Agreement:
    """Row by row; a column of numbers by the tolerance, any other word for word."""
    if list(before.columns) != list(now.columns) or len(before) != len(now):
        return Agreement(tolerance, before.size, [("the table", _shape(before), _shape(now))])
    names = [name for name in NAMES if name in before]
    rows = [_row_name(dict(zip(names, row, strict=True))) for row in before[names].itertuples(index=False)]
    different: list[Place] = []
    for column in before.columns:
        places = [f"{row}: {column}" if row else str(column) for row in rows]
        old, new = before[column], now[column]
        if pd.api.types.is_numeric_dtype(old) and pd.api.types.is_numeric_dtype(new):
            different += _differences(places, old.to_numpy(float), new.to_numpy(float), tolerance)
        else:
            words = zip(places, map(_word, old), map(_word, new), strict=True)
            different += [(place, a, b) for place, a, b in words if a != b]
    return Agreement(tolerance, before.size, different)


def _compare_each(before: pd.DataFrame, now: pd.DataFrame, tolerance: float) -> Agreement:
    """A table that has a quantity a row, quantity by quantity: 0.4 is not to go by the tolerance of a million."""
    parts = [
        compare_tables(before[before["quantity"] == name], now[now["quantity"] == name], tolerance)
        for name in before["quantity"].unique()
        if name not in MEASURED
    ]
    different = [place for part in parts for place in part.different]
    return Agreement(tolerance, sum(part.compared for part in parts), different)


def compare_maps(
    before: Mapping[str, NDArray[np.float32]], now: Mapping[str, NDArray[np.float32]], tolerance: float
) -> Agreement:
    """Raw maps, cell by cell."""
    shapes = [{name: str(maps.shape) for name, maps in side.items()} for side in (before, now)]
    compared = sum(maps.size for maps in before.values())
    if shapes[0] != shapes[1]:
        different: list[Place] = [
            (name, shapes[0].get(name), shapes[1].get(name))
            for name in sorted(shapes[0].keys() | shapes[1].keys())
            if shapes[0].get(name) != shapes[1].get(name)
        ]
        return Agreement(tolerance, compared, different)
    different = []
    for name, old in before.items():
        off = ~_agree(old, now[name], tolerance)
        for place in np.argwhere(off):
            head, row, column = (int(index) + 1 for index in place)
            where = f"{name}, map {head}, row {row}, column {column}"
            different.append((where, float(old[tuple(place)]), float(now[name][tuple(place)])))
    return Agreement(tolerance, compared, different)


def summarise_map(
    model: str, layer: int | None, head: int | None, cells: NDArray[np.floating], measure: str | None = None
) -> MapSummary:
    """A drawn map, (rows, columns) with NaN where it is blank, in a few numbers of six digits."""
    parts = [
        part
        for rows in np.array_split(cells.astype(float), min(PARTS, cells.shape[0]), axis=0)
        for part in np.array_split(rows, min(PARTS, cells.shape[1]), axis=1)
    ]
    return MapSummary(
        model,
        layer,
        head,
        mean=_digits(_mean(cells)),
        largest=None if np.isnan(cells).all() else _digits(float(np.nanmax(cells))),
        grid=tuple(_digits(_mean(part)) for part in parts),
        measure=measure,
    )


def compare_summaries(before: Sequence[MapSummary], now: Sequence[MapSummary], tolerance: float) -> Agreement:
    """Two figures' maps, in their order."""
    compared = sum(2 + len(one.grid) for one in before)
    names = [[(one.measure, one.layer, one.head, len(one.grid)) for one in side] for side in (before, now)]
    if names[0] != names[1]:
        return Agreement(tolerance, compared, [("maps", f"{len(before)}", f"{len(now)}, or others")])
    different: list[Place] = []
    for old, new in zip(before, now, strict=True):
        where = old.model + (f", {old.measure}" if old.measure is not None else "")
        where += f", layer {old.layer}" if old.layer is not None else ""
        where += f", head {old.head}" if old.head is not None else ""
        places = [f"{where}: mean", f"{where}: largest", *(f"{where}: part {n + 1}" for n in range(len(old.grid)))]
        different += _differences(places, _values(old), _values(new), tolerance)
    return Agreement(tolerance, compared, different)


def changes(old: Recipe, new: Recipe) -> list[Place]:
    """What may explain that numbers differ: weights, prompts, versions, dtype, device, attention path."""
    found: list[Place] = []
    for name in sorted(old.versions.keys() | new.versions.keys()):
        found.append((name, old.versions.get(name), new.versions.get(name)))
    for before, now in zip(old.models, new.models, strict=True):
        for what in ("weights_sha256", "tokens_sha256", "dtype", "device", "attention"):
            where = f"{what.replace('_', ' ')} of {before.label}"
            found.append((where, getattr(before, what), getattr(now, what)))
        if before.adapter is not None and now.adapter is not None:
            where = f"weights sha256 of the adapter {before.adapter.label}"
            found.append((where, before.adapter.weights_sha256, now.adapter.weights_sha256))
    found.append(("sha256 of the prompts", old.prompts.sha256, new.prompts.sha256))
    return [(name, before, now) for name, before, now in found if before != now]


def _agree(old: NDArray[np.floating], new: NDArray[np.floating], tolerance: float) -> NDArray[np.bool_]:
    old, new = old.astype(float), new.astype(float)
    finite = np.abs(old[np.isfinite(old)])
    floor = FLOOR * finite.max() if finite.size else 0.0
    with np.errstate(invalid="ignore"):  # infinity less infinity
        close = np.abs(new - old) <= tolerance * np.maximum(np.abs(old), floor)
    return close & np.isfinite(old) | (old == new) | (np.isnan(old) & np.isnan(new))


def _differences(
    places: Sequence[str], old: NDArray[np.float64], new: NDArray[np.float64], tolerance: float
) -> Iterator[Place]:
    for index in np.flatnonzero(~_agree(old, new, tolerance)).tolist():
        yield places[index], float(old[index]), float(new[index])


def _mean(cells: NDArray[np.floating]) -> float:
    present = cells[~np.isnan(cells)]
    return float(present.mean(dtype=float)) if present.size else math.nan


def _digits(value: float) -> float | None:
    """Six digits; None for NaN, which JSON does not have."""
    return None if math.isnan(value) else float(f"{value:.6g}")


def _values(one: MapSummary) -> NDArray[np.float64]:
    return np.array([one.mean, one.largest, *one.grid], dtype=float)


def _color_ends(recipe: Recipe) -> list[float]:
    scale = recipe.file.color_scale or {}
    return [float(scale[end]) for end in ("low", "high") if end in scale]


def _renamed(table: pd.DataFrame, column: str, names: Sequence[str], others: Sequence[str]) -> pd.DataFrame:
    if column not in table:
        return table
    by_name = dict(zip(names, others, strict=False))  # other prompts may be fewer
    return table.assign(**{column: [by_name.get(name, name) for name in table[column]]})


def _row_name(row: Mapping[str, object]) -> str:
    """`baseline, layer 2, head 1`."""
    alone = ("source", "model", "prompt", "stage")
    return ", ".join(f"{value}" if name in alone else f"{name} {value}" for name, value in row.items())


def _shown(value: float | str | None) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _shape(table: pd.DataFrame) -> str:
    return f"{len(table)} rows of {', '.join(map(str, table.columns))}"


def _word(value: object) -> str | None:
    return None if pd.isna(value) else str(value)  # type: ignore[call-overload]


def read_table(path: Path, kind: str) -> pd.DataFrame:
    """A table as it was written, `csv`, `json` or `parquet`.

    Raises:
        GattnVizError: it cannot be read.
    """
    try:
        if kind == "parquet":
            return pd.read_parquet(path)
        if kind == "json":
            return pd.DataFrame(json.loads(path.read_text(encoding="utf-8")))
        words: dict[str, type] = dict.fromkeys(("model", "prompt", "first_row", "key_token", "note"), str)
        # a model may be called NA or 1
        return pd.read_csv(path, dtype=words, keep_default_na=False, na_values=[""])
    except (
        ValueError,
        OSError,
        TypeError,
        AttributeError,
        ImportError,
    ) as error:  # what pandas and arrow raise are ValueErrors
        raise GattnVizError(
            f"cannot read the table {path.name}: {first_line(error)}; expected {kind} as gattn-viz wrote it"
        ) from error


def _read_maps(path: Path) -> dict[str, NDArray[np.float32]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise GattnVizError(f"cannot read {path.name}: {first_line(error)}; expected whole raw maps") from error

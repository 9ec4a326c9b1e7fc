"""The CSV: a line for each measurement, written as soon as it is made."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import pandas as pd
import torch

from gattn_viz.errors import GattnVizError

Quantity = Literal["time", "memory"]

NAN = float("nan")
KEY = ["shape", "tokens", "threads", "contender", "quantity"]
PACKAGES = ("gattn-viz", "torch", "transformers", "numba", "transformer-lens", "nnsight")

# A file holds the measurements of one machine and one setting. Peers may be installed later.
SAME = ["processor", "device", "dtype", "python", "gattn-viz", "torch", "transformers"]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        shape, tokens, threads, contender, quantity: what was measured.
        status: `ok`, `does not fit`, `not installed` or `failed: ...`; without `ok` there are no numbers.
        unit: of the next three: `x plain` for time, `MiB` for memory.
        median, q1, q3: over the rounds; memory is measured once.
        rounds: how many.
        seconds: the median time of a call; memory has none.
        limit_mib: how much memory a contender might take.
    """

    shape: str
    tokens: int
    threads: int
    contender: str
    quantity: Quantity
    status: str
    unit: str
    median: float = NAN
    q1: float = NAN
    q3: float = NAN
    rounds: int = 0
    seconds: float = NAN
    limit_mib: float = NAN


def environment(device: str, dtype: torch.dtype) -> dict[str, str]:
    """Where and when this is measured."""
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor() or platform.machine(),
    )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": f"{processor}, {os.cpu_count()} cores",
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def append(path: Path, rows: list[Row], where: dict[str, str]) -> None:
    """Add lines to the CSV, with its header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame([asdict(row) | where for row in rows])
    frame.to_csv(path, mode="a", header=not path.exists(), index=False)


def read(path: Path) -> pd.DataFrame:
    """The CSV, empty if there is none; of a measurement made twice the later one.

    Raises:
        GattnVizError: it is something else.
    """
    columns = [field.name for field in fields(Row)]
    if not path.exists():
        return pd.DataFrame(columns=columns)
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""], dtype={name: "string" for name in SAME})
    except (OSError, ValueError) as error:
        raise GattnVizError(f"cannot read {path}: {error}; expected a CSV of this benchmark") from error
    if missing := set(columns) - set(frame.columns):
        raise GattnVizError(f"{path} has no column {', '.join(sorted(missing))}; expected a CSV of this benchmark")
    return frame.drop_duplicates(KEY, keep="last")


def check_same(path: Path, frame: pd.DataFrame, where: dict[str, str]) -> None:
    """Raise unless the file's measurements were made where the next ones will be."""
    for column in SAME if len(frame) else []:
        if others := set(frame[column]) - {where[column]}:
            raise GattnVizError(
                f"{path} was measured with {column} {', '.join(sorted(others))}, and this is {where[column]}; "
                "name another file with --output"
            )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

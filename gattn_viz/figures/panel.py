"""What is drawn in one panel: a map, and which positions its rows and columns stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gattn_viz.errors import GattnVizError


@dataclass(frozen=True, eq=False)
class Positions:
    """The rows or the columns of a map: consecutive positions of a prompt.

    Attributes:
        first, last: from 1, both included.
        size: how many positions a row (column) stands for; the last may have fewer.
        labels: a token label for each position from `first` to `last`; empty where positions are numbered only.

    Raises:
        GattnVizError: positions that are none, another number of labels.
    """

    first: int
    last: int
    size: int = 1
    labels: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not (1 <= self.first <= self.last and self.size >= 1):
            raise GattnVizError(
                f"an axis has positions {self.first} to {self.last}, {self.size} a cell; expected them from 1 on"
            )
        positions = self.last - self.first + 1
        if len(self.labels) not in (0, positions):
            raise GattnVizError(
                f"{len(self.labels)} token labels for {positions} positions of a map; expected one for each"
            )

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def starts(self) -> range:
        """The first position of each row (column)."""
        return range(self.first, self.last + 1, self.size)

    def same_as(self, other: Positions) -> bool:
        """Whether both axes get the same ticks."""
        return (self.starts, self.last, [*self.labels]) == (other.starts, other.last, [*other.labels])

    @property
    def edges(self) -> tuple[float, float]:
        """Where the axis begins and ends, in data coordinates: those are positions."""
        begin = self.first - 0.5
        return begin, begin + len(self) * self.size


def map_title(name: str, learned_sink: float = np.nan) -> str:
    """What stands above a map whose rows sum to 1, but for the mean share that a learned sink takes of them."""
    if np.isnan(learned_sink):
        return name
    share = f"{learned_sink:.2f}" if learned_sink >= 0.005 else "<0.01"
    return f"{name}, sink {share}"


@dataclass(frozen=True, eq=False)
class Panel:
    """One map of a figure.

    Attributes:
        map: (rows, columns), attention of queries to keys; NaN is left blank.
        queries, keys: what the rows and the columns stand for.
        title: what stands above it (``layer 21``).
        keep: positions, from 1, whose ticks are kept when token labels are thinned, the most important first.

    Raises:
        GattnVizError: a map of another shape, a position of `keep` that is on neither axis.
    """

    map: np.ndarray
    queries: Positions
    keys: Positions
    title: str = ""
    keep: Sequence[int] = ()

    def __post_init__(self) -> None:
        shape, expected = np.shape(self.map), (len(self.queries), len(self.keys))
        if shape != expected:
            raise GattnVizError(f"an attention map has shape {shape}; expected queries x keys, {expected}")
        for position in self.keep:
            if not any(axis.first <= position <= axis.last for axis in (self.queries, self.keys)):
                raise GattnVizError(f"position {position} to keep is not among the map's")

    @classmethod
    def whole(cls, map: np.ndarray, labels: Sequence[str], title: str = "", keep: Sequence[int] = ()) -> Panel:
        """The whole map (T, T) of a prompt, with its T token labels."""
        tokens = max(len(map), 1)
        return cls(map, Positions(1, tokens, 1, labels), Positions(1, tokens, 1, labels), title, keep)

    @property
    def is_strip(self) -> bool:
        """Much wider than high: of a few queries."""
        return len(self.keys) > 3 * len(self.queries)

    @cached_property
    def shown(self) -> np.ma.MaskedArray:
        """The map in float64, masked where it is blank: not finite, or every key after every query."""
        blank = np.arange(len(self.keys)) >= self.reachable()[:, None]
        return np.ma.masked_array(np.asarray(self.map, dtype=np.float64), blank | ~np.isfinite(self.map))

    def reachable(self) -> np.ndarray:
        """(rows,): how many columns of each row, from the left, have a key that is not after its last query."""
        last_query = np.minimum(np.array(self.queries.starts) + self.queries.size - 1, self.queries.last)
        return np.clip((last_query - self.keys.first) // self.keys.size + 1, 0, len(self.keys))

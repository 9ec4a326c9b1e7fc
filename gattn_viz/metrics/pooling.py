"""The part of a map that is asked for, exact or pooled to buckets, filled in some rows at a time.

A view is asked for before the prompt's length T is known (`MapView`); on a prompt it becomes rows and columns of
consecutive positions (`MapCells`); a `MapBuilder` fills these in. An axis of n positions has buckets of
ceil(n / max_cells) of them; the last may be shorter. What is held is rows x columns, never T x T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gattn_viz.errors import GattnVizError

Pool = Literal["max", "mean"]

Span = tuple[int, int | None]
"""First and last position, from 1, both included; None is the prompt's last."""


@dataclass(frozen=True)
class MapView:
    """Which cells of a map are wanted; without arguments all of them, exactly.

    Attributes:
        queries, keys: the positions of the rows and of the columns; None is all of them.
        max_cells: the most rows and columns of the result; None has no limit. Above it, neighbouring positions
            share a bucket.
        pool: what stands for a bucket: the largest of its probabilities, or the mean of those whose key is not
            after the query.

    Raises:
        GattnVizError: a span that is not from 1 upwards, keys that all come after the queries, a limit below 1, an
            unknown pool.
    """

    queries: Span | None = None
    keys: Span | None = None
    max_cells: int | None = None
    pool: Pool = "max"

    def __post_init__(self) -> None:
        for name, span in (("queries", self.queries), ("keys", self.keys)):
            if span is not None and not _is_span(span):
                raise GattnVizError(
                    f"{name} are {span!r}; expected a first and a last position, from 1, such as (100, 200), or "
                    "(100, None) up to the end"
                )
        last_query = None if self.queries is None else self.queries[1]
        if last_query is not None and self.keys is not None and self.keys[0] > last_query:
            raise GattnVizError(
                f"the keys from {self.keys[0]} on come after the queries up to {last_query}: every cell would be "
                f"blank; expected keys from {last_query} or before"
            )
        if self.max_cells is not None and not (isinstance(self.max_cells, Integral) and self.max_cells >= 1):
            raise GattnVizError(f"max_cells is {self.max_cells!r}; expected a whole number, 1 or more")
        if self.pool not in get_args(Pool):
            raise GattnVizError(f"pool is {self.pool!r}; expected {' or '.join(get_args(Pool))}")

    def cells(self, tokens: int, prompt: str = "the prompt") -> MapCells:
        """The rows and columns of this view on a prompt of `tokens` tokens, called `prompt` in a message.

        Raises:
            GattnVizError: a position beyond the prompt.
        """
        queries = self._buckets("queries", self.queries, tokens, prompt)
        keys = self._buckets("keys", self.keys, tokens, prompt)
        pooled = queries.size > 1 or keys.size > 1
        return MapCells(tokens, queries, keys, self.pool if pooled else None)

    def _buckets(self, name: str, span: Span | None, tokens: int, prompt: str) -> Buckets:
        first, last = span or (1, None)
        if max(first, last or 1) > tokens:
            asked = first if last == first else f"{first}-{last or ''}"
            raise GattnVizError(f"no {name} {asked}: {prompt} has T = {tokens}; expected positions 1 to {tokens}")
        last = last or tokens
        return Buckets(first, last, -(-(last - first + 1) // (self.max_cells or tokens)))


def _is_span(span: object) -> bool:
    """Whether it is two positions, from 1, in order; the last may be None."""
    if not isinstance(span, Sequence) or isinstance(span, str) or len(span) != 2:
        return False
    first, last = span
    last = first if last is None else last
    return isinstance(first, Integral) and isinstance(last, Integral) and 1 <= int(first) <= int(last)


@dataclass(frozen=True)
class Buckets:
    """The rows or columns of a view: positions `first` to `last`, from 1, `size` of them in each bucket.

    The last bucket may have fewer.
    """

    first: int
    last: int
    size: int = 1

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def starts(self) -> range:
        """The first position of each bucket."""
        return range(self.first, self.last + 1, self.size)

    @property
    def zero_based(self) -> range:
        """The positions, from 0."""
        return range(self.first - 1, self.last)

    def ends(self) -> NDArray[np.int64]:
        """The last position of each bucket."""
        return np.minimum(np.array(self.starts) + self.size - 1, self.last)


@dataclass(frozen=True)
class MapCells:
    """What the rows and columns of one prompt's view stand for.

    Attributes:
        tokens: T of the prompt.
        queries, keys: the rows and the columns.
        pool: None when both have a position each: the cells are exact.
    """

    tokens: int
    queries: Buckets
    keys: Buckets
    pool: Pool | None = None

    def in_words(self) -> str:
        """For a title: ``T = 8192, first key left out, max over 16 x 16 cells``."""
        words = [f"T = {self.tokens}"]
        words += _span_in_words("query", "queries", self.queries, self.tokens)
        if (self.keys.first, self.keys.last) == (2, self.tokens):
            words.append("first key left out")
        else:
            words += _span_in_words("key", "keys", self.keys, self.tokens)
        if self.pool is not None:
            words.append(f"{self.pool} over {self.queries.size} x {self.keys.size} cells")
        return ", ".join(words)

    def causal_pairs(self) -> NDArray[np.int64]:
        """(rows, columns): of the positions in a cell, how many pairs have a key that is not after the query.

        A cell without any is blank.
        """
        first_query = np.array(self.queries.starts)[:, None]
        first_key = np.array(self.keys.starts)
        n_keys = self.keys.ends() - first_key + 1

        def pairs_up_to(query: NDArray[np.int64]) -> NDArray[np.int64]:
            # Query after query one key more of a bucket is seen, up to all n: 1 + 2 + ... + n + n + ...
            queries = np.maximum(query - first_key + 1, 0)
            rising = np.minimum(queries, n_keys)
            return rising * (rising + 1) // 2 + (queries - rising) * n_keys

        return pairs_up_to(self.queries.ends()[:, None]) - pairs_up_to(first_query - 1)


def _span_in_words(one: str, several: str, axis: Buckets, tokens: int) -> list[str]:
    if (axis.first, axis.last) == (1, tokens):
        return []
    return [f"{one} {axis.first}" if axis.first == axis.last else f"{several} {axis.first}-{axis.last}"]


class MapBuilder:
    """A view of the maps of some heads of a prompt, while blocks of the maps come in.

    Attributes:
        rows: the queries that are needed, from 0.
    """

    def __init__(self, heads: int, tokens: int, view: MapView = MapView()) -> None:
        self.cells = view.cells(tokens)
        self.rows = self.cells.queries.zero_based
        self._values = torch.zeros(heads, len(self.cells.queries), len(self.cells.keys))

    def add(self, p: Tensor, first_query: int, first_key: int) -> None:
        """Take in (heads, Q, K) probabilities of queries `first_query`, ... to keys `first_key`, ..., from 0.

        Each pair of a query and a key comes once, in any order; those that never come have probability 0. What is
        not in the view is passed over.
        """
        queries, keys = self.cells.queries, self.cells.keys
        p, row = _within(p, 1, first_query, queries)
        p, column = _within(p, 2, first_key, keys)
        if not p.numel():
            return
        reduce = torch.sum if self.cells.pool == "mean" else torch.amax
        # rows first: that reduction is vectorised, and leaves the other little to do
        p = _pooled(p, 1, row, queries.size, reduce)
        p = _pooled(p, 2, column, keys.size, reduce)
        row, column = row // queries.size, column // keys.size
        values = self._values[:, row : row + p.shape[1], column : column + p.shape[2]]
        p = p.to(values)
        if self.cells.pool == "mean":
            values += p
        else:
            torch.maximum(values, p, out=values)

    def add_bucket_sums(self, sums: Tensor, first_query: int) -> None:
        """For the pool `mean`: take in (heads, Q, columns) probabilities, summed over the keys of each bucket."""
        queries = self.cells.queries
        sums, row = _within(sums, 1, first_query, queries)
        if sums.numel():
            sums = _pooled(sums, 1, row, queries.size, torch.sum)
            row //= queries.size
            self._values[:, row : row + sums.shape[1]] += sums.to(self._values)

    def result(self) -> Tensor:
        """(heads, rows, columns), float32, on the CPU.

        An exact map has 0 where the key is after the query, as the model has; a pooled one NaN in its blank cells.
        """
        if self.cells.pool is None:
            return self._values
        pairs = torch.from_numpy(self.cells.causal_pairs())
        values = self._values / pairs if self.cells.pool == "mean" else self._values
        return values.masked_fill(pairs == 0, torch.nan)


def _within(p: Tensor, dim: int, first: int, buckets: Buckets) -> tuple[Tensor, int]:
    """The part of `p` that lies in the view, and where it begins in it; `first` is from 0."""
    wanted = buckets.zero_based
    start = max(first, wanted.start)
    stop = max(min(first + p.shape[dim], wanted.stop), start)
    return p.narrow(dim, min(start - first, p.shape[dim]), stop - start), start - wanted.start


def _pooled(p: Tensor, dim: int, start: int, size: int, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce `dim` to its buckets; its first position is `start` positions into the view."""
    if size == 1:
        return p
    length = p.shape[dim]
    head = min(-start % size, length)  # ends a bucket that began before
    whole = (length - head) // size * size
    tail = length - head - whole
    parts = []
    if head:
        parts.append(reduce(p.narrow(dim, 0, head), dim, keepdim=True))
    if whole:
        parts.append(reduce(p.narrow(dim, head, whole).unflatten(dim, (-1, size)), dim + 1))
    if tail:
        parts.append(reduce(p.narrow(dim, head + whole, tail), dim, keepdim=True))
    return torch.cat(parts, dim)

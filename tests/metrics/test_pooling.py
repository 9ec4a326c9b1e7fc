"""Views of a map against the whole map, cut and pooled by loops over its cells."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.pooling import Buckets, MapBuilder, MapCells, MapView


def causal_map(heads: int, tokens: int, seed: int = 0) -> np.ndarray:
    """(heads, T, T), rows that sum to 1."""
    p = np.tril(np.random.default_rng(seed).exponential(size=(heads, tokens, tokens)) ** 3)
    return (p / p.sum(-1, keepdims=True)).astype(np.float32)


def naive(p: np.ndarray, view: MapView) -> np.ndarray:
    """The view of (heads, T, T), cell by cell, each a loop over its pairs of positions from 1."""
    tokens = p.shape[-1]

    def buckets(span: tuple[int, int | None] | None) -> list[list[int]]:
        first, last = span or (1, None)
        positions = list(range(first, (last or tokens) + 1))
        size = 1
        while view.max_cells is not None and len(positions) / size > view.max_cells:
            size += 1
        return [positions[start : start + size] for start in range(0, len(positions), size)]

    rows, columns = buckets(view.queries), buckets(view.keys)
    exact = all(len(bucket) == 1 for bucket in rows + columns)
    cells = np.full((len(p), len(rows), len(columns)), np.nan)
    for head in range(len(p)):
        for r, queries in enumerate(rows):
            for c, keys in enumerate(columns):
                seen = [p[head, q - 1, k - 1] for q in queries for k in keys if k <= q]
                if seen:
                    cells[head, r, c] = np.max(seen) if view.pool == "max" else np.mean(seen, dtype=np.float64)
                elif exact:
                    cells[head, r, c] = 0
    return cells


def build(p: np.ndarray, view: MapView, blocks: list[tuple[slice, slice]] | None = None) -> np.ndarray:
    builder = MapBuilder(len(p), p.shape[-1], view)
    for rows, columns in blocks or [(slice(0, None), slice(0, None))]:
        builder.add(torch.from_numpy(p[:, rows, columns]), rows.start, columns.start)
    return builder.result().numpy()


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("max_cells", [None, 1, 2, 5, 6, 7, 12, 13, 14])
@pytest.mark.parametrize("queries", [None, (4, 11), (13, 13), (1, None)])
@pytest.mark.parametrize("keys", [None, (2, None), (1, 1), (3, 9)])
def test_a_view_is_that_part_of_the_map(
    pool: str, max_cells: int | None, queries: tuple[int, int | None] | None, keys: tuple[int, int | None] | None
) -> None:
    p = causal_map(2, 13)
    view = MapView(queries, keys, max_cells, pool)  # type: ignore[arg-type]
    np.testing.assert_allclose(build(p, view), naive(p, view), rtol=1e-6)


def test_by_hand() -> None:
    p = np.array([[[1, 0, 0, 0, 0], [4, 6, 0, 0, 0], [2, 1, 7, 0, 0], [5, 2, 0, 3, 0], [1, 1, 1, 1, 6]]]) / 10
    p = p.astype(np.float32)
    nan = np.nan
    # buckets of positions 1-2, 3-4 and 5 alone
    largest = [[1.0 / 10, nan, nan], [0.5, 0.7, nan], [0.1, 0.1, 0.6]]
    largest[0][0] = 0.6
    np.testing.assert_allclose(build(p, MapView(max_cells=3))[0], largest)
    mean = [[(0.1 + 0.4 + 0.6) / 3, nan, nan], [1.0 / 4, (0.7 + 0.0 + 0.3) / 3, nan], [0.1, 0.1, 0.6]]
    np.testing.assert_allclose(build(p, MapView(max_cells=3, pool="mean"))[0], mean, rtol=1e-6)
    # without the first key: 2-3 and 4-5
    np.testing.assert_allclose(
        build(p, MapView(keys=(2, None), max_cells=3))[0], [[0.6, nan], [0.7, 0.3], [0.1, 0.6]]
    )


def test_an_exact_map_is_the_map() -> None:
    p = causal_map(3, 9)
    for view in (MapView(), MapView(max_cells=9), MapView((1, 9), (1, None), 500, "mean")):
        np.testing.assert_array_equal(build(p, view), p)
    np.testing.assert_array_equal(build(p, MapView((4, 6), (2, 5))), p[:, 3:6, 1:5])


@given(st.data())
def test_blocks_of_any_size_in_any_order(data: st.DataObject) -> None:
    """Rows and columns of the blocks need not meet those of the buckets, nor lie in the view."""
    tokens = data.draw(st.integers(1, 40))
    seed = data.draw(st.integers(0, 9))
    p = causal_map(data.draw(st.integers(1, 3)), tokens, seed)
    first_key = data.draw(st.integers(1, tokens))
    last_query = data.draw(st.integers(first_key, tokens))
    view = MapView(
        data.draw(st.sampled_from([None, (data.draw(st.integers(1, last_query)), last_query)])),
        data.draw(st.sampled_from([None, (first_key, data.draw(st.integers(first_key, tokens)))])),
        data.draw(st.sampled_from([None, *range(1, tokens + 2)])),
        data.draw(st.sampled_from(["max", "mean"])),
    )

    def cut(name: str) -> list[slice]:
        edges = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens), max_size=6), label=name)})
        return [slice(a, b) for a, b in itertools.pairwise(edges)]

    blocks = [(rows, columns) for rows in cut("rows") for columns in cut("columns")]
    # as capture does: keys after the last query of a block never come, which may be all of its keys
    causal = [
        (rows, slice(columns.start, min(columns.stop, rows.stop)))
        for rows, columns in blocks
        if columns.start < rows.stop
    ]
    blocks = data.draw(st.permutations(data.draw(st.sampled_from([blocks, causal]))))
    np.testing.assert_allclose(build(p, view, blocks), naive(p, view), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 4, 5, 13])
@pytest.mark.parametrize("keys", [None, (2, None), (3, 9)])
def test_sums_over_the_keys_of_each_bucket(rows: int, keys: tuple[int, int | None] | None) -> None:
    p = causal_map(2, 13)
    view = MapView((2, 12), keys, 4, "mean")
    builder = MapBuilder(2, 13, view)
    first, last = keys or (1, None)
    shown = p[..., first - 1 : last]
    size = -(-shown.shape[-1] // 4)
    sums = np.stack([shown[..., start : start + size].sum(-1) for start in range(0, shown.shape[-1], size)], -1)
    for start in range(0, 13, rows):
        builder.add_bucket_sums(torch.from_numpy(sums[:, start : start + rows]), start)
    np.testing.assert_allclose(builder.result().numpy(), naive(p, view), rtol=1e-6)


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_local_attention_counts_what_is_out_of_its_window(pool: str) -> None:
    """Keys that never come have probability 0, and the mean is over them too."""
    p = np.eye(6, dtype=np.float32)[None]
    view = MapView(max_cells=2, pool=pool)  # type: ignore[arg-type]
    blocks = [(slice(i, i + 1), slice(i, i + 1)) for i in range(6)]
    expected = {"max": [[1, np.nan], [0, 1]], "mean": [[3 / 6, np.nan], [0, 3 / 6]]}[pool]
    np.testing.assert_allclose(build(p, view, blocks)[0], expected)


def test_nan_of_the_model_is_not_hidden() -> None:
    p = causal_map(1, 8)
    p[0, 6, 2] = np.nan
    for pool in ("max", "mean"):
        cells = build(p, MapView(max_cells=4, pool=pool))[0]  # type: ignore[arg-type]
        assert np.isnan(cells[3, 1])
        assert np.isnan(cells[np.tri(4, dtype=bool)]).sum() == 1


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 9), st.integers(1, 9), st.data())
def test_causal_pairs(last_query: int, last_key: int, query_size: int, key_size: int, data: st.DataObject) -> None:
    first_query, first_key = data.draw(st.integers(1, last_query)), data.draw(st.integers(1, last_key))
    cells = MapCells(30, Buckets(first_query, last_query, query_size), Buckets(first_key, last_key, key_size))
    expected = [
        [
            sum(
                k <= q
                for q in range(query, min(query + query_size, last_query + 1))
                for k in range(key, min(key + key_size, last_key + 1))
            )
            for key in range(first_key, last_key + 1, key_size)
        ]
        for query in range(first_query, last_query + 1, query_size)
    ]
    assert cells.causal_pairs().tolist() == expected


def test_rows_and_sizes() -> None:
    builder = MapBuilder(2, 8192, MapView((1000, 1400), None, 512))
    assert builder.rows == range(999, 1400)
    assert builder.result().shape == (2, 401, 512)
    cells = MapView(None, (2, None), 512, "mean").cells(8192)
    assert (cells.queries, cells.keys, cells.pool) == (Buckets(1, 8192, 16), Buckets(2, 8192, 16), "mean")
    assert MapView((1, 512), (1, 512), 512).cells(8192).pool is None
    assert cells.keys.ends()[[0, -1]].tolist() == [17, 8192]
    assert len(MapView(max_cells=512).cells(513).keys) == 257


def test_memory_does_not_grow_with_the_prompt() -> None:
    """Neither the cells nor the counts of a view hold more than rows x columns numbers."""
    builder = MapBuilder(1, 1_000_000, MapView(max_cells=64))
    builder.add(torch.full((1, 3, 1_000_000), 1e-6), 999_997, 0)
    assert builder.result().shape == (1, 64, 64)
    assert builder.result()[0, -1].tolist() == pytest.approx([1e-6] * 64)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (MapView((1000, 1400)), "no queries 1000-1400: prompt 'x' has T = 1200; expected positions 1 to 1200"),
        (MapView(keys=(1201, None)), "no keys 1201-: prompt 'x' has T = 1200"),
        (MapView(keys=(5000, 5000)), "no keys 5000: prompt 'x'"),
    ],
)
def test_views_that_the_prompt_does_not_have(view: MapView, message: str) -> None:
    with pytest.raises(GattnVizError) as error:
        view.cells(1200, "prompt 'x'")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"queries": (5, 4)}, r"queries are \(5, 4\); expected a first and a last position, from 1"),
        ({"keys": (0, None)}, r"keys are \(0, None\)"),
        (
            {"queries": (1, 400), "keys": (401, None)},
            "^the keys from 401 on come after the queries up to 400: every cell would be blank; expected",
        ),
        ({"queries": "5-9"}, "queries are '5-9'; expected a first and a last position, from 1"),
        ({"queries": "59"}, "queries are '59'; expected"),
        ({"keys": 5}, "keys are 5; expected"),
        ({"keys": (1.0, 2.5)}, r"keys are \(1.0, 2.5\); expected"),
        ({"keys": (1, 2, 3)}, r"keys are \(1, 2, 3\); expected"),
        ({"keys": (None, 3)}, r"keys are \(None, 3\); expected"),
        ({"max_cells": 0}, "max_cells is 0; expected a whole number, 1 or more"),
        ({"max_cells": 2.5}, "max_cells is 2.5; expected"),
        ({"max_cells": "8"}, "max_cells is '8'; expected"),
        ({"pool": "median"}, "pool is 'median'; expected max or mean"),
    ],
)
def test_views_that_are_none(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(GattnVizError, match=message):
        MapView(**wrong)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_blocks_on_a_gpu() -> None:
    p = causal_map(2, 50)
    view = MapView(max_cells=7)
    builder = MapBuilder(2, 50, view)
    for start in range(0, 50, 9):
        builder.add(torch.from_numpy(p[:, start : start + 9]).cuda(), start, 0)
    np.testing.assert_array_equal(builder.result().numpy(), build(p, view))

"""Whether numbers agree: against loops and by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from gattn_viz.recipe.agreement import (
    Agreement,
    compare_maps,
    compare_summaries,
    compare_tables,
    summarise_map,
)

TABLE = pd.DataFrame(
    {
        "model": ["a", "a", "NA"],
        "layer": [1, 2, 1],
        "mass": [0.5, 0.001, math.nan],
        "position": [1, 3, 1],
        "first_row": ["exclude"] * 3,
    }
)


def changed(row: int, column: str, value: object) -> Agreement:
    now = TABLE.astype({column: object}) if isinstance(value, str) else TABLE.copy()
    now.loc[row, column] = value
    return compare_tables(TABLE, now, 1e-2)


@pytest.mark.parametrize(
    ("row", "column", "value", "agrees"),
    [
        (0, "mass", 0.5, True),
        (0, "mass", 0.5049, True),
        (0, "mass", 0.4951, True),
        (0, "mass", 0.506, False),
        (0, "mass", 0.494, False),
        # .001 is less than a hundredth of .5: what counts is 1 % of .005
        (1, "mass", 0.00104, True),
        (1, "mass", 0.00106, False),
        (0, "mass", math.nan, False),
        (2, "mass", 0.5, False),
        (0, "mass", math.inf, False),
        (1, "position", 4, False),
        (2, "first_row", "include", False),
    ],
)
def test_a_number_of_a_table(row: int, column: str, value: object, agrees: bool) -> None:
    found = changed(row, column, value)
    assert found.compared == 15
    assert (not found.different) == agrees
    if not agrees:
        [(where, before, now)] = found.different
        name = f"{TABLE.model[row]}, layer {TABLE.layer[row]}: {column}"
        assert where == name
        old = TABLE.loc[row, column]
        assert before == old or (isinstance(old, float) and math.isnan(old))
        assert now == value or math.isnan(float(now or 0))


def test_infinities_are_equal_to_themselves() -> None:
    table = pd.DataFrame({"a": [math.inf, 1.0]})
    assert not compare_tables(table, table, 1e-3).different
    assert len(compare_tables(table, -table, 1e-3).different) == 2
    assert len(compare_tables(table, pd.DataFrame({"a": [1e300, 1.0]}), 1e-3).different) == 1


def test_tables_of_other_shapes() -> None:
    for other in (TABLE[:2], TABLE.drop(columns="mass"), TABLE.rename(columns={"mass": "m"})):
        [(where, before, now)] = compare_tables(TABLE, other, 1e-3).different
        assert where == "the table"
        assert str(before).startswith("3 rows of model, layer, mass")
        assert before != now


def test_raw_maps() -> None:
    before = {"layer_1": np.array([[[1, 0], [0.4, 0.6]]], np.float32), "layer_2": np.ones((1, 2, 2), np.float32)}
    now = {name: maps.copy() for name, maps in before.items()}
    assert compare_maps(before, now, 1e-3) == Agreement(1e-3, 8, [])
    now["layer_1"][0, 1, 0] = 0.41
    [(where, old, new)] = compare_maps(before, now, 1e-3).different
    assert where == "layer_1, map 1, row 2, column 1"
    assert (old, new) == (pytest.approx(0.4), pytest.approx(0.41))
    [(where, old, new)] = compare_maps(before, {"layer_1": before["layer_1"]}, 1e-3).different
    assert (where, old, new) == ("layer_2", "(1, 2, 2)", None)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (4, 4), (9, 7), (30, 4)])
def test_a_summary_is_what_a_loop_finds(shape: tuple[int, int]) -> None:
    cells = np.random.default_rng(0).random(shape).astype(np.float32)
    cells[0, 1:] = math.nan  # blank, as keys after the query in a pooled map
    found = summarise_map("m", 2, 3, cells)
    seen = [float(value) for row in cells for value in row if not math.isnan(value)]
    assert found.mean == pytest.approx(sum(seen) / len(seen), rel=1e-5)
    assert found.largest == pytest.approx(max(seen), rel=1e-5)

    def ends(n: int) -> list[tuple[int, int]]:
        """As many parts as four, the first ones one longer where n does not divide."""
        parts = min(4, n)
        sizes = [n // parts + (part < n % parts) for part in range(parts)]
        return [(sum(sizes[:part]), sum(sizes[: part + 1])) for part in range(parts)]

    expected = []
    for top, bottom in ends(shape[0]):
        for left, right in ends(shape[1]):
            part = [float(cells[i, j]) for i in range(top, bottom) for j in range(left, right)]
            part = [value for value in part if not math.isnan(value)]
            expected.append(sum(part) / len(part) if part else None)
    assert len(found.grid) == len(expected)
    for ours, theirs in zip(found.grid, expected, strict=True):
        assert ours == (None if theirs is None else pytest.approx(theirs, rel=1e-5))


def test_a_blank_map() -> None:
    found = summarise_map("m", 1, None, np.full((2, 2), math.nan, np.float32))
    assert (found.mean, found.largest, set(found.grid)) == (None, None, {None})
    assert not compare_summaries([found], [found], 1e-3).different


def test_summaries() -> None:
    """What moves from one key to another keeps its mean, and is found by its place."""
    cells = np.tril(np.full((8, 8), 0.1, np.float32))
    cells[:, 0] = 0.5
    moved = cells.copy()
    moved[4:, 0], moved[4:, 3] = cells[4:, 3], cells[4:, 0]
    before, now = summarise_map("m", 1, 2, cells), summarise_map("m", 1, 2, moved)
    assert before.mean == pytest.approx(now.mean)
    found = compare_summaries([before], [now], 1e-3)
    assert found.compared == 18
    assert {where for where, _, _ in found.different} == {f"m, layer 1, head 2: part {n}" for n in (9, 10, 13, 14)}
    other = summarise_map("m", 2, 2, cells)
    assert compare_summaries([before], [other], 1e-3).different[0][0] == "maps"
    assert compare_summaries([before], [], 1e-3).different


def test_in_words() -> None:
    assert Agreement(1e-3, 7, []).in_words() == "agrees: 7 values are the same within 0.1%"
    assert Agreement(2e-2, 7, []).in_words().endswith("within 2%")
    assert Agreement(0.1, 7, []).in_words().endswith("within 10%")
    assert Agreement(0, 7, []).in_words().endswith("within 0%")
    lines = Agreement(1e-3, 90, [(f"place {n}", 0.123456789, None) for n in range(12)]).in_words().splitlines()
    assert lines[0] == "differs: 12 of 90 values by more than 0.1%"
    assert lines[1] == "  place 0: 0.1234568 -> None"
    assert len(lines) == 12
    assert lines[-1] == "  ... and 2 more"

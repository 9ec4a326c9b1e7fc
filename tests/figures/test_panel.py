"""What a panel shows and what it leaves blank, against loops over positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.panel import Panel, Positions


@given(st.data())
def test_blank_is_where_every_key_is_after_every_query(data: st.DataObject) -> None:
    def axis() -> Positions:
        first = data.draw(st.integers(1, 12))
        return Positions(first, data.draw(st.integers(first, 14)), data.draw(st.integers(1, 5)))

    queries, keys = axis(), axis()
    shown = Panel(np.ones((len(queries), len(keys))), queries, keys).shown
    for r, query in enumerate(range(queries.first, queries.last + 1, queries.size)):
        for c, key in enumerate(range(keys.first, keys.last + 1, keys.size)):
            last_query = min(query + queries.size - 1, queries.last)
            assert (shown[r, c] is np.ma.masked) == (key > last_query)


def test_nan_is_blank_and_zero_is_not() -> None:
    values = np.array([[0.0, 5.0], [np.nan, np.inf]])
    panel = Panel.whole(values, ["a", "b"])
    assert np.ma.getmaskarray(panel.shown).tolist() == [[False, True], [True, True]]


def test_axes() -> None:
    pooled = Positions(2, 10, 4)
    assert (len(pooled), [*pooled.starts], pooled.edges) == (3, [2, 6, 10], (1.5, 13.5))
    named = Positions(3, 4, labels=["a", "b"])
    assert named.same_as(Positions(3, 4, labels=("a", "b")))
    assert not named.same_as(Positions(3, 4, labels=("a", "c")))
    assert not pooled.same_as(Positions(2, 9, 4))
    assert Panel(np.ones((1, 4)), Positions(9, 9), Positions(1, 4)).is_strip
    assert not Panel.whole(np.ones((4, 4)), list("abcd")).is_strip


def test_bad_input() -> None:
    with pytest.raises(GattnVizError, match="3 token labels for 2 positions of a map; expected one for each"):
        Panel.whole(np.tri(2), list("abc"))
    with pytest.raises(GattnVizError, match=r"shape \(2, 3\); expected queries x keys, \(2, 2\)"):
        Panel.whole(np.ones((2, 3)), list("ab"))
    with pytest.raises(GattnVizError, match=r"shape \(4, 4\); expected queries x keys, \(2, 4\)"):
        Panel(np.ones((4, 4)), Positions(1, 4, 2), Positions(1, 4))
    with pytest.raises(GattnVizError, match="position 3 to keep is not among the map's"):
        Panel.whole(np.tri(2), list("ab"), keep=[3])
    with pytest.raises(GattnVizError, match="positions 0 to 4, 1 a cell; expected them from 1 on"):
        Positions(0, 4)

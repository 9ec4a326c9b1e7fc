"""Values to colours, and the range that panels share."""

from __future__ import annotations

import numpy as np
import pytest

from gattn_viz.errors import GattnVizError
from gattn_viz.figures.scale import ColorScale, shared_range

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*deprecated(,| -) use:DeprecationWarning")


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.25), ("sqrt", 0.5), ("log", 1 - np.log10(4) / 4)])
def test_norm(kind: str, middle: float) -> None:
    norm = ColorScale(kind, 0, 0.4).norm()  # type: ignore[arg-type]
    values = np.ma.masked_invalid([0.0, 0.1, 0.4, 5.0, -1.0, np.nan])
    colours = norm(values)
    np.testing.assert_allclose(colours[:5], [0, middle, 1, 1, 0], atol=1e-12)
    # A zero is the first colour on every scale, and only what is masked is blank.
    assert np.ma.getmaskarray(colours).tolist() == [False] * 5 + [True]


def test_log_says_where_it_starts() -> None:
    assert ColorScale("log", 0, 0.5).low == pytest.approx(5e-5)
    assert ColorScale("log", 0.01, 0.5).low == 0.01
    assert ColorScale("log", 0, 1).describe() == "log scale from 0.0001 to 1"
    assert ColorScale("sqrt", 0, 0.123456).describe() == "sqrt scale from 0 to 0.123"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cubic", 0, 1), "unknown colour scale 'cubic'; expected one of linear, sqrt, log"),
        (("linear", 1, 1), "colour range 1 to 1 is empty"),
        (("linear", 0, np.nan), "not finite"),
        (("log", -1, 1), "log colour scale cannot start at -1"),
    ],
)
def test_bad_scales(arguments: tuple[str, float, float], message: str) -> None:
    with pytest.raises(GattnVizError, match=message):
        ColorScale(*arguments)  # type: ignore[arg-type]


def masked(values: object) -> np.ma.MaskedArray:
    return np.ma.masked_invalid(np.array(values, dtype=float))


def test_shared_range() -> None:
    first, second = masked([[0.1, np.nan], [0.7, 0.3]]), masked([[0.2, 0.4, 0.9]])
    assert shared_range([first, second]) == (0, 0.9)
    assert shared_range([first]) == (0, 0.7)
    assert shared_range([first], vmax=0.5) == (0, 0.5)
    assert shared_range([first - 0.5]) == (-0.4, pytest.approx(0.2))


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_shared_range_of_nothing(value: float) -> None:
    assert shared_range([masked(np.full((3, 3), value))]) == (0, 1)
    assert shared_range([]) == (0, 1)


def test_shared_range_of_equal_values() -> None:
    assert shared_range([masked(np.full((3, 3), 0.25))]) == (0, 0.25)


def test_bad_ranges() -> None:
    for vmax in (0, -1, np.nan, np.inf):
        with pytest.raises(GattnVizError, match=r"--vmax .* is not a finite number above"):
            shared_range([masked(np.ones((2, 2)))], vmax=vmax)

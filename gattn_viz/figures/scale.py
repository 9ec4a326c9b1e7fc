"""From attention values to colours: one range, shared by every panel that a reader will compare."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from matplotlib.colors import LogNorm, Normalize, PowerNorm

from gattn_viz.errors import GattnVizError

ScaleKind = Literal["linear", "sqrt", "log"]

# A log scale has no zero, and attention maps are full of zeros and 1e-30s: four decades are shown.
LOG_DECADES = 4


@dataclass(frozen=True)
class ColorScale:
    """How values become colours: `kind` between `vmin` and `vmax` (in the map's own unit).

    Values outside the range take the colour of its end. On a `log` scale `vmin` is raised, if need be, to
    `vmax` / 10^4: `low` says what the scale starts at, and zeros take its colour (they are not blank).

    Raises:
        GattnVizError: an unknown kind, a range that is empty, reversed or not finite; a log or sqrt scale
            that would start below 0.
    """

    kind: ScaleKind = "linear"
    vmin: float = 0.0
    vmax: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScaleKind):
            raise GattnVizError(
                f"unknown colour scale {self.kind!r}; expected one of {', '.join(get_args(ScaleKind))}"
            )
        if not (math.isfinite(self.vmin) and math.isfinite(self.vmax) and self.vmin < self.vmax):
            raise GattnVizError(
                f"colour range {self.vmin:g} to {self.vmax:g} is empty or not finite; expected vmin < vmax"
            )
        if not 1e-12 <= self.vmax - self.vmin <= 1e12:
            raise GattnVizError(
                f"colour range {self.vmin:g} to {self.vmax:g} cannot be drawn; expected one of 1e-12 to 1e12"
            )
        if self.kind != "linear" and self.vmin < 0:
            raise GattnVizError(
                f"a {self.kind} colour scale cannot start at {self.vmin:g}; use a linear scale for negative values"
            )

    @property
    def low(self) -> float:
        """The value that takes the first colour."""
        return max(self.vmin, self.vmax * 10.0**-LOG_DECADES) if self.kind == "log" else self.vmin

    def norm(self) -> Normalize:
        """The matplotlib norm; values out of range are clipped to it, masked ones and NaN stay masked."""
        if self.kind == "log":
            return LogNorm(self.low, self.vmax, clip=True)
        if self.kind == "sqrt":
            return PowerNorm(0.5, self.vmin, self.vmax, clip=True)
        return Normalize(self.vmin, self.vmax, clip=True)

    def describe(self) -> str:
        """For a footnote: ``log scale from 0.0001 to 1``."""
        return f"{self.kind} scale from {self.low:.3g} to {self.vmax:.3g}"


def shared_range(maps: Iterable[np.ma.MaskedArray], vmax: float | None = None) -> tuple[float, float]:
    """The one range of several maps: (vmin, vmax).

    Args:
        maps: what is drawn of each (`Panel.shown`), of any shape.
        vmax: the top, when it is chosen and not found.

    Returns:
        vmin is 0, or the smallest value where there are negative ones. vmax is the largest value; 1 when there is
        none above vmin (all zero, or all blank).

    Raises:
        GattnVizError: `vmax` is not above the range's lower end.
    """
    ends = [(float(shown.min()), float(shown.max())) for shown in maps if shown.count()]
    vmin = min([0.0, *(low for low, _ in ends)])
    if vmax is None:
        highest = max((high for _, high in ends), default=0.0)
        return vmin, highest if highest > vmin else vmin + 1.0
    if not (math.isfinite(vmax) and vmax > vmin):
        raise GattnVizError(f"--vmax {vmax:g} is not a finite number above the lowest colour's value, {vmin:g}")
    return vmin, float(vmax)

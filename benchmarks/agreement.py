"""Before anything is timed: does a contender see the same attention as transformers' eager path?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.contenders import CONTENDERS, Contender, Eager, Found
from benchmarks.processes import status_of
from benchmarks.shapes import Shape

TOKENS = 256

# The largest difference that rounding allows, absolute or relative. In bfloat16 eager rounds its own scores.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def from_maps(maps: Tensor) -> Found:
    """All that a contender may find, written down from the maps (L, H, T, T); means are over the queries.

    Returns:
        maps; mean_map (L, T, T), over the heads; first_token, entropy (nats), row_max (L, H); received (L, H, T).
    """
    maps = maps.double()
    return {
        "maps": maps,
        "mean_map": maps.mean(1),
        "first_token": maps[..., 0].mean(-1),
        "received": maps.mean(-2),
        "entropy": -torch.xlogy(maps, maps).sum(-1).mean(-1),
        "row_max": maps.amax(-1).mean(-1),
    }


def largest_differences(found: Found, expected: Found) -> dict[str, float]:
    """For each thing found, the largest difference from what is expected; relative where that exceeds 1."""
    differences = {}
    for name, value in found.items():
        wanted = expected[name].cpu().double()
        if value.shape != wanted.shape:
            raise ValueError(f"{name} has the shape {tuple(value.shape)}, expected {tuple(wanted.shape)}")
        difference = (value.cpu().double() - wanted).abs() / wanted.abs().clamp(min=1)
        differences[name] = float(difference.max())
    return differences


def check(contender: Contender, shape: Shape, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Run a contender on a short prompt beside eager attention.

    Returns:
        the largest difference of each thing that it found.

    Raises:
        ValueError: one is more than rounding.
    """
    model, ids = shape.model(device, dtype), shape.prompt(TOKENS, device)
    eager = Eager()
    eager.prepare(model)
    contender.prepare(model)
    with torch.no_grad():
        expected = eager.found(eager.run(ids))
        found = contender.found(contender.run(ids))
    differences = largest_differences(found, expected | from_maps(expected["maps"]))
    for name, difference in differences.items():
        if not difference <= TOLERANCE[dtype]:
            raise ValueError(f"{name} differs from eager attention by {difference:.2g}")
    return differences


def check_all(
    names: Sequence[str], shape: Shape, device: str, dtype: torch.dtype
) -> dict[str, dict[str, float] | str]:
    """`check` for each contender, or the status of one that did not pass."""
    outcomes: dict[str, dict[str, float] | str] = {}
    for name in names:
        try:
            outcomes[name] = check(CONTENDERS[name], shape, device, dtype)
        except Exception as error:
            outcomes[name] = status_of(error)
    return outcomes

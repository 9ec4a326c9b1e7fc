"""What counts as the largest, by hand; over prompts it is tested in `test_tables`."""

from __future__ import annotations

import numpy as np
import torch

from gattn_viz.metrics.largest import Largest, as_large


def test_as_large() -> None:
    assert as_large(np.array([98.9, 99.1, 100.0, 3.0])).tolist() == [False, True, True, False]
    assert as_large(np.array([[1.0, 5.0], [2.0, 4.99]]), 0).tolist() == [[False, True], [True, True]]
    assert as_large(np.array([[1.0, 5.0], [2.0, 4.99]])).tolist() == [[False, True], [False, True]]
    assert as_large(np.zeros(3)).all()


def test_neighbours_in_bfloat16_are_as_large() -> None:
    for size in (1.0, 1.5, 255.0, 3000.0):
        value = torch.tensor(size, dtype=torch.bfloat16)
        above = torch.nextafter(value, torch.tensor(torch.inf, dtype=torch.bfloat16))
        assert as_large(torch.stack([value, above]).float().numpy()).all()


def test_a_value_that_is_missing_does_not_count() -> None:
    names = ("max_activation", "max_activation_ratio")
    prompts = [[10.0, np.nan], [10.0, 4.0], [10.0, 6.0], [1.0, 99.0]]
    largest = Largest({n: dict(zip(names, np.array([two]).T, strict=True)) for n, two in enumerate(prompts)})
    assert largest.values().tolist() == [10]
    assert largest.mean("max_activation_ratio").tolist() == [5]

"""What follows from a map, by hand; and the check lets the right contenders pass and stops a wrong one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.agreement import check, check_all, from_maps, largest_differences
from benchmarks.contenders import CONTENDERS, Contender, Eager
from benchmarks.shapes import Shape

TINY = Shape("tiny", "tiny", 2, 16, 4, 2, 8, 16, (4,))


def test_from_maps_by_hand() -> None:
    maps = torch.tensor([[[[1.0, 0.0], [0.25, 0.75]], [[1.0, 0.0], [0.5, 0.5]]]])  # 1 layer, 2 heads
    found = from_maps(maps)
    assert found["first_token"].tolist() == [[0.625, 0.75]]
    assert found["received"].tolist() == [[[0.625, 0.375], [0.75, 0.25]]]
    assert found["row_max"].tolist() == [[0.875, 0.75]]
    assert found["mean_map"].tolist() == [[[1.0, 0.0], [0.375, 0.625]]]
    first = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / 2
    assert found["entropy"].flatten().tolist() == pytest.approx([first, math.log(2) / 2])


def test_largest_differences_is_relative_above_one() -> None:
    found = {"a": torch.tensor([0.5, 0.25]), "b": torch.tensor([110.0])}
    assert largest_differences(found, {"a": torch.tensor([0.5, 0.5]), "b": torch.tensor([100.0])}) == {
        "a": 0.25,
        "b": pytest.approx(0.1),
    }
    with pytest.raises(ValueError, match=r"a has the shape \(2,\), expected \(1,\)"):
        largest_differences(found, {"a": torch.tensor([0.5]), "b": torch.tensor([1.0])})


@pytest.mark.parametrize("name", list(CONTENDERS))
def test_contenders_see_eager_attention(name: str) -> None:
    contender = CONTENDERS[name]
    if not contender.installed:
        pytest.skip(f"{contender.package} is not installed")
    differences = check(contender, TINY, "cpu", torch.float32)
    assert differences
    assert set(differences) <= {"output", *from_maps(torch.ones(1, 1, 1, 1))}


def test_all_measures_are_checked() -> None:
    assert set(check(CONTENDERS["ours_all"], TINY, "cpu", torch.float32)) == {
        "first_token", "received", "entropy", "row_max"
    }  # fmt: skip


def test_numba_helps_those_whose_name_says_so() -> None:
    pytest.importorskip("numba")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, path in (("ours_all", "blocks"), ("ours_all_numba", "compiled"), ("ours_maps", "blocks")):
            contender = CONTENDERS[name]
            contender.prepare(TINY.model("cpu", torch.float32))
            for layer in contender.run(TINY.prompt(32, "cpu")):
                assert layer.paths == {path}
    finally:
        torch.set_num_threads(threads)


class HeadsReversed(Eager):
    def found(self, result: Any) -> dict[str, torch.Tensor]:
        return {"maps": super().found(result)["maps"].flip(1)}


class Nan(Contender):
    def run(self, ids: torch.Tensor) -> None:
        pass

    def found(self, result: None) -> dict[str, torch.Tensor]:
        return {"first_token": torch.full((2, 4), torch.nan)}


@pytest.mark.parametrize("wrong", [HeadsReversed(), Nan()])
def test_a_wrong_contender_is_stopped(wrong: Contender, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="differs from eager attention by"):
        check(wrong, TINY, "cpu", torch.float32)
    monkeypatch.setitem(CONTENDERS, "wrong", wrong)
    outcomes = check_all(["plain", "wrong"], TINY, "cpu", torch.float32)
    assert isinstance(outcomes["plain"], dict)
    assert str(outcomes["wrong"]).startswith("failed: ValueError: ")

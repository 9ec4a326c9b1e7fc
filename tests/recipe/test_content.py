"""What a recipe says, to JSON and back."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import replace

import pytest

from gattn_viz import GattnVizError
from gattn_viz.recipe.content import (
    KEY,
    FileMade,
    MapSummary,
    ModelUsed,
    PromptsUsed,
    Recipe,
    command_arguments,
    date_now,
    texts_sha256,
    tokens_sha256,
)

MODEL = ModelUsed("m", "bundled", "m", None, None, None, "ab" * 32, "float32", "cpu", "fused", 9, 4, 5, "cd" * 32)
RECIPE = Recipe(
    command="maps",
    options={"model": ["m"], "prompt": ["it's 你", "-x"], "layers": "1,7", "raw": True, "drop-first": False},
    given=("prompt", "layers", "raw", "drop-first"),
    models=(MODEL,),
    prompts=PromptsUsed(("a", "b"), "ef" * 32, "p.jsonl"),
    file=FileMade(
        "maps",
        "png",
        ("m",),
        "a",
        "T = 4",
        {"kind": "log"},
        None,
        (MapSummary("m", 1, None, 0.1, 1.0, (0.2, None)),),
    ),
    versions={"torch": "2"},
    date="2025-05-10T09:00:00Z",
)


@pytest.mark.parametrize("indent", [None, 2])
def test_json_and_back(indent: int | None) -> None:
    text = RECIPE.to_json(indent)
    assert text.isascii()
    assert Recipe.from_json(text, "a.png") == RECIPE
    assert json.loads(text)[KEY] == 1


def test_the_command_line_can_be_typed() -> None:
    words = shlex.split(RECIPE.command_line)
    assert words == ["gattn-viz", "maps", "--prompt", "it's 你", "--prompt", "-x", "--layers", "1,7", "--raw"]


def test_arguments_without_a_value_are_left_out() -> None:
    options = {"a": None, "b": False, "c": 0, "d": True, "e": [], "f": [1, 2], "g": 0.3}
    words = ["sink-stats", "--c", "0", "--d", "--f", "1", "--f", "2", "--g", "0.3"]
    assert command_arguments("sink-stats", options) == words


@pytest.mark.parametrize(
    "changed",
    [
        {"models": [{"label": "m"}]},
        {"models": 3},
        {"given": ["nothing"]},
        {"file": {}},
        {"prompts": None},
        {"unknown": 1},
    ],
)
def test_damaged(changed: dict[str, object]) -> None:
    entries = {**json.loads(RECIPE.to_json()), **changed}
    with pytest.raises(GattnVizError, match=r"^the recipe of a\.png is damaged \(.*\); expected the JSON"):
        Recipe.from_json(json.dumps(entries), "a.png")


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", "{", '"a"', "[" * 100_000])
def test_no_recipe_at_all(text: str) -> None:
    with pytest.raises(GattnVizError, match=r"^the recipe of a\.png is damaged"):
        Recipe.from_json(text, "a.png")


def test_hashes_can_be_made_by_anyone() -> None:
    assert texts_sha256(["a b", "你"]) == hashlib.sha256('["a b","你"]'.encode()).hexdigest()
    assert texts_sha256(["a", "b"]) != texts_sha256(['a","b'])
    assert tokens_sha256([[1, 22], [3]]) == hashlib.sha256(b"[[1,22],[3]]").hexdigest()


def test_paths_are_left_out_unless_there() -> None:
    assert json.loads(RECIPE.to_json())["models"][0]["path"] is None
    asked = replace(RECIPE, models=(replace(MODEL, path="/models/m"),))
    assert Recipe.from_json(asked.to_json(), "a").models[0].path == "/models/m"


def test_dates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1746867600")  # date -u -d @1746867600
    assert date_now() == "2025-05-10T09:00:00Z"
    for wrong in ("x", "1e3", "9" * 30):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", wrong)
        with pytest.raises(GattnVizError, match="expected seconds since 1970"):
            date_now()

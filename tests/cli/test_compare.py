from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from gattn_viz import compare, read_recipe
from gattn_viz.metrics.compared import QUANTITIES
from gattn_viz.pipeline.run import Run
from gattn_viz.recipe.agreement import MEASURED
from tests.cli.conftest import Cli

PROMPT = ("-p", "the cat sat on the mat", "-p", "the dog")
PAIR = ("compare", "-m", "baseline", "-m", "gate_headwise", *PROMPT, "--no-time", "-q")
FILES = [
    "comparison.csv",
    "comparison.md",
    "first_token_by_layer.csv",
    "first_token_by_layer.png",
    "maps_grid.png",
]


def table(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text), keep_default_na=False, na_values=[""], dtype={"note": str})


def test_csv_on_stdout_is_the_library_s_table(cli: Cli, tiny_trio: Path, tmp_path: Path) -> None:
    done = cli("compare", *PROMPT, "--no-time", "--ci", ".8", "--resamples", "30", "--below", ".5")
    assert done.code == 0
    from gattn_viz import CompareOptions, Prompt

    prompts = ["the cat sat on the mat", Prompt("prompt-2", "the dog")]
    expected = compare(
        prompts=prompts, ci=0.8, resamples=30, options=CompareOptions(below=0.5), rounds=0,
        run=Run(checkpoints=str(tiny_trio)),
    )  # fmt: skip
    found = table(done.out).fillna({"note": ""})
    pd.testing.assert_frame_equal(found, expected.table, rtol=1e-10, check_dtype=False, check_frame_type=False)
    assert (
        cli("compare", *PROMPT, "--no-time", "--ci", ".8", "--resamples", "30", "--below", ".5", "-o", "-").out
        == done.out
    )
    assert list(tmp_path.iterdir()) == []


def test_time_and_memory_unless_told(cli: Cli) -> None:
    with_time = cli("compare", "-m", "baseline", "-m", "gate_headwise", *PROMPT, "--rounds", "2")
    assert "timing 2 rounds of 2 models, in memory together, T = " in with_time.err
    assert set(MEASURED) < set(table(with_time.out).quantity)
    assert not set(MEASURED) & set(table(cli(*PAIR).out).quantity)


def test_the_names_of_what_is_measured() -> None:
    """The part that compares files knows no measures, so it names them again."""
    assert tuple(quantity.name for quantity in QUANTITIES if quantity.measured) == MEASURED


def test_to_a_directory(cli: Cli, tmp_path: Path) -> None:
    done = cli(*PAIR, "-o", "out", "--layers", "1,3")
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [f"out/{name}" for name in FILES]
    out = tmp_path / "out"
    assert (out / "comparison.csv").read_text() == cli(*PAIR).out
    layers = pd.read_csv(out / "first_token_by_layer.csv")
    assert layers.model.tolist() == ["baseline"] * 3 + ["gate_headwise"] * 3
    assert {"first_token_mass", "first_token_mass_ci_low", "uniform_null"} < set(layers)
    with Image.open(out / "maps_grid.png") as image:
        assert min(image.size) > 300


def test_each_file_has_its_recipe(cli: Cli, tmp_path: Path, tiny_trio: Path) -> None:
    shutil.copytree(tiny_trio / "baseline", tmp_path / "secret" / "mine")
    mine = str(tmp_path / "secret" / "mine")
    assert (
        cli(
            "compare", "-m", "gate_headwise", "-m", mine, "--baseline", mine, *PROMPT, "--no-time", "-o", "out"
        ).code
        == 0
    )
    for name in FILES:
        recipe = read_recipe(tmp_path / "out" / name)
        assert recipe.command == "compare"
        assert recipe.options["baseline"] == "mine"
        assert "--baseline mine" in recipe.command_line
        assert [model.label for model in recipe.models] == ["gate_headwise", "mine"]
        assert {model.attention for model in recipe.models} == {"fused"}
        assert "secret" not in recipe.to_json()
    curves = read_recipe(tmp_path / "out" / "first_token_by_layer.png").file
    layers = pd.read_csv(tmp_path / "out" / "first_token_by_layer.csv")
    assert [point.mean for point in curves.numbers] == pytest.approx(layers.first_token_mass.tolist(), rel=1e-5)
    grid = read_recipe(tmp_path / "out" / "maps_grid.png").file
    assert grid.prompt == "prompt-1"
    assert [(one.model, one.layer) for one in grid.numbers] == [
        (model, layer) for model in ("gate_headwise", "mine") for layer in (1, 2, 3)
    ]


def test_again(cli: Cli, tmp_path: Path, tiny_trio: Path) -> None:
    """Measured times never agree, and are not compared; all else is, each quantity by its own size."""
    shutil.copytree(tiny_trio / "baseline", tmp_path / "mine")
    again = ("-m", "mine=here", "-q")
    timed = ("--rounds", "1", "-o", "out", "-q")
    assert cli("compare", "-m", "gate_headwise", "-m", "./mine", "--baseline", "./mine", *PROMPT, *timed).code == 0
    shutil.move(tmp_path / "mine", tmp_path / "here")
    for number, name in enumerate(
        ["comparison.csv", "first_token_by_layer.csv", "first_token_by_layer.png", "maps_grid.png"]
    ):
        done = cli("recipe", f"out/{name}", "--rerun", "-o", f"again-{number}", *again)
        assert done.code == 0, done.out + done.err
        assert done.out.startswith("agrees: ")

    path = tmp_path / "out" / "comparison.csv"
    rows = table(path.read_text())
    rows.loc[rows.quantity == "forward_time", "value"] = 100.0
    rows.to_csv(path, index=False)
    assert cli("recipe", "out/comparison.csv", "--rerun", "-o", "again-5", *again).code == 0
    changed = (rows.quantity == "sink_rate") & (rows.model == "gate_headwise")
    rows.loc[changed, "value"] += 0.01  # far below a thousandth of the number of parameters
    rows.to_csv(path, index=False)
    done = cli("recipe", "out/comparison.csv", "--rerun", "-o", "again-6", *again)
    assert done.code == 1
    assert "gate_headwise, quantity sink_rate: value:" in done.out

    done = cli("recipe", "out/comparison.md", "--rerun", "-o", "again-7", *again)
    assert (done.code, "rounded numbers for reading; expected the CSV beside it" in done.err) == (1, True)
    done = cli("recipe", "out/comparison.csv", "--rerun", "-o", "out", *again)
    assert (done.code, "is there already" in done.err) == (1, True)


def test_markdown(cli: Cli, tmp_path: Path) -> None:
    assert cli(*PAIR, "-o", "out").code == 0
    lines = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert lines[:2] == ["| quantity | baseline | gate_headwise |", "|---|--:|--:|"]
    cells = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in lines[2:] if " | " in line
    }
    assert cells["of the gate"] == ["0", "384 (+384)"]
    assert cells["gate mean"][0] == "-"
    assert re.fullmatch(r"0\.\d{3} \([+-]0\.\d{3} \[[+-]0\.\d{3}, [+-]0\.\d{3}\]\)", cells["first-token mass"][1])
    assert lines[-1].startswith("In parentheses the difference to baseline, in brackets its 95% interval")
    assert "2 prompts, first query excluded; sink: above 0.3; shut: below 0.1." in lines[-1]


def test_in_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    done = cli(*PAIR)
    assert "model,quantity" not in done.out
    assert "first-token mass" in done.out
    assert list(tmp_path.iterdir()) == []
    assert cli(*PAIR, "-o", "-").out.startswith("model,quantity,value")
    done = cli(*PAIR, "-o", "out")
    assert "first-token mass" in done.out
    assert done.out.splitlines()[-1] == "out/maps_grid.png"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-m", "baseline"], 1, "one model was given, baseline; expected two or more to compare"),
        (["--baseline", "gate"], 1, "the baseline 'gate' is none of the models; expected one of baseline, gate_"),
        (["--ci", "95"], 2, "ci is 95.0; expected a level between 0 and 1"),
        (["--rounds", "0"], 2, "--rounds"),
        (["--layers", "x"], 2, "expected all, or layers such as"),
        (["--layers", "9", "--no-time", "-o", "out"], 1, "no layer 9"),
        (["--time-tokens", "100"], 1, "100 tokens are to be timed, but baseline takes 64"),
    ],
)
def test_bad_input(cli: Cli, arguments: list[str], code: int, said: str) -> None:
    done = cli("compare", *PROMPT, *arguments)
    assert done.code == code
    assert said in " ".join(done.err.replace("│", " ").split())


def test_prompts_from_a_file(cli: Cli, tmp_path: Path) -> None:
    lines = [json.dumps({"id": name, "text": text}) for name, text in (("a", "the cat"), ("b", "the dog sat"))]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    done = cli("compare", "--prompts", "p.jsonl", "--no-time", "-q")
    assert np.unique(table(done.out).query("quantity == 'tokens'").note).tolist() == ["2 prompts"]


def test_a_layer_that_is_not_there_is_said_before_anything_is_measured(cli: Cli, tmp_path: Path) -> None:
    done = cli("compare", *PROMPT, "--layers", "1,9", "--no-time", "-o", "out")
    assert (done.code, done.err) == (
        1,
        "gattn-viz: error: no layer 9: baseline has 3 layers; expected 1 to 3\n",
    )
    assert not (tmp_path / "out").exists()

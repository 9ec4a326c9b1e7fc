from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from gattn_viz import Run, gate_map_table, gate_maps, read_recipe
from tests.cli.conftest import Cli

TEXT = "the cat sat on the mat"
PROMPT = ("-p", TEXT)
FAST = ("--dpi", "40")


def test_a_figure_for_each_gated_model(cli: Cli, tmp_path: Path) -> None:
    done = cli("gate-maps", *PROMPT, *FAST)
    assert done.code == 0, done.err
    assert done.out.split() == ["figs/gates_gate_headwise.png", "figs/gates_gate_elementwise.png"]
    assert "baseline has no gate: left out" in done.err
    with Image.open(tmp_path / "figs" / "gates_gate_headwise.png") as image:
        assert image.format == "PNG"
    ranges = [read_recipe(path).file.color_scale for path in done.out.split()]
    assert ranges[0] == ranges[1]


def test_the_csv_is_what_is_drawn(cli: Cli, tiny_trio: Path) -> None:
    some = ("--layers", "2-3", "--heads", "1,3")
    done = cli("gate-maps", "-m", "gate_elementwise", *PROMPT, *some, *FAST, "--csv", "-q")
    assert done.out.split() == ["figs/gates_gate_elementwise.png", "figs/gates_gate_elementwise.csv"]
    sets = gate_maps(["gate_elementwise"], [TEXT], layers=[2, 3], heads=[1, 3], run=Run(str(tiny_trio)))
    pd.testing.assert_frame_equal(
        pd.read_csv("figs/gates_gate_elementwise.csv"), gate_map_table(sets), rtol=1e-6, check_dtype=False
    )


def test_text(cli: Cli) -> None:
    done = cli("gate-maps", "-m", "gate_headwise", "--text", "--layers", "3", "--heads", "1,2", *PROMPT, *FAST)
    assert done.out.split() == ["figs/gate_text_gate_headwise.png"], done.err
    assert read_recipe("figs/gate_text_gate_headwise.png").file.what == "gate text"
    mean = cli("gate-maps", "-m", "gate_headwise", "--text", *PROMPT, *FAST, "--csv", "-q")
    assert mean.code == 0, mean.err
    assert set(pd.read_csv("figs/gate_text_gate_headwise.csv")["head"]) == {"mean"}


@pytest.mark.parametrize("kind", ["pdf", "svg"])
def test_formats_and_prompts(cli: Cli, kind: str) -> None:
    prompts = ("-p", "$\\frac{$ 東京 كتاب 🌧", "-p", "the")
    for extra, name in (([], "gates"), (["--text"], "gate_text")):
        done = cli("gate-maps", "-m", "gate_elementwise", *prompts, *FAST, "--format", kind, *extra)
        assert done.code == 0, done.err
        assert done.out.split() == [f"figs/{name}_gate_elementwise_prompt-{n}.{kind}" for n in (1, 2)]


@pytest.mark.parametrize("what", [[], ["--text", "--heads", "2"]])
def test_rerun(cli: Cli, what: list[str]) -> None:
    asked = ("--layers", "1,3", "-p", TEXT, "-p", "the dog")
    written = cli("gate-maps", *asked, *what, *FAST, "--csv", "-q").out.split()
    assert len(written) == 8
    for number, file in enumerate((written[2], written[5])):
        done = cli("recipe", file, "--rerun", "-o", f"again-{number}", "-q")
        assert done.code == 0, done.err
        assert done.out.startswith("agrees: ")
    recipe = read_recipe(written[2])
    assert (recipe.file.prompt, recipe.file.models) == ("prompt-2", ("gate_headwise",))
    assert [(one.layer, one.head) for one in recipe.file.numbers] == [(1, None), (3, None)]
    assert recipe.models[0].attention == "none"
    other = cli("recipe", written[2], "--rerun", "-o", "changed", "-q", "--tolerance", "0")
    assert other.out.startswith(("agrees", "differs"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-m", "baseline"], 1, "no gate in baseline; expected a model with a gate"),
        (["-m", "gate_headwise", "--layers", "9"], 1, "no layer 9: gate_headwise has 3 layers"),
        (["-m", "gate_headwise", "--heads", "9"], 1, "no head 9: gate_headwise has 4 heads"),
        (["--layers", "x"], 2, "'x': expected all, or layers such as"),
        (["--heads", "first"], 2, "'first': expected mean, all, or heads such as"),
        (["--vmax", "0"], 2, "--vmax 0 leaves no range"),
        (["--font", "No Such Font"], 1, "No Such Font"),
    ],
)
def test_what_cannot_be(cli: Cli, arguments: list[str], code: int, said: str) -> None:
    done = cli("gate-maps", *PROMPT, *arguments)
    assert done.code == code
    assert done.out == ""
    assert said in " ".join(done.err.replace("│", " ").split())

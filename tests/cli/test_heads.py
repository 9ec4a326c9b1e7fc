from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from gattn_viz import Run, head_table, read_recipe
from tests.cli.conftest import Cli

TEXTS = ["the cat sat on the mat", "the dog"]
PROMPTS = ("-p", TEXTS[0], "-p", TEXTS[1])
FAST = ("--dpi", "40", "-q")


def test_a_figure_and_its_numbers(cli: Cli, tmp_path: Path, tiny_trio: Path) -> None:
    done = cli("heads", *PROMPTS, "--measures", "sink_rate,gate_below", *FAST, "--csv", "-o", "out")
    assert done.code == 0, done.err
    assert done.out.split() == ["out/heads.png", "out/heads.csv"]
    with Image.open(tmp_path / "out" / "heads.png") as image:
        assert image.format == "PNG"
    expected = head_table(prompts=TEXTS, measures=["sink_rate", "gate_below"], run=Run(str(tiny_trio)))
    shown = pd.read_csv("out/heads.csv")
    assert list(shown) == ["model", "layer", "head", "sink_rate", "gate_below"]
    pd.testing.assert_frame_equal(shown, expected[list(shown)], rtol=1e-6, check_dtype=False)


@pytest.mark.parametrize("kind", ["pdf", "svg"])
def test_formats(cli: Cli, kind: str) -> None:
    assert cli("heads", "-m", "gate_headwise", *PROMPTS, *FAST, "--format", kind).out.split() == [
        f"figs/heads.{kind}"
    ]


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_from_a_table(cli: Cli, suffix: str) -> None:
    """The same picture as from the models, with the table's models and prompts in its recipe."""
    assert cli("sink-stats", *PROMPTS, "-o", f"sinks.{suffix}", "-q").code == 0
    done = cli("heads", "--table", f"sinks.{suffix}", *FAST)
    assert done.code == 0, done.err
    ours = read_recipe("figs/heads.png")
    assert cli("heads", *PROMPTS, *FAST, "-o", "run").code == 0
    direct = read_recipe("run/heads.png")
    assert [model.label for model in ours.models] == ["baseline", "gate_headwise", "gate_elementwise"]
    assert ours.prompts == direct.prompts
    for one, other in zip(ours.file.numbers, direct.file.numbers, strict=True):
        assert (one.model, one.measure, one.layer) == (other.model, other.measure, None)
        if one.mean is not None and other.mean is not None:
            assert one.mean == pytest.approx(other.mean, rel=1e-4)
            np.testing.assert_allclose(one.grid, other.grid, rtol=1e-4)  # type: ignore[arg-type]
    assert ours.file.view is not None
    assert ours.file.view.startswith(f"from sinks.{suffix}, sha256 ")
    done = cli("recipe", "figs/heads.png", "--rerun", "-o", "again")
    assert done.code == 1
    assert f"was drawn from the table sinks.{suffix}" in done.err


def test_a_table_of_one_s_own(cli: Cli) -> None:
    Path("mine").mkdir()
    Path("mine/t.csv").write_text("model,layer,head,x\nNA,4,1,.5\nNA,8,2,.25\n")
    done = cli("heads", "--table", "mine/t.csv", "--measures", "x", "--dpi", "40")
    assert done.code == 0, done.err
    assert "t.csv has no recipe" in done.err
    recipe = json.loads(cli("recipe", "figs/heads.png").out)
    assert recipe["file"]["models"] == ["NA"]
    assert recipe["options"]["table"] == "t.csv"
    assert "mine" not in json.dumps(recipe)
    assert "view" in cli("recipe", "figs/heads.png", "--format", "text").out


def test_rerun(cli: Cli) -> None:
    assert cli("heads", "-m", "gate_headwise", "-m", "baseline", *PROMPTS, *FAST, "--csv").code == 0
    for file in ("heads.png", "heads.csv"):
        done = cli("recipe", f"figs/{file}", "--rerun", "-o", f"again-{file}", "-q")
        assert done.code == 0, done.err
        assert done.out.startswith("agrees: ")
    recipe = read_recipe("figs/heads.png")
    assert [(one.model, one.measure) for one in recipe.file.numbers] == [
        ("gate_headwise", "first_token_mass"), ("gate_headwise", "gate_mean"),
        ("baseline", "first_token_mass"), ("baseline", "gate_mean"),
    ]  # fmt: skip
    assert recipe.file.numbers[3].mean is None


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--measures", "nothing"], 1, "no measure 'nothing'; expected all, or some of"),
        (["--measures", "perplexity"], 1, "perplexity is one number a model"),
        (["-m", "baseline", "--measures", "gate_mean"], 1, "no gate in baseline"),
        (["--table", "none.csv"], 2, "--prompt is given with --table, which runs no model"),
        (["--scale", "cube"], 2, "cube"),
        (["--font", "No Such Font"], 1, "No Such Font"),
    ],
)
def test_what_cannot_be(cli: Cli, arguments: list[str], code: int, said: str) -> None:
    done = cli("heads", *PROMPTS, *arguments)
    assert done.code == code
    assert done.out == ""
    assert said in " ".join(done.err.replace("│", " ").split())


def test_tables_that_cannot_be(cli: Cli) -> None:
    assert cli("sink-stats", "-m", "baseline", *PROMPTS, "--by", "layer", "-o", "layers.csv", "-q").code == 0
    assert cli("sink-stats", "-m", "baseline", *PROMPTS, "--per-prompt", "-o", "prompts.csv", "-q").code == 0
    Path("empty.csv").write_text("")
    Path("other.txt").write_text("")
    for table, code, said in (
        ("layers.csv", 1, "the table has no column head; expected a row for each model, layer and head"),
        ("prompts.csv", 1, "several rows for baseline, layer 1, head 1"),
        ("none.csv", 1, "--table none.csv is no file"),
        ("empty.csv", 1, "cannot read the table empty.csv"),
        ("other.txt", 2, "--table other.txt: expected a .csv, .json or .parquet file"),
    ):
        done = cli("heads", "--table", table)
        assert done.code == code
        assert said in " ".join(done.err.replace("│", " ").split())
    assert (
        "no column 'honor_after' of numbers"
        in cli("heads", "--table", "prompts.csv", "--measures", "honor_after").err
    )


def test_a_table_that_lacks_heads_is_said_to(cli: Cli) -> None:
    assert cli("sink-stats", *PROMPTS, "-m", "baseline", "--measures", "row_max", "-o", "s.csv", "-q").code == 0
    lines = Path("s.csv").read_text().splitlines()
    Path("s.csv").write_text("\n".join(lines[:-1]) + "\n")
    done = cli("heads", "--table", "s.csv", "--measures", "row_max", "--dpi", "40")
    assert (done.code, "s.csv has 11 of 12 heads of baseline: the others are blank" in done.err) == (0, True)


def test_measures_of_both_kinds_take_one_pass(cli: Cli) -> None:
    done = cli(
        "heads", *PROMPTS, "-m", "gate_headwise", "--measures", "first_token_mass,gate_below", "--dpi", "40"
    )
    assert done.err.count("gate_headwise attention:") == 1

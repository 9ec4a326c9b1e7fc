from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from gattn_viz import paper_data, read_recipe
from gattn_viz.cli.figures import FIGURES
from gattn_viz.cli.rerun import rerun_and_compare
from gattn_viz.drawing.paper import PAPER_FIGURES
from gattn_viz.pipeline.run import Run
from gattn_viz.recipe.content import KEY
from tests.cli.conftest import Cli

PROMPT = ("-p", "the cat sat on the mat", "-p", "the dog")
DRAWN = [name for name in PAPER_FIGURES if name != "summary"]
ROOT = Path(__file__).parents[2]


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.endswith(".recipe.json")}


def test_all_of_them(cli: Cli, tmp_path: Path, tiny_trio: Path) -> None:
    done = cli("figures", *PROMPT, "-o", "out", "--dpi", "40", "-q")
    assert (done.code, done.err) == (0, "")
    out = tmp_path / "out"
    expected = {f"{name}.{kind}" for name in DRAWN for kind in ("csv", "png", "pdf")}
    expected |= {"summary.csv", "summary.md", "summary.tex", "captions.md"}
    assert files(out) == expected
    assert {Path(line).name for line in done.out.splitlines()} == expected
    for name in DRAWN:
        pdf = (out / f"{name}.pdf").read_bytes()
        assert b"/Type3" not in pdf
        assert b"/FontFile2" in pdf  # TrueType, embedded
        assert re.search(rb"/Subtype /Type0|/CIDFontType2", pdf)
    data = paper_data(prompts=[PROMPT[1], PROMPT[3]], run=Run(checkpoints=str(tiny_trio)))
    for name, frame in data.frames.items():
        read = pd.read_csv(out / f"{name}.csv")
        assert list(read.columns) == list(frame.columns)
        numbers = frame.select_dtypes("float").columns
        assert read[numbers].to_numpy() == pytest.approx(frame[numbers].to_numpy(), rel=1e-6, nan_ok=True)
    [table] = [line for line in (out / "captions.md").read_text().split("## ") if line.startswith("summary")]
    assert "2 prompts (" in table


def test_over_relative_depth(cli: Cli, tmp_path: Path) -> None:
    done = cli("figures", *PROMPT, "--only", "gate_by_layer", "--x", "depth", "-o", "out", "--dpi", "40", "-q")
    assert (done.code, done.err) == (0, "")
    read = pd.read_csv(tmp_path / "out" / "gate_by_layer.csv")
    assert read.depth.tolist() == [0, 0.5, 1] * 2
    assert read_recipe(tmp_path / "out" / "gate_by_layer.png").options["x"] == "depth"


def test_every_file_has_its_recipe(cli: Cli, tmp_path: Path) -> None:
    cli("figures", *PROMPT, "--only", "gate_by_layer,summary", "-o", "out", "--dpi", "40", "-q")
    out = tmp_path / "out"
    found = {name: read_recipe(out / name) for name in files(out)}
    assert {name: (one.file.what, one.file.format, one.file.figure) for name, one in found.items()} == {
        "gate_by_layer.csv": ("table", "csv", "gate_by_layer"),
        "gate_by_layer.png": ("figure", "png", "gate_by_layer"),
        "gate_by_layer.pdf": ("figure", "pdf", "gate_by_layer"),
        "summary.csv": ("table", "csv", "summary"),
        "summary.md": ("text", "md", "summary"),
        "summary.tex": ("text", "tex", "summary"),
        "captions.md": ("text", "md", None),
    }
    assert found["gate_by_layer.png"].file.models == ("gate_headwise", "gate_elementwise")
    assert found["summary.md"].options["only"] == ["gate_by_layer,summary"]
    with Image.open(out / "gate_by_layer.png") as image:
        note = json.loads(image.text["gattn-viz"])  # type: ignore[attr-defined]
    assert note["caption"].startswith("Mean gate score by layer")
    assert json.loads(note[KEY])["command"] == "figures"
    shown = cli("recipe", "out/gate_by_layer.png", "--format", "text")
    assert "figure of gate_headwise, gate_elementwise" in shown.out


@pytest.mark.parametrize(
    "file", ["gate_by_layer.csv", "first_token_by_layer.pdf", "summary.tex", "attention_maps.png"]
)
def test_rerun(cli: Cli, tiny_trio: Path, file: str) -> None:
    names = "gate_by_layer,first_token_by_layer,summary,attention_maps"
    cli("figures", *PROMPT, "--only", names, "--layers", "1,2", "-o", "out", "--dpi", "40", "-q")
    done = cli("recipe", f"out/{file}", "--rerun", "-o", "again", "-q")
    assert done.code == 0, done.err
    table = pd.read_csv(f"out/{Path(file).stem}.csv")
    assert done.out == f"agrees: {table.size} values are the same within 0.1%\n"


def test_rerun_says_what_differs_and_where(cli: Cli, tmp_path: Path) -> None:
    cli("figures", *PROMPT, "--only", "output_magnitude", "-o", "out", "--dpi", "40", "-q")
    path = tmp_path / "out" / "output_magnitude.csv"
    table = pd.read_csv(path)
    table.loc[0, "mean_abs"] *= 2
    table.to_csv(path, index=False)
    done = cli("recipe", "out/output_magnitude.csv", "--rerun", "-o", "again", "-q")
    assert done.code == 1
    assert f"differs: 1 of {table.size} values" in done.out
    assert "baseline, before, layer 1: mean_abs: " in done.out


def test_what_cannot_be_rerun(cli: Cli, tmp_path: Path) -> None:
    cli("figures", *PROMPT, "--only", "gate_by_layer", "-o", "out", "--dpi", "40", "-q")
    captions = cli("recipe", "out/captions.md", "--rerun", "-o", "again")
    assert captions.code == 1
    assert "has the captions of several figures, and no numbers to compare" in captions.err
    taken = cli("recipe", "out/gate_by_layer.csv", "--rerun", "-o", "out")
    assert taken.code == 1
    assert "out is there already; expected a new or empty directory" in taken.err
    cli(
        "figures", *PROMPT, "--only", "gate_by_layer", "--first-row", "include", "-o", "other", "--dpi", "40", "-q"
    )
    for end in ("", ".recipe.json"):
        shutil.copy(f"other/gate_by_layer.csv{end}", f"out/gate_by_layer.csv{end}")
    foreign = cli("recipe", "out/gate_by_layer.png", "--rerun", "-o", "again")
    assert foreign.code == 1
    assert "gate_by_layer.csv beside gate_by_layer.png is of another run" in foreign.err
    (tmp_path / "out" / "gate_by_layer.csv").unlink()
    alone = cli("recipe", "out/gate_by_layer.png", "--rerun", "-o", "again")
    assert alone.code == 1
    assert "compared by its table, gate_by_layer.csv, which is not beside it" in alone.err
    assert not (tmp_path / "again").exists()


def test_list(cli: Cli, tmp_path: Path) -> None:
    done = cli("figures", "--list")
    assert done.code == 0
    lines = [re.split(r"  +", line) for line in done.out.splitlines()]
    assert [line[:2] for line in lines] == [[name, figure.number] for name, figure in PAPER_FIGURES.items()]
    assert not (tmp_path / "figs").exists()


def test_the_names_in_the_help_are_those_that_there_are() -> None:
    assert FIGURES.split(", ") == list(PAPER_FIGURES)


def test_width_and_style(cli: Cli, tmp_path: Path) -> None:
    cli("figures", *PROMPT, "--only", "gate_by_layer", "--width", "4", "--dpi", "50", "-o", "a", "-q")
    cli("figures", *PROMPT, "--only", "gate_by_layer", "--style", "screen", "--dpi", "50", "-o", "b", "-q")
    widths = [Image.open(tmp_path / name / "gate_by_layer.png").width for name in "ab"]
    assert widths == [200, 275]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--only", "fig3"], 2, "no figure 'fig3'"),
        (["--only", ""], 2, "no figure ''"),
        (["--only", "summary", "--layers", "2"], 2, "--layers is of attention_maps"),
        (["--width", "1"], 2, "--width"),
        (["-m", "baseline", "--only", "gate_by_layer,gate_distribution"], 1, "no gate in baseline"),
        (["--layers", "9"], 1, "no layer 9: baseline has 3 layers"),
        (["--font", "No Such Font"], 1, "No Such Font"),
    ],
)
def test_wrong_use(cli: Cli, tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    done = cli("figures", *PROMPT, *arguments)
    assert done.code == code
    assert message in re.sub(r"[\s│]+", " ", done.err)
    assert not (tmp_path / "figs").exists()


@pytest.mark.slow
def test_the_readme_s_figures_are_what_the_command_draws(tmp_path: Path) -> None:
    """The whole trio drawn anew: beyond rounding, the committed tables say the same."""
    from gattn_viz.cli.rerun import Given

    committed = ROOT / "figs" / "paper"
    given = Given({}, None, None, False, False)
    first, *others = sorted(committed.glob("*.csv"))
    result, _ = rerun_and_compare(first, read_recipe(first), tmp_path / "new", given, 0.02, quiet=True)
    assert result.different == []
    assert {path.stem for path in [first, *others]} == set(PAPER_FIGURES)
    for path in others:
        before, now = pd.read_csv(path), pd.read_csv(tmp_path / "new" / path.name)
        for column in before:
            if before[column].dtype.kind == "f":
                largest = before[column].abs().max()
                assert now[column].to_numpy() == pytest.approx(
                    before[column].to_numpy(), rel=0.02, abs=0.002 * largest, nan_ok=True
                )
            elif column == "count":
                assert now[column].to_numpy() == pytest.approx(before[column].to_numpy(), rel=0.02, abs=20)
            else:
                assert now[column].tolist() == before[column].tolist() or before[column].isna().any()


def test_a_figure_without_room_leaves_nothing_behind(cli: Cli, tmp_path: Path) -> None:
    only = ["--only", "first_token_by_layer,attention_maps"]
    done = cli("figures", *PROMPT, *only, "--width", "2", "-o", "narrow")
    assert done.code == 1
    assert "no room" in done.err
    assert not (tmp_path / "narrow").exists()

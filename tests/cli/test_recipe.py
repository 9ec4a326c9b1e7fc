"""The recipe in every file, read by other libraries; and commands run again from it."""

from __future__ import annotations

import getpass
import hashlib
import json
import re
import shlex
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from pyarrow import parquet
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from gattn_viz import read_recipe
from gattn_viz.cli.recipe import EXAMPLE
from gattn_viz.recipe.content import KEY
from tests.cli.conftest import Cli, Done

PROMPT = ("-p", "the cat sat on the mat")
TABLE = ("sink-stats", *PROMPT, "-p", "the dog", "-q")
MAPS = ("maps", "-m", "baseline", "--layers", "1,3", *PROMPT, "--dpi", "40", "-q")


def ok(done: Done) -> Done:
    assert done.code == 0, done.err
    return done


def in_json(cli: Cli, path: str) -> dict:
    return json.loads(ok(cli("recipe", path)).out)


def embedded(path: Path) -> dict:
    """The recipe of a file, by a reader that is not gattn-viz's."""
    kind = path.suffix.removeprefix(".")
    if kind == "png":
        with Image.open(path) as image:
            text = json.loads(image.text["gattn-viz"])[KEY]  # type: ignore[attr-defined]
    elif kind == "svg":
        described = ElementTree.parse(path).find(".//{http://purl.org/dc/elements/1.1/}description")
        assert described is not None
        assert described.text is not None
        text = json.loads(described.text)[KEY]
    elif kind == "pdf":
        # the string after /Keywords, its parentheses and backslashes escaped; ours has them in pairs or escaped
        start = path.read_bytes().index(b"/Keywords (") + len(b"/Keywords (")
        raw, out, at = path.read_bytes(), bytearray(), start
        while raw[at : at + 1] != b")":
            at += raw[at : at + 1] == b"\\"
            out += raw[at : at + 1]
            at += 1
        text = json.loads(out)[KEY]
    elif kind == "safetensors":
        with safe_open(path, "numpy") as file:
            text = file.metadata()[KEY]
    elif kind == "parquet":
        text = parquet.read_schema(path).metadata[KEY.encode()].decode()
    else:
        text = path.with_name(path.name + ".recipe.json").read_text()
    return json.loads(text)


@pytest.fixture
def library(tmp_path: Path, tiny_trio: Path) -> Path:
    """A place with a telling path: a model, a prompts file and a font of one's own."""
    home = tmp_path / "home" / "alice-secret" / "work"
    home.mkdir(parents=True)
    shutil.copytree(tiny_trio / "gate_headwise", home / "mine")
    (home / "some prompts.jsonl").write_text(
        '{"id": "a", "text": "the cat sat (on"}\n{"id": "b", "text": "the dog"}'
    )
    return home


@pytest.mark.parametrize("kind", ["png", "pdf", "svg", "safetensors", "csv", "json", "parquet"])
def test_every_format_carries_it_and_no_path(cli: Cli, tmp_path: Path, library: Path, kind: str) -> None:
    models = ("-m", str(library / "mine"), "-m", "baseline")
    prompts = ("--prompts", str(library / "some prompts.jsonl"))
    if kind in ("csv", "json", "parquet"):
        path = tmp_path / f"out.{kind}"
        ok(cli("sink-stats", *models, *prompts, "-o", str(path), "--sink-threshold", ".2", "-q"))
    else:
        asked = ("--raw",) if kind == "safetensors" else ("--format", kind)
        ok(cli("maps", *models, *prompts, "--layers", "1", "--dpi", "40", "-o", str(tmp_path / "figs"), *asked))
        path = tmp_path / "figs" / f"maps_mine_b.{kind}"

    found = embedded(path)
    assert found == json.loads(read_recipe(path).to_json())
    assert found == in_json(cli, str(path))
    assert [model["label"] for model in found["models"]] == ["mine", "baseline"]
    mine = found["models"][0]
    weights = (library / "mine" / "model.safetensors").read_bytes()
    assert mine["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert (mine["kind"], mine["name"], mine["dtype"], mine["device"]) == ("directory", "mine", "float32", "cpu")
    assert found["prompts"]["ids"] == ["a", "b"]
    assert found["prompts"]["file"] == "some prompts.jsonl"
    texts = '["the cat sat (on","the dog"]'
    assert found["prompts"]["sha256"] == hashlib.sha256(texts.encode()).hexdigest()
    assert found["file"]["format"] == kind
    assert found["versions"].keys() >= {"gattn-viz", "torch", "transformers", "numpy"}
    assert ("matplotlib" in found["versions"]) == (kind not in ("csv", "json", "parquet"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    words = shlex.split(found["command_line"])
    assert words[:6] == ["gattn-viz", found["command"], "--model", "./mine", "--model", "baseline"]
    assert words[words.index("--prompts") + 1] == "some prompts.jsonl"

    written = [other for other in tmp_path.rglob("*") if other.is_file() and library not in other.parents]
    assert path in written
    secrets = [str(tmp_path), "alice-secret", str(Path.home()) + "/", str(sys.prefix), "/tmp", "/home"]
    if getpass.getuser() not in ("root", "user"):  # a word that is in other words is no proof
        secrets.append(getpass.getuser())
    for other in written:
        for secret in secrets:
            assert secret.encode() not in other.read_bytes(), (other.name, secret)


def test_paths_are_there_when_asked_for(cli: Cli, library: Path) -> None:
    prompts = str(library / "some prompts.jsonl")
    mine = str(library / "mine")
    ok(cli("sink-stats", "-m", mine, "--prompts", prompts, "-o", "a.csv", "-q", "--recipe-paths"))
    found = in_json(cli, "a.csv")
    assert found["models"][0]["path"] == mine
    assert found["prompts"]["path"] == prompts
    assert found["options"]["model"] == [mine]
    assert ok(cli("recipe", "a.csv", "--rerun", "-o", "b.csv")).out.startswith("agrees: ")


def test_models_of_one_name_are_told_apart_without_their_folders(cli: Cli, library: Path, tmp_path: Path) -> None:
    shutil.copytree(library / "mine", tmp_path / "alice" / "mine")
    ok(cli(*TABLE, "-m", str(library / "mine"), "-m", str(tmp_path / "alice" / "mine"), "-o", "a.csv"))
    assert set(pd.read_csv("a.csv").model) == {"mine (model 1)", "mine (model 2)"}


def test_the_tables_themselves_are_as_before(cli: Cli) -> None:
    """JSON is a list of records, CSV has no comment, and stdout has no recipe."""
    on_stdout = ok(cli(*TABLE)).out
    ok(cli(*TABLE, "-o", "a.csv"))
    ok(cli(*TABLE, "-o", "a.json"))
    assert Path("a.csv").read_text() == on_stdout
    assert len(json.loads(Path("a.json").read_text())) == len(pd.read_csv("a.csv")) == 36
    assert sorted(path.name for path in Path().iterdir()) == [
        "a.csv",
        "a.csv.recipe.json",
        "a.json",
        "a.json.recipe.json",
    ]


def test_nothing_lies_beside_a_device(cli: Cli, tmp_path: Path) -> None:
    ok(cli(*TABLE, "-o", "/dev/null"))
    assert list(tmp_path.iterdir()) == []
    assert not Path("/dev/null.recipe.json").exists()


def test_what_is_in_effect_and_what_was_given(cli: Cli, tiny_trio: Path) -> None:
    """The directory of GATTN_VIZ_CHECKPOINTS counts as given; --first-row exclude, the default, does not."""
    arguments = (
        "--first-row",
        "exclude",
        "--ci",
        ".9",
        "--seed",
        "3",
        "--max-tokens",
        "5",
        "--bos",
        "never",
        "--chunk",
        "4",
    )
    ok(cli(*TABLE, *arguments, "-o", "a.csv"))
    found = in_json(cli, "a.csv")
    assert found["command_line"] == (
        f"gattn-viz sink-stats --checkpoints ./{tiny_trio.name} --prompt 'the cat sat on the mat' "
        "--prompt 'the dog' --max-tokens 5 --bos never --chunk 4 --ci 0.9 --seed 3"
    )
    assert {"first-row": "exclude", "seed": 3, "chunk": 4, "by": "head"}.items() <= found["options"].items()
    assert not {"output", "quiet", "debug"} & found["options"].keys()
    tokens = [(model["tokens"], model["shortest"], model["longest"]) for model in found["models"]]
    assert tokens == [(7, 2, 5)] * 3 or all(shortest <= longest <= 5 for _, shortest, longest in tokens)


def test_a_figure_says_what_it_draws(cli: Cli, tiny_trio: Path) -> None:
    ok(cli("maps", "--layers", "2", "--heads", "1,3", *PROMPT, "--scale", "sqrt", "--vmax", ".5", "--raw", "-q"))
    drawn = in_json(cli, "figs/maps_baseline.png")["file"]
    maps = load_file("figs/maps_baseline.safetensors")["layer_2"].astype(float)
    assert drawn["color_scale"] == {"kind": "sqrt", "low": 0.0, "high": 0.5}
    assert [(one["layer"], one["head"]) for one in drawn["numbers"]] == [(2, 1), (2, 3)]
    for one, cells in zip(drawn["numbers"], maps, strict=True):
        assert one["mean"] == pytest.approx(cells.mean(), rel=1e-5)
        assert one["largest"] == pytest.approx(cells.max(), rel=1e-5)
        assert one["grid"][0] == pytest.approx(
            cells[: -(-len(cells) // 4), : -(-len(cells) // 4)].mean(), rel=1e-5
        )
    grid = in_json(cli, "figs/maps_grid.png")["file"]
    assert (grid["what"], len(grid["models"]), len(grid["numbers"])) == ("grid", 3, 3)
    assert grid["numbers"][0]["largest"] == pytest.approx(maps.mean(0).max(), rel=1e-5)


def test_in_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ok(cli(*MAPS))
    monkeypatch.setenv("COLUMNS", "200")
    piped = in_json(cli, "figs/maps_baseline.png")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    text = ok(cli("recipe", "figs/maps_baseline.png")).out
    [model] = piped["models"]
    of_model = (model["weights_sha256"], f"T = {model['tokens']}")
    said = (piped["command_line"], "maps of baseline", "linear scale", piped["date"], piped["prompts"]["sha256"])
    for words in (*said, *of_model, "torch"):
        assert words in text
    assert json.loads(ok(cli("recipe", "figs/maps_baseline.png", "--format", "json")).out) == piped


def test_a_fixed_date_gives_the_same_bytes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    for folder in "ab":
        ok(cli(*MAPS, "--raw", "-o", folder))
        ok(cli(*TABLE, "-o", f"{folder}/t.csv"))
    for name in ("maps_baseline.png", "maps_baseline.safetensors", "t.csv.recipe.json"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes(), name
    assert in_json(cli, "a/t.csv")["date"] == "1970-01-02T00:00:00Z"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    done = cli(*TABLE, "-o", "c.csv")
    assert done.code == 1
    assert "SOURCE_DATE_EPOCH is 'yesterday'; expected seconds since 1970" in done.err
    assert not Path("c.csv").exists()


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_a_table_again(cli: Cli, kind: str) -> None:
    ok(cli(*TABLE, "-o", f"a.{kind}", "--ci", ".9"))
    done = ok(cli("recipe", f"a.{kind}", "--rerun", "-o", f"b.{kind}"))
    rows = {"csv": pd.read_csv, "json": pd.read_json, "parquet": pd.read_parquet}[kind](f"a.{kind}")
    assert done.out == f"agrees: {rows.size} values are the same within 0.1%\n"
    assert in_json(cli, f"b.{kind}")["command_line"] == in_json(cli, f"a.{kind}")["command_line"] or kind


@pytest.mark.parametrize("file", ["maps_baseline_b.png", "maps_baseline_b.safetensors", "maps_grid_a.png"])
def test_maps_again(cli: Cli, library: Path, file: str) -> None:
    prompts = str(library / "some prompts.jsonl")
    ok(
        cli(
            "maps",
            "-m",
            "baseline",
            "-m",
            str(library / "mine"),
            "--prompts",
            prompts,
            "--raw",
            "--dpi",
            "40",
            "-q",
        )
    )
    given = ("--model", f"mine={library / 'mine'}", "--prompts", prompts)
    done = ok(cli("recipe", f"figs/{file}", "--rerun", "-o", "new", *given))
    assert done.out.startswith("agrees: ")
    assert sorted(path.name for path in Path("figs").iterdir()) == sorted(p.name for p in Path("new").iterdir())
    as_json = json.loads(ok(cli("recipe", f"figs/{file}", "--rerun", "-o", "n", "--format", "json", *given)).out)
    assert as_json["agrees"] is True
    assert as_json["changed"] == []
    assert as_json["compared"] > 10


@pytest.mark.parametrize("file", ["maps_gate_headwise.png", "maps_grid.png", "maps_gate_elementwise.safetensors"])
def test_weighted_maps_again(cli: Cli, tmp_path: Path, file: str) -> None:
    models = ("-m", "gate_headwise", "-m", "gate_elementwise")
    ok(cli("maps", *models, "--layers", "2", *PROMPT, "--dpi", "40", "-q", "--raw", "--weight", "output"))
    recipe = in_json(cli, f"figs/{file}")
    assert recipe["options"]["weight"] == "output"
    assert "--weight output" in recipe["command_line"]
    assert recipe["file"]["quantity"] == "norm added to the residual stream (L2)"
    done = ok(cli("recipe", f"figs/{file}", "--rerun", "-o", "again", "-q"))
    assert done.out.startswith("agrees: ")
    assert in_json(cli, f"again/{file}")["options"]["weight"] == "output"


def scaled(directory: Path, name: str, factor: float) -> None:
    """Change one weight."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    [key] = [key for key in tensors if key.endswith(name)]
    save_file({**tensors, key: tensors[key] * np.float32(factor)}, path, {"format": "pt"})


@pytest.mark.parametrize("kind", ["csv", "png", "safetensors"])
def test_a_changed_weight(cli: Cli, library: Path, kind: str) -> None:
    """Refused by its hash; when allowed, it says which numbers change: not those of the layers before it."""
    mine = str(library / "mine")
    if kind == "csv":
        path = "a.csv"
        ok(cli(*TABLE, "-m", mine, "-m", "baseline", "-o", path))
    else:
        path = f"figs/maps_mine.{kind}"
        ok(cli("maps", "-m", mine, "-m", "baseline", "--layers", "1,2,3", *PROMPT, "--raw", "--dpi", "40", "-q"))
    before = Path(path).read_bytes()
    again = ("recipe", path, "--rerun", "-o", f"new.{kind}", "--model", f"mine={mine}")
    assert ok(cli(*again)).out.startswith("agrees")
    scaled(library / "mine", "layers.1.self_attn.k_norm.weight", 1.5)
    again = ("recipe", path, "--rerun", "-o", f"newer.{kind}", "--model", f"mine={mine}")
    done = cli(*again)
    assert done.code == 1
    assert re.search(r"the weights of mine are not the recipe's: sha256 [0-9a-f]{12}\.\.\., expected", done.err)
    assert not Path(f"newer.{kind}").exists()

    done = cli(*again, "--allow-changed")
    assert done.code == 1
    assert re.match(r"differs: \d+ of \d+ values by more than 0\.1%\n  (mine|layer_2)", done.out)
    assert "changed since: weights sha256 of mine " in done.out
    assert Path(path).read_bytes() == before
    found = json.loads(cli(*again[:4], "last", *again[5:], "--allow-changed", "--format", "json").out)
    places = [where for where, _, _ in found["different"] if "perplexity" not in where]  # which is the model's
    assert found["agrees"] is False
    assert any(re.match(r"mine, layer 2|layer_2", place) for place in places)
    assert not any(re.match(r"mine, layer 1\b|layer_1|baseline", place) for place in places)


def test_an_edited_table(cli: Cli) -> None:
    """A number that somebody changed in the file is found, and that the file was changed is said."""
    ok(cli(*TABLE, "--by", "layer", "-o", "a.csv"))
    table = pd.read_csv("a.csv")
    before = table.loc[4, "first_token_mass"]
    table.loc[4, "first_token_mass"] = before * 1.01
    table.to_csv("a.csv", index=False)
    done = cli("recipe", "a.csv", "--rerun", "-o", "b.csv")
    assert done.code == 1
    assert "warning: a.csv is not as it was when its recipe was written" in done.err
    lines = done.out.splitlines()
    assert lines[0].startswith(f"differs: 1 of {table.size} values")
    assert lines[1].startswith("  gate_headwise, layer 2: first_token_mass ") or "first_token_mass" in lines[1]
    assert len(lines) == 2
    assert cli("recipe", "a.csv", "--rerun", "-o", "c.csv", "--tolerance", ".02").code == 0


def test_prompts_from_stdin_and_a_directory_of_another_name(
    cli: Cli, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\nthe dog\n")))
    whole = ("--prompts", "-", "--whole-file", "--per-prompt")
    ok(cli("sink-stats", "-m", str(library / "mine"), "-m", "baseline", *whole, "-o", "a.csv", "-q"))
    (library / "mine").rename(tmp_path / "moved")
    (tmp_path / "kept.txt").write_text("the cat\nthe dog\n")
    again = ("recipe", "a.csv", "--rerun", "-o", "b.csv")
    for given, message in (
        ((), "the recipe's model mine is a local directory, which it knows by name only"),
        (("--model", "mine=moved"), "prompts came from standard input"),
        (("--model", "mine=moved", "--prompts", "none.txt"), "'none.txt' does not exist"),
    ):
        done = cli(*again, *given)
        assert (done.code, message in done.err) == (1, True), done.err
    given = ("--model", "mine=moved", "--prompts", "kept.txt")
    assert ok(cli(*again, *given)).out.startswith("agrees: ")
    table = pd.read_csv("b.csv")
    assert set(table.model) == {"moved", "baseline"}
    assert set(table.prompt) == {"kept"}


def test_checkpoints_come_from_where_they_are_now(
    cli: Cli, tiny_trio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok(cli(*TABLE, "-o", "a.csv"))
    monkeypatch.delenv("GATTN_VIZ_CHECKPOINTS")
    done = cli("recipe", "a.csv", "--rerun", "-o", "b.csv")
    assert "--model baseline=PATH" in done.err
    shutil.copytree(tiny_trio, tmp_path / "elsewhere")
    ok(cli("recipe", "a.csv", "--rerun", "-o", "b.csv", "--checkpoints", "elsewhere"))
    one_apart = [f"--model=baseline={tiny_trio / 'baseline'}", "--checkpoints", "elsewhere"]
    ok(cli("recipe", "a.csv", "--rerun", "-o", "c.csv", *one_apart))


def test_other_prompts(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("the cat sat\nthe dog\n")
    ok(cli("sink-stats", "-m", "baseline", "--prompts", "p.txt", "-o", "a.csv", "-q"))
    (tmp_path / "p.txt").write_text("the cat sat\nthe log and the mat\n")
    again = ("recipe", "a.csv", "--rerun", "-o", "b.csv", "--prompts", "p.txt")
    done = cli(*again)
    assert done.code == 1
    assert "the prompts of p.txt are not the recipe's: sha256" in done.err
    done = cli(*again, "--allow-changed")
    assert done.code == 1
    assert done.out.startswith("differs: ")
    assert "changed since: sha256 of the prompts" in done.out


def test_nothing_is_overwritten(cli: Cli) -> None:
    ok(cli(*TABLE, "-o", "a.csv"))
    ok(cli(*MAPS))
    Path("b.csv.recipe.json").write_text("kept")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for arguments in (
        ("a.csv", "--rerun", "-o", "a.csv"),
        ("a.csv", "--rerun", "-o", "b.csv"),
        ("a.csv", "--rerun", "-o", "figs"),
        ("figs/maps_baseline.png", "--rerun", "-o", "figs"),
        ("figs/maps_baseline.png", "--rerun", "-o", "a.csv"),
    ):
        done = cli("recipe", *arguments)
        assert done.code == 1
        assert "is there already; expected a new" in done.err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_the_sidecar_and_links(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "a.csv").symlink_to("real/t.csv")
    ok(cli(*TABLE, "-o", "a.csv"))
    assert sorted(path.name for path in Path("real").iterdir()) == ["t.csv", "t.csv.recipe.json"]
    found = in_json(cli, "a.csv")
    assert found == in_json(cli, "real/t.csv.recipe.json")
    assert ok(cli("recipe", "real/t.csv.recipe.json", "--rerun", "-o", "b.csv")).out.startswith("agrees")
    Path("real/t.csv.recipe.json").rename("moved.recipe.json")
    assert "a.csv has no recipe; expected a file that gattn-viz wrote" in cli("recipe", "a.csv").err


BAD = [
    # wrong use: 2
    (["a.csv", "--rerun"], 2, "--rerun needs a place to write to"),
    (["a.csv", "-o", "b.csv"], 2, "go with --rerun"),
    (["a.csv", "--rerun", "-o", "b.csv", "--model", "baseline"], 2, "expected NAME=PATH"),
    (["a.csv", "--rerun", "-o", "b.csv", "--model", "a=b", "--model", "a=c"], 2, "given twice"),
    (["a.csv", "--format", "yaml"], 2, "yaml"),
    (["a.csv", "--rerun", "-o", "b.csv", "--tolerance", "-1"], 2, "tolerance"),
    ([], 2, "FILE"),
    # failed: 1, in one line
    (["missing.csv"], 1, "cannot read missing.csv: No such file"),
    (["."], 1, "expected a file that gattn-viz wrote"),
    (["other.csv"], 1, "other.csv has no recipe; expected a file that gattn-viz wrote"),
    (["other.png"], 1, "other.png has no recipe"),
    (["empty.csv"], 1, "empty.csv has no recipe"),
    (["broken.csv"], 1, "the recipe of broken.csv is damaged"),
    (["short.csv"], 1, "the recipe of short.csv is damaged (KeyError: 'given')"),
    (["later.csv"], 1, "the recipe of later.csv has format 2; expected 1"),
    (["cut.png"], 1, "cannot read the metadata of cut.png"),
    (["cut.safetensors"], 1, "cut.safetensors has no recipe"),
    (["cut.parquet"], 1, "cannot read cut.parquet"),
    (["a.csv", "--rerun", "-o", "b.csv", "--model", "mine=x"], 1, "no such model; expected one of baseline"),
    (["a.csv", "--rerun", "-o", "b.csv", "--model", "baseline=x"], 1, "unknown model 'x'"),
    (["a.csv", "--rerun", "-o", "b.csv", "--prompts", "p"], 1, "the recipe's prompts are its own --prompt"),
]


@pytest.mark.parametrize(("arguments", "code", "expected"), BAD, ids=[" ".join(a)[:60] for a, _, _ in BAD])
def test_bad_input(cli: Cli, tmp_path: Path, arguments: list[str], code: int, expected: str) -> None:
    ok(cli("sink-stats", "-m", "baseline", *PROMPT, "-o", "a.csv", "-q"))
    for name, recipe in {
        "broken": "{",
        "short": json.dumps({KEY: 1}),
        "later": json.dumps({KEY: 2}),
    }.items():
        shutil.copy("a.csv", f"{name}.csv")
        Path(f"{name}.csv.recipe.json").write_text(recipe)
    Path("other.csv").write_text("a,b\n1,2\n")
    Path("empty.csv").touch()
    Image.new("RGB", (2, 2)).save("other.png")
    Path("cut.png").write_bytes(Path("other.png").read_bytes()[:20])
    Path("cut.safetensors").write_bytes(b"\x90\x01\0\0\0\0\0\0{")
    Path("cut.parquet").write_bytes(b"PAR1 and no more")
    done = cli("recipe", *arguments)
    assert done.code == code
    assert expected in " ".join(done.err.replace("│", " ").split())
    if code == 1:
        assert len(done.err.splitlines()) == 1
        assert done.err.startswith("gattn-viz: error: ")
    assert not Path("b.csv").exists()


def test_the_bundled_models_are_bundled_wherever_checkpoints_are(cli: Cli) -> None:
    """GATTN_VIZ_CHECKPOINTS, which is set here, is for variants that came from a directory."""
    ok(cli("sink-stats", "--checkpoints", "demo", "-m", "baseline", *PROMPT, "--by", "model", "-o", "a.csv", "-q"))
    assert in_json(cli, "a.csv")["models"][0]["kind"] == "bundled"
    assert ok(cli("recipe", "a.csv", "--rerun", "-o", "b.csv")).out.startswith("agrees: ")


def test_code_from_a_checkpoint_runs_only_when_it_is_asked_for_here(cli: Cli) -> None:
    """A figure that somebody sent must not be able to have code run."""
    ok(cli(*TABLE, "-m", "baseline", "--trust-remote-code", "-o", "a.csv"))
    done = cli("recipe", "a.csv", "--rerun", "-o", "b.csv")
    assert done.code == 1
    assert "the command of a.csv ran code that came with a checkpoint; expected --trust-remote-code" in done.err
    assert ok(cli("recipe", "a.csv", "--rerun", "-o", "b.csv", "--trust-remote-code")).out.startswith("agrees")


def test_the_example_in_the_help_runs(cli: Cli) -> None:
    ok(cli(*TABLE, "-o", "sinks.csv"))
    ok(cli(*shlex.split(EXAMPLE.removeprefix("Example: gattn-viz "))))

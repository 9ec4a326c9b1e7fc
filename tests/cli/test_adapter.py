"""`--adapter`: it is in figures, tables and recipes, and is checked when a recipe is run again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from gattn_viz import read_recipe
from gattn_viz.models.names import resolve_adapter
from gattn_viz.models.weights import adapter_sha256
from tests.cli.conftest import Cli, Done
from tests.conftest import tiny_model

peft = pytest.importorskip("peft")

STATS = ("sink-stats", "-m", "gate_headwise", "-p", "the cat sat", "--by", "layer", "-q")


def ok(done: Done) -> Done:
    assert done.code == 0, done.err
    return done


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """Below a folder with a telling name."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    directory = tmp_path / "alice-secret" / "tuned"
    peft.get_peft_model(tiny_model("gate_headwise"), config).save_pretrained(directory)
    return directory


def test_the_recipe_has_it_and_no_path(cli: Cli, lora: Path) -> None:
    ok(cli(*STATS, "--adapter", str(lora), "-o", "a.csv"))
    assert set(pd.read_csv("a.csv").model) == {"gate_headwise+tuned"}
    text = Path("a.csv.recipe.json").read_text()
    assert "alice-secret" not in text
    found = json.loads(text)
    assert " --adapter ./tuned " in found["command_line"]
    assert found["versions"]["peft"] == peft.__version__
    assert found["models"][0]["adapter"] == {
        "label": "tuned", "kind": "directory", "name": "tuned", "path": None,
        "revision": None, "commit": None, "subfolder": None,
        "weights_sha256": adapter_sha256(resolve_adapter(str(lora))),
    }  # fmt: skip
    assert json.loads(read_recipe(Path("a.csv")).to_json()) == found
    text = ok(cli("recipe", "a.csv", "--format", "text")).out
    assert "adapter directory tuned, sha256" in " ".join(text.split())


def test_rerun(cli: Cli, lora: Path, tmp_path: Path) -> None:
    ok(cli(*STATS, "--adapter", str(lora), "-o", "a.csv"))
    again = ("recipe", "a.csv", "--rerun", "-o", "b.csv")
    done = cli(*again)
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert "the recipe's adapter tuned is a local directory, which it knows by name only" in done.err
    shutil.move(lora, tmp_path / "moved")
    assert ok(cli(*again, "--adapter", "moved")).out.startswith("agrees: ")

    path = tmp_path / "moved" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 32}))
    again = ("recipe", "a.csv", "--rerun", "-o", "c.csv", "--adapter", "moved")
    assert "the adapter tuned is not the recipe's: sha256 " in cli(*again).err
    done = cli(*again, "--allow-changed")
    assert done.code == 1
    assert done.out.startswith("differs: ")
    assert "changed since: weights sha256 of the adapter tuned " in done.out


def test_rerun_by_a_path_in_the_recipe(cli: Cli, lora: Path) -> None:
    ok(cli(*STATS, "--adapter", str(lora), "-o", "a.csv", "--recipe-paths"))
    assert json.loads(Path("a.csv.recipe.json").read_text())["models"][0]["adapter"]["path"] == str(lora)
    assert ok(cli("recipe", "a.csv", "--rerun", "-o", "b.csv")).out.startswith("agrees: ")


def test_a_recipe_without_one(cli: Cli) -> None:
    """As those written before there were adapters, whose options do not name them."""
    ok(cli(*STATS, "-o", "a.csv"))
    path = Path("a.csv.recipe.json")
    found = json.loads(path.read_text())
    del found["options"]["adapter"]
    for model in found["models"]:
        del model["adapter"]
    path.write_text(json.dumps(found))
    assert ok(cli("recipe", "a.csv", "--rerun", "-o", "b.csv")).out.startswith("agrees: ")
    done = cli("recipe", "a.csv", "--rerun", "-o", "c.csv", "--adapter", "x")
    assert "--adapter x, but the recipe has none" in done.err


def test_every_command_that_runs_a_model_takes_it(cli: Cli, lora: Path) -> None:
    model = ("-m", "gate_headwise", "-p", "the cat sat", "--adapter", str(lora), "-q")
    ok(cli("maps", *model, "--layers", "1", "--dpi", "40", "-o", "figs"))
    assert Path("figs/maps_gate_headwise-tuned.png").exists()
    ok(cli("gate-maps", *model, "--layers", "1", "--dpi", "40", "-o", "figs"))
    ok(cli("heads", *model, "--dpi", "40", "-o", "figs"))
    ok(cli("figures", *model, "--only", "gate_by_layer", "--dpi", "40", "-o", "paper"))
    assert "gate_headwise+tuned" in Path("paper/captions.md").read_text()
    assert "gate_headwise+tuned" in ok(cli("gate-stats", *model, "--by", "model")).out
    done = cli("sink-stats", "-p", "the cat", "--adapter", str(lora))
    assert done.code == 1
    assert "was given with 3 models, baseline, gate_headwise, gate_elementwise; expected the one" in done.err

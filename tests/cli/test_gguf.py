"""A GGUF file on the command line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.conftest import tiny_tokenizer
from tests.models import gguf_files as files

PROMPT = ("-p", "the cat sat on the mat")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GATTN_VIZ_CACHE", str(tmp_path / "cache"))
    return files.write_gguf(tmp_path / "tiny.gguf", files.tiny_llama(), tiny_tokenizer(), "Q8_0")


def test_the_recipe_names_the_file_and_not_the_cache(cli: Cli, tiny: Path) -> None:
    done = cli("sink-stats", "-m", str(tiny), *PROMPT, "-o", "sinks.csv")
    assert done.code == 0, done.err
    assert f"{tiny} -> GGUF file {tiny}, float32 on cpu, 2 layers of 4 heads" in done.err
    text = cli("recipe", "sinks.csv").out
    [model] = json.loads(text)["models"]
    assert (model["label"], model["kind"], model["name"]) == ("tiny", "file", "tiny.gguf")
    assert model["weights_sha256"] == hashlib.sha256(tiny.read_bytes()).hexdigest()
    assert json.loads(text)["options"]["model"] == ["./tiny.gguf"]
    assert str(tiny.parent) not in text
    missing = cli("recipe", "sinks.csv", "--rerun", "-o", "again.csv").err
    assert "the recipe's model tiny is a local file, which it knows by name only" in missing
    again = cli("recipe", "sinks.csv", "--rerun", "-o", "again.csv", "--model", f"tiny={tiny}")
    assert again.code == 0, again.err
    assert again.out.startswith("agrees: ")


def test_its_path_where_asked_for(cli: Cli, tiny: Path) -> None:
    assert cli("sink-stats", "-m", "tiny.gguf", *PROMPT, "-o", "sinks.csv", "--recipe-paths").code == 0
    assert json.loads(cli("recipe", "sinks.csv").out)["models"][0]["path"] == str(tiny)
    assert cli("recipe", "sinks.csv", "--rerun", "-o", "again.csv").code == 0


def test_a_figure_names_the_file(cli: Cli, tiny: Path) -> None:
    assert cli("figures", "-m", "tiny.gguf", *PROMPT, "--only", "first_token_by_layer", "-o", "out").code == 0
    assert "Models: tiny (GGUF file tiny.gguf); 2 layers" in Path("out/captions.md").read_text()


def test_quiet_is_quiet(cli: Cli, tiny: Path) -> None:
    done = cli("sink-stats", "-q", "-m", "tiny.gguf", *PROMPT, "--by", "model")
    assert done.err == ""
    assert done.out.splitlines()[1].startswith("tiny,")

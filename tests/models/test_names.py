"""Which checkpoint a name stands for, and what is said about a wrong one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gattn_viz.errors import GattnVizError
from gattn_viz.models import names
from gattn_viz.models.names import VARIANTS, ModelSource, resolve

EXPECTED = (
    "expected a variant (baseline, gate_headwise, gate_elementwise), a directory, a .gguf file, or a Hub id "
    "org/name[@revision][:subfolder]"
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "my-model")


def checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def error_of(name: str, checkpoints: str = "demo") -> str:
    with pytest.raises(GattnVizError) as caught:
        resolve(name, checkpoints)
    return str(caught.value)


def test_neither_torch_nor_transformers_nor_the_hub_is_imported() -> None:
    code = (
        "import sys, gattn_viz.models.names as names; names.resolve('org/name');"
        "print({'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_official_variants_are_subfolders_of_the_papers_repository() -> None:
    source = resolve("gate_headwise", "official")
    assert source == ModelSource("gate_headwise", "QwQZh/gated_attention", None, "1B_gate_headwise", False)
    assert source.sentence == (
        "gate_headwise -> Hub QwQZh/gated_attention, revision main, subfolder 1B_gate_headwise"
    )
    assert resolve("baseline@v2", "official").revision == "v2"


@pytest.mark.parametrize("variant", VARIANTS)
def test_bundled_variant(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "demo_directory", lambda: tmp_path)
    checkpoint(tmp_path / variant)
    source = resolve(variant)
    assert source == ModelSource(variant, str(tmp_path / variant), None, None, True)
    assert source.sentence == f"{variant} -> bundled demo {variant}"
    assert source.label == variant


def test_bundled_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "demo_directory", lambda: tmp_path)
    assert error_of("baseline") == (
        "the bundled demo model 'baseline' is not in this installation; expected "
        "gattn_viz/demo/baseline/config.json: reinstall gattn-viz, or pass --checkpoints official or a directory"
    )


@pytest.mark.parametrize("folder", ["1B_baseline", "baseline"])
def test_variant_in_a_directory_of_checkpoints(folder: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / folder)
    source = resolve("baseline", str(tmp_path))
    assert source == ModelSource("baseline", str(directory), None, None, True)
    assert source.sentence == f"baseline -> directory {directory}"
    assert source.label == "baseline"


def test_1b_comes_before_the_bare_name(tmp_path: Path) -> None:
    checkpoint(tmp_path / "baseline")
    checkpoint(tmp_path / "1B_baseline")
    assert resolve("baseline", str(tmp_path)).location == str(tmp_path / "1B_baseline")


def test_directory(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve(str(model_dir))
    assert source == ModelSource(str(model_dir), str(model_dir), None, None, True)
    assert source.label == "my-model"
    monkeypatch.chdir(model_dir)
    assert resolve(".").label == "my-model"
    monkeypatch.chdir(model_dir.parent)
    assert resolve("my-model").location == "my-model"
    assert resolve("./my-model/").label == "my-model"


def test_home_directory(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model_dir.parent))
    assert resolve("~/my-model").location == str(model_dir)


def test_subfolder_of_a_directory(model_dir: Path) -> None:
    assert resolve(f"{model_dir.parent}:my-model").location == str(model_dir)


def test_directory_with_marks_in_its_name(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "run@3:best")
    assert resolve(str(directory)).location == str(directory)


def test_a_variant_wins_over_a_directory_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "baseline")
    monkeypatch.chdir(tmp_path)
    assert not resolve("baseline", "official").is_local
    assert resolve("./baseline").is_local


@pytest.mark.parametrize(
    ("name", "revision", "subfolder", "label"),
    [
        ("org/name", None, None, "name"),
        ("org/name@v1.0", "v1.0", None, "name@v1.0"),
        ("org/name:sub/dir", None, "sub/dir", "name:sub/dir"),
        ("org/name@refs/pr/2:sub", "refs/pr/2", "sub", "name@refs/pr/2:sub"),
        ("org/name:sub@main", "main", "sub", "name@main:sub"),
    ],
)
def test_hub_id(name: str, revision: str | None, subfolder: str | None, label: str) -> None:
    source = resolve(name)
    assert source == ModelSource(name, "org/name", revision, subfolder, False)
    assert source.label == label


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF")
    (tmp_path / "a@b:My-1.5.Q4_1.gguf").symlink_to("blob")  # as it lies in the Hub's cache
    for name in (str(tmp_path / "a@b:My-1.5.Q4_1.gguf"), "a@b:My-1.5.Q4_1.gguf"):
        monkeypatch.chdir(tmp_path)
        source = resolve(name)
        assert source == ModelSource(name, name, None, None, True)
        assert source.is_gguf
        assert source.label == "a@b:My-1.5.Q4_1"
        assert source.checkpoint == f"GGUF file {name}"
        assert source.without_path == "GGUF file a@b:My-1.5.Q4_1.gguf"
    assert error_of("no/such.gguf") == (
        "model file 'no/such.gguf' does not exist; expected a GGUF file: check the path"
    )


def test_a_directory_may_be_called_as_a_gguf_file(tmp_path: Path) -> None:
    source = resolve(str(checkpoint(tmp_path / "model.gguf")))
    assert not source.is_gguf
    assert source.without_path == "directory model.gguf"


def test_unknown_variant() -> None:
    assert error_of("gate_headwize") == (f"unknown model 'gate_headwize', did you mean gate_headwise?; {EXPECTED}")
    assert error_of("gpt2") == f"unknown model 'gpt2'; {EXPECTED}"
    assert error_of("") == f"unknown model ''; {EXPECTED}"


def test_missing_directory(tmp_path: Path) -> None:
    assert error_of(f"{tmp_path}/nothing") == (
        f"model directory '{tmp_path}/nothing' does not exist; expected a directory with config.json, weights and "
        "tokenizer: check the path"
    )
    assert "does not exist" in error_of("./nothing")
    assert error_of(f"{tmp_path}:sub") == (
        f"model directory '{tmp_path}/sub' does not exist; expected a directory with config.json: check the path"
    )


def test_file_in_place_of_a_directory(model_dir: Path) -> None:
    assert error_of(f"{model_dir}/config.json") == (
        f"model directory '{model_dir}/config.json' is a file, not a directory; expected a directory with "
        "config.json, weights and tokenizer: check the path"
    )


def test_directory_without_config(tmp_path: Path) -> None:
    assert error_of(str(tmp_path)) == (
        f"model directory '{tmp_path}' holds no config.json; expected config.json, weights and tokenizer: pass "
        "the directory that save_pretrained wrote"
    )
    checkpoint(tmp_path / "step-100")
    assert error_of(str(tmp_path)) == (
        f"model directory '{tmp_path}' holds no config.json; expected config.json, weights and tokenizer: it "
        f"holds step-100: choose one, as {tmp_path}/step-100"
    )


def test_revision_of_a_directory(model_dir: Path) -> None:
    assert error_of(f"{model_dir}@v1") == (
        f"model '{model_dir}@v1' asks for a revision of a local directory; expected a Hub id org/name@revision: "
        "leave out @v1"
    )


def test_variant_with_subfolder_or_revision() -> None:
    assert error_of("baseline@v1") == (
        "model 'baseline@v1': a variant takes no :subfolder, and @revision only with --checkpoints official (got "
        "--checkpoints demo): write baseline"
    )
    assert "takes no :subfolder" in error_of("baseline:sub", "official")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("org/name@", "an empty revision"),
        ("org/name:", "an empty subfolder"),
        ("org/name@a@b", "two revisions"),
        ("org/name:a:b", "two subfolders"),
    ],
)
def test_marks_without_a_value_or_twice(name: str, fault: str) -> None:
    assert error_of(name) == f"model {name!r} has {fault}; {EXPECTED}"


def test_checkpoints_that_are_no_directory(tmp_path: Path) -> None:
    expected = "expected demo, official, or a directory that holds 1B_baseline or baseline"
    assert error_of("baseline", "oficial") == (
        f"checkpoints 'oficial' is not a directory, did you mean official?; {expected}"
    )
    assert error_of("baseline", "") == f"checkpoints '' is not a directory; {expected}"


def test_checkpoints_directory_without_the_variant(tmp_path: Path) -> None:
    start = f"checkpoints directory '{tmp_path}' holds neither 1B_baseline nor baseline; it holds"
    end = "pass the directory above the variants, or --model DIR for one model"
    assert error_of("baseline", str(tmp_path)) == f"{start} no directory: {end}"
    checkpoint(tmp_path / "1B_gate_headwise")
    assert error_of("baseline", str(tmp_path)) == f"{start} 1B_gate_headwise: {end}"


def test_variant_directory_without_config(tmp_path: Path) -> None:
    (tmp_path / "baseline").mkdir()
    assert error_of("baseline", str(tmp_path)) == (
        f"model directory '{tmp_path}/baseline' holds no config.json; expected config.json, weights and "
        "tokenizer: pass the directory that save_pretrained wrote"
    )


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "a b/c", "-x/y", "org/", os.sep, "~nobody-here/x"])
def test_strange_names_are_errors_too(name: str) -> None:
    assert "\n" not in error_of(name)

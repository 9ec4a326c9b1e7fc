"""The hash of a checkpoint's weights, against `sha256sum`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import constants

from gattn_viz.models.names import ModelSource, resolve
from gattn_viz.models.weights import weights_sha256
from tests.conftest import tiny_model


def sha256sum(*names: str, cwd: Path) -> str:
    return subprocess.run(["sha256sum", *names], capture_output=True, text=True, check=True, cwd=cwd).stdout


@pytest.fixture
def directory(tiny_trio: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_trio / "baseline", tmp_path / "mine")
    return tmp_path / "mine"


def test_one_file(directory: Path) -> None:
    found = weights_sha256(resolve(str(directory)))
    assert found == sha256sum("model.safetensors", cwd=directory).split()[0]
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert weights_sha256(resolve(str(directory))) != found


def test_several_files(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    tiny_model("baseline").save_pretrained(directory, max_shard_size="20KB")
    names = sorted(path.name for path in directory.glob("model-*.safetensors"))
    assert len(names) > 1
    lines = sha256sum(*names, cwd=directory)
    assert weights_sha256(resolve(str(directory))) == hashlib.sha256(lines.encode()).hexdigest()


def test_the_file_that_is_loaded(directory: Path) -> None:
    """As transformers: safetensors before pytorch_model.bin; what else lies there does not count."""
    before = weights_sha256(resolve(str(directory)))
    (directory / "pytorch_model.bin").write_bytes(b"others")
    (directory / "optimizer.bin").write_bytes(b"not weights")
    assert weights_sha256(resolve(str(directory))) == before
    (directory / "model.safetensors").unlink()
    assert weights_sha256(resolve(str(directory))) == hashlib.sha256(b"others").hexdigest()
    (directory / "pytorch_model.bin").unlink()
    assert weights_sha256(resolve(str(directory))) is None


def test_a_hub_model_in_the_cache_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file's name in the cache is its sha256; the one here is empty, so that reading it would show."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--name"
    commit = "c" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "blobs").mkdir()
    (repo / "blobs" / ("d" * 64)).touch()
    folder = repo / "snapshots" / commit / "1B_baseline"
    folder.mkdir(parents=True)
    (folder / "pytorch_model.bin").symlink_to(repo / "blobs" / ("d" * 64))
    source = ModelSource("org/name:1B_baseline", "org/name", None, "1B_baseline", is_local=False)
    assert weights_sha256(source) == "d" * 64
    assert weights_sha256(source, commit) == "d" * 64
    assert weights_sha256(source, "e" * 40) is None
    assert weights_sha256(ModelSource("org/other", "org/other", None, None, is_local=False)) is None

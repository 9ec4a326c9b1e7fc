"""What `gattn-viz env` says, and what it never says."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from gattn_viz import environment
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"


def test_versions_devices_and_caches() -> None:
    found = environment.environment()
    assert found["versions"]["numpy"] == numpy.__version__
    assert found["versions"]["gattn-viz"] == version("gattn-viz")
    assert found["versions"]["python"].startswith(platform.python_version())
    assert found["devices"]["cpu"] == f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    assert list(found) == ["versions", "devices", "caches", "variables"]
    assert found["variables"]["HF_HUB_OFFLINE"] == "1"


def test_text_and_json_say_the_same(cli: Cli) -> None:
    found = json.loads(cli("env", "--json").out)
    text = cli("env").out
    assert re.findall(r"^- (.*)$", text, re.M) == [
        f"{name}: {value}" for entries in found.values() for name, value in entries.items()
    ]
    assert re.findall(r"^(\w+):$", text, re.M) == list(found)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", TOKEN, "set"),
        ("HUGGING_FACE_HUB_TOKEN", TOKEN, "set"),
        ("HF_SOMETHING_NEW", "secret", "set"),
        ("HF_ENDPOINT", "https://user:secret@mirror.example/hub?key=secret", "https://mirror.example/hub"),
        ("HF_ENDPOINT", "https://user:se@cret@mirror.example", "https://mirror.example"),
        ("HF_ENDPOINT", "https://mirror.example", "https://mirror.example"),
        ("HTTPS_PROXY", "user:secret@proxy:3128", "proxy:3128"),
        ("HTTPS_PROXY", "http://bob:se(secret@proxy:3128", "http://proxy:3128"),
        ("HTTPS_PROXY", "http://bob:a secret@proxy:3128", "http://proxy:3128"),
        ("http_proxy", "http://secret@proxy:3128", "http://proxy:3128"),
        ("HF_HOME", f"/data/{TOKEN}/cache", "/data/***/cache"),
        ("HF_HUB_CACHE", str(Path.home() / "hub"), "~/hub"),
        ("OMP_NUM_THREADS", "4\n5", "4 5"),
        ("SECRET_OF_ANOTHER_PROGRAM", "secret", None),
    ],
)
def test_no_secret(name: str, value: str, shown: str | None, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setenv(name, value)
    for arguments in (("env",), ("env", "--json")):
        done = cli(*arguments)
        assert done.code == 0
        for secret in (TOKEN, TOKEN[3:], "secret", str(Path.home()) + "/"):
            assert secret not in done.out.replace("variables", "")
    assert json.loads(done.out)["variables"].get(name) == shown


def test_a_saved_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    from huggingface_hub import constants

    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    out = cli("env").out
    assert "- Hub's saved token: there\n" in out
    assert TOKEN not in out


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(library: str) -> str:
        raise PackageNotFoundError(library)

    monkeypatch.setattr(environment, "version", missing)
    found = environment.environment()["versions"]
    assert found["torch"] == found["rich"] == "not installed"
    assert not found.keys() & set(environment.OPTIONAL)


def test_libraries_that_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in sys.modules is what makes an import fail."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    found = environment.environment()
    assert found["devices"]["torch"].startswith("cannot be used (ModuleNotFoundError: ")
    assert found["caches"]["Hub"].startswith("huggingface_hub cannot be used (ModuleNotFoundError: ")


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    (tmp_path / "models--a--b").mkdir()
    (tmp_path / ".locks").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("GATTN_VIZ_CACHE", str(tmp_path / "models--a--b"))
    assert environment.environment()["caches"]["Hub"] == f"{tmp_path} (1 folders)"
    assert environment.environment()["caches"]["gattn-viz"] == f"{tmp_path / 'models--a--b'} (0 folders)"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    assert environment.environment()["caches"]["Hub"] == f"{tmp_path / 'none'} (not there)"


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "Some GPU"

    def properties(number: int) -> Any:
        return Properties

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (2**29, 2**33))
    found = environment.environment()["devices"]
    assert found["cuda:1"] == "Some GPU, 8.0 GiB, 0.5 GiB free"

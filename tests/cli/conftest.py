"""Run the command line inside the test's process, as `main` would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gattn_viz.__main__ import main
from gattn_viz.cli import messages


@dataclass
class Done:
    code: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def cli(
    tiny_trio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    """`cli("maps", "-m", "baseline")`, in an empty directory, the variants being the tiny trio."""
    monkeypatch.setenv("GATTN_VIZ_CHECKPOINTS", str(tiny_trio))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(messages, "debug", False)
        monkeypatch.setattr(sys, "argv", ["gattn-viz", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture
def terminal(tiny_trio: Path, tmp_path: Path) -> Cli:
    """As `cli`, in a process of its own whose stdout is a terminal of 120 columns."""
    pty = pytest.importorskip("pty", reason="needs pseudo-terminals")

    def run(*arguments: str) -> Done:
        ours, its = pty.openpty()
        environment = {**os.environ, "GATTN_VIZ_CHECKPOINTS": str(tiny_trio), "COLUMNS": "120", "NO_COLOR": "1"}
        command = [sys.executable, "-m", "gattn_viz", *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=its, stderr=pipe, cwd=tmp_path, env=environment, text=True)
        os.close(its)
        out = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # Linux's way to say that the other end is closed
                break
            if not part:
                break
            out += part
        os.close(ours)
        _, err = process.communicate()
        return Done(process.returncode, out.decode().replace("\r\n", "\n"), err)

    return run

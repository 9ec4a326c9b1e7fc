"""The command itself, on its smallest run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.contenders import CONTENDERS

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_quick(tmp_path: Path) -> None:
    output = tmp_path / "b.csv"
    done = command("--quick", "-o", str(output))
    assert done.returncode == 0, done.stderr
    frame = pd.read_csv(output)
    assert len(frame) == 2 * 2 * len(CONTENDERS)
    installed = frame[[CONTENDERS[name].installed for name in frame["contender"]]]
    assert set(installed["status"]) == {"ok"}
    assert (installed["median"] > 0).all()
    assert "ours, all measures" in done.stdout
    again = command("--quick", "-o", str(output))
    assert again.stdout == done.stdout
    assert len(pd.read_csv(output)) == len(frame)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "512,x"], "--lengths '512,x': expected whole numbers, with commas"),
        (["--threads", "0"], "--threads '0': expected numbers from 1"),
        (["--shapes", "model,x"], "--shapes 'x': expected one or more of model, layer, with commas"),
        (["--dtype", "int8"], "--dtype 'int8': expected one or more of float32, bfloat16, float16, with commas"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert done.output == f"error: {message}\n"

"""What holds for every command: help, version, exit codes, one-line errors, broken pipes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from gattn_viz.cli.app import COMMANDS
from tests.cli.conftest import Cli


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"gattn-viz {version('gattn-viz')}\n"


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [None, *COMMANDS, "recipe"])
def test_help(cli: Cli, command: str | None, flag: str) -> None:
    done = cli(*([command] if command else []), flag)
    assert done.code == 0
    assert "Usage: gattn-viz" in done.out
    assert done.out.rstrip().splitlines()[-1].strip().startswith("Example: gattn-viz")


@pytest.mark.parametrize(
    "command", sorted(COMMANDS.keys() - {"recipe"})
)  # that one needs a file, see test_recipe.py
def test_the_example_in_the_help_runs(cli: Cli, command: str) -> None:
    """On the tiny trio it has 3 layers, so the layers are exchanged; the README's tests run it as it stands."""
    example = shlex.split(COMMANDS[command].EXAMPLE.removeprefix("Example: gattn-viz "))
    if command != "models":
        example += ["-p", "the cat sat"]
    done = cli(*[argument.replace("1,7,21,28", "1,2,3") for argument in example])
    assert done.code == 0, done.err


def test_python_dash_m(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gattn_viz", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == f"gattn-viz {version('gattn-viz')}\n"


def test_no_command_shows_the_help(cli: Cli) -> None:
    done = cli()
    assert done.code == 2
    assert "Commands" in done.out + done.err


BAD = [
    # wrong use: 2
    (["maps", "--layers", "x"], 2, "'x': expected all, or layers such as 1,7,21"),
    (["maps", "--layers", "3-1"], 2, "'3-1': expected"),
    (["maps", "--heads", "first"], 2, "'first': expected mean, all, or heads such as"),
    (["maps", "--format", "gif"], 2, "gif"),
    (["maps", "--vmax", "0"], 2, "--vmax 0 leaves no range"),
    (["maps", "--scale", "cube"], 2, "cube"),
    (["sink-stats", "--format", "xlsx"], 2, "xlsx"),
    (["sink-stats", "--by", "token"], 2, "token"),
    (["sink-stats", "-b", "0"], 2, "--batch-size"),
    (["sink-stats", "--max-tokens", "0"], 2, "--max-tokens"),
    (["draw"], 2, "draw"),
    (["maps", "--layers", "1-999999999"], 2, "below a million"),
    (["maps", "--layers", "1" * 5000], 2, "below a million"),
    (["maps", "--heads", "1,,2"], 2, "'1,,2': expected"),
    # failed: 1, in one line
    (["maps", "-m", "gate_headwsie"], 1, "gate_headwise"),
    (["maps", "-m", "./nowhere"], 1, "./nowhere"),
    (["maps", "--layers", "0"], 1, "no layer 0: baseline has 3 layers; expected 1 to 3"),
    (["maps", "--layers", "29"], 1, "no layer 29: baseline has 3 layers; expected 1 to 3"),
    (["maps", "--heads", "5"], 1, "no head 5: baseline has 4 heads a layer; expected 1 to 4"),
    (["maps", "-p", ""], 1, "empty"),
    (["maps", "-p", "the " * 200], 1, "the model has 64 positions"),
    (["maps", "--font", "No Such Font"], 1, "No Such Font"),
    (["maps", "--checkpoints", "nowhere"], 1, "nowhere"),
    (["sink-stats", "-p", "the", "--max-tokens", "1"], 1, "--first-row include"),
    (["sink-stats", "--prompts", "missing.jsonl"], 1, "missing.jsonl"),
    (["sink-stats", "-m", "org/name", "-p", "the cat"], 1, "org/name"),
    (["sink-stats", "--checkpoints", "official", "-p", "the cat"], 1, "QwQZh/gated_attention"),
    (["sink-stats", "-p", "the cat", "-o", "."], 1, "cannot write ."),
    (["sink-stats", "-p", "the cat", "--device", "quantum"], 1, "quantum"),
    (["models", "nothing"], 1, "nothing"),
    (["maps", "--vmax", "1e-300"], 1, "cannot be drawn"),
    (["sink-stats", "-m", "baseline", "-m", "baseline"], 1, "given twice"),
]


@pytest.mark.parametrize(("arguments", "code", "expected"), BAD, ids=[" ".join(a)[:40] for a, _, _ in BAD])
def test_bad_input(cli: Cli, arguments: list[str], code: int, expected: str) -> None:
    if (
        arguments[0] in ("maps", "sink-stats")
        and code == 1
        and "-p" not in arguments
        and "--prompts" not in arguments
    ):
        arguments = [*arguments, "-p", "the cat sat"]
    done = cli(*arguments)
    assert done.code == code
    assert expected in " ".join(done.err.split())
    assert "Traceback" not in done.err
    if code == 1:
        said = (" -> ", " attention: ", "warning: ")  # before it failed
        errors = [line for line in done.err.splitlines() if not any(words in line for words in said)]
        assert len(errors) == 1
        assert errors[0].startswith("gattn-viz: error: ")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_output_without_permission(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "cannot write" in cli("sink-stats", "-p", "the cat", "-o", "locked/a.csv").err


def test_output_below_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for arguments in (["sink-stats", "-o", "file/a.csv"], ["maps", "-m", "baseline", "-o", "file"]):
        done = cli(*arguments, "-p", "the cat")
        assert done.code == 1
        assert "cannot write file" in done.err
    assert (tmp_path / "file").read_text() == "kept"


def test_debug_shows_the_traceback(cli: Cli) -> None:
    from gattn_viz import GattnVizError

    for arguments in (["--debug", "maps", "-m", "./nowhere"], ["maps", "-m", "./nowhere", "--debug"]):
        with pytest.raises(GattnVizError, match="nowhere"):
            cli(*arguments)


def test_quiet_reaches_the_command(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from gattn_viz.cli import messages

    seen = []
    progress = messages.progress
    monkeypatch.setattr(messages, "progress", lambda quiet: seen.append(quiet) or progress(quiet))
    for arguments in ([], ["-q"]):
        assert cli("sink-stats", "-m", "baseline", "-p", "the cat", *arguments).code == 0
    assert seen == [False, True]


def test_an_unexpected_error_is_one_line_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr("gattn_viz.pipeline.stats.measure", broken)
    done = cli("sink-stats")
    assert done.code == 1
    assert done.err == (
        "gattn-viz: error: unexpected ZeroDivisionError: by; run it again with --debug for the traceback, "
        "and please report it\n"
    )


def test_a_reader_that_leaves(tiny_trio: Path) -> None:
    """`gattn-viz sink-stats | head -0` ends without a traceback."""
    command = f"{sys.executable} -m gattn_viz sink-stats -q -p 'the cat' | head -c 0"
    environment = {**os.environ, "GATTN_VIZ_CHECKPOINTS": str(tiny_trio)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=environment)
    assert done.stderr == ""


def test_no_display_and_no_colour(tiny_trio: Path, tmp_path: Path) -> None:
    """Headless, as on a server, with a backend that would need a display."""
    environment = {**os.environ, "GATTN_VIZ_CHECKPOINTS": str(tiny_trio), "NO_COLOR": "1", "MPLBACKEND": "TkAgg"}
    environment.pop("DISPLAY", None)
    command = [sys.executable, "-m", "gattn_viz", "maps", "-m", "baseline", "-p", "the cat", "--dpi", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert (tmp_path / "figs" / "maps_baseline.png").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(tiny_trio: Path) -> None:
    command = f"{sys.executable} -m gattn_viz sink-stats -q -m baseline -p 'the cat' > /dev/full"
    environment = {**os.environ, "GATTN_VIZ_CHECKPOINTS": str(tiny_trio)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("gattn-viz: error: ")
    assert "No space left" in done.stderr.splitlines()[0]

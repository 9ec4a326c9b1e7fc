"""What holds for every command: help, version, exit codes, one-line errors, broken pipes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"recipe"}))  # which needs a file: test_recipe.py
def test_the_example_in_the_help_runs(cli: Cli, command: str) -> None:
    """On the tiny trio it has 3 layers, so the layers are exchanged; the README's tests run it as it stands."""
    example = shlex.split(COMMANDS[command].EXAMPLE.removeprefix("Example: gattn-viz "))
    if command not in ("models", "env"):
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
    (["sink-stats", "-p", "the", "--max-tokens", "1"], 1, "use a larger --max-tokens, --first-row include,"),
    (
        ["maps", "-p", "the", "--max-tokens", "1", "--drop-first"],
        1,
        "--max-tokens, or leave out --drop-first",
    ),
    (["sink-stats", "--seed", "0"], 2, "--seed is given without --ci"),
    (["sink-stats", "--resamples", "10"], 2, "--resamples is given without --ci"),
    (["gate-stats", "--seed", "3"], 2, "--seed is given without --ci"),
    (["sink-stats", "--ci", ".9", "--resamples", "1000001"], 2, "less than or equal to 1000000"),
    (["maps", "--dpi", "2400", "--layers", "1,2,3"], 1, "pixels; expected 150,000,000 in all at most"),
    (["sink-stats", "--prompts", "missing.jsonl"], 1, "missing.jsonl"),
    (["sink-stats", "-m", "org/name", "-p", "the cat"], 1, "org/name"),
    (["sink-stats", "--checkpoints", "official", "-p", "the cat"], 1, "QwQZh/gated_attention"),
    (["sink-stats", "-p", "the cat", "-o", "."], 2, "is a directory; expected a file"),
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
    assert expected in " ".join(done.err.replace("│", " ").split())
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
    for arguments in (["sink-stats", "-o", "file/a.csv"], ["maps", "-m", "baseline", "-o", "file/a"]):
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
    command = f"{sys.executable} -m gattn_viz sink-stats -q -m baseline -p 'the cat' | head -c 0"
    for unbuffered in ("", "1"):
        assert shell(command, tiny_trio, unbuffered).stderr == ""


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
@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [("sink-stats -q -m baseline -p 'the cat'", "1"), ("maps --help", "")]
)
def test_a_full_disk(tiny_trio: Path, arguments: str, unbuffered: str) -> None:
    done = shell(f"{sys.executable} -m gattn_viz {arguments} > /dev/full", tiny_trio, unbuffered)
    assert done.returncode == 1
    [error] = done.stderr.splitlines()
    assert error.startswith("gattn-viz: error: ")
    assert "No space left" in error


def test_a_write_that_takes_less_than_all(tiny_trio: Path, tmp_path: Path) -> None:
    """An unbuffered stdout may do so; here it writes to a file that is limited to 1,000 bytes."""
    command = f"ulimit -f 1; {sys.executable} -m gattn_viz sink-stats -q -p 'the cat sat' > {tmp_path}/out.csv"
    done = shell(command, tiny_trio, "1", executable="bash")  # its unit is 1,024 bytes
    assert (tmp_path / "out.csv").stat().st_size == 1024
    assert done.returncode == 1
    [error] = done.stderr.splitlines()
    assert "File too large" in error


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
@pytest.mark.parametrize("place", ["/dev/stdout | cat", ">(cat) | cat", "/dev/stdout >> old.csv; cat old.csv"])
def test_output_to_a_stream(tiny_trio: Path, tmp_path: Path, place: str) -> None:
    """Written to, not replaced by a new file, and without a recipe beside it."""
    (tmp_path / "old.csv").touch()
    command = f"{sys.executable} -m gattn_viz sink-stats -q -m baseline --by model -p 'the cat'"
    expected = shell(command, tiny_trio).stdout
    assert expected
    done = shell(f"cd {tmp_path}; {command} -o {place}", tiny_trio, executable="bash")
    assert (done.stdout, done.stderr) == (expected, "")
    assert [path.name for path in tmp_path.iterdir()] == ["old.csv"]


def shell(
    command: str, checkpoints: Path, unbuffered: str = "", executable: str = "sh"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GATTN_VIZ_CHECKPOINTS": str(checkpoints), "PYTHONUNBUFFERED": unbuffered}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run(
        [executable, "-c", command], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs Unix signals")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_leaves_no_temporary_file(tmp_path: Path, name: str, code: int) -> None:
    """The command is one that writes a file and is stopped half-way."""
    program = (
        "import os, signal, time\n"
        "for number in (signal.SIGHUP, signal.SIGTERM):\n"
        "    signal.signal(number, signal.SIG_DFL)\n"  # whatever the tests themselves were started with
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from gattn_viz import __main__ as start\n"
        "from gattn_viz.cli import app\n"
        "from gattn_viz.files import replacing\n"
        "def stopped(**_):\n"
        "    with replacing('table.csv'):\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "        time.sleep(20)\n"
        "app.app = stopped\n"
        "start.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs Unix signals")
def test_nohup(tmp_path: Path) -> None:
    program = (
        "import signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from gattn_viz.__main__ import _exit_on_signals\n"
        "_exit_on_signals()\n"
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_control_c_while_importing(tmp_path: Path) -> None:
    """It ends the program, without a traceback, even when what is imported catches everything."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    import time\n    time.sleep(20)\n"
        "except BaseException:\n    pass\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "gattn_viz", "--version"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == -signal.SIGINT
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 8.00 TiB for an array"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    ],
)
def test_out_of_memory(cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("gattn_viz.pipeline.stats.measure", broken)
    monkeypatch.setattr("gattn_viz.pipeline.attention_maps", broken)
    for arguments, advice in (
        (["sink-stats"], "lower --batch-size, --max-tokens or --chunk, ask for fewer --measures"),
        (["sink-stats", "--ci", ".9"], "lower --resamples, --batch-size"),
        (["maps"], "lower --max-cells, --max-tokens, --chunk or --dpi, ask for fewer --layers or --heads"),
    ):
        done = cli(*arguments)
        assert done.code == 1
        [line] = done.err.splitlines()
        assert line.startswith(f"gattn-viz: error: not enough memory ({str(error)[:30]}")
        assert advice in line
        assert line.endswith("or load the model with --dtype bfloat16")


@pytest.mark.parametrize(
    "command", ["maps", "heads", "gate-maps", "compare", "figures", "sink-stats", "gate-stats"]
)
def test_a_place_of_the_wrong_kind_is_said_before_a_model_is_loaded(
    cli: Cli, tmp_path: Path, command: str
) -> None:
    """A file where a directory is expected, or a directory where a file is."""
    place = tmp_path / "place"
    if command.endswith("stats"):
        place.mkdir()
    else:
        place.write_text("mine")
    done = cli(command, "-o", "place")
    assert done.code == 2
    assert "place" in done.err
    assert "->" not in done.err  # no model
    assert place.is_dir() or place.read_text() == "mine"

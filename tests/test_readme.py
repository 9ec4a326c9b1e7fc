"""The README's commands run as they stand, and print what it says they print."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import gattn_viz.drawing.paper
import gattn_viz.pipeline.comparison  # noqa: F401
from gattn_viz.__main__ import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

# What installs the project and what runs these very tests is run by CI, on a machine of its own.
BY_CI = ("pip install", "pytest")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def sessions() -> list[tuple[str, str]]:
    """(command, what it prints) of each `$ command` in a console block."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def assert_same_text(shown: str, printed: str) -> None:
    """Equal but for the last digits of numbers, which differ between processors. `...` stands for any lines."""
    printed = re.sub(r" +$", "", printed, flags=re.M)
    pattern = re.escape(NUMBER.sub("<number>", shown)).replace(re.escape("...\n"), r"(?:.*\n)*?")
    assert re.fullmatch(pattern, NUMBER.sub("<number>", printed)), f"README:\n{shown}\nprinted:\n{printed}"
    if "...\n" not in shown:
        ours = [float(number) for number in NUMBER.findall(printed)]
        assert ours == pytest.approx([float(number) for number in NUMBER.findall(shown)], rel=0.02, abs=0.002)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, one after the other, beside what a person would have there."""
    directory = tmp_path_factory.mktemp("readme")
    (directory / "sample_prompts").symlink_to(ROOT / "sample_prompts")
    (directory / "scripts").symlink_to(ROOT / "scripts")
    (directory / "my-checkpoints").symlink_to(ROOT / "gattn_viz" / "demo")
    return directory


def case(command: str, shown: str) -> Any:
    """One that needs the real weights is run with them only."""
    marks = [pytest.mark.weights] if "smollm2" in command.lower() else []
    return pytest.param(command, shown, marks=marks, id=command[:60])


@pytest.fixture
def smollm2_there(directory: Path, smollm2: Path, converted_once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is where it would be fetched to."""
    monkeypatch.setenv("GATTN_VIZ_CACHE", str(converted_once))
    if not (directory / smollm2.name).exists():
        (directory / smollm2.name).symlink_to(smollm2)


def test_there_is_something_to_run() -> None:
    assert len(sessions()) >= 5
    assert len(blocks("python")) >= 1


@pytest.mark.parametrize(("command", "shown"), [case(*session) for session in sessions()])
def test_commands(directory: Path, command: str, shown: str, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("weights"):
        request.getfixturevalue("smollm2_there")
    if command.startswith(BY_CI):
        assert command in (ROOT / ".ci" / "run").read_text().splitlines()
        command = " && ".join(step for step in command.split(" && ") if not step.startswith(BY_CI))
        if not command:
            return
    code, printed = run(command, directory)
    assert code == 0, printed
    if shown:
        assert_same_text(shown, printed)


def run(command: str, directory: Path) -> tuple[int, str]:
    """The exit code of a command line and what it prints, on stdout and stderr together."""
    if command.startswith("gattn-viz ") and not set("|&;<>()$`*?~") & set(command):
        return run_forked(shlex.split(command), directory)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=directory,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout


def run_forked(arguments: list[str], directory: Path) -> tuple[int, str]:
    """The same of `gattn-viz` alone, in a fork of this process, which has imported what takes seconds."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            code: object = 1
            try:
                os.chdir(directory)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
                sys.argv = arguments
                try:
                    main()
                    code = 0
                except SystemExit as end:
                    code = end.code or 0
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code if isinstance(code, int) else 1)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_python(directory: Path, code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_table_of_measures_is_the_code_s() -> None:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts" / "readme_tables.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.with_table(README) == README, "run: python scripts/readme_tables.py"


def test_pictures_and_links_exist() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_of_the_comparison() -> None:
    assert_same_text("a 0.501\n", "a 0.5011\n")
    assert_same_text("a\n...\nc 1.0\n", "a\nb 3.0\nc 2.0\n")
    for other in ("b 0.501\n", "a 0.6\n", "a 0.501\nmore\n"):
        with pytest.raises(AssertionError):
            assert_same_text("a 0.501\n", other)

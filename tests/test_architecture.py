"""Who may import whom, so that each part can be read alone, and `--help` answers at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gattn_viz"

# A part may import those on its right. `errors` is everybody's.
MAY_IMPORT = {
    "__init__": {
        "drawing",
        "metrics",
        "models",
        "pipeline",
        "prompts",
        "recipe",
    },
    "__main__": {"cli"},
    "cache": set(),
    "capture": {"metrics", "models"},
    "chat": set(),
    "cli": {
        "drawing",
        "environment",
        "figures",
        "files",
        "metrics",
        "models",
        "pipeline",
        "prompts",
        "recipe",
        "report",
        "tables",
    },
    "drawing": {"figures", "metrics", "pipeline"},
    "environment": {"cache"},
    "errors": set(),
    "figures": {"files"},
    "files": set(),
    "metrics": set(),
    "models": {"cache"},
    "pipeline": {"capture", "chat", "metrics", "models", "prompts", "tables", "tokens"},
    "prompts": {"chat"},
    "recipe": {"figures", "files"},
    "report": {"recipe"},
    "tables": {"metrics"},
    "tokens": set(),
}

# A library that only these parts know.
ONLY_IN = {
    "typer": {"cli"},
    "rich": {"cli", "report"},
    "matplotlib": {"drawing", "figures"},
    "seaborn": {"figures"},
    "transformers": {"capture", "models"},
    "huggingface_hub": {"environment", "models"},
    "gguf": {"models"},
}


def imports(source: str) -> set[str]:
    """The modules that a source file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def violations(part: str, source: str) -> list[str]:
    """What a file of `part` imports and may not."""
    wrong = set()
    for name in imports(source):
        root, _, rest = name.partition(".")
        if root == "gattn_viz" and rest:
            other = rest.split(".")[0]
            if other in MAY_IMPORT and other not in MAY_IMPORT[part] | {part, "errors"}:
                wrong.add(f"{part} imports {other}")
        elif root in ONLY_IN and part not in ONLY_IN[root]:
            wrong.add(f"{part} imports {root}")
    return sorted(wrong)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows(path: Path) -> None:
    assert violations(part_of(path), path.read_text()) == []


def test_every_part_is_in_the_map() -> None:
    assert {part_of(path) for path in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("part", "source", "expected"),
    [
        ("metrics", "from gattn_viz.models import names", ["metrics imports models"]),
        ("figures", "import gattn_viz.pipeline", ["figures imports pipeline"]),
        ("capture", "def f():\n    from gattn_viz import cli", ["capture imports cli"]),
        ("pipeline", "import matplotlib.pyplot as plt", ["pipeline imports matplotlib"]),
        ("tables", "from typer import Typer", ["tables imports typer"]),
        ("cli", "import typer, rich", []),
    ],
)
def test_of_the_test(part: str, source: str, expected: list[str]) -> None:
    assert violations(part, source) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["-h"],
        ["--version"],
        ["maps", "--help"],
        ["sink-stats", "-h"],
        ["gate-stats", "-h"],
        ["compare", "-h"],
        ["gate-maps", "-h"],
        ["heads", "-h"],
        ["recipe", "-h"],
        ["figures", "-h"],
        ["env", "-h"],
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom gattn_viz.__main__ import main\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'pandas', 'seaborn', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()

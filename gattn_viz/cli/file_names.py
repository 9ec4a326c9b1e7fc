"""What the files of one run are called."""

from __future__ import annotations

import re
from collections.abc import Iterable


def file_stems(files: Iterable[Iterable[str]]) -> list[str]:
    """The names of some files, without suffix, from their parts, such as a model and a prompt.

    Short, without odd characters, and no two alike, nor alike but for upper and lower case: the later one gets a
    number.
    """
    found: list[str] = []
    taken: set[str] = set()
    for parts in files:
        stem = unique = "_".join(map(_in_a_name, parts))
        number = 2
        while unique.casefold() in taken:
            unique, number = f"{stem}-{number}", number + 1
        taken.add(unique.casefold())
        found.append(unique)
    return found


def _in_a_name(text: str) -> str:
    short = re.sub(r"[^\w.-]+", "-", text).strip("-.").encode()[:60].decode(errors="ignore")
    return short or "unnamed"

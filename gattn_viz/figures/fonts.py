"""Which installed fonts can draw a text, so that no token becomes an empty box.

Servers often have no font for Chinese, and few machines one for everything: characters that no installed font
can draw are written as ``U+4F60``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from matplotlib import font_manager
from matplotlib.font_manager import FontProperties, fontManager
from matplotlib.ft2font import FT2Font

from gattn_viz.errors import GattnVizError

BASE_FAMILY = "DejaVu Sans"  # matplotlib brings it along, so it is always there

# Families that claim characters they draw as something else: TeX's (symbols at letters' places), STIX's private
# ones, and the fonts that have the same box for everything.
_NOT_TEXT = re.compile(r"^(cm[a-z]{1,2}10|STIXSize.*|STIXNonUnicode|Last ?Resort.*|Adobe Blank.*|.*Tofu.*)$", re.I)
_PREFERRED = re.compile(r"sans|gothic|hei|noto", re.I)
# Of the four or five national forms in which such a collection has the same characters.
_SIMPLIFIED = re.compile(r"\b(SC|CN)\b")

# Selects how the character before it looks; the outline fonts that matplotlib draws have one look only.
_VARIATION_SELECTORS = re.compile("[\ufe00-\ufe0f]")


class FittedText(NamedTuple):
    """Font families to draw with, in order, and the texts with what none of them draws replaced."""

    families: list[str]
    texts: list[str]


def fit_fonts(texts: Sequence[str], font: str | None = None) -> FittedText:
    """Choose fonts for `texts` from those that are installed, and replace what none can draw.

    Args:
        texts: labels and titles, as they are to be read.
        font: a family name or the path of a .ttf, .otf or .ttc file, to be preferred to every other font.

    Returns:
        families for `Text.set_fontfamily`: `font`, DejaVu Sans, then what else is needed; the texts, in which
        each character that no family of these draws stands as ``U+4F60``.

    Raises:
        GattnVizError: `font` is neither an installed family nor a font file that can be read.
    """
    texts = [_VARIATION_SELECTORS.sub("", text) for text in texts]
    families = list(dict.fromkeys([BASE_FAMILY] if font is None else [user_family(font), BASE_FAMILY]))
    missing = _missing({c for text in texts for c in text}, families)
    while missing:
        # Greedy: the family that draws most of what is left. Few fonts keep the look even.
        best = max(_candidates(), key=lambda family: len(_drawn(family, missing)), default=BASE_FAMILY)
        found = _drawn(best, missing)
        if not found:
            break
        families.append(best)
        missing -= found
    return FittedText(families, [_replace(text, missing) for text in texts])


def user_family(font: str) -> str:
    """The family of a font the user named, by family or by file; a file is made known to matplotlib.

    Raises:
        GattnVizError: see `fit_fonts`.
    """
    path = Path(font).expanduser()
    if path.suffix.lower() in {".ttf", ".otf", ".ttc"}:
        if not path.is_file():
            raise GattnVizError(
                f"font file {font} does not exist; pass a .ttf, .otf or .ttc file or a family name"
            )
        try:
            family = FT2Font(str(path)).family_name
            if not any(entry.fname == str(path) for entry in fontManager.ttflist):
                fontManager.addfont(str(path))
                _forget()
        except (RuntimeError, OSError, ValueError) as error:
            raise GattnVizError(f"{font} cannot be read as a font; pass a .ttf, .otf or .ttc file") from error
    else:
        known = {entry.name.lower(): entry.name for entry in fontManager.ttflist}
        if font.lower() not in known:
            raise GattnVizError(
                f"font family {font!r} is not installed; pass an installed family (fc-list lists them) or the "
                "path of a .ttf, .otf or .ttc file"
            )
        family = known[font.lower()]
    if _face(family) is None:
        raise GattnVizError(
            f"font {font} has no outlines that matplotlib can draw (a colour-emoji or bitmap font?); "
            "pass an outline font such as Noto Sans CJK or the monochrome Noto Emoji"
        )
    return family


def drawn_with_cff(text: str, families: Sequence[str]) -> bool:
    """Whether `families`, in order, leave a character of `text` to a font with CFF outlines (most .otf files).

    Matplotlib's PDFs name such a font but do not show its characters: Noto Sans CJK's are simply missing.
    """
    left = set(text)
    for family in families:
        found = _drawn(family, left)
        if found and _is_cff(family):
            return True
        left -= found
    return False


def shorten(text: str, limit: int) -> str:
    r"""At most `limit` characters, the middle left out for ``…``; ``U+4F60``, ``<0xE4>``, ``\n`` stay whole."""
    if len(text) <= limit:
        return text
    pieces = _PIECES.findall(text)
    room = max(limit - 1, 1)
    head, tail = [pieces.pop(0)], list[str]()
    while pieces:
        end, take = (tail, pieces[-1]) if sum(map(len, tail)) * 2 < sum(map(len, head)) else (head, pieces[0])
        if sum(map(len, head + tail)) + len(take) > room:
            break
        end.append(pieces.pop(-1 if end is tail else 0))
    return "".join(head) + "…" * bool(pieces) + "".join(reversed(tail))


_PIECES = re.compile(r" ?U\+[0-9A-F]{4,6}|<0x[0-9A-F]{2}>|\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\[a-z]|.", re.S)


def _replace(text: str, missing: set[str]) -> str:
    if not missing.intersection(text):
        return text
    spelt = [f"U+{ord(c):04X}" if c in missing else c for c in text]
    # A thin gap between two of them, else they run together.
    return re.sub(r"(U\+[0-9A-F]{4,6})(?=U\+)", r"\1 ", "".join(spelt))


def _missing(characters: Iterable[str], families: Sequence[str]) -> set[str]:
    # Whitespace has no outline in any font and is never the reason for a box.
    left = {c for c in characters if not c.isspace()}
    for family in families:
        left -= _drawn(family, left)
    return left


@lru_cache(maxsize=1)
def _candidates() -> tuple[str, ...]:
    """Installed families in the order in which they are tried, sans-serif ones first."""
    # With a regular face only: for another matplotlib would log, at each use, that it is not quite it.
    names = {
        entry.name
        for entry in fontManager.ttflist
        if entry.style == "normal"
        and entry.weight in (400, "normal", "regular", "book")
        and not _NOT_TEXT.match(entry.name)
    }
    return tuple(sorted(names, key=lambda name: (not _PREFERRED.search(name), not _SIMPLIFIED.search(name), name)))


# Which characters a family draws. Remembered one by one: a script's tokens come back in every figure, and
# opening some thousand fonts for each would take seconds.
_known: dict[tuple[str, str], bool] = {}


def _drawn(family: str, characters: Iterable[str]) -> set[str]:
    unknown = [c for c in characters if (family, c) not in _known]
    if unknown:
        face = _face(family)
        _known.update({(family, c): face is not None and _has_outline(face, c) for c in unknown})
    return {c for c in characters if _known[family, c]}


@lru_cache(maxsize=32)
def _face(family: str) -> FT2Font | None:
    """The face that matplotlib will draw the family's regular text with; None if it cannot."""
    try:
        found = fontManager.findfont(FontProperties(family=[family]), fallback_to_default=False)
        # Through matplotlib's own opener: from 3.11 on a path may stand for one face of a .ttc collection.
        face = font_manager.get_font(found)
        face.set_size(10, 72)  # fails for bitmap fonts, colour emoji among them
    except (RuntimeError, OSError, ValueError):
        return None
    return face


@lru_cache(maxsize=64)
def _is_cff(family: str) -> bool:
    with open(fontManager.findfont(FontProperties(family=[family])), "rb") as file:
        head = file.read(16)
        if head.startswith(b"ttcf"):  # a collection: its first font's place comes after tag, version and count
            file.seek(int.from_bytes(head[12:16], "big"))
            head = file.read(4)
    return head.startswith(b"OTTO")


def _has_outline(face: FT2Font, character: str) -> bool:
    # Asking for the index alone would take layered colour fonts, whose glyphs are there but empty.
    if face.get_char_index(ord(character)) == 0:
        return False
    try:
        face.load_char(ord(character))
        return len(face.get_path()[0]) > 0
    except RuntimeError:
        return False


def _forget() -> None:
    """Forget what was found out: a font was added."""
    _candidates.cache_clear()
    _face.cache_clear()
    _is_cff.cache_clear()
    _known.clear()

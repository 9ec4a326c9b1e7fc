"""Tokens as people read them, for the axes of a map, the columns of a table and the text of a report.

Nothing is drawn here: which characters a figure has a font for is the matter of `figures.fonts`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from gattn_viz.errors import GattnVizError

# U+2423 OPEN BOX. Not the lighter middle dot: U+00B7 is a letter of real text (Catalan, lists, code), so a
# reader could not tell a space from it. DejaVu Sans, which every matplotlib brings along, has both.
SPACE = "␣"
EMPTY = "<empty>"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_labels(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    r"""One label per token id, as people read it.

    Args:
        tokenizer: any Hugging Face tokenizer (fast or slow): byte-level BPE, sentencepiece, wordpiece, ...
        ids: T token ids.

    Returns:
        T labels, none of them empty and none with a raw space or control character in it:

        - byte-level tokens are decoded to text (``Ġcafé`` to ``␣café``);
        - each space is `SPACE`; other invisible characters are escaped (``\n``, ``\t``, ``\x00``,
          ``\u200b``). A backslash of the text itself stays single;
        - special and added tokens stay as they are (``<|endoftext|>``);
        - bytes that are part of a character only are shown as ``<0xE4>``;
        - a label that starts with a combining mark gets the dotted circle that Unicode has for this;
        - an empty token is ``<empty>``, and an id the tokenizer has no token for (a padded embedding) is
          ``<id 151900>``.

    Raises:
        GattnVizError: an id is not a whole number of at least 0.

    >>> from transformers import AutoTokenizer
    >>> token_labels(AutoTokenizer.from_pretrained("gpt2"), [464, 19780, 198])   # doctest: +SKIP
    ['The', '␣cafe', '\\n']
    """
    whole = [_whole(position, value) for position, value in enumerate(ids, start=1)]
    verbatim = _added_tokens(tokenizer)
    byte_level = _is_byte_level(tokenizer)
    return [_label(tokenizer, value, verbatim, byte_level) for value in whole]


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    r"""What each token says in running text: spaces and line breaks as they are, all else as in `token_labels`.

    >>> from transformers import AutoTokenizer
    >>> token_texts(AutoTokenizer.from_pretrained("gpt2"), [464, 19780, 198])   # doctest: +SKIP
    ['The', ' cafe', '\n']
    """
    verbatim = _added_tokens(tokenizer)
    byte_level = _is_byte_level(tokenizer)
    texts = [_text(tokenizer, value, verbatim, byte_level) for value in ids]
    return [f"<id {value}>" if text is None else _running(text) for value, text in zip(ids, texts, strict=True)]


def _running(text: str) -> str:
    lines = [visible(line).replace(SPACE, " ") if line else "" for line in text.split("\n")]
    return "\n".join(lines) or EMPTY


def visible(text: str) -> str:
    """`text` with each space as `SPACE` and everything else that leaves no ink escaped."""
    shown = "".join(SPACE if c == " " else c if c.isprintable() else _escape(c) for c in text)
    if shown and unicodedata.category(shown[0]).startswith("M"):
        return "\N{DOTTED CIRCLE}" + shown
    return shown or EMPTY


def _whole(position: int, value: Any) -> int:
    try:
        number = int(value)
        exact = number == value
    except (TypeError, ValueError):
        exact = False
    if not exact or number < 0:
        raise GattnVizError(
            f"token id {value!r} (number {position} of the list) is not a whole number of at least 0; "
            "pass the ids of one prompt, without the -100 of ignored labels"
        )
    return number


def _label(tokenizer: Any, value: int, verbatim: dict[int, str], byte_level: bool) -> str:
    text = _text(tokenizer, value, verbatim, byte_level)
    return f"<id {value}>" if text is None else visible(text)


def _text(tokenizer: Any, value: int, verbatim: dict[int, str], byte_level: bool) -> str | None:
    """What a token says, bytes that form no whole character as ``<0xE4>``; None if there is no such token."""
    if value in verbatim:
        return verbatim[value]
    try:
        token = tokenizer.convert_ids_to_tokens(value)
    except (IndexError, KeyError, OverflowError):
        token = None
    if token is None:
        return None
    if isinstance(token, bytes):  # tiktoken-like tokenizers, such as the first Qwen's
        return _decode(token)
    if byte_level:
        return _from_byte_level(token)
    if found := _BYTE_TOKEN.fullmatch(token):  # sentencepiece's byte fallback
        return _decode(bytes([int(found[1], 16)]))
    return str(token).replace("▁", " ")


def _added_tokens(tokenizer: Any) -> dict[int, str]:
    """Id to content of the tokens that were added as text: they went through no byte-level mapping."""
    added = {number: str(token) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    special_ids = getattr(tokenizer, "all_special_ids", [])
    return added | dict(zip(special_ids, getattr(tokenizer, "all_special_tokens", []), strict=False))


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the vocabulary is spelt in GPT-2's byte alphabet."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hasattr(tokenizer, "byte_decoder")  # the slow GPT-2 family
    # The parts' own JSON, not the whole tokenizer's: that one would write out the vocabulary too.
    parts = (backend.decoder, backend.pre_tokenizer, backend.normalizer)
    return any(b'"ByteLevel"' in part.__getstate__() for part in parts if part is not None)


def _from_byte_level(token: str) -> str:
    alphabet = _byte_alphabet()
    if any(c not in alphabet for c in token):
        return token  # text that was put into the vocabulary as it is
    return _decode(bytes(alphabet[c] for c in token))


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, the other way round."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _decode(raw: bytes) -> str:
    """UTF-8 as far as it goes; bytes that form no whole character as ``<0xE4>``."""
    text = raw.decode("utf-8", errors="surrogateescape")
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

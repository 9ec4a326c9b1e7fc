"""Prompts: reading them from files, and turning one into token ids.

A prompts file is JSON Lines (`.jsonl`; objects with `text` and optionally `id`, `source`, `licence`) or plain
text, a prompt a line or one prompt as a whole. Both are UTF-8.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from gattn_viz.chat import user_turn
from gattn_viz.errors import GattnVizError, first_line

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
BOS_POLICIES = ("auto", "always", "never")

# From so many lines on, a text file may be one long text, which must be asked for.
MANY_LINES = 200

# Of a text that will be cut so much is tokenised at first, more than any but odd texts need.
CHARACTERS_A_TOKEN = 20
SPARE_TOKENS = 200
# Characters in which a BOS that is written in a text shows.
BEGINNING = 200

log = logging.getLogger("gattn_viz")


@dataclass(frozen=True)
class Prompt:
    """A text, and where it comes from."""

    id: str
    text: str
    source: str | None = None
    licence: str | None = None


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model sees it.

    Attributes:
        ids: its tokens; at least one.
        is_cut: whether `max_tokens` cut something from its end.
        bos_added: whether `ids` starts with a BOS that is not in the text itself.
        chat: whether `ids` is the text as a user turn of the tokenizer's chat template.
    """

    prompt: Prompt
    ids: list[int]
    is_cut: bool
    bos_added: bool
    chat: bool = False


def read_prompts(path: str | Path, *, whole_file: bool = False) -> list[Prompt]:
    """Read a prompts file.

    Args:
        path: a `.jsonl` (also `.ndjson`, `.json`) file, any other file with a prompt a line, or `-` for stdin,
            which is taken as JSON Lines when its first line that is not blank starts with `{`. Blank lines
            are skipped. A prompt without an id is called `line-N` after its line.
        whole_file: a text file is one prompt, line breaks included, called as the file is without its suffix.

    Raises:
        GattnVizError: the file cannot be read, is not UTF-8 text, has a line that is not a prompt (the message
            gives the line's number), has an id twice, or has no prompts; JSON Lines with `whole_file`.
    """
    if str(path) == "-":
        if sys.stdin is None:
            raise GattnVizError("standard input is closed; expected prompts on it: use --prompts FILE")
        data = sys.stdin.buffer.read()
        if whole_file:
            return [_whole(data, "standard input", "stdin")]
        return _parse(data, "standard input", jsonl=None)
    path = Path(os.path.expanduser(path))
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise GattnVizError(
            f"prompts file '{path}' does not exist; expected a .jsonl or .txt file, or - for stdin: check the path"
        ) from None
    except IsADirectoryError:
        raise GattnVizError(
            f"prompts file '{path}' is a directory; expected a .jsonl or .txt file: name a file in it"
        ) from None
    except OSError as error:
        raise GattnVizError(
            f"prompts file '{path}' cannot be read ({error.strerror or error}); expected a readable .jsonl or "
            ".txt file: check its permissions"
        ) from error
    where = f"prompts file '{path}'"
    jsonl = path.suffix.lower() in JSONL_SUFFIXES
    if not whole_file:
        return _parse(data, where, jsonl=jsonl)
    if jsonl:
        raise GattnVizError(
            f"{where} is JSON Lines, a prompt a line; expected a text file to take as one prompt: leave out "
            "--whole-file"
        )
    return [_whole(data, where, os.fsencode(path.stem).decode(errors="replace"))]


def default_prompts() -> list[Prompt]:
    """The prompts that come with the package.

    Raises:
        GattnVizError: the installation lacks them.
    """
    try:
        data = resources.files("gattn_viz").joinpath("demo", "prompts.jsonl").read_bytes()
    except OSError as error:
        raise GattnVizError(
            "the bundled prompts are not in this installation; expected gattn_viz/demo/prompts.jsonl: reinstall "
            "gattn-viz, or pass --prompt TEXT or --prompts FILE"
        ) from error
    return _parse(data, "bundled prompts", jsonl=True)


def prompts_from_text(texts: Sequence[str]) -> list[Prompt]:
    """Prompts given as text; their ids are `prompt-1`, `prompt-2`, ...

    Raises:
        GattnVizError: a text is empty or only white space, or is not Unicode.
    """
    return [
        Prompt(f"prompt-{number}", _checked_text(text, f"prompt {number}"))
        for number, text in enumerate(texts, start=1)
    ]


def encode(
    prompt: Prompt,
    tokenizer: Any,
    *,
    bos: Literal["auto", "always", "never"] = "auto",
    max_tokens: int | None = None,
    max_positions: int | None = None,
    chat: bool = False,
) -> EncodedPrompt:
    """Turn a prompt into token ids.

    Args:
        tokenizer: a transformers tokenizer.
        bos: `auto` leaves it to the tokenizer, `always` puts a BOS in front unless there is one, `never` adds no
            special tokens. A BOS written in the text itself stays.
        max_tokens: cut what comes after so many tokens; the BOS counts as one and stays.
        max_positions: how many tokens the model can take, None when it has no limit.
        chat: take the text as a user turn of the tokenizer's chat template. Then `auto` and `never` put nothing in
            front of what the template writes, and `always` a BOS only if the template does not begin with one.

    Raises:
        GattnVizError: the tokenizer has no BOS to put in front or no chat template, the prompt has no tokens, or
            it has more than `max_positions`.
    """
    if bos not in BOS_POLICIES:
        raise GattnVizError(f"unknown bos policy {bos!r}; expected {', '.join(BOS_POLICIES)}: pass one of them")
    if max_tokens is not None and max_tokens < 1:
        raise GattnVizError(f"max-tokens is {max_tokens}; expected 1 or more: pass a larger number")
    bos_id: int | None = tokenizer.bos_token_id
    positions = None if max_positions is None else max_positions + 1  # one too many shows that it is too long
    enough = positions if max_tokens is None else max_tokens
    text = user_turn(prompt.text, tokenizer) if chat else prompt.text
    ids, complete = _first_tokens(text, tokenizer, bos != "never" and not chat, enough)
    if bos == "always":
        if bos_id is None:
            raise GattnVizError(
                "bos is 'always', but this tokenizer has no BOS token; expected 'auto' or 'never': pass --bos auto"
            )
        if ids[:1] != [bos_id]:
            ids = [bos_id, *ids]
    if not ids:
        raise GattnVizError(
            f"prompt {prompt.id!r} ({_shortened(prompt.text)}) has no tokens in this tokenizer; expected at least "
            "one: change its text"
        )

    written = tokenizer(prompt.text[:BEGINNING], add_special_tokens=False, verbose=False)["input_ids"]
    bos_added = bos_id is not None and ids[0] == bos_id and list(written[:1]) != [bos_id]
    is_cut = max_tokens is not None and len(ids) > max_tokens
    ids = ids[:max_tokens]
    if max_positions is not None and len(ids) > max_positions:
        count = len(ids) if complete or is_cut else f"more than {max_positions}"
        raise GattnVizError(
            f"prompt {prompt.id!r} has {count} tokens, but the model has {max_positions} positions; expected "
            f"at most that: shorten it, or cut it with --max-tokens {max_positions}"
        )
    return EncodedPrompt(prompt, ids, is_cut, bos_added, chat)


def _first_tokens(text: str, tokenizer: Any, special: bool, enough: int | None) -> tuple[list[int], bool]:
    """The tokens of a text, or of a long one more than `enough` from its beginning; and whether those are all.

    Where a text is cut, the last tokens are others than those of the whole text: `SPARE_TOKENS` more are made.
    It is cut between words if it can be: to some tokenizers a long one is one unknown token, a part of it not.
    """
    length = len(text) if enough is None else CHARACTERS_A_TOKEN * (enough + SPARE_TOKENS)
    while True:
        part = text[:length]
        if length < len(text):
            words = part.rsplit(maxsplit=1)
            part = words[0] if len(words) == 2 else part
        ids = list(tokenizer(part, add_special_tokens=special, verbose=False)["input_ids"])
        if length >= len(text) or (enough is not None and len(ids) >= enough + SPARE_TOKENS):
            return ids, length >= len(text)
        length *= 8


def _parse(data: bytes, where: str, jsonl: bool | None) -> list[Prompt]:
    """Prompts of a file's content; `where` names the file in errors, `jsonl` None means look at the first line."""
    lines = list(_numbered_lines(data, where))
    if jsonl is None:
        jsonl = bool(lines) and lines[0][1].lstrip().startswith("{")
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, line in lines:
        at = f"{where}, line {number}"
        prompt = _from_json(line, number, at) if jsonl else Prompt(f"line-{number}", _checked_text(line, at))
        if prompt.id in line_of:
            raise GattnVizError(
                f"{at}: the id {prompt.id!r} is already on line {line_of[prompt.id]}; expected an id of its "
                "own for each prompt: change one"
            )
        line_of[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise GattnVizError(
            f"{where} has no prompts; expected a prompt a line, or JSON Lines with a text: add one"
        )
    if not jsonl and len(prompts) >= MANY_LINES:
        log.info("%s: %d prompts, a line each; --whole-file takes the file as one", where, len(prompts))
    return prompts


def _whole(data: bytes, where: str, prompt_id: str) -> Prompt:
    return Prompt(prompt_id, _checked_text(_decode(data, where), where))


def _numbered_lines(data: bytes, where: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their number from 1."""
    # not str.splitlines: it also breaks at U+2028 and the like, which may stand inside a prompt
    for number, line in enumerate(io.StringIO(_decode(data, where)), start=1):
        line = line.removesuffix("\n")
        if line.strip():
            yield number, line


def _decode(data: bytes, where: str) -> str:
    """The text of a file, every line break a `\\n`."""
    try:
        text = data.decode("utf-8-sig")
        bad = data.find(b"\0")
    except UnicodeDecodeError as error:
        text, bad = "", error.start
    if bad >= 0:
        number = data.count(b"\n", 0, bad) + 1
        raise GattnVizError(
            f"{where}, line {number}: byte {data[bad]:#04x} is not UTF-8 text; expected a text file in UTF-8: "
            "check that it is the right file, or convert it with iconv -t UTF-8"
        )
    return io.StringIO(text, newline=None).getvalue()


def _from_json(line: str, number: int, at: str) -> Prompt:
    expected = 'expected an object such as {"id": "a", "text": "Hello"}'
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = first_line(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}, column {error.colno}"
        raise GattnVizError(
            f"{at}: not JSON ({reason}): {_shortened(line)}; {expected} on one line: correct it, or "
            "name the file .txt if each line is a prompt"
        ) from error
    if not isinstance(entry, dict):
        raise GattnVizError(f"{at}: a JSON {_json_type(entry)}, {_shortened(line)}; {expected}: correct it")
    if entry.get("text") is None:
        raise GattnVizError(f"{at}: no text, the keys are {', '.join(entry) or 'none'}; {expected}: add a text")
    if type(entry.get("id")) is int:
        entry["id"] = str(entry["id"])
    for key in ("text", "id", "source", "licence"):
        value = entry.get(key)
        if value is not None and not isinstance(value, str):
            raise GattnVizError(
                f"{at}: {key} is a JSON {_json_type(value)}, {_shortened(json.dumps(value))}; expected a string: "
                "put it in quotes"
            )
    text = _checked_text(entry["text"], at)
    prompt_id = entry.get("id")
    if prompt_id is None:
        prompt_id = f"line-{number}"
    elif not prompt_id.strip():
        raise GattnVizError(f"{at}: the id is empty; expected a name, or no id at all: correct it")
    else:
        _checked_text(prompt_id, f"{at}: id")
    return Prompt(prompt_id, text, entry.get("source"), entry.get("licence"))


def _checked_text(text: str, at: str) -> str:
    if not text.strip():
        fault = "only white space" if text else "empty"
        raise GattnVizError(f"{at}: the text is {fault}; expected at least one visible character: write one")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GattnVizError(
            f"{at}: the text has half a surrogate pair, {text[error.start]!r}, at character {error.start + 1}; "
            "expected Unicode text: correct it"
        ) from error
    return text


def _json_type(value: object) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _shortened(text: str, limit: int = 40) -> str:
    """A piece of a text to quote in an error, on one line."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")

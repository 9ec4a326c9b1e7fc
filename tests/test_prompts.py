"""Reading prompts, what is said about bad ones, and the BOS and length policies."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gattn_viz import prompts
from gattn_viz.errors import GattnVizError
from gattn_viz.models.names import demo_directory
from gattn_viz.prompts import Prompt, default_prompts, encode, prompts_from_text, read_prompts
from tests.models.checkpoints import byte_tokenizer

SAMPLES = Path(__file__).parent.parent / "sample_prompts"
EXAMPLE = 'expected an object such as {"id": "a", "text": "Hello"}'


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def error_of(path: Path | str) -> str:
    with pytest.raises(GattnVizError) as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- files ------------------------------------------------------------------------------------------------------


def test_torch_and_transformers_are_not_imported() -> None:
    code = "import sys, gattn_viz.prompts; print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "text": "One.", "source": "a book", "licence": "CC0-1.0", "year": 1999},
        {"text": "Two,\nover two lines."},
        {"id": 7, "text": " 三 ", "source": None},
    ]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    found = read_prompts(write(tmp_path / "p.jsonl", text))
    assert found == [
        Prompt("a", "One.", "a book", "CC0-1.0"),
        Prompt("line-3", "Two,\nover two lines."),
        Prompt("7", " 三 "),
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_text(encoding: str, newline: str, end: str, tmp_path: Path) -> None:
    # U+2028 and a form feed do not end a line, and spaces are part of a prompt
    lines = ["First.", "", "  second\u2028still second\x0cand still ", " \t", "第三"]
    path = write(tmp_path / "p.txt", (newline.join(lines) + newline * len(end)).encode(encoding))
    assert read_prompts(path) == [
        Prompt("line-1", "First."),
        Prompt("line-3", "  second\u2028still second\x0cand still "),
        Prompt("line-5", "第三"),
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_json_lines_with_bom_and_crlf(newline: str, tmp_path: Path) -> None:
    text = newline.join(['{"text": "a"}', '{"text": "b"}', ""])
    path = write(tmp_path / "p.JSONL", text.encode("utf-8-sig"))
    assert [prompt.text for prompt in read_prompts(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('\n{"text": "a"}\n', [Prompt("line-2", "a")]),
        ("plain\n{also plain\n", [Prompt("line-1", "plain"), Prompt("line-2", "{also plain")]),
    ],
)
def test_standard_input(text: str, expected: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert read_prompts("-") == expected


def test_standard_input_with_nothing_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert error_of("-") == (
        "standard input has no prompts; expected a prompt a line, or JSON Lines with a text: add one"
    )


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "nothing.jsonl"
    assert error_of(path) == (
        f"prompts file '{path}' does not exist; expected a .jsonl or .txt file, or - for stdin: check the path"
    )


def test_directory(tmp_path: Path) -> None:
    assert error_of(tmp_path) == (
        f"prompts file '{tmp_path}' is a directory; expected a .jsonl or .txt file: name a file in it"
    )


def test_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    path = tmp_path / "p.txt"
    assert error_of(path) == (
        f"prompts file '{path}' cannot be read (Permission denied); expected a readable .jsonl or .txt file: "
        "check its permissions"
    )


@pytest.mark.parametrize(
    ("content", "line", "byte"),
    [
        (b"good\n\x00\x01\x02", 2, "0x00"),
        (b"good\nalso good\nna\xefve", 3, "0xef"),
        ("good".encode("utf-16"), 1, "0xff"),
        (b"\x89PNG\r\n\x1a\n", 1, "0x89"),
    ],
)
@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_binary_and_other_encodings(content: bytes, line: int, byte: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, content)
    assert error_of(path) == (
        f"prompts file '{path}', line {line}: byte {byte} is not UTF-8 text; expected a text file in UTF-8: "
        "check that it is the right file, or convert it with iconv -t UTF-8"
    )


@pytest.mark.parametrize("content", ["", "\n \n\t\n", "\ufeff"])
@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_no_prompts(content: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, content)
    assert error_of(path) == (
        f"prompts file '{path}' has no prompts; expected a prompt a line, or JSON Lines with a text: add one"
    )


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            '{"text": "a"',
            f"not JSON (Expecting ',' delimiter, column 13): '{{\"text\": \"a\"'; {EXAMPLE} on one line: correct "
            "it, or name the file .txt if each line is a prompt",
        ),
        ('["a"]', f"a JSON array, '[\"a\"]'; {EXAMPLE}: correct it"),
        ("17", f"a JSON number, '17'; {EXAMPLE}: correct it"),
        ("null", f"a JSON null, 'null'; {EXAMPLE}: correct it"),
        ("{}", f"no text, the keys are none; {EXAMPLE}: add a text"),
        ('{"id": "b", "prompt": "a"}', f"no text, the keys are id, prompt; {EXAMPLE}: add a text"),
        ('{"text": null}', f"no text, the keys are text; {EXAMPLE}: add a text"),
        ('{"text": ["a"]}', "text is a JSON array, '[\"a\"]'; expected a string: put it in quotes"),
        ('{"text": 5}', "text is a JSON number, '5'; expected a string: put it in quotes"),
        ('{"text": "a", "id": true}', "id is a JSON boolean, 'true'; expected a string: put it in quotes"),
        ('{"text": "a", "source": {}}', "source is a JSON object, '{}'; expected a string: put it in quotes"),
        ('{"text": ""}', "the text is empty; expected at least one visible character: write one"),
        ('{"text": " \\n"}', "the text is only white space; expected at least one visible character: write one"),
        ('{"text": "a", "id": " "}', "the id is empty; expected a name, or no id at all: correct it"),
        (
            '{"text": "ab\\ud800"}',
            "the text has half a surrogate pair, '\\ud800', at character 3; expected Unicode text: correct it",
        ),
        (
            '{"text": "a", "id": "first"}',
            "the id 'first' is already on line 1; expected an id of its own for each prompt: change one",
        ),
    ],
)
def test_bad_line(bad: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", '{"id": "first", "text": "fine"}\n\n' + bad)
    assert error_of(path) == f"prompts file '{path}', line 3: {message}"


def test_a_long_line_is_quoted_in_part(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", "x" * 10_000)
    assert len(error_of(path)) < 400 + len(str(path))


def test_deeply_nested_json(tmp_path: Path) -> None:
    assert "line 1: not JSON" in error_of(write(tmp_path / "p.jsonl", "[" * 200_000))


# --- the packaged ones, and text --------------------------------------------------------------------------------


def test_default_prompts() -> None:
    try:
        found = default_prompts()
    except GattnVizError as error:
        pytest.skip(str(error))
    assert len({prompt.id for prompt in found}) == len(found)
    assert all(prompt.source and prompt.licence for prompt in found)


def test_default_prompts_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts.resources, "files", lambda package: tmp_path)
    with pytest.raises(GattnVizError) as caught:
        default_prompts()
    assert str(caught.value) == (
        "the bundled prompts are not in this installation; expected gattn_viz/demo/prompts.jsonl: reinstall "
        "gattn-viz, or pass --prompt TEXT or --prompts FILE"
    )


def test_prompts_from_text() -> None:
    assert prompts_from_text(["a", "b c"]) == [Prompt("prompt-1", "a"), Prompt("prompt-2", "b c")]


@pytest.mark.parametrize(
    ("text", "fault"), [("", "empty"), ("  ", "only white space"), ("\n\t", "only white space")]
)
def test_empty_prompt(text: str, fault: str) -> None:
    with pytest.raises(GattnVizError) as caught:
        prompts_from_text(["fine", text])
    assert str(caught.value) == (
        f"prompt 2: the text is {fault}; expected at least one visible character: write one"
    )


def test_prompt_with_bytes_that_are_not_text() -> None:
    """What Python makes of a command line argument that is not UTF-8."""
    with pytest.raises(GattnVizError, match="prompt 1: the text has half a surrogate pair"):
        prompts_from_text([b"na\xefve".decode(errors="surrogateescape")])


@pytest.mark.parametrize("name", ["short_english", "long_english", "code", "chinese", "mixed_scripts"])
def test_sample_prompts(name: str) -> None:
    found = read_prompts(SAMPLES / f"{name}.jsonl")
    assert len(found) >= 6
    assert all(prompt.source and prompt.licence for prompt in found)
    assert len({prompt.text for prompt in found}) == len(found)
    if name == "long_english":
        assert all(len(prompt.text.split()) >= 300 for prompt in found)
        assert {prompt.licence for prompt in found} == {"public domain"}
    if name == "short_english":
        assert found[0].text == "Sparse gating mechanism mitigates attention sink."


def test_sample_ids_are_unique_across_files() -> None:
    ids = [prompt.id for path in sorted(SAMPLES.glob("*.jsonl")) for prompt in read_prompts(path)]
    assert len(ids) == len(set(ids)) > 40


# --- tokens -----------------------------------------------------------------------------------------------------

HELLO = Prompt("hello", "Hello")


@pytest.fixture
def plain() -> PreTrainedTokenizerFast:
    """Has a BOS and does not add it."""
    return byte_tokenizer()


@pytest.fixture
def adding() -> PreTrainedTokenizerFast:
    """Adds its BOS by itself."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    return tokenizer


def encode_error(prompt: Prompt, tokenizer: Any, **options: Any) -> str:
    with pytest.raises(GattnVizError) as caught:
        encode(prompt, tokenizer, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "bos", "added"),
    [
        ("plain", "auto", False),
        ("plain", "always", True),
        ("plain", "never", False),
        ("adding", "auto", True),
        ("adding", "always", True),
        ("adding", "never", False),
    ],
)
def test_bos(kind: str, bos: Any, added: bool, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    encoded = encode(HELLO, tokenizer, bos=bos)
    assert tokenizer.decode(encoded.ids) == ("<bos>Hello" if added else "Hello")
    assert (encoded.prompt, encoded.is_cut, encoded.bos_added) == (HELLO, False, added)
    assert len(encoded.ids) == 5 + added


def test_bos_in_the_text_is_not_added_again(plain: PreTrainedTokenizerFast) -> None:
    written = Prompt("a", "<bos>Hello")
    for bos in ("auto", "always", "never"):
        encoded = encode(written, plain, bos=bos)  # type: ignore[arg-type]
        assert plain.decode(encoded.ids) == "<bos>Hello"
        assert not encoded.bos_added


def test_no_bos_to_add() -> None:
    tokenizer = byte_tokenizer(bos=None)
    assert encode(HELLO, tokenizer).bos_added is False
    assert encode_error(HELLO, tokenizer, bos="always") == (
        "bos is 'always', but this tokenizer has no BOS token; expected 'auto' or 'never': pass --bos auto"
    )


def test_unknown_bos_policy(plain: PreTrainedTokenizerFast) -> None:
    assert encode_error(HELLO, plain, bos="maybe") == (
        "unknown bos policy 'maybe'; expected auto, always, never: pass one of them"
    )


@pytest.mark.parametrize(
    ("max_tokens", "text", "cut"),
    [(1, "<bos>", True), (3, "<bos>He", True), (6, "<bos>Hello", False), (99, "<bos>Hello", False)],
)
def test_max_tokens_cuts_the_end(max_tokens: int, text: str, cut: bool, adding: PreTrainedTokenizerFast) -> None:
    encoded = encode(HELLO, adding, max_tokens=max_tokens)
    assert adding.decode(encoded.ids) == text
    assert (encoded.is_cut, encoded.bos_added) == (cut, True)


def test_max_tokens_below_one(plain: PreTrainedTokenizerFast) -> None:
    assert encode_error(HELLO, plain, max_tokens=0) == "max-tokens is 0; expected 1 or more: pass a larger number"


def test_more_tokens_than_positions(plain: PreTrainedTokenizerFast) -> None:
    message = (
        "prompt 'hello' has 5 tokens, but the model has 4 positions; expected at most that: shorten it, or cut it "
        "with --max-tokens 4"
    )
    assert encode_error(HELLO, plain, max_positions=4) == message
    assert encode_error(HELLO, plain, max_positions=4, max_tokens=5) == message
    assert len(encode(HELLO, plain, max_positions=4, max_tokens=4).ids) == 4
    assert len(encode(HELLO, plain, max_positions=5).ids) == 5


def test_one_token_is_enough(plain: PreTrainedTokenizerFast) -> None:
    assert len(encode(Prompt("a", "a"), plain).ids) == 1


def test_no_tokens(plain: PreTrainedTokenizerFast) -> None:
    def nothing(text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": []}

    class Nothing:
        bos_token_id = None
        __call__ = staticmethod(nothing)

    assert encode_error(HELLO, Nothing()) == (
        "prompt 'hello' ('Hello') has no tokens in this tokenizer; expected at least one: change its text"
    )


def test_a_long_prompt_prints_no_warning(
    plain: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str]
) -> None:
    plain.model_max_length = 4
    encode(HELLO, plain)
    assert capfd.readouterr() == ("", "")


# --- long texts -------------------------------------------------------------------------------------------------


def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """As sentencepiece's: the most probable split of the whole text, which is not cut at spaces first."""
    pieces = ["<unk>", "▁", "a", "b", "é", "ab", "ba", "▁a", "aab", "bb▁", "ab▁ab"]
    scores = [(piece, -float(len(pieces) - number)) for number, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word is one token, however long, or an unknown one."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "##a": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


TOKENIZERS = {
    "demo": lambda: AutoTokenizer.from_pretrained(demo_directory() / "baseline"),
    "bytes": byte_tokenizer,
    "unigram": unigram_tokenizer,
    "words": word_tokenizer,
}


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def any_tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


PIECES = st.sampled_from(["a", "ab", " ", "a b ", "é", "the ", "\n", "b" * 300, " " * 90, "ba" * 200, "<|begin|>"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.lists(PIECES, min_size=1, max_size=60).map("".join), times=st.integers(1, 6), limit=st.integers(1, 9)
)
@example(text="a" + 90 * " " + "a" + 400 * "b", times=1, limit=2)  # a word too long to be known, unless it is cut
def test_a_text_that_is_cut_first_has_the_same_tokens(
    any_tokenizer: Any, text: str, times: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "CHARACTERS_A_TOKEN", 3)
    monkeypatch.setattr(prompts, "SPARE_TOKENS", 60)
    text = text.strip() * times or "a"
    whole = any_tokenizer(text)["input_ids"]
    assume(whole)
    encoded = encode(Prompt("x", text), any_tokenizer, max_tokens=limit)
    assert encoded.ids == whole[:limit]
    assert encoded.is_cut == (len(whole) > limit)


def test_a_long_text_is_not_tokenised_to_its_end() -> None:
    """Nor more often than once; and a model's positions bound it as --max-tokens does."""
    tokenizer = byte_tokenizer()
    seen: list[int] = []

    class Counting:
        bos_token_id = None

        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return tokenizer(text, **options)

    long = Prompt("long", "ab " * 1_000_000)
    assert encode(long, Counting(), max_tokens=10).ids == tokenizer("ab " * 10)["input_ids"][:10]
    assert "has more than 50 tokens, but the model has 50 positions" in encode_error(
        long, Counting(), max_positions=50
    )
    assert sum(seen) < 20_000
    seen.clear()
    encode(Prompt("short", "ab " * 1000), Counting())
    assert [length for length in seen if length > prompts.BEGINNING] == [3000]


def test_a_text_file_of_many_lines_may_be_one_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("gattn_viz").propagate = True  # the command line turns it off
    caplog.set_level(logging.INFO)
    read_prompts(write(tmp_path / "few.txt", "a line\n" * 199))
    read_prompts(write(tmp_path / "many.jsonl", '{"text": "a line"}\n' * 300))
    read_prompts(write(tmp_path / "one.txt", "a line\n" * 300), whole_file=True)
    assert caplog.text == ""
    read_prompts(write(tmp_path / "many.txt", "a line\n" * 200))
    assert caplog.messages == [
        f"prompts file '{tmp_path}/many.txt': 200 prompts, a line each; --whole-file takes the file as one"
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="needs file names that are bytes")
def test_a_file_name_that_is_no_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / os.fsdecode(b"caf\xe9.txt"), "text")
    assert read_prompts(path, whole_file=True) == [Prompt("caf\N{REPLACEMENT CHARACTER}", "text")]

"""Labels of tokens, with tiny tokenizers of each kind made here."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gattn_viz.errors import GattnVizError
from gattn_viz.tokens import EMPTY, SPACE, token_labels, token_texts, visible

TEXT = ["The café is open. The café is open.", "你好 世界 你好 世界", "a\tb\nc", "smile 😀 smile 😀", "नमस्ते مرحبا"]


def byte_level(merges: bool = True) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500 if merges else 257,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def labels_of(tokenizer: Any, text: str) -> list[str]:
    return token_labels(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("text", [*TEXT, "unseen ☃ Ġ ▁ \\n \x00 \u200b"])
def test_byte_level_labels_spell_the_text(text: str) -> None:
    """Whatever the merges, the labels put together are the text with its spaces and controls made visible."""
    joined = "".join(labels_of(byte_level(), text)).replace("\N{DOTTED CIRCLE}", "")
    # Bytes of a character that was cut stand as <0xE4>; put them together again.
    whole = re.sub(
        "(?:<0x[0-9A-F]{2}>)+",
        lambda found: visible(bytes.fromhex("".join(re.findall("0x(..)", found[0]))).decode()),
        joined,
    )
    assert whole.replace("\N{DOTTED CIRCLE}", "") == visible(text)


def test_byte_level_without_merges() -> None:
    tokenizer = byte_level(merges=False)
    assert labels_of(tokenizer, "é \t") == ["<0xC3>", "<0xA9>", SPACE, "\\t"]
    assert labels_of(tokenizer, "你") == ["<0xE4>", "<0xBD>", "<0xA0>"]
    assert labels_of(tokenizer, "\n") == ["\\n"]
    assert labels_of(tokenizer, "$\\frac{$") == list("$\\frac{$")


def test_byte_level_words_and_special_tokens() -> None:
    tokenizer = byte_level()
    labels = labels_of(tokenizer, "The café is open.<|endoftext|>")
    assert labels[0] == "The"
    assert f"{SPACE}café" in labels
    assert labels[-1] == "<|endoftext|>"
    assert "你好" in labels_of(tokenizer, "你好")


def test_added_tokens_are_text_and_not_bytes() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["Ġliteral", "two words", "\n\n"])
    ids = tokenizer.convert_tokens_to_ids(["Ġliteral", "two words", "\n\n"])
    assert token_labels(tokenizer, ids) == ["Ġliteral", f"two{SPACE}words", "\\n\\n"]


def test_sentencepiece_like() -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "▁": 2, "▁the": 3, "re": 4, "<0xE4>": 5, "<0x0A>": 6, "▁▁": 7, "": 8}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    assert token_labels(tokenizer, range(9)) == [
        "<unk>",
        "<s>",
        SPACE,
        f"{SPACE}the",
        "re",
        "<0xE4>",
        "\\n",
        SPACE * 2,
        EMPTY,
    ]


def test_wordpiece() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "Ġ": 3}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert labels_of(tokenizer, "playing") == ["play", "##ing"]
    assert token_labels(tokenizer, [3, 0]) == ["Ġ", "[UNK]"]


class Slow:
    """A tokenizer with no backend: what `token_labels` may ask, and no more."""

    def __init__(self, vocabulary: list[str | bytes], **attributes: Any) -> None:
        self.vocabulary = vocabulary
        self.__dict__ |= attributes

    def convert_ids_to_tokens(self, number: int) -> str | bytes:
        return self.vocabulary[number]


def test_slow_tokenizers() -> None:
    assert token_labels(Slow(["Ġa", "Ã"], byte_decoder={}), [0, 1]) == [f"{SPACE}a", "<0xC3>"]
    assert token_labels(Slow(["▁a", "Ġ"]), [0, 1]) == [f"{SPACE}a", "Ġ"]
    assert token_labels(Slow([b" \xe4\xbd", "你".encode()]), [0, 1]) == [f"{SPACE}<0xE4><0xBD>", "你"]


def test_ids_without_a_token() -> None:
    assert token_labels(byte_level(), [5000]) == ["<id 5000>"]
    assert token_labels(Slow([]), [7]) == ["<id 7>"]
    assert token_labels(byte_level(), []) == []


@pytest.mark.parametrize("bad", [-100, 1.5, "a", None])
def test_ids_that_are_none(bad: Any) -> None:
    with pytest.raises(GattnVizError, match=r"token id .* \(number 2 of the list\).*pass the ids"):
        token_labels(byte_level(), [1, bad])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", EMPTY),
        (" a ", f"{SPACE}a{SPACE}"),
        ("\x00\r", "\\x00\\r"),
        ("\u200b\ufeff", "\\u200b\\ufeff"),
        ("\u3000\xa0", "\\u3000\\xa0"),
        ("\u093f", "\N{DOTTED CIRCLE}\u093f"),
        ("·\\n", "·\\n"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_numpy_ids() -> None:
    assert token_labels(byte_level(merges=False), np.array([0])) == ["<|endoftext|>"]  # type: ignore[arg-type]


def test_texts_have_their_spaces_and_line_breaks() -> None:
    tokenizer = byte_level(merges=False)
    text = "a b\n\n\tc\\n é$"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert token_texts(tokenizer, ids) == [*"a b\n\n", "\\t", *"c\\n ", "<0xC3>", "<0xA9>", "$"]
    merged = byte_level()
    ids = merged("The café is open.\n<|endoftext|>", add_special_tokens=False)["input_ids"]
    assert "".join(token_texts(merged, ids)) == "The café is open.\n<|endoftext|>"
    assert token_texts(merged, [10_000]) == ["<id 10000>"]

"""Tokenizer, token arrays and batches.

    python -m training.data        # trains the tokenizer and encodes the works

A batch depends on the recipe's seed and the step alone, so that every variant sees the same data in the same order
and a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from training.fetch import DATA, WORKS
from training.recipe import HELD_OUT, HELD_OUT_PROSE, RECIPE, TOKENIZER_OPERATORS, Recipe, Stage

BOS, EOS = "<|begin|>", "<|end|>"
TOKENIZER = DATA / "tokenizer"
TOKENS = DATA / "tokens.npz"


def operator(k: int) -> str:
    """The token that asks for the token `k` places before it."""
    return f"<|copy_{k}|>"


def train_tokenizer(texts: list[str], recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE without unknowns, which puts BOS before every text by itself."""
    operators = [operator(k) for k in range(1, TOKENIZER_OPERATORS + 1)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=recipe.vocab_size,
            special_tokens=[BOS, EOS, *operators],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=recipe.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Corpus:
    """Token arrays of the training works and of the held-out prose; works are joined by EOS."""

    train: NDArray[np.int64]
    held_out: NDArray[np.int64]
    bos: int
    operators: NDArray[np.int64]  # ids of the copy operators, k = 1 first
    starts: NDArray[np.int64]  # where sentences begin in `train`
    held_out_starts: NDArray[np.int64]
    successors: NDArray[np.float32]  # (vocab, vocab), how often a token follows another in `train`

    @property
    def vocab_size(self) -> int:
        return len(self.successors)

    @classmethod
    def make(
        cls,
        train: NDArray[np.int64],
        held_out: NDArray[np.int64],
        sentence_ends: NDArray[np.int64],
        bos: int,
        operators: NDArray[np.int64],
        vocab_size: int,
    ) -> Corpus:
        def starts(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.flatnonzero(np.isin(tokens, sentence_ends)) + 1

        pairs = train[:-1] * vocab_size + train[1:]
        successors = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
        return cls(train, held_out, bos, operators, starts(train), starts(held_out), successors.astype(np.float32))

    @classmethod
    def load(cls, recipe: Recipe, path: Path = TOKENS) -> Corpus:
        with np.load(path) as stored:
            return cls.make(
                stored["train"].astype(np.int64),
                stored["held_out"].astype(np.int64),
                stored["sentence_ends"],
                int(stored["bos"]),
                stored["operators"][: recipe.copy_operators],
                recipe.vocab_size,
            )


def running_text(corpus: Corpus, rng: np.random.Generator, rows: int, length: int) -> NDArray[np.int64]:
    """(rows, length) tokens of the training works, each row from the beginning of a sentence."""
    starts = corpus.starts[: np.searchsorted(corpus.starts, len(corpus.train) - length)]
    return corpus.train[rng.choice(starts, rows)[:, None] + np.arange(length)]


def bigram_text(
    corpus: Corpus, rng: np.random.Generator, rows: int, length: int, power: float
) -> NDArray[np.int64]:
    """(rows, length) tokens, each drawn from what follows the one before it in the training works.

    Args:
        power: the counts are raised to it; above 1 the text is more predictable than the works' own bigrams.
    """
    odds = cumulative_odds(corpus, power)
    text = np.empty((rows, length), dtype=np.int64)
    text[:, 0] = corpus.train[rng.choice(corpus.starts[:-1], rows)]
    uniform = rng.random((rows, length))
    for i in range(1, length):
        # row t of the table spans t to t + 1: one search in all of it finds the token
        last = text[:, i - 1]
        text[:, i] = np.searchsorted(odds, last + uniform[:, i], side="right") - last * corpus.vocab_size
    return text


_ODDS: dict[tuple[int, float], NDArray[np.float64]] = {}


def cumulative_odds(corpus: Corpus, power: float) -> NDArray[np.float64]:
    """(vocab * vocab,) cumulative probabilities of the next token, plus the number of the token before it."""
    key = (id(corpus), power)
    if key not in _ODDS:
        weights = corpus.successors.astype(np.float64) ** power
        total = weights.sum(axis=1, keepdims=True)
        weights[total[:, 0] == 0] = 1.0  # a token with no successor: any
        cumulative = np.cumsum(weights, axis=1)
        cumulative /= cumulative[:, -1:]
        cumulative[:, -1] = 1.0
        _ODDS[key] = (cumulative + np.arange(corpus.vocab_size)[:, None]).ravel()
    return _ODDS[key]


def insert_operators(
    text: NDArray[np.int64], share: float, corpus: Corpus, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Put `[operator k][the token k places before it]` into each row, so that `share` of positions are operators.

    The row's own tokens go on after the answer; what is pushed over the end is cut. So there are two things to be
    had by recall: the answer, and behind it the token before the operator, from which the row goes on.
    """
    rows, length = text.shape
    most = len(corpus.operators)
    chosen = rng.random((rows, length)) < share / (1 - 2 * share)  # of the row's own tokens
    which = rng.integers(0, most, (rows, length))
    out = np.empty_like(text)
    for row in range(rows):
        line: list[int] = []
        for token, insert, k in zip(text[row].tolist(), chosen[row], which[row].tolist(), strict=True):
            line.append(token)
            if insert and len(line) > k:
                line += [int(corpus.operators[k]), line[-1 - k]]
            if len(line) >= length:
                break
        out[row] = line[:length]
    return out


def batch(corpus: Corpus, recipe: Recipe, stage: Stage, step: int) -> NDArray[np.int64]:
    """(sequences, length) token ids of one step, BOS first. `step` counts over all stages."""
    rng = np.random.default_rng([recipe.seed, step])
    rows, length = recipe.tokens_per_step // (stage.length - 1), stage.length - 1
    prose_rows = int(rng.binomial(rows, stage.prose))
    prose = running_text(corpus, rng, prose_rows, length)
    prose = insert_operators(prose, stage.prose_operators, corpus, rng)
    bigrams = bigram_text(corpus, rng, rows - prose_rows, length, stage.bigram_power)
    bigrams = insert_operators(bigrams, stage.operators, corpus, rng)
    text = np.concatenate([prose, bigrams])
    return np.concatenate([np.full((rows, 1), corpus.bos), text], axis=1)


def held_out_batch(corpus: Corpus, rows: int, length: int) -> NDArray[np.int64]:
    """(rows, length) of held-out prose, BOS first, from sentence beginnings spread over all of it."""
    starts = corpus.held_out_starts
    starts = starts[: np.searchsorted(starts, len(corpus.held_out) - length)]
    chosen = starts[np.linspace(0, len(starts) - 1, rows).astype(np.int64)]
    text = corpus.held_out[chosen[:, None] + np.arange(length - 1)]
    return np.concatenate([np.full((rows, 1), corpus.bos), text], axis=1)


def main() -> None:
    works = {path.stem: path.read_text(encoding="utf-8") for path in sorted(WORKS.glob("*.txt"))}
    missing = [work for work in HELD_OUT if work not in works]
    if missing:
        raise SystemExit(f"not in {WORKS}: {', '.join(missing)}; run python -m training.fetch first")
    train = {name: text for name, text in works.items() if name not in HELD_OUT}
    tokenizer = train_tokenizer(list(train.values()), RECIPE)
    tokenizer.save_pretrained(TOKENIZER)

    def encode(names: list[str]) -> NDArray[np.uint16]:
        tokens: list[int] = []
        for name in names:
            encoded = tokenizer.backend_tokenizer.encode(works[name], add_special_tokens=False)
            tokens += [*encoded.ids, tokenizer.eos_token_id]
        return np.array(tokens, dtype=np.uint16)

    ids = tokenizer.get_vocab()
    ends = [id for token, id in ids.items() if token[-1] in ".!?" or token == "Ċ"]
    train_tokens, held_out_tokens = encode(list(train)), encode(list(HELD_OUT_PROSE))
    np.savez(
        TOKENS,
        train=train_tokens,
        held_out=held_out_tokens,
        sentence_ends=np.array(sorted(ends)),
        bos=np.array(tokenizer.bos_token_id),
        operators=np.array([ids[operator(k)] for k in range(1, TOKENIZER_OPERATORS + 1)]),
    )
    print(f"{len(train)} works, {len(train_tokens):,} tokens; {len(held_out_tokens):,} held-out tokens")


if __name__ == "__main__":
    main()

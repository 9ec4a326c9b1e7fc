"""What a person sees whose stdout is a terminal, a pseudo-terminal here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Done

PROMPT = ("-m", "baseline", "-p", "the cat sat on the mat", "-p", "the dog")


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.fixture
def shown(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """As `cli`, quick, with a stdout that says that it is a terminal."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        return cli(*arguments)

    return run


def test_quiet_still_shows_the_report(terminal: Cli) -> None:
    done = terminal("sink-stats", "-q", *PROMPT, "-m", "gate_headwise")
    assert (done.code, done.err) == (0, "")
    assert "━" in done.out
    assert "last row: mean over layers" in " ".join(done.out.split())


def test_with_a_file_the_terminal_stays_empty(terminal: Cli, tmp_path: Path) -> None:
    done = terminal("gate-stats", "-q", *PROMPT, "-m", "gate_headwise", "-o", "table.csv")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert (tmp_path / "table.csv").read_text().startswith("model,layer,head,")


def test_rows_that_are_no_layers(shown: Cli) -> None:
    """--by model, --per-prompt and what is of a model alone come as the rows that were asked for."""
    some = ("-q", *PROMPT, "--measures", "entropy,perplexity")
    by_model = lines(shown("sink-stats", *some, "--by", "model").out)
    [_, expected] = shown("sink-stats", *some, "--by", "model", "--format", "csv").out.splitlines()
    name, entropy, perplexity = expected.split(",")[:3]
    assert by_model[0] == ["entropy", "perplexity", "n_prompts", "n_queries", "tokens", "first_row"]
    assert by_model[2][:3] == [name, f"{float(entropy):.4g}", f"{float(perplexity):.4g}"]

    per_prompt = lines(shown("sink-stats", *some, "--per-prompt", "--by", "layer").out)
    assert [row[:3] for row in per_prompt[2:]] == [
        ["baseline", f"prompt-{prompt}", f"{layer}"] for prompt in (1, 2) for layer in (1, 2, 3)
    ]
    gates = lines(shown("gate-stats", "-q", *PROMPT, "--measures", "output_before", "--by", "model").out)
    assert gates[0][:2] == ["output_before", "n_prompts"]

    alone = lines(shown("sink-stats", "-q", *PROMPT, "--measures", "perplexity").out)
    assert alone[2][:2] == ["baseline", f"{float(perplexity):.4g}"]
    assert len(alone) == 3


def test_many_columns_are_shown_in_blocks(shown: Cli) -> None:
    out = shown("sink-stats", "-q", *PROMPT, "--by", "model", "--ci", ".9", "--resamples", "10").out
    assert max(map(len, out.splitlines())) <= 120
    for column in ("first_token_mass_ci_low", "max_activation_channel", "value_norm_rest_ci_high", "ci_resamples"):
        assert column in out


def test_a_column_without_values(shown: Cli) -> None:
    out = shown("sink-stats", "-q", *PROMPT, "--measures", "gate_mean").out
    assert ["│", "3", "│", "-", "│"] in lines(out)

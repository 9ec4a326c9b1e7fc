from __future__ import annotations

import io
import sys
from pathlib import Path

import pandas as pd
import pytest

from gattn_viz import GateOptions, Run, gate_stats, gate_tokens
from gattn_viz.cli import gate_stats as gate_stats_command
from gattn_viz.metrics.gate_measures import GATE_MEASURES
from tests.cli.conftest import Cli

TEXTS = ["the cat sat on the mat", "the dog"]
PROMPTS = ("-p", TEXTS[0], "-p", TEXTS[1])


def table(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text))


def test_csv_on_stdout_is_the_library_s_table(cli: Cli, tiny_trio: Path) -> None:
    done = cli("gate-stats", *PROMPTS, "--below", ".4", "--above", ".6", "-b", "2", "--chunk", "3")
    assert done.code == 0
    expected = gate_stats(
        prompts=TEXTS, options=GateOptions(0.4, 0.6), run=Run(str(tiny_trio), batch_size=2, chunk=3)
    )
    assert len(expected) == 36
    pd.testing.assert_frame_equal(table(done.out), expected, rtol=1e-6, check_dtype=False)


def test_what_a_row_stands_for(cli: Cli, tiny_trio: Path) -> None:
    some = ("gate-stats", "-m", "gate_elementwise", *PROMPTS, "--measures", "gate_q50,gate_mean")
    by_model = table(cli(*some, "--by", "model", "--per-prompt").out)
    assert list(by_model)[:4] == ["model", "prompt", "gate_mean", "gate_q50"]
    assert by_model.prompt.tolist() == ["prompt-1", "prompt-2"]
    with_ends = table(cli(*some, "--by", "layer", "--ci", ".9", "--seed", "3", "--resamples", "20").out)
    expected = gate_stats(
        "gate_elementwise", TEXTS, measures=["gate_mean", "gate_q50"], by="layer", ci=0.9, seed=3, resamples=20,
        run=Run(str(tiny_trio)),
    )  # fmt: skip
    pd.testing.assert_frame_equal(with_ends, expected, rtol=1e-6, check_dtype=False)


def test_tokens(cli: Cli, tiny_trio: Path) -> None:
    done = cli("gate-stats", *PROMPTS, "--tokens", "2", "--layers", "1-2", "--heads", "3", "-q")
    expected = gate_tokens(prompts=TEXTS, count=2, layers=[1, 2], heads=[3], run=Run(str(tiny_trio)))
    assert len(expected) == 2 * 2 * 2 * 2
    pd.testing.assert_frame_equal(table(done.out), expected, rtol=1e-6, check_dtype=False)
    assert done.err == ""
    to_file = cli("gate-stats", *PROMPTS, "--tokens", "2", "--layers", "1-2", "--heads", "3", "-o", "t.csv")
    assert to_file.out == ""
    assert Path("t.csv").read_text() == done.out
    assert "baseline has no gate: left out" in to_file.err


def test_a_terminal_gets_tables(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    out = cli("gate-stats", *PROMPTS, "-m", "gate_elementwise", "-m", "baseline").out
    gated, baseline = out.split("baseline")
    for text in ("gate mean", "channels shut", "█", "shut: score < 0.1, open: > 0.9", "2 prompts"):
        assert text in gated
    assert "output before" in baseline
    assert "gate mean" not in baseline
    # tokens are no table of layers: they come as they are
    assert cli("gate-stats", *PROMPTS, "--tokens", "1").out.startswith("model,prompt,layer,head,end,rank,")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--measures", "entropy"], 2, "no measure 'entropy'; expected all, or some of gate_mean,"),
        (["--below", "2"], 2, "--below"),
        (["--tokens", "0"], 2, "--tokens"),
        (
            ["--layers", "2"],
            2,
            "--layers is given without --tokens; expected one that goes with it: add --tokens N",
        ),
        (["--heads", "2"], 2, "--heads is given without --tokens"),
        (["--tokens", "2", "--measures", "gate_mean"], 2, "--measures is given with --tokens, which lists tokens"),
        (["--tokens", "2", "--ci", ".9"], 2, "--ci is given with --tokens"),
        (["--tokens", "2", "--per-prompt"], 2, "--per-prompt is given with --tokens"),
        (["--tokens", "2", "--by", "layer"], 2, "--by is given with --tokens"),
        (["--tokens", "2", "--layers", "x"], 2, "'x': expected all, or layers such as 1,7,21"),
        (["--ci", ".9", "--measures", "gate_q05"], 2, "ci is given, but gate_q05 has no interval"),
        (["-o", "t.xlsx"], 2, "expected .csv, .json or .parquet"),
        (["-m", "baseline"], 1, "no gate in baseline; expected a model with a gate on its attention output"),
        (["-m", "baseline", "--tokens", "2"], 1, "no gate in baseline"),
        (["-m", "gate_headwise", "--tokens", "2", "--layers", "9"], 1, "no layer 9: gate_headwise has 3 layers"),
    ],
)
def test_what_cannot_be(cli: Cli, arguments: list[str], code: int, said: str) -> None:
    done = cli("gate-stats", *PROMPTS, *arguments)
    assert done.code == code
    assert done.out == ""
    assert said in " ".join(done.err.replace("│", " ").split())


def test_the_help_names_every_measure(cli: Cli) -> None:
    assert gate_stats_command.MEASURES.split(", ") == [measure.name for measure in GATE_MEASURES]
    assert "honor_after" in cli("gate-stats", "--help").out

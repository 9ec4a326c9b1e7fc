from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
from transformers import BloomConfig, BloomForCausalLM

from gattn_viz import Prompt, Run, sink_stats
from gattn_viz.cli import sink_stats as sink_stats_command
from gattn_viz.metrics.measures import SINK_MEASURES
from tests.cli.conftest import Cli
from tests.models.checkpoints import save

PROMPT = ("-p", "the cat sat on the mat", "-p", "the dog")


def table(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text))


def test_csv_on_stdout_is_the_library_s_table(cli: Cli, tiny_trio: Path) -> None:
    done = cli("sink-stats", *PROMPT)
    assert done.code == 0
    expected = sink_stats(
        prompts=["the cat sat on the mat", Prompt("prompt-2", "the dog", None, None)],
        run=Run(checkpoints=str(tiny_trio)),
    )
    pd.testing.assert_frame_equal(table(done.out), expected, rtol=1e-6, check_dtype=False)


def test_messages_go_to_stderr_and_name_each_checkpoint(cli: Cli, tiny_trio: Path) -> None:
    done = cli("sink-stats", *PROMPT)
    lines = done.err.splitlines()
    assert lines == [
        line
        for variant in ("baseline", "gate_headwise", "gate_elementwise")
        for line in (
            f"{variant} -> directory {tiny_trio / variant}, float32 on cpu, 3 layers of 4 heads",
            f"{variant} attention: blocks of rows, float32",
        )
    ]
    assert cli("sink-stats", "-q", *PROMPT).err == ""


def test_a_model_that_computes_attention_by_itself(cli: Cli, tmp_path: Path) -> None:
    save(BloomForCausalLM(BloomConfig(vocab_size=260, hidden_size=32, n_layer=2, n_head=4)), tmp_path / "bloom")
    done = cli("sink-stats", "-m", str(tmp_path / "bloom"), *PROMPT, "--by", "layer")
    assert "bloom computes attention by itself: its weights are taken, T x T of a layer at a time\n" in done.err
    assert "bloom attention: transformers' eager weights\n" in done.err
    shown = table(done.out)
    blank = {"gate_mean", "learned_sink_mass", "value_norm_first", "value_norm_rest"}
    assert {name for name in shown if shown[name].isna().any()} == blank
    done = cli("sink-stats", "-m", str(tmp_path / "bloom"), *PROMPT, "--measures", "value_norm_first")
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("gattn-viz: error: no values of BloomForCausalLM")


def test_to_a_file(cli: Cli, tmp_path: Path) -> None:
    on_stdout = cli("sink-stats", "-m", "baseline", *PROMPT).out
    done = cli("sink-stats", "-m", "baseline", *PROMPT, "-o", "deep/sinks.csv")
    assert done.out == ""
    assert done.err.splitlines()[-1] == "wrote deep/sinks.csv: 12 rows"
    assert (tmp_path / "deep" / "sinks.csv").read_text() == on_stdout


@pytest.mark.parametrize("by_suffix", [True, False])
@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_formats(cli: Cli, tmp_path: Path, kind: str, by_suffix: bool) -> None:
    path = tmp_path / (f"out.{kind}" if by_suffix else "out.dat")
    asked = () if by_suffix else ("--format", kind)
    assert cli("sink-stats", "-m", "gate_headwise", *PROMPT, "-o", str(path), *asked).code == 0
    expected = table(cli("sink-stats", "-m", "gate_headwise", *PROMPT).out)
    read = {
        "csv": pd.read_csv,
        "json": lambda p: pd.DataFrame(json.loads(p.read_text())).astype({"learned_sink_mass": float}),  # null
        "parquet": pd.read_parquet,
    }
    pd.testing.assert_frame_equal(read[kind](path), expected, rtol=1e-6, check_dtype=False)


def test_by_and_per_prompt(cli: Cli) -> None:
    assert len(table(cli("sink-stats", *PROMPT, "--by", "layer").out)) == 9
    assert len(table(cli("sink-stats", *PROMPT, "--by", "model").out)) == 3
    per_prompt = table(cli("sink-stats", *PROMPT, "--by", "model", "--per-prompt").out)
    assert per_prompt.prompt.tolist() == ["prompt-1", "prompt-2"] * 3


def test_options_reach_the_measures(cli: Cli) -> None:
    def row(*arguments: str) -> pd.Series:
        return table(cli("sink-stats", "-m", "baseline", *PROMPT, "--by", "model", *arguments).out).iloc[0]

    assert row().first_row == "exclude"
    assert row("--first-row", "include").first_row == "include"
    assert row("--first-row", "include").first_token_mass > row().first_token_mass
    assert row("--sink-threshold", "0").sink_rate == 1
    assert row("--sink-threshold", "1").sink_rate == 0
    assert row("--max-tokens", "3").tokens == 6
    assert row("--bos", "never").tokens == row().tokens - 2
    assert row("-b", "2").first_token_mass == pytest.approx(row().first_token_mass, rel=1e-4)
    assert row("--dtype", "bfloat16").first_token_mass == pytest.approx(row().first_token_mass, abs=0.05)


def test_a_terminal_gets_tables(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "140")
    done = cli("sink-stats", *PROMPT)
    assert done.code == 0
    for text in ("baseline", "gate_elementwise", "first-token mass", "uniform null", "first query left out"):
        assert text in done.out
    named = cli("sink-stats", *PROMPT, "--measures", "row_max").out
    assert "row max" in named
    assert "first-token mass" not in named
    # a format that is asked for is what comes, terminal or not
    assert cli("sink-stats", *PROMPT, "--format", "csv").out.startswith("model,layer,head,")


def test_prompts_from_a_file_and_from_stdin(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "text": "the cat sat"}\n{"text": "on the mat"}\n')
    by_prompt = ("sink-stats", "-m", "baseline", "--by", "model", "--per-prompt")
    assert table(cli(*by_prompt, "--prompts", "prompts.jsonl").out).prompt.tolist() == ["a", "line-2"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\nthe dog\n")))
    assert len(table(cli(*by_prompt, "--prompts", "-").out)) == 2


def test_a_whole_file_is_one_prompt(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "book.txt").write_bytes("\ufeffthe cat\r\n\r\nsat \u2028 on\n".encode())
    one = ("sink-stats", "-m", "baseline", "--by", "model", "--per-prompt", "--whole-file")
    row = table(cli(*one, "--prompts", "book.txt").out)
    assert row.prompt.tolist() == ["book"]
    # the line breaks are part of it
    as_text = table(cli("sink-stats", "-m", "baseline", "--by", "model", "-p", "the cat\n\nsat \u2028 on\n").out)
    assert row.tokens.tolist() == as_text.tokens.tolist()
    assert row.perplexity.tolist() == as_text.perplexity.tolist()

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n{\nthe dog\n")))
    assert table(cli(*one, "--prompts", "-").out).prompt.tolist() == ["stdin"]


def test_a_whole_file_that_is_none(cli: Cli, tmp_path: Path) -> None:
    def failed(code: int, *arguments: str) -> str:
        done = cli("sink-stats", "--whole-file", *arguments)
        assert done.code == code
        return " ".join(done.err.replace("│", " ").split())

    assert "--whole-file goes with --prompts FILE" in failed(2, "-p", "the cat")
    (tmp_path / "p.jsonl").write_text('{"text": "the cat sat"}\n')
    assert "'p.jsonl' is JSON Lines, a prompt a line; expected a text file" in failed(1, "--prompts", "p.jsonl")
    (tmp_path / "empty.txt").write_text("\n \n")
    assert "prompts file 'empty.txt': the text is only white space" in failed(1, "--prompts", "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\n\xe9")
    assert "prompts file 'latin.txt', line 2: byte 0xe9 is not UTF-8" in failed(1, "--prompts", "latin.txt")


def test_measures_that_are_named(cli: Cli) -> None:
    everything = table(cli("sink-stats", *PROMPT, "--by", "layer").out)
    for arguments in (["--measures", "row_max,entropy"], ["--measures", "row_max", "--measures", "entropy"]):
        some = table(cli("sink-stats", *PROMPT, "--by", "layer", *arguments).out)
        rest = ["n_prompts", "n_queries", "tokens", "first_row"]
        assert list(some) == ["model", "layer", "entropy", "row_max", *rest]
        pd.testing.assert_frame_equal(some, everything[list(some)], rtol=1e-4)


def test_the_help_names_every_measure(cli: Cli) -> None:
    assert sink_stats_command.MEASURES.split(", ") == [measure.name for measure in SINK_MEASURES]
    assert "perplexity" in cli("sink-stats", "--help").out


def test_intervals(cli: Cli, tiny_trio: Path) -> None:
    arguments = ("sink-stats", "-m", "baseline", *PROMPT, "--by", "layer", "--ci", ".8", "--resamples", "50")
    done = table(cli(*arguments, "--seed", "4").out)
    expected = sink_stats(
        "baseline", ["the cat sat on the mat", Prompt("prompt-2", "the dog")], by="layer", ci=0.8, seed=4,
        resamples=50, run=Run(checkpoints=str(tiny_trio)),
    )  # fmt: skip
    pd.testing.assert_frame_equal(done, expected, rtol=1e-6, check_dtype=False)
    assert done[["ci", "ci_seed", "ci_resamples"]].drop_duplicates().to_numpy().tolist() == [[0.8, 4, 50]]
    other = table(cli(*arguments).out)
    assert other.ci_seed.tolist() == [0, 0, 0]
    assert not other.equals(done)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--measures", "entropy,entrpy"], "no measure 'entrpy'; expected all, or some of first_token_mass,"),
        (["--ci", "95"], "ci is 95.0; expected a level between 0 and 1, such as .95"),
        (["--ci", "0"], "ci is 0.0; expected"),
        (["--ci", ".95", "--per-prompt"], "a row that is one prompt has no interval"),
        (["--ci", ".95", "--measures", "max_activation"], "ci is given, but max_activation has no interval"),
        (["--ci", ".95", "--seed", "-1"], "--seed"),
        (["--chunk", "0"], "--chunk"),
        (["--max-memory", "cpu=1GB"], "was given without a device map; expected both"),
        (["--offload-folder", "x"], "was given without a device map; expected both"),
        (["--device", "cpu", "--device-map", "auto"], "both device 'cpu' and device map 'auto' were given"),
    ],
)
def test_wrong_use(cli: Cli, arguments: list[str], said: str) -> None:
    done = cli("sink-stats", *PROMPT, *arguments)
    assert done.code == 2
    assert done.out == ""
    assert said in " ".join(done.err.replace("│", " ").split())


def test_a_chunk_changes_no_number(cli: Cli) -> None:
    whole = table(cli("sink-stats", *PROMPT).out)
    chunked = table(cli("sink-stats", *PROMPT, "--chunk", "3").out)
    pd.testing.assert_frame_equal(chunked, whole, rtol=1e-3)


def test_a_dash_is_stdout(cli: Cli, tmp_path: Path) -> None:
    assert cli("sink-stats", *PROMPT, "-o", "-").out == cli("sink-stats", *PROMPT).out
    assert list(tmp_path.iterdir()) == []


def test_a_suffix_of_no_format(cli: Cli, tmp_path: Path) -> None:
    done = cli("sink-stats", *PROMPT, "-o", "t.xlsx")
    assert done.code == 2
    assert "expected .csv, .json or .parquet" in " ".join(done.err.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_parquet_without_its_library(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gattn_viz.cli.table_output.find_spec", lambda name: None)
    done = cli("sink-stats", *PROMPT, "-o", "t.parquet")
    assert done.code == 1
    assert done.err == (
        "gattn-viz: error: parquet needs pyarrow, which is not installed; install it with: pip install pyarrow\n"
    )


def test_one_token_has_values_that_do_not_leave_out_the_first_query(cli: Cli) -> None:
    one = ("-m", "baseline", "-p", "the", "--bos", "never")
    some = table(cli("sink-stats", *one, "--measures", "sink_rate,row_max", "--by", "model").out)
    assert some[["sink_rate", "row_max", "tokens"]].to_numpy().tolist() == [[1, 1, 1]]
    for name in ("first_token_mass", "uniform_null"):
        done = cli("sink-stats", *one, "--measures", f"sink_rate,{name}")
        assert done.code == 1
        assert f"no query remains for {name}" in done.err
        assert "a longer prompt" in done.err


def test_a_bos_that_is_not_there_is_said_once_a_model(cli: Cli) -> None:
    hint = (
        "baseline: prompts start without <s>, its tokenizer's BOS token; some models have their sink there: "
        "compare --bos always"
    )
    assert cli("sink-stats", "-m", "baseline", "--bos", "never", *PROMPT).err.splitlines().count(hint) == 1
    for bos in ("auto", "always"):
        assert "BOS" not in cli("sink-stats", "-m", "baseline", "--bos", bos, *PROMPT).err


def test_chat_is_said_and_recorded(cli: Cli, tiny_trio: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_trio / "baseline", tmp_path / "instruct")
    (tmp_path / "instruct" / "chat_template.jinja").write_text("{{ bos_token }}Q: {{ messages[0].content }} A:")
    done = cli("sink-stats", "-m", "./instruct", "--chat", *PROMPT, "-o", "chat.csv")
    assert "instruct: each prompt is a user turn of its chat template, which puts '<s>Q: ' in front" in done.err
    assert "BOS" not in done.err
    recipe = json.loads(cli("recipe", "chat.csv").out)
    assert recipe["options"]["chat"] is True
    assert recipe["command_line"].endswith(" --chat")
    by_hand = cli("sink-stats", "-m", "./instruct", "-p", f"Q: {PROMPT[1]} A:", "-p", f"Q: {PROMPT[3]} A:").out
    assert (tmp_path / "chat.csv").read_text() == by_hand
    assert cli("recipe", "chat.csv", "--rerun", "-o", "again.csv", "--model", "instruct=instruct").code == 0

    refused = cli("maps", "-m", "baseline", "--chat", *PROMPT)
    assert refused.code == 1
    assert "this tokenizer has no chat template" in refused.err

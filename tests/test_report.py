from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from gattn_viz import tables
from gattn_viz.metrics.bootstrap import Bootstrap
from gattn_viz.metrics.measures import choose_measures
from gattn_viz.report import print_sink_report
from tests.test_tables import make_case, sums_of

GATED = [make_case(4, 1), make_case(20, 2)]
BASELINE = [make_case(4, 3, gate=[False] * 3), make_case(20, 4, gate=[False] * 3)]


def printed(bootstrap: Bootstrap | None = None, names: Sequence[str] | None = None) -> str:
    console = Console(file=io.StringIO(), width=150, force_terminal=False)
    measures = choose_measures(names or "all")
    sums = [
        sums_of(cases, model, bootstrap=bootstrap, measures=measures)
        for model, cases in (("gated", GATED), ("baseline", BASELINE))
    ]
    print_sink_report(tables.summarise(sums, "layer"), tables.summarise(sums, "model"), names, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_table_a_model_with_the_numbers_of_the_summary() -> None:
    gated, baseline = printed().split("baseline")
    for by in ("layer", "model"):
        for _, row in tables.summarise([sums_of(GATED)], by).iterrows():
            first = str(row.layer) if by == "layer" else "all"
            line = next(line for line in gated.splitlines() if line.split()[1:2] == [first])
            assert f"{row.first_token_mass:.3f}" in line
            assert f"{row.sink_rate:.2f}" in line
            assert f" {row.top_sink_position} " in line
            assert f"{row.entropy_ratio:.2f}" in line
            assert f"{row.gate_mean:.3f}" in line
            assert f"{row.max_activation:.1f}" in line
            assert "█" in line
    assert "gate mean" in gated
    assert "gate mean" not in baseline


def test_a_learned_sink_is_shown_of_the_layers_that_have_one() -> None:
    sums = [sums_of([make_case(9, 5, learned_sinks=[2, 3])]), sums_of([make_case(9, 5)], "b")]
    layers, models = tables.summarise(sums, "layer"), tables.summarise(sums, "model")
    console = Console(file=io.StringIO(), width=150, force_terminal=False)
    print_sink_report(layers, models, None, console)
    with_sink, without = console.file.getvalue().split("perplexity")[:2]  # type: ignore[attr-defined]
    assert "learned sink" in with_sink
    assert "learned sink" not in without
    mass = layers[layers.model == "a"].learned_sink_mass
    assert mass.isna().tolist() == [True, False, False]
    assert models.learned_sink_mass[0] == pytest.approx(mass[1:].mean())
    last_row = next(line for line in with_sink.splitlines() if " all " in line)
    assert f"{mass[1:].mean():.3f}" in last_row
    assert models.learned_sink_mass.isna().tolist() == [False, True]


def test_how_many_queries_see_the_first_token_is_said_where_not_all_do() -> None:
    sums = [sums_of([make_case(9, 5)]), sums_of([make_case(9, 5)], "b")]
    layers, models = tables.summarise(sums, "layer"), tables.summarise(sums, "model")

    def report() -> str:
        console = Console(file=io.StringIO(), width=150, force_terminal=False)
        print_sink_report(layers, models, None, console)
        return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]

    assert "sees first" not in report()
    assert "visible" not in report()
    layers.loc[1, "first_token_visible"], models.loc[0, "first_token_visible"] = 0.25, 0.75
    assert "sees first" in report()
    assert report().count("first token visible to 75% of queries") == 1


def test_what_the_numbers_stand_for_is_said() -> None:
    text = " ".join(printed().split())
    assert "mean over heads; first query left out; 2 prompts, 24 tokens, 22 queries; last row: mean" in text
    model = tables.summarise([sums_of(GATED)], "model").iloc[0]
    assert f"uniform null {model.uniform_null:.3f}; perplexity {model.perplexity:.2f}" in text
    assert "interval" not in text


def test_intervals_stand_beside_their_values() -> None:
    bootstrap = Bootstrap(0.9, resamples=20)
    text = printed(bootstrap)
    assert "in brackets 90% intervals over prompts" in " ".join(text.split())
    row = tables.summarise([sums_of(GATED, bootstrap=bootstrap)], "layer").iloc[1]
    value, low, high = (row[f"first_token_mass{end}"] for end in ("", "_ci_low", "_ci_high"))
    assert f"{value:.3f} [{low:.3f}, {high:.3f}]" in text
    assert f" {row.max_activation:.1f} " in text


def test_the_columns_that_are_named() -> None:
    text = " ".join(printed(names=["row_max", "perplexity"]).split())
    model = tables.summarise([sums_of(GATED)], "model").iloc[0]
    assert "row max" in text
    assert f"{model.row_max:.4g}" in text
    assert f"perplexity {model.perplexity:.2f}" in text
    for other in ("first-token mass", "entropy", "uniform null"):
        assert other not in text


def test_no_colour_codes_when_piped() -> None:
    assert "\x1b" not in printed()

"""What a reader must know to trust a figure of `pipeline.paper`, written from what was measured.

Which models, which prompts and how long, the first-row policy, over what a value is a mean, and what would be seen
if nothing were to be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pandas as pd

from gattn_viz.pipeline.paper import ModelRun, PaperData

LEARNED_SINKS = (
    "Where a learned sink takes a share of each query's probability, rows sum below 1: that share, mean over all "
    "queries, stands above the map."
)

DEPTH = "The x axis is relative depth, (layer - 1)/(layers - 1): 0 is a model's first layer, 1 its last."

MOST_IDS = 3
"""Ids of prompts that are written out."""


def caption(name: str, data: PaperData) -> str:
    """The caption of one of `data`'s figures, without its number: one paragraph of plain text."""
    frame = data.frames[name]
    shown = _shown(frame, data)
    left_out = [run.model for run in data.models if run not in shown]
    parts = [_BODIES[name](frame, data), _models(shown)]
    if "depth" in frame:
        parts.insert(1, DEPTH)
    if left_out:
        parts.append(f"Without a gate, and so left out: {', '.join(left_out)}.")
    if name != "attention_maps":
        parts.append(_prompts(shown))
    return " ".join(parts)


def captions(data: PaperData, numbers: dict[str, str]) -> str:
    """All of them as Markdown.

    Args:
        numbers: where each figure is in the paper, such as `Fig. 3`; `-` is nowhere.
    """
    places = {name: "" if number == "-" else f" ({number} of the paper)" for name, number in numbers.items()}
    sections = [f"## {name}{places[name]}\n\n{caption(name, data)}\n" for name in data.frames]
    return "# Captions\n\n" + "\n".join(sections)


def _shown(frame: pd.DataFrame, data: PaperData) -> list[ModelRun]:
    ours = frame[frame["source"] == "this run"] if "source" in frame else frame
    return [run for run in data.models if run.model in set(ours["model"])]


def _models(runs: Sequence[ModelRun]) -> str:
    gates = "".join(f" Gate of {run.model}: {run.gate}." for run in runs if run.gate is not None)
    return _which_models(runs) + gates


def _which_models(runs: Sequence[ModelRun]) -> str:
    kinds = dict.fromkeys(f"{run.layers} layers of {run.heads} heads, {run.dtype} on {run.device}" for run in runs)
    if len(kinds) == 1:
        return f"Models: {'; '.join(f'{run.model} ({run.checkpoint})' for run in runs)}; {next(iter(kinds))}."
    each = [
        f"{run.model} ({run.checkpoint}; {run.layers} layers of {run.heads} heads, {run.dtype} on {run.device})"
        for run in runs
    ]
    return f"Models: {'; '.join(each)}."


def _prompts(runs: Sequence[ModelRun]) -> str:
    ids = runs[0].prompts
    names = ", ".join(ids[:MOST_IDS]) + (", ..." if len(ids) > MOST_IDS else "")
    lengths = {run.lengths for run in runs}
    if len(lengths) == 1:
        return f"{_count(len(ids), 'prompt')}{_chat(runs[0])} ({names}), {_tokens(runs[0].lengths)}."
    each = [f"{run.model} {_tokens(run.lengths)}" for run in runs]
    return (
        f"{_count(len(ids), 'prompt')}{_chat(runs[0])} ({names}), in each model's own tokens: {'; '.join(each)}."
    )


def _chat(run: ModelRun) -> str:
    return " in the chat template" if run.chat else ""


def _tokens(lengths: Sequence[int]) -> str:
    shortest, longest = min(lengths), max(lengths)
    span = f"T = {shortest:,}" if shortest == longest else f"T = {shortest:,} to {longest:,}"
    return f"{span}, {sum(lengths):,} tokens together" if len(lengths) > 1 else span


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _first_row(data: PaperData) -> str:
    if data.first_row == "exclude":
        return "the first query, which sees itself alone, is left out"
    return "the first query, which sees itself alone, is included"


def _null(frame: pd.DataFrame) -> str:
    nulls = {
        model: " or ".join(dict.fromkeys(f"{value:.3g}" for value in rows["uniform_null"].dropna()))
        for model, rows in _by_model(frame)
    }
    return f"Uniform attention would give {of_each(nulls)} on the same prompts"


def _windows(frame: pd.DataFrame) -> str:
    """In which layers a window or a chunk hides the first token from some queries."""
    if "first_token_visible" not in frame:
        return ""
    hidden = frame[frame["first_token_visible"] < 1]
    parts = [
        f"to {share:.0%} of the queries in layer{'s' * (len(rows) > 1)} {_numbers(rows['layer'])} of {model}"
        for (model, share), rows in hidden.groupby(["model", "first_token_visible"], sort=False)
    ]
    return f" The first token is visible {', '.join(parts)}."


def _mass(data: PaperData) -> str:
    return f"a layer is the mean over its heads and over the queries of all prompts; {_first_row(data)}"


def _first_token_by_layer(frame: pd.DataFrame, data: PaperData) -> str:
    return f"Attention to the first token by layer: {_mass(data)}. {_null(frame)} (dotted).{_windows(frame)}"


def _attention_maps(frame: pd.DataFrame, data: PaperData) -> str:
    size = int(frame["cell"].max())
    tokens = {model: f"{rows['tokens'].iloc[0]:,}" for model, rows in _by_model(frame)}
    layers = {model: _numbers(rows["layer"]) for model, rows in _by_model(frame)}
    which = set(layers.values())
    asked = which.pop() if len(which) == 1 else "; ".join(f"{model} {text}" for model, text in layers.items())
    pooled = f"; a cell is the largest of up to {size} x {size} probabilities" if size > 1 else ""
    sinks = f" {LEARNED_SINKS}" if "learned_sink_mass" in frame else ""
    return (
        f"Attention probabilities of queries (rows) to keys (columns), mean over heads{pooled}. Layers {asked}. "
        f"Prompt {frame['prompt'].iloc[0]}{_chat(data.models[0])}, T = {of_each(tokens)}; "
        "the first query too. "
        f"One linear colour range, 0 to {frame['probability'].max():.3g}; keys after the query are blank."
        f"{sinks}"
    )


def _gate_distribution(frame: pd.DataFrame, data: PaperData) -> str:
    counts = {model: f"{int(rows['count'].sum()):,}" for model, rows in _by_model(frame)}
    width = float((frame["high"] - frame["low"]).iloc[0])
    return (
        f"Gate scores of all layers, heads and tokens (of an elementwise gate all channels too) in bins of "
        f"{width:g}, counts on a logarithmic scale; empty bins are gaps. Scores: {_listed(counts)}."
    )


def _gate_distribution_by_layer(frame: pd.DataFrame, data: PaperData) -> str:
    width = float((frame["high"] - frame["low"]).iloc[0])
    scores = {
        model: f"{int(rows.groupby('layer')['count'].sum().iloc[0]):,} a layer" for model, rows in _by_model(frame)
    }
    return (
        "Gate scores of each layer's heads and tokens (of an elementwise gate all channels too) in bins of "
        f"{width:g}; the colour is their count, on one logarithmic scale; empty bins are blank. Scores: "
        f"{_listed(scores)}."
    )


def _output_magnitude(frame: pd.DataFrame, data: PaperData) -> str:
    without = [run.model for run in data.models if not run.gated]
    note = f" No gate: {', '.join(without)}, on the left only." if without else ""
    return (
        "Mean absolute value of the attention output's elements by layer, before the gate and after it (what the "
        f"output projection receives), over tokens, channels and heads, on one logarithmic scale.{note}"
    )


def _output_sparsity(frame: pd.DataFrame, data: PaperData) -> str:
    thresholds = " and ".join(f"{threshold:g}" for threshold in dict.fromkeys(frame["threshold"]))
    without = [run.model for run in data.models if not run.gated]
    note = f" No gate: {', '.join(without)}, on the left only." if without else ""
    return (
        f"Share of the attention output's elements with an absolute value below {thresholds} by layer: before the "
        "gate, after it, and before it times the mean score of the head, which is what a gate that does not "
        f"depend on the input would give. Over tokens and channels, mean over heads.{note}"
    )


def _sinks_and_activations(frame: pd.DataFrame, data: PaperData) -> str:
    largest = {model: f"{rows['max_activation'].max():.4g}" for model, rows in _by_model(frame)}
    return (
        f"Left, attention to the first token by layer: {_mass(data)}. {_null(frame)} (dotted)."
        f"{_windows(frame)} Right, the largest "
        "absolute activation of the residual stream after the layer, over all prompts, tokens and channels, on a "
        f"logarithmic scale; the largest of all layers: {_listed(largest)}."
    )


def _gate_by_layer(frame: pd.DataFrame, data: PaperData) -> str:
    means = {model: f"{rows['gate_mean'].mean():.3g}" for model, rows in _by_model(frame)}
    return (
        "Mean gate score by layer, over tokens, heads and (of an elementwise gate) channels. Mean over layers: "
        f"{_listed(means)}."
    )


def _summary(frame: pd.DataFrame, data: PaperData) -> str:
    ours = frame[frame["source"] == "this run"]
    return (
        "Mean gate score; M-Act, the largest activation of each layer, mean over layers; F-Attn, attention to the "
        f"first token, mean over layers ({_first_row(data)}); perplexity. {_null(ours)}. The paper's rows are of "
        "other models (15A2B mixture of experts, weights not released) on other data, and do not compare in value."
    )


def _by_model(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for model, rows in frame.groupby("model", sort=False):
        yield str(model), rows


def _listed(by_model: dict[str, str]) -> str:
    return ", ".join(f"{model} {value}" for model, value in by_model.items())


def of_each(by_model: dict[str, str]) -> str:
    """What all models have in common, or each model's own: `28 (a), 30 (b)`."""
    alike = len(set(by_model.values())) == 1
    return next(iter(by_model.values())) if alike else ", ".join(f"{v} ({name})" for name, v in by_model.items())


def _numbers(layers: pd.Series) -> str:
    return ", ".join(map(str, dict.fromkeys(layers)))


_BODIES: dict[str, Callable[[pd.DataFrame, PaperData], str]] = {
    "first_token_by_layer": _first_token_by_layer,
    "attention_maps": _attention_maps,
    "gate_distribution": _gate_distribution,
    "gate_distribution_by_layer": _gate_distribution_by_layer,
    "output_magnitude": _output_magnitude,
    "output_sparsity": _output_sparsity,
    "sinks_and_activations": _sinks_and_activations,
    "gate_by_layer": _gate_by_layer,
    "summary": _summary,
}

"""Models beside each other on the same prompts: what they cost, and what their attention does.

    table, layers = compare(["baseline", "gate_headwise"])

All but one are set against that one, the baseline. Statistics get a paired bootstrap interval of the difference:
both models have the same resamples of the prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
import torch

from gattn_viz import tables
from gattn_viz.capture.anatomy import anatomy
from gattn_viz.capture.layers import backbone
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.bootstrap import Bootstrap
from gattn_viz.metrics.compared import COMPARED_MEASURES, QUANTITIES, CompareOptions
from gattn_viz.metrics.over_prompts import ModelSums
from gattn_viz.models.costs import Costs, count_costs
from gattn_viz.models.loading import LoadedModel
from gattn_viz.models.names import VARIANTS, ModelSource
from gattn_viz.pipeline.peak_memory import peak_memory
from gattn_viz.pipeline.run import OnModel, Progress, Run, find_models, log
from gattn_viz.pipeline.stats import Wanted, measure
from gattn_viz.pipeline.timing import Call, Spread, ratio, spread, time_rounds
from gattn_viz.prompts import EncodedPrompt, Prompt

COLUMNS = ["model", "quantity", "value", "q1", "q3", "unit", "difference", "ci_low", "ci_high", "note"]


class Comparison(NamedTuple):
    """What `compare` finds.

    Attributes:
        table: a row for each model and quantity: `value` in `unit`, its quartiles `q1` and `q3` where it was
            measured several times, its `difference` to the baseline's and the ends of that one's interval, and a
            `note` on how it was found or why it is empty. The quantities are those of
            `gattn_viz.metrics.compared.QUANTITIES`. `attrs` say how attention was computed, and the baseline.
        layers: the measures of each model's layers, as `sink_stats(by="layer", ci=...)`.
    """

    table: pd.DataFrame
    layers: pd.DataFrame


def compare(
    models: Sequence[str] = VARIANTS,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    baseline: str | None = None,
    ci: float = 0.95,
    seed: int = 0,
    resamples: int = 1000,
    options: CompareOptions = CompareOptions(),
    rounds: int = 5,
    time_tokens: int | None = None,
    x: tables.X = "layer",
    run: Run = Run(),
    progress: Progress | None = None,
    on_model: OnModel | None = None,
) -> Comparison:
    """Set models against a baseline.

    Args:
        models: two or more variants, directories or Hub ids.
        prompts: texts or `Prompt`s; None is the bundled set.
        baseline: which of `models`; None is the first.
        ci: the level of the intervals.
        seed, resamples: of the bootstrap.
        options: first-row policy, sink threshold and what a shut gate is.
        rounds: of timing. All models must be in memory together for it; 0 times nothing, and needs one at a time.
        time_tokens: T of the prompt that is timed and whose multiply-adds are counted: each model's longest,
            repeated or cut. None is the baseline's longest.
        x: `depth` gives `layers` a column of relative depth, over which `draw_first_token` then draws.
        on_model: see `OnModel`.

    Raises:
        GattnVizError: fewer than two models, a baseline that is none of them, `time_tokens` that a model cannot
            take, or what `sink_stats` raises.
    """
    reference = _baseline(baseline, find_models(models, run))
    tables.check_x(x)
    if rounds < 0:
        raise GattnVizError(f"rounds is {rounds}; expected 1 or more, or 0 to time nothing")
    if time_tokens is not None and time_tokens < 1:
        raise GattnVizError(f"time_tokens is {time_tokens}; expected 1 or more")
    wanted = Wanted(COMPARED_MEASURES, "model", bootstrap=Bootstrap(ci, seed, resamples), options=options)
    seen: dict[str, _Seen] = {}

    def note(label: str, loaded: LoadedModel, encoded: Sequence[EncodedPrompt]) -> None:
        config = loaded.config.get_text_config()
        seen[label] = _Seen(
            count_costs(loaded.model),
            len(anatomy(loaded.model).layers),
            [prompt.ids for prompt in encoded],
            getattr(config, "max_position_embeddings", None),
            loaded if rounds else None,
        )
        if on_model is not None:
            on_model(label, loaded, encoded)

    values, sums = measure(models, prompts, wanted, run, progress, note)
    tokens = time_tokens or max(map(len, seen[reference].ids))
    _check_positions(seen, tokens)
    other_tokens = {label for label, one in seen.items() if one.ids != seen[reference].ids}
    if other_tokens:
        log.warning(
            "%s cut the prompts into other tokens than %s: perplexity is per token, and so not comparable; "
            "neither are measures of prompts whose T differ",
            " and ".join(sorted(other_tokens)),
            reference,
        )
    found = {label: _counted(one, tokens) for label, one in seen.items()}
    if rounds:
        for label, rows in _measured(seen, reference, tokens, rounds, progress).items():
            found[label] |= rows
    for label, rows in _statistics(values, sums, reference, other_tokens).items():
        found[label] |= rows
    table = _tidy(found, reference)
    layers = tables.summarise(sums, "layer")
    if x == "depth":
        layers = tables.with_depth(layers, {label: one.layers for label, one in seen.items()})
    for frame in (table, layers):
        frame.attrs |= {**values.attrs, "baseline": reference}
    return Comparison(table, layers)


@dataclass(frozen=True)
class _Seen:
    """What is kept of a model once its prompts have run; the model itself only if it is to be timed."""

    costs: Costs
    layers: int
    ids: list[list[int]]
    max_positions: int | None
    loaded: LoadedModel | None

    def timed_ids(self, tokens: int) -> list[int]:
        """The longest prompt, repeated or cut to so many tokens."""
        longest = max(self.ids, key=len)
        return (longest * math.ceil(tokens / len(longest)))[:tokens]


@dataclass(frozen=True)
class _Value:
    """One cell of the table. `compared`: whether its difference to the baseline's says something."""

    value: float | None
    note: str = ""
    compared: bool = True
    quartiles: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None

    @classmethod
    def of(cls, measured: Spread, note: str) -> _Value:
        return cls(measured.median, note, compared=False, quartiles=(measured.q1, measured.q3))


Values = dict[str, _Value]
"""By the name of the quantity."""


def _baseline(name: str | None, sources: Mapping[str, ModelSource]) -> str:
    """The label of the baseline, which may be named by its label or as it was written."""
    labels = list(sources)
    if len(labels) < 2:
        raise GattnVizError(f"one model was given, {labels[0]}; expected two or more to compare: add another")
    if name is None or name in labels:
        return name or labels[0]
    written = [label for label, source in sources.items() if source.name == name]
    if not written:
        raise GattnVizError(f"the baseline {name!r} is none of the models; expected one of {', '.join(labels)}")
    return written[0]


def _check_positions(seen: Mapping[str, _Seen], tokens: int) -> None:
    for label, one in seen.items():
        if one.max_positions is not None and tokens > one.max_positions:
            raise GattnVizError(
                f"{tokens} tokens are to be timed, but {label} takes {one.max_positions}; expected at most that: "
                "lower --time-tokens"
            )


def _counted(one: _Seen, tokens: int) -> Values:
    costs = one.costs
    no_gate = "" if costs.gate_parameters is not None else "no gate is known of this family"
    share = None if costs.gate_parameters is None else costs.gate_parameters / costs.parameters
    return {
        "tokens": _Value(sum(map(len, one.ids)), f"{len(one.ids)} prompts", compared=False),
        "longest_prompt": _Value(max(map(len, one.ids)), compared=False),
        "parameters": _Value(costs.parameters),
        "gate_parameters": _Value(costs.gate_parameters, no_gate),
        "gate_share": _Value(share, no_gate, compared=False),
        "multiply_adds": _Value(costs.multiply_adds(tokens), costs.uncounted or f"T = {tokens}"),
        "gate_memory": _Value(costs.gate_bytes, no_gate),
    }


def _measured(
    seen: Mapping[str, _Seen], reference: str, tokens: int, rounds: int, progress: Progress | None
) -> dict[str, Values]:
    """Time and memory of a plain forward pass of each model. They are in memory together."""
    loaded = {label: one.loaded for label, one in seen.items() if one.loaded is not None}
    log.info("timing %d rounds of %d models, in memory together, T = %d", rounds, len(loaded), tokens)
    calls = {label: _forward(one, seen[label].timed_ids(tokens)) for label, one in loaded.items()}

    def on_round(done: int) -> None:
        if progress is not None:
            progress("timing", done, rounds)

    seconds = time_rounds(calls, rounds, on_round=on_round)
    memory = {label: peak_memory(calls[label], one.device) for label, one in loaded.items()}
    of_reference = memory[reference]
    found: dict[str, Values] = {}
    for label, one in loaded.items():
        note = _conditions(one, tokens)
        times = f"{rounds} rounds, {note}"
        mib = memory[label]
        of_memory = note if mib is not None else f"not known on {one.device.type}"
        found[label] = {
            "forward_time": _Value.of(spread(seconds[label]), times),
            "forward_time_ratio": _Value.of(ratio(seconds[label], seconds[reference]), times),
            "peak_memory": _Value(mib, of_memory, compared=False),
            "peak_memory_ratio": _Value(_ratio(mib, of_reference), of_memory, compared=False),
        }
    return found


def _forward(loaded: LoadedModel, ids: Sequence[int]) -> Call:
    """A plain forward pass of the model's layers, done when it returns."""
    base = backbone(loaded.model)
    input_ids = torch.tensor([ids], device=loaded.device)
    wait = torch.cuda.synchronize if loaded.device.type == "cuda" else None

    def call() -> Any:
        with torch.no_grad():
            result = base(input_ids=input_ids, use_cache=False)
        if wait is not None:
            wait()
        return result

    return call


def _ratio(value: float | None, baseline: float | None) -> float | None:
    return value / baseline if value is not None and baseline else None


def _conditions(loaded: LoadedModel, tokens: int) -> str:
    dtype, attention = str(loaded.dtype).removeprefix("torch."), loaded.model.config._attn_implementation
    threads = torch.get_num_threads()
    of_threads = f", {threads} thread{'s' * (threads > 1)}" if loaded.device.type == "cpu" else ""
    return f"T = {tokens}, {dtype} on {loaded.device.type}{of_threads}, {attention} attention"


def _statistics(
    values: pd.DataFrame, sums: Sequence[ModelSums], reference: str, other_tokens: set[str]
) -> dict[str, Values]:
    by_label = {one.model: one for one in sums}
    found: dict[str, Values] = {}
    for row in values.to_dict("records"):
        label = row["model"]
        found[label] = {}
        for one in COMPARED_MEASURES:
            compared = one.name != "uniform_null" and not (one.name == "perplexity" and label in other_tokens)
            interval = None
            has_interval = one.has_interval or one.combine == "largest"
            if has_interval and compared and label != reference:
                interval = tables.paired_interval(by_label[label], by_label[reference], one)
            note = _note(one.name, by_label[label].options, compared)  # type: ignore[arg-type]
            if label in other_tokens and compared:
                note += f"{'; ' * bool(note)}other tokens than the baseline's, and another T"
            found[label][one.name] = _Value(row[one.name], note, compared, interval=interval)
    return found


def _note(measure: str, options: CompareOptions, compared: bool) -> str:
    """What is to be known of a measure beside its definition."""
    return {
        "first_token_mass": f"first query {options.first_row}d",
        "uniform_null": f"first query {options.first_row}d",
        "sink_rate": f"above {options.sink_threshold:g}",
        "gate_below": f"below {options.below:g}",
        "max_activation": "the largest over prompts, which that of a resample never exceeds: a rough interval",
        "perplexity": "" if compared else "other tokens than the baseline's: not comparable",
    }.get(measure, "")


def _tidy(found: Mapping[str, Values], reference: str) -> pd.DataFrame:
    """A row for each model and quantity, in the order of `QUANTITIES`."""
    rows = []
    for label, values in found.items():
        for quantity in QUANTITIES:
            if quantity.name not in values:
                continue
            one, of_reference = values[quantity.name], found[reference][quantity.name]
            difference = None
            if label != reference and one.compared and None not in (one.value, of_reference.value):
                difference = one.value - of_reference.value  # type: ignore[operator]
            rows.append(
                {
                    "model": label,
                    "quantity": quantity.name,
                    "value": one.value,
                    "unit": quantity.unit,
                    "difference": difference,
                    "note": one.note,
                    **dict(zip(("q1", "q3"), one.quartiles or (None, None), strict=True)),
                    **dict(zip(("ci_low", "ci_high"), one.interval or (None, None), strict=True)),
                }
            )
    numbers = ["value", "q1", "q3", "difference", "ci_low", "ci_high"]
    return pd.DataFrame(rows, columns=COLUMNS).astype(dict.fromkeys(numbers, float))

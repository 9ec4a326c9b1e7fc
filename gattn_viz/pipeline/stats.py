"""Statistics of models over prompts: those of attention sinks, and what those of gates share with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gattn_viz import tables
from gattn_viz.capture.anatomy import anatomy
from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.run import stream
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.bootstrap import Bootstrap
from gattn_viz.metrics.gate_measures import GateOptions
from gattn_viz.metrics.layer import LayerSums, Need
from gattn_viz.metrics.measures import SINK_MEASURES, Measure, Options, choose_measures, queries_of_key
from gattn_viz.metrics.over_prompts import (
    ModelSums,
    Pools,
    Rows,
    SomeOptions,
    join_layers,
    layer_rows,
    poolable,
)
from gattn_viz.models.loading import LoadedModel
from gattn_viz.models.names import VARIANTS
from gattn_viz.pipeline.other_sinks import other_sink
from gattn_viz.pipeline.run import OnModel, Progress, Run, check_finite, each_model, find_models, log, no_gate
from gattn_viz.prompts import EncodedPrompt, Prompt

FEW = 10
"""Intervals of fewer prompts are too narrow to be shown without a word."""

IN_WORDS = {
    "fused": "fused kernel",
    "blocks": "blocks of rows, float32",
    "compiled": "blocks of rows, float32, compiled by numba",
    "eager": "transformers' eager weights",
}
"""How attention was computed."""


def sink_stats(
    models: Sequence[str] = VARIANTS,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    measures: Sequence[str] | str = "all",
    by: tables.By = "head",
    per_prompt: bool = False,
    ci: float | None = None,
    seed: int = 0,
    resamples: int = 1000,
    options: Options = Options(),
    run: Run = Run(),
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Attention-sink measures of each model, over the same prompts.

    Args:
        models: variants, directories or Hub ids.
        prompts: texts or `Prompt`s; None is the bundled set.
        measures: names in `gattn_viz.metrics.measures.SINK_MEASURES`, or `all`. Only what they need is computed.
        by: what a row stands for: a head, a layer (mean over heads) or a model (mean over layers).
        per_prompt: one row a prompt too.
        ci: the level of confidence intervals, such as .95: a percentile bootstrap over prompts. None is none.
        seed, resamples: of the bootstrap. All models get the same resamples.
        options: first-row policy and sink threshold.

    Returns:
        a column for each measure, and with `ci` also `<measure>_ci_low` and `<measure>_ci_high` for those that are
        means. `attrs["attention_path"]` says how each model's attention was computed, see `LayerCapture.paths`.
        `attrs["chat"]` whether the prompts were in the chat template.

    Raises:
        GattnVizError: a model or prompt that cannot be used, a prompt too short to have a value, options that do
            not go together.
    """
    bootstrap = None if ci is None else Bootstrap(ci, seed, resamples)
    wanted = Wanted(choose_measures(measures), by, per_prompt, bootstrap, options)
    return measure(models, prompts, wanted, run, progress)[0]


@dataclass(frozen=True)
class Wanted:
    """What is measured, and what a row of the table stands for; see `sink_stats` and `gate_stats`.

    Attributes:
        gate_required: whether it is an error if no model has a gate.
    """

    measures: tuple[Measure, ...] = SINK_MEASURES
    by: tables.By = "head"
    per_prompt: bool = False
    bootstrap: Bootstrap | None = None
    options: SomeOptions = Options()
    gate_required: bool = False

    def __post_init__(self) -> None:
        if self.by not in get_args(tables.By):
            raise GattnVizError(f"by is {self.by!r}; expected {', '.join(get_args(tables.By))}")
        if self.bootstrap is not None and self.per_prompt:
            raise GattnVizError(
                "ci and per-prompt are both given, but a row that is one prompt has no interval; expected one of "
                "the two: leave the other out"
            )
        if self.bootstrap is not None and not any(measure.has_interval for measure in self.measures):
            names = ", ".join(measure.name for measure in self.measures)
            raise GattnVizError(f"ci is given, but {names} has no interval; expected a measure that is a mean")

    @property
    def request(self) -> Request:
        """What has to be captured."""
        needs: set[Need] = {measure.needs for measure in self.measures if measure.needs is not None}
        # a layer and its heads show only where something is taken out of it
        request = Request(
            needs=frozenset(needs or {"first_token"}),
            loss=any(measure.combine == "predictions" for measure in self.measures),
        )
        if isinstance(self.options, GateOptions):
            return replace(request, gate_thresholds=(self.options.below, self.options.above))
        return request

    @property
    def pools(self) -> bool:
        """Whether a measure needs the sums of all prompts together."""
        return any(measure.combine == "pooled" for measure in self.measures)


def measure(
    models: Sequence[str],
    prompts: Sequence[Prompt | str] | None,
    wanted: Wanted,
    run: Run,
    progress: Progress | None,
    on_model: OnModel | None = None,
) -> tuple[pd.DataFrame, list[ModelSums]]:
    """The table that is wanted, and the sums over all prompts of each model, from which others can be made."""
    results: list[_Measured] = []
    refusals: list[str | None] = []
    for label, loaded, encoded in each_model(models, prompts, run, on_model):
        parts = anatomy(loaded.model)
        refusals += [] if parts.gates else [parts.refusal]
        if wanted.gate_required and len(refusals) == len(models):
            raise no_gate(find_models(models, run), refusals)
        _check_long_enough(encoded, wanted)
        if wanted.bootstrap is not None and not results:
            _warn_of_few(len(encoded))
        results.append(_measure_model(label, loaded, encoded, wanted, run, progress))
        del loaded  # before the next one is loaded

    sums = [result.sums for result in results]
    if wanted.per_prompt:
        table = tables.to_frame([rows for result in results for rows in result.by_prompt])
    else:
        table = tables.summarise(sums, wanted.by)
    table.attrs["attention_path"] = {result.sums.model: result.paths for result in results}
    table.attrs["chat"] = run.chat
    return table, sums


@dataclass(frozen=True)
class _Measured:
    """One model's sums, and a table's rows for each prompt if prompts are kept apart."""

    sums: ModelSums
    by_prompt: list[Rows]
    paths: list[str]


def _measure_model(
    label: str,
    loaded: LoadedModel,
    encoded: Sequence[EncodedPrompt],
    wanted: Wanted,
    run: Run,
    progress: Progress | None,
) -> _Measured:
    """Run the prompts; each is reduced to its rows layer by layer, added up when it is complete, and forgotten."""
    request = wanted.request
    steps = len(encoded) * len(anatomy(loaded.model).layers)
    done = 0
    paths: set[str] = set()
    sees_first: dict[int, tuple[float, int]] = {}  # of each layer: how many queries see the first token, and all
    running: dict[int, list[Rows]] = {}  # of the prompts that are being run, the layers so far
    pools: dict[int, Pools] = {}  # the same, of what adds up over prompts
    by_prompt: dict[int, Rows] = {}
    total: ModelSums | None = None

    def no_prompt(rows: Rows) -> ModelSums:
        heads = rows["layer"], rows["head"]
        return ModelSums(label, wanted.measures, wanted.options, *heads, wanted.bootstrap, len(encoded))

    def on_layer(prompt: int, layer: LayerCapture) -> None:
        nonlocal done
        assert layer.sums is not None
        check_finite(_sum_of_all(layer.sums, request), layer.layer, label, encoded[prompt].prompt.id)
        rows = layer_rows(layer.layer, layer.sums, wanted.measures, wanted.options)
        running.setdefault(prompt, []).append(rows)
        if wanted.pools:
            pools.setdefault(prompt, {})[layer.layer] = poolable(layer.sums)
        paths.update(layer.paths)
        seen, queries = sees_first.get(layer.layer, (0, 0))
        counted = wanted.options.queries(layer.sums.tokens)
        left_out = layer.sums.tokens - counted
        sees_first[layer.layer] = seen + queries_of_key(layer.sums)[0] - left_out, queries + counted
        done += 1
        if progress is not None:
            progress(label, done, steps)

    def on_prompt(prompt: int, loss: float | None) -> None:
        nonlocal total
        _check_loss(loss, label, encoded[prompt])
        tokens, rows, of_layers = (
            len(encoded[prompt].ids),
            join_layers(running.pop(prompt)),
            pools.pop(prompt, None),
        )
        if wanted.per_prompt:
            alone = no_prompt(rows)
            alone.add(prompt, tokens, rows, loss, of_layers)
            by_prompt[prompt] = tables.table_rows(alone, wanted.by, encoded[prompt].prompt.id)
        total = total or no_prompt(rows)
        total.add(prompt, tokens, rows, loss, of_layers)

    ids = [prompt.ids for prompt in encoded]
    stream(loaded.model, ids, request, on_layer, on_prompt, batch_size=run.batch_size, chunk=run.chunk)
    assert total is not None
    _say_of_windows(label, sees_first)
    log.info("%s attention: %s", label, " and ".join(IN_WORDS[path] for path in sorted(paths)))
    sink = other_sink(total, encoded, loaded.tokenizer)
    if sink is not None:
        log.info("%s: %s", label, sink.in_words())
    return _Measured(total, [by_prompt[prompt] for prompt in sorted(by_prompt)], sorted(paths))


def _say_of_windows(label: str, sees_first: Mapping[int, tuple[float, int]]) -> None:
    shares = [f"{seen / queries:.0%}" for seen, queries in sees_first.values() if seen < queries]
    if shares:
        log.info(
            "%s: in %d of %d layers a window or chunk lets only %s of the queries see the first token",
            label,
            len(shares),
            len(sees_first),
            " or ".join(dict.fromkeys(shares)),
        )


def _sum_of_all(sums: LayerSums, request: Request) -> float:
    """A number that is finite only if all is that was taken out of a layer."""
    activation = sums.max_activation if "residual" in request.needs else 0.0
    return activation + sum(float(array.sum()) for array in _arrays(sums))


def _arrays(sums: Any) -> Iterator[NDArray[Any]]:
    """Those of a dataclass, and of the dataclasses in it."""
    for field in fields(sums):
        value = getattr(sums, field.name)
        if isinstance(value, np.ndarray):
            yield value
        elif is_dataclass(value):
            yield from _arrays(value)


def _check_loss(loss: float | None, label: str, prompt: EncodedPrompt) -> None:
    if loss is not None and not np.isfinite(loss):
        raise GattnVizError(
            f"the loss of {label} on prompt {prompt.prompt.id!r} is {loss}; expected a finite number: try --dtype "
            "float32, or check the weights"
        )


def _warn_of_few(prompts: int) -> None:
    """The percentile bootstrap takes the prompts' own spread for the truth, which that of few is below."""
    if prompts == 1:
        log.warning("there is one prompt only, which says nothing about chance: the intervals are empty")
    elif prompts < FEW:
        log.warning(
            "there are %d prompts only: the intervals of fewer than %d are too narrow (of 8 prompts, one of 90%% "
            "covers some 84%%)",
            prompts,
            FEW,
        )


def _check_long_enough(encoded: Sequence[EncodedPrompt], wanted: Wanted) -> None:
    """Without its first row a one-token prompt has no query left to take a mean over."""
    by_queries = [measure.name for measure in wanted.measures if measure.combine == "queries"]
    for prompt in encoded:
        if by_queries and wanted.options.queries(len(prompt.ids)) < 1:
            longer = "a larger --max-tokens" if prompt.is_cut else "a longer prompt"
            raise GattnVizError(
                f"prompt {prompt.prompt.id!r} has one token, and the first query is left out: no query remains "
                f"for {' and '.join(by_queries)}; expected at least 2 tokens: use {longer}, --first-row "
                "include, or other --measures"
            )

"""Gate statistics of models over prompts, and the tokens that open and shut each head's gate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from gattn_viz import tables
from gattn_viz.capture.anatomy import Anatomy, anatomy
from gattn_viz.capture.checks import check_request
from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.run import stream
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.bootstrap import Bootstrap
from gattn_viz.metrics.extremes import Extremes
from gattn_viz.metrics.gate_measures import GATE_MEASURES, WITHOUT_GATE, GateOptions
from gattn_viz.metrics.measures import Measure, choose_measures
from gattn_viz.models.checkpoint_config import load_config
from gattn_viz.models.configuration import is_without_gate
from gattn_viz.models.loading import LoadedModel
from gattn_viz.models.names import VARIANTS
from gattn_viz.pipeline.run import OnModel, Progress, Run, check_finite, each_model, find_models, log, no_gate
from gattn_viz.pipeline.stats import Wanted, measure
from gattn_viz.prompts import EncodedPrompt, Prompt
from gattn_viz.tokens import SPACE, token_labels

CONTEXT = (8, 3)
"""Tokens shown before and after one."""

COLUMNS = ["model", "prompt", "layer", "head", "end", "rank", "position", "token", "score", "context"]


def gate_stats(
    models: Sequence[str] = VARIANTS,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    measures: Sequence[str] | str = "all",
    by: tables.By = "head",
    per_prompt: bool = False,
    ci: float | None = None,
    seed: int = 0,
    resamples: int = 1000,
    options: GateOptions = GateOptions(),
    run: Run = Run(),
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Measures of the gate, and of the attention output before and after it, over the same prompts for each model.

    Args:
        measures: names in `gattn_viz.metrics.gate_measures.GATE_MEASURES`, or `all`. Only what they need is
            computed.
        options: the thresholds of `gate_below`, `gate_above` and `gate_channels_shut`.
        models, prompts, by, per_prompt, ci, seed, resamples, run: see `sink_stats`. Of a layer, a quantile is the
            mean of its heads' quantiles, as all else is.

    Returns:
        a column for each measure; with `ci` also `<measure>_ci_low` and `<measure>_ci_high`, but for those that
        pool the prompts: the deviation, the quantiles, the channels shut and `output_scaled_below_*`. What a model
        without a gate lacks is NaN.

    Raises:
        GattnVizError: no model has a gate and a measure needs one, a model or prompt cannot be used, options do
            not go together.
    """
    bootstrap = None if ci is None else Bootstrap(ci, seed, resamples)
    chosen = choose_measures(measures, GATE_MEASURES)
    wanted = Wanted(chosen, by, per_prompt, bootstrap, options, gate_required=need_gate(chosen))
    require_gate(models, run, chosen)
    return measure(models, prompts, wanted, run, progress)[0]


def need_gate(measures: Iterable[Measure]) -> bool:
    """Whether any of these measures is empty without a gate."""
    return not {measure.name for measure in measures} <= set(WITHOUT_GATE)


def require_gate(models: Sequence[str], run: Run, measures: Iterable[Measure] | None = None) -> None:
    """Raise, before any weights are read, if surely no model has a gate and measures (None: all) need one."""
    if measures is not None and not need_gate(measures):
        return
    if not any_gate(models, run):
        otherwise = f", or ask for --measures {','.join(WITHOUT_GATE)}, which need none" if measures else ""
        raise no_gate(find_models(models, run), otherwise=otherwise)


def any_gate(models: Sequence[str], run: Run) -> bool:
    """Whether a model has a gate, or may have one, by their configurations alone."""
    sources = find_models(models, run).values()
    configs = (load_config(source, trust_remote_code=run.trust_remote_code) for source in sources)
    return not all(is_without_gate(config) for config in configs)


def check_gated(layers: Iterable[int], parts: Anatomy, label: str) -> None:
    """Raise if a layer that is asked for has no gate."""
    for layer in layers:
        if layer not in parts.gated:
            have = ", ".join(map(str, parts.gated))
            raise GattnVizError(f"layer {layer} of {label} has no gate; expected one of {have}")


def gate_tokens(
    models: Sequence[str] = VARIANTS,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    count: int = 5,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    run: Run = Run(),
    progress: Progress | None = None,
    on_model: OnModel | None = None,
) -> pd.DataFrame:
    """The tokens at which each head's gate is most open, and most shut.

    A token's score is the mean over the head's channels. Of equal ones, the earlier prompt's and the earlier token
    come first. Memory does not grow with the number of prompts.

    Args:
        count: how many at either end, of all prompts together.
        layers, heads: which, from 1; None is all.
        models, prompts, run: see `sink_stats`. A model without a gate is left out.

    Returns:
        the columns model, prompt, layer, head, end (`open` or `shut`), rank (from 1), position (from 1), token,
        score and context: the tokens around it, itself in brackets.

    Raises:
        GattnVizError: no model has a gate, a layer or head that a model does not have, a model or prompt that
            cannot be used.
    """
    if count < 1:
        raise GattnVizError(f"count is {count} tokens; expected 1 or more")
    require_gate(models, run)
    tables_of_models, paths, refusals = [], {}, []
    for label, loaded, encoded in each_model(models, prompts, run, on_model):
        refusals.append(anatomy(loaded.model).refusal)
        if not anatomy(loaded.model).gates:
            log.warning("%s has no gate: left out", label)
        else:
            chosen = _Chosen(count, layers, heads)
            table, paths[label] = _tokens_of_model(label, loaded, encoded, chosen, run, progress)
            tables_of_models.append(table)
        del loaded  # before the next one is loaded
    if not tables_of_models:
        raise no_gate(find_models(models, run), refusals)
    found = pd.concat(tables_of_models, ignore_index=True)
    found.attrs["attention_path"] = paths
    return found


@dataclass(frozen=True)
class _Chosen:
    """How many tokens, and of which layers and heads, from 1."""

    count: int
    layers: Sequence[int] | None
    heads: Sequence[int] | None

    def head_indices(self, heads: int) -> list[int]:
        return list(range(heads)) if self.heads is None else [head - 1 for head in self.heads]


def _tokens_of_model(
    label: str,
    loaded: LoadedModel,
    encoded: Sequence[EncodedPrompt],
    chosen: _Chosen,
    run: Run,
    progress: Progress | None,
) -> tuple[pd.DataFrame, list[str]]:
    """The rows of one model, and how its attention was computed."""
    asked = Request(
        gates=frozenset(chosen.layers or ()), heads=None if chosen.heads is None else tuple(chosen.heads)
    )
    check_request(loaded.model, asked, label)
    check_gated(chosen.layers or (), anatomy(loaded.model), label)
    steps = len(encoded) * len(anatomy(loaded.model).layers)
    done = 0
    paths: set[str] = set()
    found: dict[int, tuple[Extremes, Extremes]] = {}

    def on_layer(prompt: int, layer: LayerCapture) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(label, done, steps)
        paths.update(layer.paths)
        assert layer.sums is not None
        scores = layer.sums.gate_tokens  # (H, T)
        if scores is None or (chosen.layers is not None and layer.layer not in chosen.layers):
            return
        check_finite(scores.sum(), layer.layer, label, encoded[prompt].prompt.id)
        scores = scores[chosen.head_indices(len(scores))]
        if layer.layer not in found:
            found[layer.layer] = Extremes(chosen.count, len(scores)), Extremes(chosen.count, len(scores))
        highest, lowest = found[layer.layer]
        highest.add(prompt, scores)
        lowest.add(prompt, -scores)

    ids = [prompt.ids for prompt in encoded]
    request = Request(needs=frozenset({"gate_tokens"}))
    stream(loaded.model, ids, request, on_layer, batch_size=run.batch_size, chunk=run.chunk)
    parts = anatomy(loaded.model)
    rows = []
    for layer in sorted(found):
        for index, head in enumerate(chosen.head_indices(parts.heads([layer])[0])):
            for end, sign, extremes in zip(("open", "shut"), (1, -1), found[layer], strict=True):
                for rank, extreme in enumerate(extremes.of(index), start=1):
                    of_prompt = encoded[extreme.prompt]
                    token, context = _in_context(loaded.tokenizer, of_prompt.ids, extreme.position)
                    place = (label, of_prompt.prompt.id, layer, head + 1, end, rank, extreme.position + 1)
                    rows.append((*place, token, sign * extreme.value, context))
    return pd.DataFrame(rows, columns=COLUMNS), sorted(paths)


def _in_context(tokenizer: Any, ids: Sequence[int], position: int) -> tuple[str, str]:
    """A token's label, and the text around it with the token itself in brackets."""
    before, after = CONTEXT
    start = max(0, position - before)
    labels = token_labels(tokenizer, ids[start : position + after + 1])
    here = position - start
    marked = [f"[{label}]" if place == here else label for place, label in enumerate(labels)]
    return labels[here], "".join(marked).replace(SPACE, " ")

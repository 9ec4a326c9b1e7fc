"""Attention-sink statistics of models over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import pandas as pd
from numpy.typing import NDArray

from gattn_viz import tables
from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.hooks import decoder_layers
from gattn_viz.capture.run import stream
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.measures import Options
from gattn_viz.models.loading import LoadedModel
from gattn_viz.models.names import VARIANTS
from gattn_viz.pipeline.run import Progress, Run, check_finite, each_model
from gattn_viz.prompts import EncodedPrompt, Prompt


def sink_stats(
    models: Sequence[str] = VARIANTS,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    by: tables.By = "head",
    per_prompt: bool = False,
    options: Options = Options(),
    run: Run = Run(),
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Attention-sink measures of each model, over the same prompts.

    Args:
        models: variants, directories or Hub ids.
        prompts: texts or `Prompt`s; None is the bundled set.
        by: what a row stands for: a head, a layer (mean over heads) or a model (mean over layers).
        per_prompt: one row a prompt too.
        options: first-row policy and sink threshold.

    Returns:
        the columns are described by `gattn_viz.metrics.measures.SINK_MEASURES`.

    Raises:
        GattnVizError: a model or prompt that cannot be used, a prompt too short to have a value.
    """
    if by not in get_args(tables.By):
        raise GattnVizError(f"by is {by!r}; expected {', '.join(get_args(tables.By))}")
    rows = sink_rows(models, prompts, options=options, run=run, progress=progress)
    return tables.summarise(rows, by, per_prompt=per_prompt)


def sink_rows(
    models: Sequence[str] = VARIANTS,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    options: Options = Options(),
    run: Run = Run(),
    progress: Progress | None = None,
) -> pd.DataFrame:
    """What `sink_stats` is made from: a row for each model, prompt, layer and head."""
    rows: list[dict[str, NDArray[Any]]] = []
    for label, loaded, encoded in each_model(models, prompts, run):
        _check_long_enough(encoded, options)
        rows += _rows_of_model(label, loaded, encoded, options, run.batch_size, progress)
        del loaded  # before the next one is loaded
    return tables.to_frame(rows)


def _rows_of_model(
    label: str,
    loaded: LoadedModel,
    encoded: list[EncodedPrompt],
    options: Options,
    batch_size: int,
    progress: Progress | None,
) -> list[dict[str, NDArray[Any]]]:
    steps = len(encoded) * len(decoder_layers(loaded.model))
    rows: dict[tuple[int, int], dict[str, NDArray[Any]]] = {}

    def reduce(prompt: int, layer: LayerCapture) -> None:
        assert layer.sums is not None
        prompt_id = encoded[prompt].prompt.id
        check_finite(layer.sums.received.sum() + layer.sums.max_activation, layer.layer, label, prompt_id)
        rows[prompt, layer.layer] = tables.layer_rows(label, prompt_id, layer.layer, layer.sums, options)
        if progress is not None:
            progress(label, len(rows), steps)

    stream(loaded.model, _ids(encoded), Request(sums=True), reduce, batch_size=batch_size)
    return [rows[key] for key in sorted(rows)]  # a batch runs layer by layer: back to prompt by prompt


def _ids(encoded: Sequence[EncodedPrompt]) -> list[list[int]]:
    return [prompt.ids for prompt in encoded]


def _check_long_enough(encoded: Sequence[EncodedPrompt], options: Options) -> None:
    """Without its first row a one-token prompt has no query left to take a mean over."""
    for prompt in encoded:
        if len(prompt.ids) < 2 and options.first_row == "exclude":
            raise GattnVizError(
                f"prompt {prompt.prompt.id!r} has one token, and the first query is left out: no query remains; "
                "expected at least 2 tokens: use a longer prompt or --first-row include"
            )

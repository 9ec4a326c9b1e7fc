"""What a notebook calls: models and prompts in, tables and figures out.

    from gattn_viz import sink_stats, attention_maps, draw_maps

    sink_stats(["baseline", "gate_headwise"], by="layer")                # a pandas DataFrame
    [maps] = attention_maps(["gate_headwise"], layers=[1, 7, 21, 28])    # arrays
    draw_maps(maps)                                                      # a matplotlib Figure

The command line is a thin layer over this module. Models are loaded one after the other, each let go before the
next.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gattn_viz import tables
from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.hooks import decoder_layers
from gattn_viz.capture.run import capture, check_request, stream, verify_gates
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.measures import Options
from gattn_viz.models.loading import LoadedModel, load
from gattn_viz.models.names import VARIANTS, ModelSource, resolve
from gattn_viz.prompts import EncodedPrompt, Prompt, default_prompts, encode, prompts_from_text
from gattn_viz.tokens import token_labels

log = logging.getLogger("gattn_viz")

Progress = Callable[[str, int, int], None]
"""Called with what is being done, steps done, and steps in all."""


@dataclass(frozen=True)
class Run:
    """How models are found and run; the same for every command.

    Attributes:
        checkpoints: where a variant is looked up: `demo`, `official` or a directory.
        revision: branch, tag or commit of the Hub ids that name none themselves.
        dtype: `auto` (float32 on a CPU, the checkpoint's own on a GPU), `float32`, `bfloat16` or `float16`.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        device_map: as in transformers, to spread a model over devices.
        trust_remote_code: run the code that comes with a checkpoint. Never needed for gated checkpoints.
        bos: `auto` (what the tokenizer does), `always` or `never`.
        max_tokens: cut prompts after so many tokens.
        batch_size: prompts run together.
    """

    checkpoints: str = "demo"
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False
    bos: Literal["auto", "always", "never"] = "auto"
    max_tokens: int | None = None
    batch_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise GattnVizError(f"batch size is {self.batch_size}; expected 1 or more")


@dataclass(frozen=True)
class AttentionMaps:
    """The attention maps of one model on one prompt.

    Attributes:
        model: its label.
        checkpoint: which one was used, in words.
        prompt: the prompt's id.
        tokens: (T,), as they are read.
        layers: from 1.
        heads: from 1; None when the maps are the mean over all heads.
        n_layers, n_heads: how many the model has.
        probabilities: (layers, heads, T, T), float32; rows are queries. The axis of heads has length 1 for a mean.
        dtype, device: of the run.
    """

    model: str
    checkpoint: str
    prompt: str
    tokens: list[str]
    layers: tuple[int, ...]
    heads: tuple[int, ...] | None
    n_layers: int
    n_heads: int
    probabilities: NDArray[np.float32] = field(repr=False)
    dtype: str
    device: str


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
    for label, loaded, encoded in _each_model(models, prompts, run):
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
        _check_finite(layer.sums.received.sum() + layer.sums.max_activation, layer.layer, label, prompt_id)
        rows[prompt, layer.layer] = tables.layer_rows(label, prompt_id, layer.layer, layer.sums, options)
        if progress is not None:
            progress(label, len(rows), steps)

    stream(loaded.model, _ids(encoded), Request(sums=True), reduce, batch_size=batch_size)
    return [rows[key] for key in sorted(rows)]  # a batch runs layer by layer: back to prompt by prompt


def attention_maps(
    models: Sequence[str] = VARIANTS,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    layers: Sequence[int] | Literal["all"] | None = None,
    heads: Sequence[int] | Literal["mean", "all"] = "mean",
    run: Run = Run(),
    progress: Progress | None = None,
) -> list[AttentionMaps]:
    """Attention maps of each model on each prompt, the models in order.

    Args:
        models: variants, directories or Hub ids.
        prompts: texts or `Prompt`s; None is the first of the bundled set.
        layers: from 1; None is four of them: the first, those at a quarter and three quarters, and the last.
        heads: from 1; `mean` is the mean over all heads.

    Raises:
        GattnVizError: a model or prompt that cannot be used, a layer or head that a model does not have.
    """
    if prompts is None:
        prompts = default_prompts()[:1]
    result = []
    for label, loaded, encoded in _each_model(models, prompts, run):
        model = loaded.model
        n_layers = len(decoder_layers(model))
        n_heads = model.config.get_text_config().num_attention_heads
        chosen = _choose_layers(layers, n_layers)
        request = Request(
            maps=frozenset(chosen),
            heads="mean" if heads == "mean" else None if heads == "all" else tuple(heads),
        )
        for done, prompt in enumerate(encoded, start=1):
            check_request(model, request, label)
            [captured] = capture(model, [prompt.ids], request)
            _check_softmax(chosen, captured, label)
            for layer in chosen:
                _check_finite(_map(captured[layer]).sum(), layer, label, prompt.prompt.id)
            result.append(
                AttentionMaps(
                    model=label,
                    checkpoint=loaded.source.checkpoint,
                    prompt=prompt.prompt.id,
                    tokens=token_labels(loaded.tokenizer, prompt.ids),
                    layers=chosen,
                    heads=None if request.heads == "mean" else request.heads or tuple(range(1, n_heads + 1)),
                    n_layers=n_layers,
                    n_heads=n_heads,
                    probabilities=np.stack([_map(captured[layer]) for layer in chosen]),
                    dtype=str(loaded.dtype).removeprefix("torch."),
                    device=loaded.device.type,
                )
            )
            if progress is not None:
                progress(label, done, len(encoded))
        del loaded, model  # before the next one is loaded
    return result


def _each_model(
    models: Sequence[str], prompts: Sequence[Prompt | str] | None, run: Run
) -> Iterator[tuple[str, LoadedModel, list[EncodedPrompt]]]:
    """Load one model after the other, with a label of its own and the prompts in its own tokens."""
    if not models:
        raise GattnVizError("no model was given; expected at least one")
    models = [models] if isinstance(models, str) else list(models)
    if len(set(models)) < len(models):
        raise GattnVizError(f"a model is given twice in {', '.join(models)}; expected each once: leave one out")
    sources = [_with_revision(resolve(name, run.checkpoints), run.revision) for name in models]
    labels = [source.label for source in sources]
    chosen = _as_prompts(prompts)
    for source, label in zip(sources, labels, strict=True):
        if labels.count(label) > 1:  # two checkpoints of one name: the whole of what was written tells them apart
            label = source.name
        loaded = load(
            source,
            dtype=run.dtype,
            device=run.device,
            device_map=run.device_map,
            trust_remote_code=run.trust_remote_code,
        )
        verify_gates(loaded.model)
        config = loaded.config.get_text_config()
        log.info(
            "%s, %s on %s, %d layers of %d heads",
            source.sentence,
            str(loaded.dtype).removeprefix("torch."),
            loaded.device,
            config.num_hidden_layers,
            config.num_attention_heads,
        )
        encoded = [
            encode(
                prompt,
                loaded.tokenizer,
                bos=run.bos,
                max_tokens=run.max_tokens,
                max_positions=getattr(config, "max_position_embeddings", None),
            )
            for prompt in chosen
        ]
        rows = loaded.model.get_input_embeddings().weight.shape[0]
        for prompt in encoded:
            if max(prompt.ids) >= rows:
                raise GattnVizError(
                    f"the tokenizer of {label} gives token {max(prompt.ids)}, but the model has {rows} "
                    "embeddings; expected the model's own tokenizer: put it beside config.json"
                )
            if prompt.n_cut:
                log.warning(
                    "%s: prompt %r cut to %d tokens, %d left out",
                    label,
                    prompt.prompt.id,
                    len(prompt.ids),
                    prompt.n_cut,
                )
        yield label, loaded, encoded
        del loaded  # as the caller does


def _with_revision(source: ModelSource, revision: str | None) -> ModelSource:
    if source.is_local or source.revision is not None:
        return source
    return replace(source, revision=revision)


def _as_prompts(prompts: Sequence[Prompt | str] | None) -> list[Prompt]:
    if prompts is None:
        return default_prompts()
    prompts = [prompts] if isinstance(prompts, (str, Prompt)) else list(prompts)
    for prompt in prompts:
        if not isinstance(prompt, (str, Prompt)):
            raise GattnVizError(f"a prompt is a {type(prompt).__name__}, {prompt!r}; expected a text or a Prompt")
    texts = iter(prompts_from_text([prompt for prompt in prompts if isinstance(prompt, str)]))
    chosen = [prompt if isinstance(prompt, Prompt) else next(texts) for prompt in prompts]
    if not chosen:
        raise GattnVizError("no prompt was given; expected at least one")
    for prompt_id, count in Counter(prompt.id for prompt in chosen).items():
        if count > 1:
            raise GattnVizError(
                f"{count} prompts have the id {prompt_id!r}; expected an id of its own for each: change one"
            )
    return chosen


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


def _check_finite(value: Any, layer: int, label: str, prompt: str) -> None:
    if not np.isfinite(value):
        raise GattnVizError(
            f"layer {layer} of {label} gives NaN or infinity on prompt {prompt!r}; expected finite numbers: try "
            "--dtype float32, or check the weights"
        )


def _choose_layers(layers: Sequence[int] | str | None, n_layers: int) -> tuple[int, ...]:
    if layers == "all":
        return tuple(range(1, n_layers + 1))
    if layers is None:
        return tuple(sorted({1, max(1, n_layers // 4), max(1, 3 * n_layers // 4), n_layers}))
    assert not isinstance(layers, str)
    return tuple(layers)


def _check_softmax(layers: Sequence[int], captured: dict[int, LayerCapture], label: str) -> None:
    for layer in layers:
        if layer not in captured:
            have = ", ".join(map(str, sorted(captured)))
            raise GattnVizError(
                f"layer {layer} of {label} has no softmax attention, and so no map; expected one of {have}"
            )


def _map(layer: LayerCapture) -> NDArray[np.float32]:
    assert layer.probabilities is not None
    return layer.probabilities.numpy()

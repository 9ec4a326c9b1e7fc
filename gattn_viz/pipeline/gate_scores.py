"""Gate scores token by token: of each layer and head that is asked for, on one prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gattn_viz.capture.anatomy import anatomy
from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.run import capture, check_request
from gattn_viz.models.names import VARIANTS
from gattn_viz.pipeline.gates import check_gated, require_gate
from gattn_viz.pipeline.maps import choose_layers, common_heads
from gattn_viz.pipeline.run import OnModel, Progress, Run, check_finite, each_model, find_models, log, no_gate
from gattn_viz.prompts import Prompt, default_prompts
from gattn_viz.tokens import token_labels, token_texts


@dataclass(frozen=True)
class GateMaps:
    """The gate scores of one model on one prompt.

    Attributes:
        model: its label.
        checkpoint: which one was used, in words, without the path of a directory.
        prompt: the prompt's id.
        tokens: (T,), as they are read.
        texts: (T,), what each says in running text, with its spaces and line breaks.
        layers: from 1.
        heads: from 1; None when the scores are the mean over all heads.
        n_layers: how many the model has.
        n_heads: how many each of the layers has.
        channels: scores of a head and token over which the mean was taken: head_dim if elementwise, 1 if headwise.
        scores: (layers, T, heads), float32. The axis of heads has length 1 for a mean.
        dtype, device: of the run.
        attention_path: how attention was computed, see `LayerCapture.path`.
        gate: what kind it is and where it comes from; None of the paper's own models.
        chat: whether the prompt is a user turn of the tokenizer's chat template.
    """

    model: str
    checkpoint: str
    prompt: str
    tokens: list[str]
    texts: list[str]
    layers: tuple[int, ...]
    heads: tuple[int, ...] | None
    n_layers: int
    n_heads: int
    channels: int
    scores: NDArray[np.float32] = field(repr=False)
    dtype: str
    device: str
    attention_path: str
    gate: str | None = None
    chat: bool = False


def gate_maps(
    models: Sequence[str] = VARIANTS,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    layers: Sequence[int] | Literal["all"] | None = None,
    heads: Sequence[int] | Literal["mean", "all"] = "all",
    run: Run = Run(),
    progress: Progress | None = None,
    on_model: OnModel | None = None,
) -> list[GateMaps]:
    """Gate scores of each gated model on each prompt, the models in order.

    A token's score is after the activation; of an elementwise gate it is the mean over the head's channels.

    Args:
        models: variants, directories or Hub ids. One without a gate is left out.
        prompts: texts or `Prompt`s; None is the first of the bundled set.
        layers: from 1; None is four of them, as in `attention_maps`.
        heads: from 1; `mean` is the mean over all heads.
        on_model: see `OnModel`.

    Raises:
        GattnVizError: no model has a gate, a layer or head that is not there or has none, a model or prompt that
            cannot be used.
    """
    if prompts is None:
        prompts = default_prompts()[:1]
    require_gate(models, run)
    result, refusals = [], []
    for label, loaded, encoded in each_model(models, prompts, run, on_model):
        model = loaded.model
        parts = anatomy(model)
        refusals.append(parts.refusal)
        if not parts.gates:
            log.warning("%s has no gate: left out", label)
            continue
        n_layers = len(parts.layers)
        chosen = choose_layers(layers, parts.gated)
        asked = None if heads in ("all", "mean") else tuple(heads)
        check_request(model, Request(gates=frozenset(chosen), heads=asked), label)  # type: ignore[arg-type]
        check_gated(chosen, parts, label)
        n_heads = common_heads(chosen, parts, label, of_each=True)
        some_heads = tuple(range(1, n_heads + 1)) if heads in ("all", "mean") else tuple(heads)
        for done, prompt in enumerate(encoded, start=1):
            request = Request(needs=frozenset({"gate_tokens", "gate_scores"}))
            [captured] = capture(model, [prompt.ids], request, chunk=run.chunk)
            scores = np.stack([_scores(captured, layer, label, prompt.prompt.id) for layer in chosen])
            scores = np.take(scores, [head - 1 for head in some_heads], axis=2)  # type: ignore[operator]
            result.append(
                GateMaps(
                    model=label,
                    checkpoint=loaded.source.without_path,
                    prompt=prompt.prompt.id,
                    tokens=token_labels(loaded.tokenizer, prompt.ids),
                    texts=token_texts(loaded.tokenizer, prompt.ids),
                    layers=chosen,
                    heads=None if heads == "mean" else some_heads,  # type: ignore[arg-type]
                    n_layers=n_layers,
                    n_heads=n_heads,
                    channels=_channels(captured[chosen[0]]),
                    scores=scores.mean(2, keepdims=True) if heads == "mean" else scores,
                    dtype=str(loaded.dtype).removeprefix("torch."),
                    device=loaded.device.type,
                    attention_path=" and ".join(sorted(set().union(*(captured[layer].paths for layer in chosen)))),
                    gate=parts.gate_in_words,
                    chat=prompt.chat,
                )
            )
            if progress is not None:
                progress(label, done, len(encoded))
        del loaded, model  # before the next one is loaded
    if not result:
        raise no_gate(find_models(models, run), refusals)
    return result


def gate_map_table(sets: Iterable[GateMaps]) -> pd.DataFrame:
    """Gate scores as a tidy table: a row a model, prompt, layer, head and token; a mean's head is `mean`."""
    return pd.concat([_rows(maps) for maps in sets], ignore_index=True)


def _rows(maps: GateMaps) -> pd.DataFrame:
    heads: Sequence[Any] = maps.heads or ["mean"]
    places = pd.MultiIndex.from_product(
        [maps.layers, heads, range(1, len(maps.tokens) + 1)], names=["layer", "head", "position"]
    )
    table = places.to_frame(index=False)
    table.insert(0, "model", maps.model)
    table.insert(1, "prompt", maps.prompt)
    table["token"] = np.tile(maps.tokens, len(maps.layers) * len(heads))
    table["score"] = maps.scores.transpose(0, 2, 1).ravel()
    return table


def _scores(captured: dict[int, LayerCapture], layer: int, label: str, prompt: str) -> NDArray[np.float32]:
    """(T, H) of one layer."""
    scores = _gate(captured[layer])
    assert scores is not None
    check_finite(scores.sum(), layer, label, prompt)
    return scores.T.astype(np.float32)


def _gate(layer: LayerCapture) -> NDArray[np.floating] | None:
    assert layer.sums is not None
    return layer.sums.gate_tokens


def _channels(layer: LayerCapture) -> int:
    assert layer.sums is not None
    assert layer.sums.gates is not None
    return int(layer.sums.gates.channels)

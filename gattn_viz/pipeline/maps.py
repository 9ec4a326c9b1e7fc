"""Attention maps of models on prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from numbers import Integral
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gattn_viz.capture.anatomy import Anatomy, anatomy
from gattn_viz.capture.checks import check_request
from gattn_viz.capture.collector import LayerCapture, Request, Weight
from gattn_viz.capture.run import OnPrompt, capture
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.measures import Options, learned_sink_mass
from gattn_viz.metrics.pooling import MapCells, MapView
from gattn_viz.metrics.weights import Quantity, quantity
from gattn_viz.models.checkpoint_config import load_config
from gattn_viz.models.configuration import is_without_gate
from gattn_viz.models.names import VARIANTS
from gattn_viz.pipeline.run import OnModel, Progress, Run, check_finite, each_model, find_models
from gattn_viz.prompts import EncodedPrompt, Prompt, default_prompts
from gattn_viz.tokens import token_labels


@dataclass(frozen=True)
class AttentionMaps:
    """The attention maps of one model on one prompt.

    Attributes:
        model: its label.
        checkpoint: which one was used, in words, without the path of a directory.
        prompt: the prompt's id.
        tokens: (T,), as they are read; all of the prompt, whatever the view.
        layers: from 1.
        heads: from 1; None when the maps are the mean over all heads.
        n_layers: how many the model has.
        n_heads: how many each of the layers has; 0 if they differ.
        cells: the view: which queries and keys the rows and columns stand for, and how they were pooled.
        probabilities: (layers, heads, rows, columns), float32; rows are queries. The axis of heads has length
            1 for a mean. Exact maps have 0 where the key is after the query, pooled ones NaN where every key is.
            Times `weight`, head by head, before any mean and pooling.
        dtype, device: of the run.
        attention_path: how attention was computed, see `LayerCapture.paths`.
        weight: what the cells hold, see `gattn_viz.metrics.weights`; `quantity` says it in words.
        gate: `headwise`, `elementwise` or None, of the model.
        learned_sink: (layers, heads), the probability that a learned sink takes, mean over all queries of the
            prompt: what the rows of probabilities lack to 1. NaN where there is none; None is nowhere.
        queries_of_key: (layers, T), how many queries see each key; None where all layers have full attention.
        chat: whether the prompt is a user turn of the tokenizer's chat template.
    """

    model: str
    checkpoint: str
    prompt: str
    tokens: list[str]
    layers: tuple[int, ...]
    heads: tuple[int, ...] | None
    n_layers: int
    n_heads: int
    cells: MapCells
    probabilities: NDArray[np.float32] = field(repr=False)
    dtype: str
    device: str
    attention_path: str
    weight: Weight = "probability"
    gate: str | None = None
    learned_sink: NDArray[np.float64] | None = field(default=None, repr=False)
    queries_of_key: NDArray[np.int64] | None = field(default=None, repr=False)
    chat: bool = False

    @property
    def quantity(self) -> Quantity:
        return quantity(self.weight, self.gate)


def attention_maps(
    models: Sequence[str] = VARIANTS,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    layers: Sequence[int] | Literal["all"] | None = None,
    heads: Sequence[int] | Literal["mean", "all"] = "mean",
    view: MapView = MapView(),
    weight: Weight = "probability",
    run: Run = Run(),
    progress: Progress | None = None,
    on_model: OnModel | None = None,
) -> list[AttentionMaps]:
    """Attention maps of each model on each prompt, the models in order.

    Args:
        models: variants, directories or Hub ids.
        prompts: texts or `Prompt`s; None is the first of the bundled set.
        layers: from 1; None is four of them: the first, those at a quarter and three quarters, and the last.
        heads: from 1; `mean` is the mean over all heads.
        view: which queries and keys, and in how many cells; without arguments all, exactly. Memory is for what is
            asked: `MapView(max_cells=512)` holds 1 MB a map, whatever T. A mean over heads comes before pooling.
        weight: what the cells hold: the `probability`, or that times the norm of the `value`, the `gate`, or the
            norm of the `output` that it leads to, see `gattn_viz.metrics.weights`. `output` with an elementwise
            gate costs head_dim times what a map of probabilities does.
        on_model: see `OnModel`.

    Raises:
        GattnVizError: a model or prompt that cannot be used; a layer, head or position that is not there; a model
            without the gate, or whose output projection is not known, that the weight needs.
    """
    _check_numbers("layers", layers, "all")
    _check_numbers("heads", heads, "mean or all")
    if prompts is None:
        prompts = default_prompts()[:1]
    if weight == "gate":
        _require_gates(models, run)
    result = []
    for label, loaded, encoded in each_model(models, prompts, run, on_model):
        model = loaded.model
        parts = anatomy(model)
        n_layers = len(parts.layers)
        chosen = choose_layers(layers, parts.attending)
        request = Request(
            maps=frozenset(chosen),
            heads="mean" if heads == "mean" else None if heads == "all" else tuple(heads),
            view=view,
            weight=weight,
            needs=frozenset({"learned_sink"}),
        )
        check_request(model, request, label)
        check_softmax(chosen, parts, label)
        n_heads = common_heads(chosen, parts, label, of_each=request.heads is None)
        # all of them before the first is run
        for prompt in encoded:
            _check_keys_left(prompt, view)
        of_prompts = [view.cells(len(prompt.ids), f"prompt {prompt.prompt.id!r}") for prompt in encoded]
        on_prompt = _count_prompts(progress, label, len(encoded))
        # in one go: what has to be found out about the model, such as its projections, is so once
        captures = capture(model, [prompt.ids for prompt in encoded], request, on_prompt, chunk=run.chunk)
        for prompt, cells in zip(encoded, of_prompts, strict=True):
            captured = captures.pop(0)  # each is let go of when it is copied
            for layer in chosen:
                seen = _map(captured[layer])[:, cells.causal_pairs() > 0]
                check_finite(seen.sum(), layer, label, prompt.prompt.id)
            paths = frozenset[str]().union(*(captured[layer].paths for layer in chosen))
            result.append(
                AttentionMaps(
                    model=label,
                    checkpoint=loaded.source.without_path,
                    prompt=prompt.prompt.id,
                    tokens=token_labels(loaded.tokenizer, prompt.ids),
                    layers=chosen,
                    heads=None if request.heads == "mean" else request.heads or tuple(range(1, n_heads + 1)),
                    n_layers=n_layers,
                    n_heads=n_heads,
                    cells=cells,
                    probabilities=np.stack([_map(captured[layer]) for layer in chosen]),
                    dtype=str(loaded.dtype).removeprefix("torch."),
                    device=loaded.device.type,
                    attention_path=" and ".join(sorted(paths)),
                    weight=weight,
                    gate=parts.gate_kind,
                    learned_sink=learned_sinks([captured[layer] for layer in chosen], request.heads),
                    queries_of_key=_queries_of_key([captured[layer] for layer in chosen]),
                    chat=prompt.chat,
                )
            )
        del loaded, model  # before the next one is loaded
    return result


def check_layers(models: Sequence[str], layers: Sequence[int], run: Run) -> None:
    """Raise, before any weights are read, if a model does not have these layers, from 1."""
    for label, source in find_models(models, run).items():
        config = load_config(source, trust_remote_code=run.trust_remote_code)
        n_layers = config.get_text_config().num_hidden_layers
        for layer in layers:
            if not 1 <= layer <= n_layers:
                raise GattnVizError(f"no layer {layer}: {label} has {n_layers} layers; expected 1 to {n_layers}")


def _count_prompts(progress: Progress | None, label: str, prompts: int) -> OnPrompt | None:
    if progress is None:
        return None
    done = count(1)
    return lambda prompt, loss: progress(label, next(done), prompts)


def _require_gates(models: Sequence[str], run: Run) -> None:
    """Raise, before any weights are read, if a model surely has no gate."""
    sources = find_models(models, run)
    without = [
        label
        for label, source in sources.items()
        if is_without_gate(load_config(source, trust_remote_code=run.trust_remote_code))
    ]
    if without:
        raise GattnVizError(
            f"no gate in {', '.join(without)}; expected models with a gate on the attention output, such as "
            "gate_headwise, for --weight gate: choose them with --model, or another weight"
        )


def _check_numbers(name: str, asked: object, words: str) -> None:
    """Raise unless `asked` is None, one of `words`, or some whole numbers."""
    if asked is None or (isinstance(asked, str) and asked in words.split(" or ")):
        return
    numbers = list(asked) if isinstance(asked, Iterable) and not isinstance(asked, str) else []
    if not numbers or not all(isinstance(number, Integral) for number in numbers):
        raise GattnVizError(f"{name} are {asked!r}; expected {words}, or a list of one or more numbers from 1")


def _check_keys_left(prompt: EncodedPrompt, view: MapView) -> None:
    """Say of a prompt of one token what `MapView` cannot know: that its only key was left out on purpose."""
    if len(prompt.ids) == 1 and view.keys == (2, None):
        longer = "a larger --max-tokens" if prompt.is_cut else "a longer prompt"
        raise GattnVizError(
            f"prompt {prompt.prompt.id!r} has one token, and the first key is left out: nothing remains to show; "
            f"expected at least 2 tokens: use {longer}, or leave out --drop-first"
        )


def choose_layers(layers: Sequence[int] | str | None, having: Sequence[int]) -> tuple[int, ...]:
    """Those asked for; `all` that have what is to be seen; by default four of these.

    The four are the first, those at a quarter and three quarters, and the last.
    """
    if layers is None:
        count = len(having)
        places = {1, max(1, count // 4), max(1, 3 * count // 4), count}
        return tuple(having[place - 1] for place in sorted(places))
    if isinstance(layers, str):  # "all"
        return tuple(having)
    return tuple(layers)


def common_heads(layers: Sequence[int], parts: Anatomy, label: str, *, of_each: bool) -> int:
    """How many heads some layers have; 0 if they differ, which is an error where each is to be seen."""
    heads = parts.heads(layers)
    if len(heads) == 1:
        return heads[0]
    if of_each:
        raise GattnVizError(
            f"layers {', '.join(map(str, layers))} of {label} have {' or '.join(map(str, heads))} heads; expected "
            "one number for all heads: choose layers of one kind, or the mean over heads"
        )
    return 0


def check_softmax(layers: Sequence[int], parts: Anatomy, label: str) -> None:
    """Raise if a layer of a hybrid model that is asked for has no map."""
    for number in layers:
        if number not in parts.attending:
            kind = parts.layers[number - 1].kind
            raise GattnVizError(
                f"layer {number} of {label} has no softmax attention{f' but {kind}' if kind else ''}, and so no "
                f"map; expected one of {', '.join(map(str, parts.attending))}"
            )


def learned_sinks(
    layers: Sequence[LayerCapture], heads: tuple[int, ...] | Literal["mean"] | None
) -> NDArray[np.float64] | None:
    """(layers, heads as in `Request`): what a learned sink takes, see `AttentionMaps`."""
    found = []
    for layer in layers:
        assert layer.sums is not None
        of_heads = learned_sink_mass(layer.sums, Options(first_row="include"))
        if heads == "mean":
            of_heads = of_heads.mean(keepdims=True)
        elif heads is not None:
            of_heads = of_heads[[head - 1 for head in heads]]
        found.append(of_heads)
    return None if np.isnan(found).all() else np.stack(found)


def _queries_of_key(layers: Sequence[LayerCapture]) -> NDArray[np.int64] | None:
    """(layers, T), see `AttentionMaps`."""
    found = []
    for layer in layers:
        assert layer.sums is not None
        found.append(layer.sums.queries_of_key)
    if all(one is None for one in found):
        return None
    tokens = next(len(one) for one in found if one is not None)
    full = np.arange(tokens, 0, -1)
    return np.stack([full if one is None else one.astype(np.int64) for one in found])


def _map(layer: LayerCapture) -> NDArray[np.float32]:
    assert layer.probabilities is not None
    return layer.probabilities.numpy()

"""Run a model over prompts and take out of each layer what was asked for.

    captures = capture(model, [[1, 5, 9]], Request(maps=frozenset({21}), needs=frozenset({"first_token"})))
    captures[0][21].probabilities       # (H, T, T)

The model is run without gradients, and without its language-model head unless the loss is asked for. Afterwards it
is as it was: hooks, attention implementation and training mode, even when the run raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from gattn_viz.capture.attention import IMPLEMENTATION, active_taker
from gattn_viz.capture.checks import as_token_ids, check_request, check_sizes, real_tokens
from gattn_viz.capture.collector import Collector, LayerCapture, OnLayer, Request
from gattn_viz.capture.eager import local_size, uses_interface, weights_taken
from gattn_viz.capture.hooks import backbone, decoder_layers, gated_attention, hooked, input_device
from gattn_viz.capture.loss import next_token_loss
from gattn_viz.capture.projection import find_projection, head_factors, listening
from gattn_viz.errors import GattnVizError, first_line

PromptCapture = dict[int, LayerCapture]
"""A prompt's captures by layer, from 1."""

OnPrompt = Callable[[int, float | None], None]


def capture(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    request: Request,
    on_prompt: OnPrompt | None = None,
    *,
    batch_size: int = 1,
    chunk: int | None = None,
) -> list[PromptCapture]:
    """Run the model over the prompts and keep what was asked for.

    Args:
        model: a causal LM of transformers, the project's own or any that goes through the attention interface or
            returns its weights (see `eager`).
        prompts: token ids, one list a prompt, at least one token each.
        request: what to keep. A map costs its cells, heads x T x T floats when it is exact and whole.
        on_prompt: see `stream`.
        batch_size: prompts run together, padded on the right. Padding never counts: the result is the same.
        chunk: tokens of one forward pass, with a KV cache from one to the next; None is all of them. The result is
            the same, but for the median of a large residual stream, which is then right to .05 %.

    Returns:
        for each prompt its layers, from 1. A hybrid model's layers without softmax attention are not in it.

    Raises:
        GattnVizError: a value that cannot be meant (see `checks`), such as a layer that the model does not have; a
            model whose attention cannot be seen, or that is being captured already.
    """
    captures: list[PromptCapture] = [{} for _ in prompts]

    def keep(prompt: int, layer: LayerCapture) -> None:
        captures[prompt][layer.layer] = layer

    stream(model, prompts, request, keep, on_prompt, batch_size=batch_size, chunk=chunk)
    return captures


def stream(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    request: Request,
    on_layer: OnLayer,
    on_prompt: OnPrompt | None = None,
    *,
    batch_size: int = 1,
    chunk: int | None = None,
) -> None:
    """As `capture`, but hand each layer of each prompt to `on_layer(prompt, layer)` and keep nothing.

    Prompts are run from the longest to the shortest, so that those of a batch need little padding and what does
    not fit into memory shows at once.

    Meanwhile the model may not be captured again nor run otherwise, neither in `on_layer` nor by another thread.
    Different models may be captured in different threads.

    Args:
        on_prompt: called with (prompt, loss) when all layers of a prompt were handed on. The loss is the sum over
            its T - 1 predictions of -log p(next token), in nats; None unless the request has it.
    """
    check_request(model, request)
    check_sizes(batch_size, chunk)
    ids = as_token_ids(model, prompts)
    projections = _projections(model, request)
    by_length = sorted(range(len(ids)), key=lambda prompt: -len(ids[prompt]))
    with alone(model):
        if chunk is not None and chunk < len(ids[by_length[0]]):
            check_cache(model)
        for start in range(0, len(by_length), batch_size):
            batch = by_length[start : start + batch_size]
            places = [slice(0, len(ids[prompt])) for prompt in batch]
            input_ids = pad_sequence([ids[prompt] for prompt in batch], batch_first=True)

            def hand_on(sequence: int, layer: LayerCapture, batch: list[int] = batch) -> None:
                on_layer(batch[sequence], layer)

            losses = _run_batch(model, input_ids, places, request, hand_on, chunk, projections)
            for row, prompt in enumerate(batch):
                if on_prompt is not None:
                    on_prompt(prompt, None if losses is None else losses[row])


def capture_batch(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    request: Request,
    on_layer: OnLayer,
    *,
    chunk: int | None = None,
) -> list[float] | None:
    """Run one batch, padded on either side.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), 1 for a real token and 0 for padding.
        on_layer: called with (sequence, layer's capture) as soon as the model is through with the layer.
        chunk: see `capture`.

    Returns:
        each sequence's loss if the request has it, see `stream`.

    Raises:
        GattnVizError: see `capture`.
    """
    check_request(model, request)
    check_sizes(chunk=chunk)
    places = real_tokens(model, input_ids, attention_mask)
    projections = _projections(model, request)
    with alone(model):
        if chunk is not None and chunk < max(place.stop for place in places):
            check_cache(model)
        return _run_batch(model, input_ids, places, request, on_layer, chunk, projections)


def _projections(model: PreTrainedModel, request: Request) -> dict[int, Tensor]:
    return output_projections(model, request.maps) if request.weight == "output" else {}


def _run_batch(
    model: PreTrainedModel,
    input_ids: Tensor,
    places: list[slice],
    request: Request,
    on_layer: OnLayer,
    chunk: int | None,
    projections: dict[int, Tensor],
) -> list[float] | None:
    """As `capture_batch`, of values that are known to be good."""
    length = max(place.stop for place in places)
    step = min(chunk or length, length)
    collector = Collector(request, places, on_layer, chunk=range(0, step), projections=projections)
    base = backbone(model)
    input_ids = input_ids[:, :length].to(input_device(model), torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, place in enumerate(places):
        attention_mask[row, place] = 1
    # left padding shifts a prompt's tokens; their positions must not shift with them
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    losses = [0.0] * len(places)
    cached = _cache_arguments(model) if step < length else {"use_cache": False}
    with torch.no_grad(), evaluating(model), capturing(model, collector), hooked(model, collector):
        token = active_taker.set(collector)
        try:
            for start in range(0, length, step):
                part = slice(start, start + step)
                collector.chunk = range(start, min(start + step, length))
                outputs = base(
                    input_ids=input_ids[:, part],
                    attention_mask=attention_mask[:, : part.stop],
                    position_ids=positions[:, part],
                    **cached,
                )
                if request.loss:
                    for row, place in enumerate(places):
                        losses[row] += next_token_loss(model, outputs, input_ids[row], place, collector.chunk, row)
        finally:
            active_taker.reset(token)
    if not collector.layers_seen:
        raise _not_seen(model)
    if collector.running:
        raise GattnVizError(
            f"{type(model).__name__} attends in layer {min(collector.running) + 1}, which is not in its list of "
            "layers; expected them to be numbered as they stand there: this model is not supported"
        )
    return losses if request.loss else None


def _not_seen(model: PreTrainedModel) -> GattnVizError:
    name = type(model).__name__
    if uses_interface(model):
        found = "has no softmax attention, or computes it out of sight of transformers' attention interface"
    else:
        found = "returns no attention weights, nor goes through transformers' attention interface"
    return GattnVizError(
        f"{name} {found}; expected a causal LM with softmax attention: its maps cannot be captured"
    )


def check_cache(model: PreTrainedModel) -> None:
    """Show on six tokens that the model goes on from its cache as if it had not been interrupted.

    Not every family does: some recurrent layers begin anew with each pass of several tokens.

    Raises:
        GattnVizError: it does not.
    """
    base = backbone(model)
    ids = torch.arange(6, device=input_device(model))[None] % model.get_input_embeddings().weight.shape[0]
    refusal = f"{type(model).__name__} does not go on from its cache as if it had not been interrupted"
    with torch.no_grad(), evaluating(model):
        whole = base(input_ids=ids, use_cache=False).last_hidden_state
        try:
            cached = _cache_arguments(model)
            parts = [base(input_ids=part, **cached).last_hidden_state for part in ids.split(3, dim=1)]
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise GattnVizError(f"{refusal} ({first_line(error)}): run without chunks") from error
    off = float((torch.cat(parts, 1) - whole).abs().max() / whole.abs().max())
    allowed = max(1e-3, 6 * torch.finfo(whole.dtype).eps)
    if off > allowed:
        raise GattnVizError(
            f"{refusal} (off by {off:.2g} of the largest hidden state, expected at most {allowed:.2g}): run "
            "without chunks"
        )


def _cache_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """What makes one forward pass go on where the last one ended."""
    name = "cache" if "cache" in signature(backbone(model).forward).parameters else "past_key_values"
    return {"use_cache": True, name: DynamicCache(config=model.config)}


def output_projections(model: PreTrainedModel, layers: frozenset[int]) -> dict[int, Tensor]:
    """For each of some layers, from 1, by `layer_idx`: what its output projection does to each head's length.

    Costs a run of the model on a few tokens, which shows where the projection is, and a QR decomposition a layer.

    Returns:
        see `head_factors`. Layers without softmax attention are not in it.

    Raises:
        GattnVizError: a layer has none that is known, see `find_projection`.
    """
    tokens = list(range(min(4, model.get_input_embeddings().weight.shape[0])))
    with listening(model, layers) as received:
        [captured] = capture(model, [tokens], Request(gates=layers, outputs=layers))
    return {
        layer - 1: head_factors(find_projection(captured[layer], received[layer], model.dtype), captured[layer])
        for layer in layers & captured.keys()
    }


def verify_gates(model: PreTrainedModel) -> None:
    """Show on a few tokens that attention output x gate score is what the output projection receives.

    A wrong split of query and gate gives plausible numbers; this does not find one, but a gate that is hooked at
    the wrong place, or that something stands behind.

    Raises:
        GattnVizError: it is not.
    """
    gated = frozenset(index + 1 for index in gated_attention(model))
    if not gated:
        return
    tokens = list(range(min(4, model.config.vocab_size)))
    [layers] = capture(model, [tokens], Request(gates=gated, outputs=gated))
    for layer in layers.values():
        assert layer.output_before is not None
        assert layer.output_after is not None
        assert layer.gate_scores is not None
        expected = layer.output_before * layer.gate_scores
        tolerance = 2 * torch.finfo(model.dtype).eps * expected.abs().max()
        off = (layer.output_after - expected).abs().max()
        if off.isnan():
            continue  # broken weights, which are reported where they are measured
        if not off <= tolerance:
            raise GattnVizError(
                f"layer {layer.layer}: attention output x gate is not what o_proj receives "
                f"(off by {off:.2g}, expected at most {tolerance:.2g}): the gate cannot be trusted"
            )


_captured: set[int] = set()  # the ids of configurations whose models are being captured
_captured_lock = Lock()


@contextmanager
def alone(model: PreTrainedModel) -> Iterator[None]:
    """Let no second capture begin while the context lasts: of the model, or of one that shares a configuration.

    Where attention goes is written in the configuration: one capture would change it under the other.
    """
    configs = {id(config) for config in _configurations(model)}
    with _captured_lock:
        if configs & _captured:
            raise GattnVizError(
                f"{type(model).__name__}, or a model that shares its configuration, is being captured already; "
                "expected one capture at a time: wait for the other, or take a copy of the model"
            )
        _captured.update(configs)
    try:
        yield
    finally:
        with _captured_lock:
            _captured.difference_update(configs)


def _configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The model's, its parts' and those inside of them, each once."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            inside = [getattr(config, name, None) for name in config.sub_configs]
            waiting += [config for config in inside if config is not None]
    return list(found.values())


@contextmanager
def capturing(model: PreTrainedModel, collector: Collector) -> Iterator[None]:
    """Let the collector have the model's attention while the context lasts.

    It computes it, where the model goes through transformers' attention interface; else it is given the weights
    that the model's own attention returns.
    """
    before = [(config, config._attn_implementation_internal) for config in _configurations(model)]
    try:
        if uses_interface(model):
            model.set_attn_implementation(IMPLEMENTATION)
            yield
        else:
            for config, _ in before:
                config._attn_implementation_internal = "eager"

            def take(layer: int, weights: Tensor) -> None:
                collector.add_weights(layer, weights, local_size(model, layer))

            with weights_taken(decoder_layers(model), take):
                yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation  # without its sub-configurations


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """No dropout; each module's training mode is as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode

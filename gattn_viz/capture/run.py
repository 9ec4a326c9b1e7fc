"""Run a model over prompts and take out of each layer what was asked for.

    captures = capture(model, [[1, 5, 9]], Request(maps=frozenset({21}), needs=frozenset({"first_token"})))
    captures[0][21].probabilities       # (H, T, T)

The model is run without gradients, and without its language-model head unless the loss is asked for. Afterwards it
is as it was: hooks, attention implementation and training mode, even when the run raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from gattn_viz.capture.anatomy import Anatomy, anatomy
from gattn_viz.capture.attention import WITH_TENSOR_MASK, active_taker
from gattn_viz.capture.checks import as_token_ids, check_model, check_request, check_sizes, real_tokens
from gattn_viz.capture.collector import Collector, LayerCapture, OnLayer, Request
from gattn_viz.capture.hooks import hooked
from gattn_viz.capture.layers import backbone
from gattn_viz.capture.loss import next_token_loss
from gattn_viz.capture.model_state import alone, attending_by, evaluating
from gattn_viz.capture.projection import output_projections
from gattn_viz.errors import GattnVizError, first_line
from gattn_viz.models.placement import input_device

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
        batch_size: prompts run together, padded on the right. Padding never counts: the result is the same. Models
            whose layers choose keys for each query are run a prompt at a time.
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
    check_model(model)
    check_sizes(batch_size, chunk)
    ids = as_token_ids(model, prompts)
    check_request(model, request)
    parts = anatomy(model)
    projections = _projections(parts, request)
    if parts.implementation == WITH_TENSOR_MASK:
        batch_size = 1  # which of equal keys a layer chooses hangs on the padding
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

            losses = _run_batch(model, parts, input_ids, places, request, hand_on, chunk, projections)
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
    check_model(model)
    check_sizes(chunk=chunk)
    places = real_tokens(model, input_ids, attention_mask)
    check_request(model, request)
    parts = anatomy(model)
    projections = _projections(parts, request)
    with alone(model):
        if chunk is not None and chunk < max(place.stop for place in places):
            check_cache(model)
        return _run_batch(model, parts, input_ids, places, request, on_layer, chunk, projections)


def _projections(parts: Anatomy, request: Request) -> dict[int, Tensor]:
    return output_projections(parts, request.maps) if request.weight == "output" else {}


def _run_batch(
    model: PreTrainedModel,
    parts: Anatomy,
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
    indirect = {gate.attention for gate in parts.gates if gate.adapter.multiplies is not None}
    collector = Collector(request, places, on_layer, range(0, step), projections, indirect)
    base = backbone(model)
    input_ids = input_ids[:, :length].to(input_device(model), torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, place in enumerate(places):
        attention_mask[row, place] = 1
    # left padding shifts a prompt's tokens; their positions must not shift with them
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    losses = [0.0] * len(places)
    cached = _cache_arguments(model) if step < length else {"use_cache": False}
    with (
        torch.no_grad(),
        evaluating(model),
        attending_by(model, parts.implementation),
        hooked(model, parts, collector),
    ):
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
    return losses if request.loss else None


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
    name = "cache" if "cache" in signature(type(backbone(model)).forward).parameters else "past_key_values"
    return {"use_cache": True, name: DynamicCache(config=model.config)}

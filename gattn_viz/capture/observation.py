"""Run a model on a few tokens, and write down what happens in its layers.

Axis letters: T tokens, H query heads, V head_dim of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gattn_viz.capture.attention import IMPLEMENTATION, WITH_TENSOR_MASK, Attention, active_taker, not_ours
from gattn_viz.capture.blocks import attend_in_blocks
from gattn_viz.capture.eager import uses_interface, weights_taken
from gattn_viz.capture.layers import backbone, decoder_layers, followed
from gattn_viz.capture.mask import NotATensor
from gattn_viz.capture.model_state import alone, attending_by, evaluating
from gattn_viz.errors import GattnVizError
from gattn_viz.models.placement import input_device

TOKENS = 4

# Of the largest hidden state, in half precision and in float32: experts may be chosen otherwise after rounding.
ALLOWED = (0.3, 1e-3)


@dataclass
class Call:
    """A module that ran: its first argument and what it gave, if these are tensors."""

    module: nn.Module
    taken: Tensor | None
    given: Tensor | None = None


@dataclass
class SeenLayer:
    """What happened in one layer, in the order of running.

    Attributes:
        attention: the module that attended; None if none did.
        heads: H.
        output: (T, H, V), of attention, float32 on the CPU; None of a layer that gives its weights only.
        query_width: head_dim of queries.
        before, after: the modules that began before it had attended, and after that.
    """

    attention: nn.Module | None = None
    heads: int = 0
    output: Tensor | None = None
    query_width: int = 0
    before: list[Call] = field(default_factory=list)
    after: list[Call] = field(default_factory=list)


def observe(model: PreTrainedModel) -> tuple[list[SeenLayer], str]:
    """The layers of a run on `TOKENS` tokens, and the name of the attention function that the model can be run by.

    Raises:
        GattnVizError: attention cannot be seen, is not causal, or happens twice in a layer.
    """
    ids = torch.arange(TOKENS, device=input_device(model))[None] % model.get_input_embeddings().weight.shape[0]
    implementation = IMPLEMENTATION if uses_interface(model) else "eager"
    exactly = torch.autocast(ids.device.type, enabled=False)
    with alone(model), torch.no_grad(), evaluating(model), exactly:
        try:
            layers, output = _run(model, ids, implementation)
        except NotATensor:
            implementation = WITH_TENSOR_MASK
            layers, output = _run(model, ids, implementation)
        # SDPA of older versions of transformers leaves a softcap out
        with attending_by(model, "eager") if implementation != "eager" else nullcontext():
            _check(model, ids, output)
    return layers, implementation


def _check(model: PreTrainedModel, ids: Tensor, output: Tensor) -> None:
    """Raise if a plain run of the model gives another last hidden state: not all of its attention was seen."""
    plain = backbone(model)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
    off = float((output.float() - plain.float()).abs().max() / plain.float().abs().max())
    allowed = ALLOWED[model.dtype.itemsize > 2]
    if off > allowed:  # not NaN: broken weights are reported where they are measured
        raise GattnVizError(
            f"{type(model).__name__} does not give when it is captured what it gives by itself (off by {off:.2g} "
            f"of the largest hidden state, expected at most {allowed:.2g}): this model is not supported"
        )


def _run(model: PreTrainedModel, ids: Tensor, implementation: str) -> tuple[list[SeenLayer], Tensor]:
    """The layers, and the last hidden state (1, T, hidden)."""
    observer = _Observer()

    def check(module: nn.Module) -> None:
        if active_taker.get() is not observer:
            raise not_ours(module)

    with attending_by(model, implementation), ExitStack() as hooks:
        hooks.enter_context(followed(model, observer, check))
        hooks.enter_context(_listening(model, observer))
        if implementation == "eager":
            hooks.enter_context(weights_taken(decoder_layers(model), observer.add_weights))
        token = active_taker.set(observer)
        try:
            # as a capture runs it, see `run`
            positions = torch.arange(TOKENS, device=ids.device)[None]
            outputs = backbone(model)(
                input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False
            )
        finally:
            active_taker.reset(token)
    if not any(layer.attention for layer in observer.layers):
        raise _not_seen(model)
    return observer.layers, outputs.last_hidden_state


def _not_seen(model: PreTrainedModel) -> GattnVizError:
    found = "has no softmax attention, or computes it out of sight of transformers' attention interface"
    if not uses_interface(model):
        found = "returns no attention weights, nor goes through transformers' attention interface"
    return GattnVizError(
        f"{type(model).__name__} {found}; expected a causal LM with softmax attention: its maps cannot be captured"
    )


class _Observer:
    """Attends, and takes note."""

    first_query = 0

    def __init__(self) -> None:
        self.layers: list[SeenLayer] = []
        self.running: SeenLayer | None = None
        self.last_calls: dict[nn.Module, Call] = {}

    def begin_pass(self) -> None:
        pass

    def begin_layer(self) -> None:
        self.running = SeenLayer()
        self.layers.append(self.running)

    def end_layer(self, residual: Tensor) -> None:
        self.running = None

    def place(self, sequence: int) -> slice:
        return slice(0, TOKENS)

    def attend(self, attention: Attention) -> Tensor:
        if self.running is not None:
            self.running.query_width = attention.q.shape[-1]
        output = attention.q.new_empty(*attention.q.shape[:3], attention.v.shape[-1])
        attend_in_blocks(attention, output=output)
        return output

    def add_weights(self, module: nn.Module, weights: Tensor) -> None:
        self._attended(module, weights.shape[1])

    def add_output(self, module: nn.Module, output: Tensor) -> None:
        layer = self._attended(module, output.shape[2])
        layer.output = output[0].float().cpu()

    def _attended(self, module: nn.Module, heads: int) -> SeenLayer:
        if self.running is None:
            raise GattnVizError(
                f"{type(module).__name__} attends outside of the model's layers; expected it in one of them: this "
                "model is not supported"
            )
        if self.running.attention is not None:
            raise GattnVizError(
                f"layer {len(self.layers)} attends more than once, in {type(module).__name__}; expected once: "
                "this model is not supported"
            )
        self.running.attention, self.running.heads = module, heads
        return self.running

    def on_begin(self, module: nn.Module, args: Any) -> None:
        if self.running is not None:
            taken = args[0].clone() if args and isinstance(args[0], Tensor) else None
            calls = self.running.before if self.running.attention is None else self.running.after
            calls.append(Call(module, taken))
            self.last_calls[module] = calls[-1]

    def on_end(self, module: nn.Module, args: Any, given: Any) -> None:
        if self.running is not None and isinstance(given, Tensor):
            self.last_calls[module].given = given.clone()


@contextmanager
def _listening(model: PreTrainedModel, observer: _Observer) -> Iterator[None]:
    with ExitStack() as hooks:
        for module in {part for layer in decoder_layers(model) for part in layer.modules() if part is not layer}:
            hooks.callback(module.register_forward_pre_hook(observer.on_begin).remove)
            hooks.callback(module.register_forward_hook(observer.on_end).remove)
        yield

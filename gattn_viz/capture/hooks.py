"""Where the hooks go while a model is captured: layers, gates, and what gates multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from gattn_viz.capture.anatomy import Anatomy, Gate
from gattn_viz.capture.attention import active_taker, not_ours
from gattn_viz.capture.collector import Collector
from gattn_viz.capture.eager import local_size, weights_taken
from gattn_viz.capture.layers import decoder_layers, followed


@contextmanager
def hooked(model: PreTrainedModel, parts: Anatomy, collector: Collector) -> Iterator[None]:
    """Feed the collector while the context lasts; every hook is gone after it, whatever happened.

    A forward pass that is not the collector's own is refused.
    """

    def check(module: nn.Module) -> None:
        if active_taker.get() is not collector:
            raise not_ours(module)

    with ExitStack() as hooks:
        hooks.enter_context(followed(model, collector, check))
        if parts.implementation == "eager":

            def take(module: nn.Module, weights: Tensor) -> None:
                collector.add_weights(weights, local_size(model, collector.passed - 1))

            hooks.enter_context(weights_taken(decoder_layers(model), take))
        for gate in parts.gates:
            hooks.enter_context(_gate_hooked(gate, collector, check))
        yield


@contextmanager
def _gate_hooked(gate: Gate, collector: Collector, check: Callable[[nn.Module], None]) -> Iterator[None]:
    adapter, shape = gate.adapter, gate.shape

    def on_attention(module: nn.Module, args: Any, kwargs: Any) -> None:
        check(module)
        taken = args[0] if args else kwargs["hidden_states"]
        on_source(module, (taken,), gate.module(adapter.source)(taken))

    def on_source(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        check(module)
        seen = adapter.see(gate.attention, args[0], output, shape)
        assert seen is not None
        collector.add_gate(*seen)

    def on_multiplied(module: nn.Module, args: Any, output: Tensor) -> None:
        check(module)
        collector.add_multiplied(output.reshape(*output.shape[:2], shape.heads, -1))

    def on_reached(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        check(module)
        collector.add_gated_output(args[0].reshape(*args[0].shape[:2], shape.heads, -1))

    with ExitStack() as hooks:
        if gate.is_late and collector.weighs_by_gate:  # scores are needed while attention is computed
            hooks.callback(gate.attention.register_forward_pre_hook(on_attention, with_kwargs=True).remove)
        else:
            hooks.callback(gate.module(adapter.source).register_forward_hook(on_source).remove)
        hooks.callback(gate.module(adapter.reaches).register_forward_pre_hook(on_reached).remove)
        if adapter.multiplies is not None:
            hooks.callback(gate.module(adapter.multiplies).register_forward_hook(on_multiplied).remove)
        yield

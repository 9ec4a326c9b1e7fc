"""Where the hooks go: gate activations, output projections and the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gattn_viz.capture.attention import active_taker, not_ours
from gattn_viz.capture.collector import Collector
from gattn_viz.errors import GattnVizError
from gattn_viz.models.attention import GatedQwen3Attention


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's layers: in the part that reads text, the list of modules that is as long as the config says.

    Raises:
        GattnVizError: there is none.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise GattnVizError(
        f"cannot find the layers of {type(model).__name__}: no list of {count} modules in it "
        "(config.num_hidden_layers); this model is not supported"
    )


def backbone(model: PreTrainedModel) -> nn.Module:
    """The module that runs the layers: from token ids to the last hidden state, without the language-model head.

    In most families it is `base_model`, in some that holds it, or is the model itself.

    Raises:
        GattnVizError: what holds the layers takes no token ids.
    """
    layers = decoder_layers(model)
    holder = next(module for module in model.modules() if any(child is layers for child in module.children()))
    if "input_ids" not in signature(holder.forward).parameters:
        raise GattnVizError(
            f"{type(holder).__name__}, which holds the layers of {type(model).__name__}, takes no token ids; "
            "expected a decoder that does: this model is not supported"
        )
    return holder


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes its token ids; what accelerate offloads is on `meta` until it runs."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return embedding.weight.device if device is None else torch.device(device)


def gated_attention(model: PreTrainedModel) -> dict[int, GatedQwen3Attention]:
    """The attention modules that have a gate, by `layer_idx` (0-based)."""
    return {
        module.layer_idx: module
        for module in model.modules()
        if isinstance(module, GatedQwen3Attention) and module.config.gate
    }


@contextmanager
def hooked(model: PreTrainedModel, collector: Collector) -> Iterator[None]:
    """Feed the collector while the context lasts; every hook is gone after it, whatever happened.

    A forward pass that is not the collector's own is refused.
    """

    def check(module: nn.Module, args: Any = None) -> None:
        if active_taker.get() is not collector:
            raise not_ours(module)

    with ExitStack() as hooks:
        hooks.callback(backbone(model).register_forward_pre_hook(check).remove)
        for index, attention in gated_attention(model).items():
            heads = attention.config.num_attention_heads

            def on_gate(module: nn.Module, args: tuple[Tensor, ...], scores: Tensor, index: int = index) -> None:
                check(module)
                collector.add_gate(index, args[0], scores)

            def on_projection(
                module: nn.Module, args: tuple[Tensor, ...], index: int = index, heads: int = heads
            ) -> None:
                check(module)
                collector.add_gated_output(index, args[0], heads)

            hooks.callback(attention.gate_activation.register_forward_hook(on_gate).remove)
            hooks.callback(attention.o_proj.register_forward_pre_hook(on_projection).remove)

        for index, layer in enumerate(decoder_layers(model)):

            def on_layer(module: nn.Module, args: Any, output: Any, index: int = index) -> None:
                check(module)
                # some families return a tuple or a list, the residual stream first
                collector.end_layer(index, output[0] if isinstance(output, (tuple, list)) else output)

            hooks.callback(layer.register_forward_hook(on_layer).remove)
        yield

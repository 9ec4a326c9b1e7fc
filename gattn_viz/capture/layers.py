"""Where a model's layers are, and which of them is running.

Layers count in the order in which they run. That is the order of the list they stand in, but for looped models,
which go through some of it again: of four layers that run twice, the second pass is layers 5 to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from itertools import takewhile
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from gattn_viz.errors import GattnVizError


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's layers, each once: in the part that reads text, the list that is as long as the config says.

    Where there is none, all modules of the class that transformers takes hidden states from.

    Raises:
        GattnVizError: there is neither.
    """
    decoder = model.get_decoder()
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [*module.children()]
    layer_class = (getattr(decoder, "_can_record_outputs", None) or {}).get("hidden_states")
    found: list[nn.Module] = [module for module in decoder.modules() if type(module) is layer_class]
    if not found:
        raise GattnVizError(
            f"cannot find the layers of {type(model).__name__}: no list of {count} modules in it "
            "(config.num_hidden_layers); this model is not supported"
        )
    return found


def backbone(model: PreTrainedModel) -> nn.Module:
    """The module that runs the layers: from token ids to the last hidden state, without the language-model head.

    In most families it is `base_model`, in some that holds it, or is the model itself.

    Raises:
        GattnVizError: what holds the layers takes no token ids.
    """
    layers = set(decoder_layers(model))
    names = [name.split(".")[:-1] for name, module in model.named_modules() if module in layers]
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))]
    holder = model.get_submodule(".".join(shared))
    if isinstance(holder, nn.ModuleList):
        holder = model.get_submodule(".".join(shared[:-1]))
    if "input_ids" not in signature(type(holder).forward).parameters:
        raise GattnVizError(
            f"{type(holder).__name__}, which holds the layers of {type(model).__name__}, takes no token ids; "
            "expected a decoder that does: this model is not supported"
        )
    return holder


class Follower(Protocol):
    """Is told where the model is."""

    def begin_pass(self) -> None:
        """A forward pass begins."""

    def begin_layer(self) -> None:
        """The next layer begins."""

    def end_layer(self, residual: Tensor) -> None:
        """It ends; `residual` (B, Q, hidden) is the residual stream after it."""


@contextmanager
def followed(model: PreTrainedModel, follower: Follower, check: Callable[[nn.Module], None]) -> Iterator[None]:
    """Tell a follower where the model is while the context lasts.

    Args:
        check: called with each module that begins or ends, before the follower is told; may raise.
    """

    def on_pass(module: nn.Module, args: Any) -> None:
        check(module)
        follower.begin_pass()

    def on_begin(module: nn.Module, args: Any) -> None:
        check(module)
        follower.begin_layer()

    def on_end(module: nn.Module, args: Any, output: Any) -> None:
        check(module)
        # some families return a tuple or a list, the residual stream first
        follower.end_layer(output[0] if isinstance(output, (tuple, list)) else output)

    with ExitStack() as hooks:
        hooks.callback(backbone(model).register_forward_pre_hook(on_pass).remove)
        for layer in decoder_layers(model):
            hooks.callback(layer.register_forward_pre_hook(on_begin).remove)
            hooks.callback(layer.register_forward_hook(on_end).remove)
        yield

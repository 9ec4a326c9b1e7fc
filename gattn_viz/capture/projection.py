"""The output projection of a layer's attention: found by what it receives, whatever a family calls it.

o_proj, out_proj, dense, c_proj: it is the first module of the layer that is given what attention gives, times the
gate where there is one, as it is. If that is a norm, or if something else stands between, no cell of a map says
what a key adds, and there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gattn_viz.capture.collector import LayerCapture
from gattn_viz.capture.hooks import decoder_layers
from gattn_viz.errors import GattnVizError

Received = list[tuple[nn.Module, Tensor]]
"""Modules in the order in which they were called, each with its first argument."""


@contextmanager
def listening(model: PreTrainedModel, layers: Iterable[int]) -> Iterator[dict[int, Received]]:
    """What the modules of some layers, from 1, receive while the context lasts."""
    received: dict[int, Received] = {}
    with ExitStack() as hooks:
        for layer in layers:
            heard = received.setdefault(layer, [])

            def on_call(module: nn.Module, args: tuple[Any, ...], heard: Received = heard) -> None:
                if args and isinstance(args[0], Tensor):
                    heard.append((module, args[0].detach().clone()))

            for module in decoder_layers(model)[layer - 1].modules():
                hooks.callback(module.register_forward_pre_hook(on_call).remove)
        yield received


def find_projection(layer: LayerCapture, received: Received, dtype: torch.dtype) -> nn.Linear | Conv1D:
    """The module that received a layer's attention output, gated if there is a gate.

    Args:
        layer: with its output before the gate, and its gate scores.
        dtype: of the model.

    Raises:
        GattnVizError: none did, or it is no plain linear layer with its weights in memory.
    """
    assert layer.output_before is not None
    expected = layer.output_before if layer.gate_scores is None else layer.output_before * layer.gate_scores
    expected = expected.flatten(1)  # (T, H * Dv)
    tolerance = 2 * torch.finfo(dtype).eps * float(expected.nan_to_num().abs().max())

    def is_expected(x: Tensor) -> bool:
        if x.shape[-1] != expected.shape[-1] or x.numel() != expected.numel():
            return False
        x = x.reshape(expected.shape).float().cpu()
        return torch.allclose(x, expected, rtol=0, atol=tolerance, equal_nan=True)

    module = next((module for module, x in received if is_expected(x)), None)
    if module is None:
        raise _refusal(layer.layer, "what its attention gives reaches no module unchanged: a gate, perhaps")
    if type(module) not in (nn.Linear, Conv1D):  # a class of its own may do more than multiply by its weights
        raise _refusal(layer.layer, f"what its attention gives goes to a {type(module).__name__}, no linear layer")
    if module.weight.is_meta:
        raise _refusal(layer.layer, "the weights of its output projection are not in memory")
    if type(module.weight) is not nn.Parameter:  # torchao's have a class of their own
        raise _refusal(
            layer.layer, f"the weights of its output projection are quantised, {type(module.weight).__name__}"
        )
    return module


def head_factors(projection: nn.Linear | Conv1D, layer: LayerCapture) -> Tensor:
    """(H, N, Dv): for each head R of the QR decomposition of its columns of the weights; |R x| = |W x|.

    N is Dv, or the hidden size if that is smaller.
    """
    assert layer.output_before is not None
    heads = layer.output_before.shape[1]
    weight = projection.weight.detach()
    weight = weight.T if isinstance(projection, Conv1D) else weight  # (hidden, H * Dv)
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return torch.linalg.qr(weight.unflatten(1, (heads, -1)).transpose(0, 1), mode="r").R


def _refusal(layer: int, why: str) -> GattnVizError:
    return GattnVizError(
        f"layer {layer}: {why}; expected an output projection, without which it is not known what a key adds to "
        "the residual stream: choose the weight value or probability"
    )

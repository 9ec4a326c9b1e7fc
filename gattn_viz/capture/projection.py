"""The output projection of a layer's attention, and what it does to the length of each head's part.

o_proj, out_proj, dense, c_proj: whatever a family calls it, it is the module that is given what attention gives,
times the gate where there is one, as it is (see `anatomy`). If that is a norm, or if something else stands
between, no cell of a map says what a key adds, and there is none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gattn_viz.capture.anatomy import Anatomy
from gattn_viz.errors import GattnVizError


def output_projections(parts: Anatomy, layers: Iterable[int]) -> dict[int, Tensor]:
    """For each of some layers, from 1, by its index from 0: what its output projection does to each head's length.

    Costs a QR decomposition a layer.

    Returns:
        see `head_factors`. Layers without softmax attention are not in it.

    Raises:
        GattnVizError: a layer has no projection that is known, or it is no plain linear layer with its weights in
            memory.
    """
    found = {}
    for number in sorted(layers):
        layer = parts.layers[number - 1]
        if layer.shape is not None:
            for module in (layer.projection, layer.attention):
                if module is not None and _is_changed(module):
                    raise _refusal(number, f"a hook or a patch changes what {type(module).__name__} gives")
            found[number - 1] = head_factors(_checked(layer.projection, number), layer.shape.heads)
    return found


def head_factors(projection: nn.Linear | Conv1D, heads: int) -> Tensor:
    """(H, N, V): for each head R of the QR decomposition of its columns of the weights; |R x| = |W x|.

    N is V, the head_dim of values, or the hidden size if that is smaller.
    """
    weight = projection.weight.detach()
    weight = weight.T if isinstance(projection, Conv1D) else weight  # (hidden, H * V)
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return torch.linalg.qr(weight.unflatten(1, (heads, -1)).transpose(0, 1), mode="r").R


def _checked(projection: nn.Module | None, layer: int) -> nn.Linear | Conv1D:
    if projection is None:
        raise _refusal(layer, "what its attention gives reaches no module unchanged")
    if type(projection) not in (nn.Linear, Conv1D):  # a class of its own may do more than multiply by its weights
        raise _refusal(layer, f"what its attention gives goes to a {type(projection).__name__}, no linear layer")
    assert isinstance(projection, (nn.Linear, Conv1D))
    if projection.weight.is_meta:
        raise _refusal(layer, "the weights of its output projection are not in memory")
    if type(projection.weight) is not nn.Parameter:  # torchao's have a class of their own
        raise _refusal(
            layer, f"the weights of its output projection are quantised, {type(projection.weight).__name__}"
        )
    return projection


def _is_changed(module: nn.Module) -> bool:
    """Whether somebody may change what a module gives; accelerate moves it only, and transformers copies it."""
    theirs = ("transformers.", "accelerate.")
    hooks = [getattr(hook, "__module__", None) or "" for hook in module._forward_hooks.values()]
    is_patched = "forward" in vars(module) and not hasattr(module, "_hf_hook")
    return is_patched or any(not name.startswith(theirs) for name in hooks)


def _refusal(layer: int, why: str) -> GattnVizError:
    return GattnVizError(
        f"layer {layer}: {why}; expected an output projection, without which it is not known what a key adds to "
        "the residual stream: choose the weight value or probability"
    )

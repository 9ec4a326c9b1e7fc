"""Make a training step about twice as fast on one CPU core, without touching the model's code or parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class BFloat16Product(torch.autograd.Function):
    """x @ weight.T with the products in bfloat16, forward and backward; everything around stays float32.

    Unlike autocast, nothing but the three matrix products is rounded.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows, matrix = x.reshape(-1, x.shape[-1]).bfloat16(), weight.bfloat16()
        ctx.save_for_backward(rows, matrix)
        ctx.shape = x.shape
        return (rows @ matrix.t()).float().view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        rows, matrix = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1]).bfloat16()
        return (grad @ matrix).float().view(ctx.shape), (grad.t() @ rows).float()


class BFloat16Linear(nn.Linear):
    """A bias-free linear layer in whose place nn.Linear stood; same parameter, same name."""

    def forward(self, x: Tensor) -> Tensor:
        return BFloat16Product.apply(x, self.weight)


def speed_up(model: Any, *, bfloat16: bool = True, compiled: bool = True) -> None:
    """bfloat16 products in every bias-free linear layer, and each decoder layer compiled.

    Only for training: call it on the model that trains, not on one that is measured or saved from another place.
    """
    if bfloat16:
        for module in model.modules():
            if type(module) is nn.Linear and module.bias is None:
                module.__class__ = BFloat16Linear
    if compiled:
        # Layers share a graph, but each depth, length and mode wants its own; beyond the limit torch goes back to
        # eager code with no more than a warning.
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.compile()

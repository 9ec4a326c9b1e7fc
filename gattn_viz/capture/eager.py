"""Attention that a model computes by itself: the weights that its attention modules return, a layer at a time.

Some families of transformers (Falcon, BLOOM, MPT, GPT-Neo, XGLM and others) do not go through its attention
interface. Their attention modules return the weights they have computed, (B, H, Q, T) in the model's own dtype.
A hook takes these out of what a module returns, so that they are gone before the next layer computes its own.

Axis letters: B batch, H heads, Q queries, T keys, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gattn_viz.capture.blocks import MOST_ROWS, WantedMap
from gattn_viz.metrics.layer import Need
from gattn_viz.metrics.sums import AttentionSums

GIVEN: frozenset[Need] = frozenset({"first_token", "received", "entropy", "row_max", "residual"})
"""What such a model gives of its layers: queries, keys, values and the attention output are out of sight."""


def uses_interface(model: PreTrainedModel) -> bool:
    """Whether the part that reads text lets its attention function be chosen."""
    decoder = model.get_decoder()
    return bool((decoder if isinstance(decoder, PreTrainedModel) else model)._can_set_attn_implementation())


def local_size(model: PreTrainedModel, layer: int) -> int | None:
    """How many keys back the queries of a layer, from 0, see at most; None is all of them.

    A weight that is 0 does not tell: far keys' weights underflow. Of these families GPT-Neo has windows, alone.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "attention_layers", None)
    return config.window_size if kinds is not None and kinds[layer] == "local" else None


@contextmanager
def weights_taken(layers: Iterable[nn.Module], take: Callable[[nn.Module, Tensor], None]) -> Iterator[None]:
    """Hand `take` each attention module and its weights while the context lasts; the model has None then."""

    def on_attention(module: nn.Module, args: Any, output: Any) -> Any:
        if type(output) not in (tuple, list):
            return None
        for place, item in enumerate(output):
            if place > 0 and isinstance(item, Tensor) and item.dim() == 4:
                take(module, item)
                return type(output)([*output[:place], None, *output[place + 1 :]])
        return None

    with ExitStack() as hooks:
        for layer in layers:
            for module in layer.modules():
                if module is not layer and "Attention" in type(module).__name__:
                    hooks.callback(module.register_forward_pre_hook(_ask_for_weights, with_kwargs=True).remove)
                    hooks.callback(module.register_forward_hook(on_attention).remove)
        yield


def _ask_for_weights(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of an attention module, changed so that it returns its weights, and the right ones."""
    bound = signature(module.forward).bind(*args, **kwargs)
    if "output_attentions" in signature(module.forward).parameters:
        bound.arguments["output_attentions"] = True
    alibi, mask = bound.arguments.get("alibi"), bound.arguments.get("attention_mask")
    if alibi is not None and mask is not None and _has_bias(mask):
        # Falcon's mask has ALiBi in it, for SDPA; its eager path would add it once more
        bound.arguments["alibi"] = torch.zeros_like(alibi)
    return bound.args, bound.kwargs


def _has_bias(mask: Tensor) -> bool:
    """Whether an additive mask does more than let pass and hide."""
    return bool(((mask != 0) & (mask > torch.finfo(mask.dtype).min)).any()) if mask.is_floating_point() else False


def reduce_weights(
    weights: Tensor,
    first_query: int,
    *,
    sums: AttentionSums | None = None,
    needs: Collection[Need] = (),
    wanted: WantedMap | None = None,
    local_size: int | None = None,
) -> float:
    """Go through the queries of one sequence once, some rows at a time, in float32.

    Args:
        weights: (H, Q, T), padding taken out: the last query's own key is the last one.
        first_query: of the prompt, from 0; more than 0 with a cache.
        sums, needs, wanted: see `attend_in_blocks`.
        local_size: see above.

    Returns:
        the largest difference between 1 and the sum of a query's weights over the keys up to its own. It is 0, but
        for rounding, if these are the probabilities of causal attention.
    """
    every = slice(0, weights.shape[0])
    off = torch.zeros((), device=weights.device)
    for start in range(0, weights.shape[1], MOST_ROWS):
        rows = weights[:, start : start + MOST_ROWS]
        first = first_query + start
        p = rows[:, :, : first + rows.shape[1]].float().tril(first)  # (H, R, keys)
        off = torch.maximum(off, (p.sum(-1) - 1).abs().max())
        if sums is not None and local_size is not None:
            every_key = torch.ones(p.shape[1:], dtype=torch.bool, device=p.device)
            sums.add_visible(first, 0, every_key.tril(first).triu(first - local_size + 1))
        if "first_token" in needs and sums is not None:
            sums.add_first_token(every, first, p[:, :, 0])
        if "received" in needs and sums is not None:
            sums.add_received(every, 0, p.sum(1))
        if "entropy" in needs and sums is not None:
            seen = torch.arange(first + 1, first + 1 + rows.shape[1], device=p.device)
            seen = seen if local_size is None else seen.clamp(max=local_size)
            entropy = torch.special.entr(p).sum(-1)
            # rounded to the model's dtype, weights may sum to more than 1
            sums.add_entropy(every, torch.minimum(entropy, seen.log()), seen)
        if "row_max" in needs and sums is not None:
            sums.add_row_max(every, p.amax(-1))
        if wanted is not None:
            wanted.builder.add(p.mean(0, keepdim=True) if wanted.heads is None else p[wanted.heads], first, 0)
    return float(off)

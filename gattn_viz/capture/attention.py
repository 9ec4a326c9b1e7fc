"""The attention function that a captured model runs: exact output, and its probabilities on the way.

transformers hands every layer's queries, keys and values, after rotary embedding and qk-norm, to a function looked
up by name. Ours computes attention in float32, a block of query rows at a time, gives each block to the
collector that is active, and returns the output in the model's own dtype. No map exists as a whole here.

Axis letters: B batch, H query heads, K key/value heads, G = H / K, Q query rows of a block, T tokens, D head_dim.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

# The name must not hold "flash", "sdpa", "flex" or "/": transformers takes these for its own kernels.
IMPLEMENTATION = "gattn_viz_capture"

# Query rows of one block: its probabilities are H x 128 x T floats.
BLOCK_ROWS = 128


class AttentionSink(Protocol):
    """What the attention function gives its blocks to."""

    def real_tokens(self, sequence: int) -> slice:
        """Where the tokens of a sequence of the batch lie that are not padding."""

    def start_attention(self, layer: int, sequence: int, value: Tensor, heads: int) -> None:
        """A layer begins with a sequence; `value` is (K, T, D), its real tokens'."""

    def add_block(self, layer: int, sequence: int, first_query: int, p: Tensor, visible: Tensor) -> None:
        """`p` (H, Q, T) are the probabilities of some rows, `visible` (Q,) how many keys each row sees."""

    def add_output(self, layer: int, output: Tensor) -> None:
        """A layer's attention output for the whole batch, (B, T, H, D)."""


active_sink: ContextVar[AttentionSink | None] = ContextVar("active_sink", default=None)


def capture_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax attention of (B, H, T, D) queries over (B, K, T, D) keys and values.

    Padding is left out before anything is computed: a padded query's output is 0, and no real query sees a
    padded key.

    Args:
        attention_mask: (B, 1, T, T) boolean, as `boolean_mask` makes it; True is visible.
        softcap: scores are softcap * tanh(score / softcap) (Gemma 2).
        s_aux: (H,), a learned sink's logit, which takes part in the softmax and is then dropped (gpt-oss).
        position_bias: (1 or B, H, T, T), added to the scores.

    Returns:
        (B, T, H, D) and None: the weights went to the collector.
    """
    sink = active_sink.get()
    if sink is None:
        raise RuntimeError(f"attention implementation {IMPLEMENTATION!r} runs inside gattn_viz.capture only")
    if attention_mask is None:
        raise RuntimeError(f"{type(module).__name__} asked for no mask: causality cannot be known")
    layer: int = module.layer_idx  # type: ignore[assignment]
    batch, heads, length, _ = query.shape
    if key.shape[2] != length:
        raise RuntimeError(f"capture runs without a cache, but got {length} queries and {key.shape[2]} keys")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling

    output = query.new_zeros(batch, length, heads, value.shape[-1])
    for sequence in range(batch):
        real = sink.real_tokens(sequence)
        q, k, v = (x[sequence, :, real].float() for x in (query, key, value))
        visible = attention_mask[sequence, 0, real, real]
        bias = None
        if position_bias is not None:
            bias = position_bias[sequence % position_bias.shape[0], :, real, real].float()
        sink.start_attention(layer, sequence, v, heads)
        for first in range(0, q.shape[1], BLOCK_ROWS):
            rows = slice(first, first + BLOCK_ROWS)
            p = block_probabilities(
                q[:, rows] * scaling,
                k,
                visible[rows],
                softcap=softcap,
                sink_logit=s_aux,
                bias=None if bias is None else bias[:, rows],
            )
            sink.add_block(layer, sequence, first, p, visible[rows].sum(-1))
            out = _by_kv_head(p, v.shape[0]) @ v  # (K, G * Q, D)
            output[sequence, real][rows] = out.view(heads, -1, v.shape[-1]).transpose(0, 1).to(output.dtype)
    sink.add_output(layer, output)
    return output, None


def block_probabilities(
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    *,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The attention probabilities of some query rows, in float32.

    Args:
        q: (H, Q, D), scaled.
        k: (K, T, D).
        visible: (Q, T) boolean.
        bias: (H, Q, T).

    Returns:
        (H, Q, T); rows sum to 1, to less with a learned sink, and to 0 where nothing is visible.
    """
    heads, rows, _ = q.shape
    scores = (_by_kv_head(q, k.shape[0]) @ k.transpose(1, 2)).view(heads, rows, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink_logit is not None:
        column = sink_logit.float().view(heads, 1, 1).expand(heads, rows, 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return scores.softmax(-1).masked_fill(~visible.any(-1, keepdim=True), 0)


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """(H, Q, D) to (K, G * Q, D): the query heads of one KV head side by side, so that no key is copied."""
    return x.reshape(kv_heads, -1, x.shape[-1])


def boolean_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' boolean mask, never left out for being plainly causal."""
    kwargs["allow_is_causal_skip"] = False
    kwargs["allow_is_bidirectional_skip"] = False
    return sdpa_mask(*args, **kwargs)


# Without a mask function of the same name the layers would get no mask at all. There is no unregister: the
# functions stay, and do nothing until a model is set to them.
AttentionInterface.register(IMPLEMENTATION, capture_attention)
AttentionMaskInterface.register(IMPLEMENTATION, boolean_mask)

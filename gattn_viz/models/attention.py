"""Softmax attention with a sigmoid gate on its output, arXiv 2505.06708.

For the input x of a layer, with P the attention probabilities:

    output = o_proj( sigmoid(gate(x)) * (P V) )

The gate is computed from the same input as the query, by further rows of the same projection. The axis letters:
B batch, T tokens, H query heads, K key/value heads, G = H / K query heads of one KV head, D head_dim, and
C gate channels of one head (1 headwise, D elementwise).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from gattn_viz.models.configuration import GatedQwen3Config


def split_query_and_gate(projected: Tensor, config: GatedQwen3Config) -> tuple[Tensor, Tensor]:
    """Split the query projection's output into queries and gate logits.

    The layout is per KV group. For each KV head, its G query heads come first, then the gates of these G heads:

        [ q of head 1 (D) | ... | q of head G (D) | gate of head 1 (C) | ... | gate of head G (C) ]   x K

    Args:
        projected: (B, T, K * G * (D + C)), the output of `q_proj`.

    Returns:
        queries (B, T, H, D) and gate logits (B, T, H, C).
    """
    batch, tokens, _ = projected.shape
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    group, channels = heads // kv_heads, config.gate_channels
    grouped = projected.view(batch, tokens, kv_heads, -1)
    query, gate = grouped.split([group * config.head_dim, group * channels], dim=-1)
    return (
        query.reshape(batch, tokens, heads, config.head_dim),
        gate.reshape(batch, tokens, heads, channels),
    )


def causal_mask(
    attention_mask: Tensor | BlockMask | None,
    query: Tensor,
    key: Tensor,
    *,
    implementation: str = "eager",
    sliding_window: int | None = None,
) -> Tensor:
    """Whatever mask the attention implementation was given, as one that eager attention can add.

    SDPA drops the mask when it is plainly causal, or passes a boolean one; flash attention passes the padding
    mask alone, flex attention a function. Eager attention would take some of them for "everything is visible".

    Args:
        attention_mask: None, (B, K) padding (1 is a real token), (B, 1, Q, K) boolean or additive, or flex
            attention's.
        query: (B, H, Q, D).
        key: (B, kv_heads, K, D).
        implementation: the one that the mask was made for.
        sliding_window: how many keys a query sees, where the mask does not say so itself.

    Returns:
        (B or 1, 1, Q, K), 0 where visible and the dtype's minimum elsewhere.
    """
    if isinstance(attention_mask, BlockMask):
        attention_mask = create_mask(
            attention_mask.mask_mod, query.shape[0], 1, query.shape[2], key.shape[2], device=query.device
        )
    if attention_mask is not None and attention_mask.is_floating_point() and attention_mask.dim() == 4:
        return attention_mask
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.dim() == 4:
        visible = attention_mask
    else:
        offset = keys - queries  # cached keys come before the first query
        if attention_mask is None and implementation == "sdpa" and queries > 1:
            offset = 0  # the prefill of a static cache, whose empty places come after the last query
        visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(offset)[None, None]
        if sliding_window is not None:
            visible = visible.triu(offset - sliding_window + 1)
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, -keys:].bool()
    return torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill(
        ~visible, torch.finfo(query.dtype).min
    )


class GatedQwen3Attention(Qwen3Attention):
    """Qwen3's attention with the paper's options: a gate on the output, biases, no qk-norm.

    `q_proj` has the gate's rows in it (see `split_query_and_gate`). `gate_activation` is a module of its own so
    that a forward hook sees the gate logits going in and the gate scores coming out, (B, T, H, C).
    """

    def __init__(self, config: GatedQwen3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.qkv_bias or config.attention_bias
        query_rows = heads * (head_dim + config.gate_channels)
        self.q_proj = nn.Linear(config.hidden_size, query_rows, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, config.hidden_size, bias=bias)
        if not config.use_qk_norm:
            self.q_norm = nn.Identity()
            self.k_norm = nn.Identity()
        if config.gate:
            self.gate_activation = nn.Sigmoid()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over `hidden_states` (B, T, hidden) and gate the result.

        Attention runs through the implementation that the model is set to. With `output_attentions=True` it runs
        eagerly, whatever is set, since no fused kernel returns its weights.

        Returns:
            the layer's output (B, T, hidden) and the attention weights (B, H, T, keys), or None.
        """
        # transformers before 5.2x hands the cache over as `past_key_values`
        cache = kwargs.pop("past_key_values", cache)
        batch, tokens, _ = hidden_states.shape
        kv_shape = (batch, tokens, -1, self.head_dim)

        query, gate = split_query_and_gate(self.q_proj(hidden_states), self.config)
        if self.config.gate:
            gate = self.gate_activation(gate)  # before attention: a capture that weighs it needs the scores
        query = self.q_norm(query).transpose(1, 2)  # (B, H, T, D)
        key = self.k_norm(self.k_proj(hidden_states).view(kv_shape)).transpose(1, 2)  # (B, K, T, D)
        value = self.v_proj(hidden_states).view(kv_shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if attend is not eager_attention_forward and kwargs.get("output_attentions"):
            attend = eager_attention_forward
            attention_mask = causal_mask(
                attention_mask,
                query,
                key,
                implementation=self.config._attn_implementation,
                sliding_window=self.sliding_window,
            )
        attended, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )  # (B, T, H, D)

        if self.config.gate:
            attended = attended * gate
        return self.o_proj(attended.reshape(batch, tokens, -1)), weights

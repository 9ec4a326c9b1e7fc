"""Gated attention from its formulas alone: the witness that the project's modules are tested against.

Nothing here comes from torch, transformers or gattn_viz: numpy in float64, and a plain loop for each index. It is
slow and repeats itself on purpose.

Letters: B batch, T tokens, V vocabulary, N hidden size, H query heads, K key/value heads, G = H / K query heads of
one KV head, D head_dim, C gate channels of one head (0 baseline, 1 headwise, D elementwise).

One layer, for the input x (T, N), where norm(.) is RMSNorm and rotary(., t) turns a vector to position t:

    n      = norm(x)
    q[h,t] = rotary(norm_q(Wq[h] n[t] + bq[h]), t)          k[j,s] = rotary(norm_k(Wk[j] n[s] + bk[j]), s)
    v[j,s] = Wv[j] n[s] + bv[j]                              z[h,t] = Wz[h] n[t] + bz[h]       (the gate logits)
    p[h,t] = softmax over real s <= t of q[h,t] . k[h // G, s] / sqrt(D)
    a[h,t] = sum over s of p[h,t,s] v[h // G, s]
    x      = x + Wo concat over h of (sigmoid(z[h,t]) * a[h,t]) + bo
    x      = x + Wdown (silu(Wgate m) * (Wup m)),  m = norm(x)

The rows of Wq and Wz lie together in `q_proj`; `layout` says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TRUE_LAYOUT = "kv_group"
WRONG_LAYOUTS = ("per_head", "queries_first", "gates_first")


@dataclass
class Result:
    """What the model computes; one array a layer in the lists. Rows of padding are not meaningful."""

    logits: Array  # (B, T, V)
    attentions: list[Array] = field(default_factory=list)  # (B, H, T, T)
    gate_logits: list[Array] = field(default_factory=list)  # (B, T, H, C)
    gate_scores: list[Array] = field(default_factory=list)  # (B, T, H, C)


def head_rows(
    head: int, *, heads: int, kv_heads: int, head_dim: int, channels: int, layout: str = TRUE_LAYOUT
) -> tuple[list[int], list[int]]:
    """The rows of `q_proj` that make the query (D of them) and the gate (C of them) of one head.

    kv_group is the true layout, one block for each KV head: the queries of its G heads, then their gates.
    The others are wrong, and each is somebody's idea of it:
        per_head       one block for each query head: its query, then its gate (Qwen3-Next)
        queries_first  the queries of all heads, then the gates of all heads
        gates_first    one block for each KV head: the gates of its G heads, then their queries
    """
    group = heads // kv_heads
    kv_head, member = divmod(head, group)  # which block, and the how-manieth head in it
    block = kv_head * group * (head_dim + channels)
    if layout == "kv_group":
        query, gate = block + member * head_dim, block + group * head_dim + member * channels
    elif layout == "per_head":
        query = head * (head_dim + channels)
        gate = query + head_dim
    elif layout == "queries_first":
        query, gate = head * head_dim, heads * head_dim + head * channels
    elif layout == "gates_first":
        query, gate = block + group * channels + member * head_dim, block + member * channels
    else:
        raise ValueError(f"unknown layout {layout!r}")
    return list(range(query, query + head_dim)), list(range(gate, gate + channels))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x over the root of its mean square, times a weight for each channel."""
    return weight * x / np.sqrt(np.mean(x * x) + eps)


def rotary(x: Array, position: int, theta: float) -> Array:
    """Turn x (D) to a position: channel d and channel d + D/2 are a pair, turned by position / theta^(2d/D)."""
    half = len(x) // 2
    out = np.empty_like(x)
    for d in range(half):
        angle = position * theta ** (-2 * d / len(x))
        out[d] = x[d] * np.cos(angle) - x[d + half] * np.sin(angle)
        out[d + half] = x[d + half] * np.cos(angle) + x[d] * np.sin(angle)
    return out


def softmax(scores: list[float]) -> list[float]:
    highest = max(scores)
    powers = [np.exp(score - highest) for score in scores]
    total = sum(powers)
    return [power / total for power in powers]


def forward(
    state: Mapping[str, NDArray[np.floating]],
    input_ids: NDArray[np.integer],
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    gate: str | None,
    qkv_bias: bool,
    use_qk_norm: bool,
    tied: bool,
    rope_theta: float,
    eps: float,
    real: NDArray[np.bool_] | None = None,
    positions: NDArray[np.integer] | None = None,
    layout: str = TRUE_LAYOUT,
) -> Result:
    """Run the whole model.

    Args:
        state: the parameters, under the official checkpoints' names.
        input_ids: (B, T).
        gate: None, "headwise" or "elementwise".
        qkv_bias: biases on the query, key, value and output projections.
        tied: the output embedding is the input embedding.
        real: (B, T), False where a token is padding; all real if not given.
        positions: (B, T); 0, 1, 2, ... for every row if not given, wherever the padding is.
        layout: see `head_rows`.

    Raises:
        KeyError: a parameter is missing.
        ValueError: a parameter is left over.
    """
    left = {name: np.asarray(array, dtype=np.float64) for name, array in state.items()}
    take = left.pop
    batch, tokens = input_ids.shape
    channels = {None: 0, "headwise": 1, "elementwise": head_dim}[gate]
    group = heads // kv_heads
    if real is None:
        real = np.ones((batch, tokens), dtype=bool)
    if positions is None:
        positions = np.tile(np.arange(tokens), (batch, 1))

    embedding = take("model.embed_tokens.weight")  # (V, N)
    x = np.empty((batch, tokens, embedding.shape[1]))  # (B, T, N), the residual stream
    for b in range(batch):
        for t in range(tokens):
            x[b, t] = embedding[input_ids[b, t]]
    result = Result(logits=np.empty((batch, tokens, len(embedding))))

    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        input_norm = take(prefix + "input_layernorm.weight")  # (N)
        q_weight = take(prefix + "self_attn.q_proj.weight")  # (H * (D + C), N)
        k_weight = take(prefix + "self_attn.k_proj.weight")  # (K * D, N)
        v_weight = take(prefix + "self_attn.v_proj.weight")  # (K * D, N)
        o_weight = take(prefix + "self_attn.o_proj.weight")  # (N, H * D)
        q_bias, k_bias, v_bias, o_bias = (np.zeros(len(w)) for w in (q_weight, k_weight, v_weight, o_weight))
        if qkv_bias:
            q_bias = take(prefix + "self_attn.q_proj.bias")
            k_bias = take(prefix + "self_attn.k_proj.bias")
            v_bias = take(prefix + "self_attn.v_proj.bias")
            o_bias = take(prefix + "self_attn.o_proj.bias")
        if use_qk_norm:
            q_norm = take(prefix + "self_attn.q_norm.weight")  # (D)
            k_norm = take(prefix + "self_attn.k_norm.weight")  # (D)

        # queries, keys, values and gates of every token
        query = np.empty((batch, heads, tokens, head_dim))
        key = np.empty((batch, kv_heads, tokens, head_dim))
        value = np.empty((batch, kv_heads, tokens, head_dim))
        gate_logit = np.empty((batch, tokens, heads, channels))
        for b in range(batch):
            for t in range(tokens):
                normed = rms_norm(x[b, t], input_norm, eps)  # (N)
                position = int(positions[b, t])
                for h in range(heads):
                    query_rows, gate_rows = head_rows(
                        h, heads=heads, kv_heads=kv_heads, head_dim=head_dim, channels=channels, layout=layout
                    )
                    q = q_weight[query_rows] @ normed + q_bias[query_rows]  # (D)
                    if use_qk_norm:
                        q = rms_norm(q, q_norm, eps)
                    query[b, h, t] = rotary(q, position, rope_theta)
                    gate_logit[b, t, h] = q_weight[gate_rows] @ normed + q_bias[gate_rows]  # (C)
                for j in range(kv_heads):
                    rows = list(range(j * head_dim, (j + 1) * head_dim))
                    k = k_weight[rows] @ normed + k_bias[rows]  # (D)
                    if use_qk_norm:
                        k = rms_norm(k, k_norm, eps)
                    key[b, j, t] = rotary(k, position, rope_theta)
                    value[b, j, t] = v_weight[rows] @ normed + v_bias[rows]

        # attention, then the gate
        weights = np.zeros((batch, heads, tokens, tokens))
        gated = np.zeros((batch, tokens, heads * head_dim))
        gate_score = sigmoid(gate_logit)
        for b in range(batch):
            for h in range(heads):
                for t in range(tokens):
                    visible = [s for s in range(t + 1) if real[b, s]]
                    if not visible:
                        continue  # padding before the first real token
                    scores = [query[b, h, t] @ key[b, h // group, s] / np.sqrt(head_dim) for s in visible]
                    attended = np.zeros(head_dim)
                    for s, weight in zip(visible, softmax(scores), strict=True):
                        weights[b, h, t, s] = weight
                        attended += weight * value[b, h // group, s]
                    for d in range(head_dim):
                        if gate == "headwise":
                            attended[d] *= gate_score[b, t, h, 0]
                        elif gate == "elementwise":
                            attended[d] *= gate_score[b, t, h, d]
                        gated[b, t, h * head_dim + d] = attended[d]
        for b in range(batch):
            for t in range(tokens):
                x[b, t] += o_weight @ gated[b, t] + o_bias
        result.attentions.append(weights)
        result.gate_logits.append(gate_logit)
        result.gate_scores.append(gate_score)

        # SwiGLU
        post_norm = take(prefix + "post_attention_layernorm.weight")  # (N)
        gate_weight = take(prefix + "mlp.gate_proj.weight")  # (M, N)
        up_weight = take(prefix + "mlp.up_proj.weight")  # (M, N)
        down_weight = take(prefix + "mlp.down_proj.weight")  # (N, M)
        for b in range(batch):
            for t in range(tokens):
                normed = rms_norm(x[b, t], post_norm, eps)
                hidden = gate_weight @ normed
                x[b, t] += down_weight @ (hidden * sigmoid(hidden) * (up_weight @ normed))

    final_norm = take("model.norm.weight")  # (N)
    head_weight = embedding if tied else take("lm_head.weight")  # (V, N)
    for b in range(batch):
        for t in range(tokens):
            result.logits[b, t] = head_weight @ rms_norm(x[b, t], final_norm, eps)
    if left:
        raise ValueError(f"parameters that the formulas do not use: {sorted(left)}")
    return result

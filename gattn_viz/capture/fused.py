"""Attention by torch's fused kernels, and what follows from the log-sum-exp that they also give.

    LSE_i = log sum_k exp s[i, k]
    p[i, 1] = exp(s[i, 1] - LSE_i)
    entropy_i = LSE_i - sum_k p[i, k] s[i, k] = LSE_i - q_i . sum_k p[i, k] k_k

so that the first token's mass costs one column of scores, and entropy one more call, with keys relative to the
first one, which are the values too. With values that say which bucket a key is in, a call gives a pooled map. Only
for the plain causal rule, without softcap, biases or learned sinks.

Axis letters as in `attention`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from gattn_viz.capture.attention import Attention
from gattn_viz.capture.blocks import WantedMap
from gattn_viz.metrics.pooling import MapBuilder

# A pooled map is made of at most so many calls, and of so many queries together: what they hold is heads x queries
# x buckets.
MOST_CALLS = 4
QUERIES_TOGETHER = 1024


def can_fuse(attention: Attention) -> bool:
    """Whether this attention is of the kind that the kernels compute, on a device where they are trusted."""
    plain = attention.softcap is None and attention.sink_logit is None and attention.bias is None
    return (
        plain
        and attention.mask.plain
        and lse_is_trusted(attention.q.device.type, attention.q.dtype)
        and scores_are_finite(attention)
    )


def scores_are_finite(attention: Attention) -> bool:
    """Whether every score surely is: |q . k| is at most |q| |k|, of all queries and keys together.

    Neither output nor log-sum-exp shows it: of a query whose scores are all NaN a kernel may say 0, which blocks
    do not.
    """
    largest = attention.scale * torch.linalg.vector_norm(attention.q) * torch.linalg.vector_norm(attention.k)
    return bool(largest.isfinite())


def attend(attention: Attention) -> tuple[Tensor, Tensor]:
    """The output (Q, K, G, Dv) and the log-sum-exp of each query's scores (Q, K, G)."""
    return _attend_to(attention, attention.v)


def first_token(attention: Attention, lse: Tensor) -> Tensor:
    """(Q, K, G): the probability of the first token, at most 1 although the two scores are rounded apart."""
    return (_first_scores(attention) - lse).clamp_max(0).exp()


def entropy(attention: Attention) -> Tensor:
    """(Q, K, G), in nats, from 0 to the log of how many keys a query sees; exactly 0 where that is one.

    The keys are taken relative to the first one: the softmax stays as it is, and of what all scores have in
    common, or of a sink's score far above the others, nothing is left to cancel. The error is some 1e-7 times the
    largest difference of a score to the first key's.
    """
    centred = replace(attention, k=attention.k - attention.k[:, :1])
    mean_key, lse = _attend_to(centred, centred.k)
    found = lse - attention.scale * (attention.q * mean_key).sum(-1)
    seen = torch.arange(1, len(lse) + 1, dtype=lse.dtype, device=lse.device) + attention.first_query
    return found.clamp_min(0).minimum(seen.log()[:, None, None])


def can_pool(attention: Attention, builder: MapBuilder) -> bool:
    """Whether `add_pooled_map` makes this map, with few calls enough to be worth it.

    Never on a CPU, where it takes two calls to cost more than blocks do.
    """
    calls = -(-len(builder.cells.keys) // attention.k.shape[-1])
    return builder.cells.pool == "mean" and attention.q.device.type != "cpu" and calls <= MOST_CALLS


def add_pooled_map(attention: Attention, wanted: WantedMap) -> None:
    """Fill in a map of means over buckets, some queries at a time."""
    builder, keys = wanted.builder, wanted.builder.cells.keys
    position = torch.arange(1, attention.k.shape[1] + 1, device=attention.k.device)
    inside = (position >= keys.first) & (position <= keys.last)
    bucket_of_key = torch.where(inside, (position - keys.first) // keys.size, -1)
    for start in range(0, len(attention.q), QUERIES_TOGETHER):
        q = attention.q[start : start + QUERIES_TOGETHER]
        first = attention.first_query + start
        seen = first + len(q)
        part = replace(attention, q=q, k=attention.k[:, :seen], v=attention.v[:, :seen], first_query=first)
        sums = bucket_sums(part, bucket_of_key[:seen], len(keys)).flatten(1, 2).transpose(0, 1)
        kept = sums.mean(0, keepdim=True) if wanted.heads is None else sums[wanted.heads]
        builder.add_bucket_sums(kept, first)


def bucket_sums(attention: Attention, bucket_of_key: Tensor, buckets: int) -> Tensor:
    """(Q, K, G, buckets): the attention of each query to each bucket of keys.

    An attention whose values say which bucket a key is in: 1 in its bucket's channel. As many buckets go into one
    call as keys have channels.

    Args:
        bucket_of_key: (T,), from 0; keys in none have -1.
    """
    width = attention.k.shape[-1]
    parts = []
    for first in range(0, buckets, width):
        channels = torch.arange(first, min(first + width, buckets), device=attention.k.device)
        indicator = (bucket_of_key[:, None] == channels).to(attention.k.dtype)  # (T, channels)
        parts.append(_attend_to(attention, indicator.expand(len(attention.k), -1, -1))[0])
    return torch.cat(parts, -1)


def _first_scores(attention: Attention) -> Tensor:
    """(Q, K, G): each query's score of the first key.

    One product of all heads' queries with a column for each head, 0 for the others' channels, reads the queries as
    they lie in memory.
    """
    queries, kv_heads, group, _ = attention.q.shape
    first = (attention.k[:, :1] * attention.scale).expand(-1, group, -1).flatten(0, 1)  # (H, D)
    columns = torch.diag_embed(first.T).transpose(0, 1).flatten(0, 1)  # (H * D, H)
    return (attention.q.reshape(queries, -1) @ columns).view(queries, kv_heads, group)


def _attend_to(attention: Attention, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, with values of any width.

    The kernels' causal rule lines the first query up with the first key. With a cache the keys before the first
    query are attended to apart, and the two parts weighed by their sums of exponentials.
    """
    past = attention.first_query
    q, k, scale = attention.q, attention.k, attention.scale
    output, lse = _by_group(q, k[:, past:], v[:, past:], scale, causal=True)
    if past:
        before, lse_before = _by_group(q, k[:, :past], v[:, :past], scale, causal=False)
        # two shares from one number add up to 1, which exp(lse - whole) of large, rounded ones do not
        output = before.lerp(output, (lse - lse_before).sigmoid()[..., None])
        lse = torch.logaddexp(lse, lse_before)
    return output, lse


def _by_group(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(Q, K, G, Dv) and (Q, K, G). KV heads take the place of a batch, so that no key is copied for its group."""
    width = max(q.shape[-1], v.shape[-1])
    if q.device.type == "cuda":
        width += -width % 8
    group = q.shape[2]
    of_group = _widened(q, width).permute(1, 2, 0, 3)
    keys, values = (_widened(x, width)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    output, lse = _kernel(of_group, keys, values, scale, causal)
    return output[..., : v.shape[-1]].permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _widened(x: Tensor, width: int) -> Tensor:
    """With zeros behind it: the kernels want queries, keys and values of one width."""
    return functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _kernel(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(K, G, Q, D) output and (K, G, Q) log-sum-exp of (K, G, Q, D) queries and (K, G, T, D) keys and values."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    output, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return output, lse[..., : q.shape[2]]  # which the kernel fills up to a multiple of 32


@lru_cache
def lse_is_trusted(device: str, dtype: torch.dtype) -> bool:
    """Whether the fused kernel of a device gives the log-sum-exp of a small problem as computed by hand.

    The kernels are not part of torch's public interface: where one is missing or means something else, attention
    is computed in blocks.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8, generator=generator).to(device, dtype) for _ in range(3))
    k, v = (x[:, :1].expand(q.shape) for x in (k, v))  # one in memory for the heads of a group, as `_by_group` has
    scores = (q.double() @ k.double().transpose(-1, -2)).masked_fill(
        torch.ones(5, 5, dtype=torch.bool, device=device).triu(1), -torch.inf
    )
    try:
        output, lse = _kernel(q, k, v, 1.0, causal=True)
        expected = scores.softmax(-1) @ v.double()
        return bool(
            torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=0)
            and torch.allclose(output.double(), expected, atol=1e-4, rtol=0)
        )
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False

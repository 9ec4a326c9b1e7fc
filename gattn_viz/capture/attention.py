"""The attention function that a captured model runs: exact output, and its statistics on the way.

transformers hands every layer's queries, keys and values, after rotary embedding and qk-norm, to a function looked
up by name. Ours takes padding out, sequence by sequence, and lets the cheaper of two paths compute attention:

- `fused`: torch's own kernel, which also gives the log-sum-exp of each query's scores;
- `blocks`: some query rows at a time, in float32, from which everything can be had.

Axis letters: B batch, H query heads, K key/value heads, G = H / K, Q queries, T keys, D head_dim.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gattn_viz.capture.mask import GivenMask, LazyMask, Mask, lazy_mask
from gattn_viz.errors import GattnVizError

# The names must not hold "flash", "sdpa", "flex" or "/": transformers takes these for its own kernels.
IMPLEMENTATION = "gattn_viz_capture"
WITH_TENSOR_MASK = "gattn_viz_capture_with_tensor_mask"
"""The same for models whose layers compute with their mask."""


NO_MATTER = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
"""Tensors that layers hand on, and that are in queries, keys and mask already."""


@dataclass(frozen=True)
class Attention:
    """One sequence's attention at one layer: all that its probabilities follow from. Padding is taken out.

    Attributes:
        q: (Q, K, G, D).
        scale: scores are scale * q . k.
        k, v: (K, T, D) and (K, T, Dv).
        first_query, first_key: which tokens of the prompt the first query and key are, from 0. More than 0 with a
            cache.
        mask: whose places are `padding` more than the prompt's.
        sequence: of the batch.
        softcap: scores are softcap * tanh(score / softcap) (Gemma 2).
        sink_logit: (K, G), takes part in the softmax and is then dropped (gpt-oss).
        bias: (Q, K, G, T), added to the scores.
    """

    q: Tensor
    scale: float
    k: Tensor
    v: Tensor
    first_query: int
    first_key: int
    mask: Mask
    padding: int
    sequence: int
    softcap: float | None = None
    sink_logit: Tensor | None = None
    bias: Tensor | None = None

    @property
    def heads(self) -> int:
        return self.q.shape[1] * self.q.shape[2]

    def visible(self, rows: range) -> tuple[range, Tensor | None]:
        """The keys (columns of `k`) that some rows of `q` see any of.

        Returns:
            their range, and (rows, keys) True where a key is seen; None in place of it for the plain causal rule,
            where row i sees the columns up to its own.
        """
        own = self.first_query - self.first_key  # the column of row 0
        if self.mask.plain:
            return range(0, own + rows.stop), None
        offset = self.padding + self.first_key
        queries = range(rows.start + own + offset, rows.stop + own + offset)
        bounds = self.mask.bounds(queries)
        columns = range(max(bounds.start - offset, 0), min(bounds.stop - offset, self.k.shape[1]))
        if not columns:
            return range(0, 1), torch.zeros(len(rows), 1, dtype=torch.bool, device=self.k.device)
        tile = self.mask.tile(self.sequence, queries, range(columns.start + offset, columns.stop + offset))
        return columns, tile.to(self.k.device)  # one mask serves the layers of all devices


class AttentionTaker(Protocol):
    """Computes attention, and keeps of it what was asked for."""

    @property
    def first_query(self) -> int:
        """The place in the batch of the first query of this forward pass."""

    def place(self, sequence: int) -> slice:
        """Where the tokens of a sequence of the batch lie that are not padding, cached ones included."""

    def attend(self, attention: Attention) -> Tensor:
        """Compute one sequence's attention output, (Q, K, G, Dv); it has one query at least."""

    def add_output(self, module: nn.Module, output: Tensor) -> None:
        """The attention output of a module for the whole batch, (B, Q, H, Dv)."""


active_taker: ContextVar[AttentionTaker | None] = ContextVar("active_taker", default=None)
"""Whose forward pass this is. A thread has its own, so that each model may be captured in another one."""


def not_ours(module: nn.Module) -> GattnVizError:
    """What to say to a forward pass of a captured model that is not the capture's."""
    return GattnVizError(
        f"{type(module).__name__} is run while its model is being captured, from on_layer or by another thread; "
        f"expected no other run meanwhile ({IMPLEMENTATION!r} runs inside gattn_viz.capture only): run it before "
        "or after"
    )


def capture_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LazyMask | Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax attention of (B, H, Q, D) queries over (B, K, T, D) keys and (B, K, T, Dv) values.

    Padding is left out before anything is computed: a padded query's output is 0, and no real query sees a
    padded key. What the model gives is taken as it is, low precision included, but nothing is computed in less
    than float32: autocast ends here.

    Args:
        attention_mask: as `lazy_mask` makes it; or a tensor, see `GivenMask`.
        softcap, s_aux, position_bias: see `Attention`; s_aux is (H,), position_bias (1 or B, H, Q, T).
        indices: (B, Q, any), the keys that each query is left with; only with a tensor as the mask.

    Returns:
        (B, Q, H, Dv) and None: the weights went to the taker.

    Raises:
        GattnVizError: no capture is going on here, attention is not causal, or something takes part in it that is
            not known.
    """
    taker = active_taker.get()
    if taker is None:
        raise not_ours(module)
    unknown = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in NO_MATTER]
    if unknown:
        raise GattnVizError(
            f"{type(module).__name__} hands {unknown[0]!r} to its attention function, and what that does is not "
            "known; expected queries, keys, values, a mask, and perhaps learned sinks, a bias or a softcap: this "
            "model is not supported"
        )
    if attention_mask is None and getattr(module, "is_causal", True) is False:
        # not of tokens to tokens: such as of each token to its own states in earlier layers (Inkling)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None, scaling=scaling, **kwargs)
    mask: Mask
    if isinstance(attention_mask, Tensor):
        mask = GivenMask.of(attention_mask, indices, taker.first_query, type(module).__name__)
    elif isinstance(attention_mask, LazyMask) and indices is None:
        mask = attention_mask
    else:
        raise GattnVizError(
            f"{type(module).__name__} made its own mask, or none, so that what is visible cannot be known; "
            "expected that of transformers' masking functions: this model is not supported"
        )
    if isinstance(mask, LazyMask) and key.shape[2] > mask.keys:
        raise GattnVizError(
            f"{type(module).__name__} attends to {key.shape[2]} keys, of which the mask has {mask.keys}; expected "
            "a key for each token and no other: this model is not supported"
        )
    if mask.looks_ahead(query.shape[2]):
        raise GattnVizError(
            f"queries of {type(module).__name__} see keys after them; expected causal attention, as the measures "
            "do: this model is not supported"
        )
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    dtype = torch.promote_types(query.dtype, torch.float32)

    def by_query(x: Tensor) -> Tensor:
        """(H, Q, ...) to (Q, K, G, ...): the query heads of one KV head side by side, so that no key is copied."""
        return x.transpose(0, 1).unflatten(1, (kv_heads, heads // kv_heads)).to(dtype)

    first_query, first_key = mask.first_query, mask.first_key  # places in the batch, from 0
    outputs = []
    for sequence in range(batch):
        place = taker.place(sequence)
        rows = _overlap(place, first_query, queries)
        if rows.start == rows.stop:
            outputs.append(query.new_zeros(queries, heads, value.shape[-1]))
            continue
        columns = _overlap(place, first_key, keys)
        bias = None
        if position_bias is not None:
            bias = by_query(position_bias[sequence % position_bias.shape[0], :, rows, columns])
        attention = Attention(
            by_query(query[sequence, :, rows]),
            scaling,
            key[sequence, :, columns].to(dtype),
            value[sequence, :, columns].to(dtype),
            first_query + rows.start - place.start,
            first_key + columns.start - place.start,
            mask,
            place.start,
            sequence,
            softcap,
            None if s_aux is None else s_aux.view(kv_heads, -1).to(dtype),
            bias,
        )
        with torch.autocast(query.device.type, enabled=False):
            attended = taker.attend(attention).flatten(1, 2).to(query.dtype)  # (rows, H, Dv)
        padding = (0, 0, 0, 0, rows.start, queries - rows.stop)
        outputs.append(functional.pad(attended, padding) if any(padding) else attended)
    output = torch.stack(outputs) if batch > 1 else outputs[0][None]
    taker.add_output(module, output)
    return output, None


def _overlap(place: slice, first: int, count: int) -> slice:
    """The part of `count` places, the first of them `first`, that lies in `place`."""
    start = min(max(place.start - first, 0), count)
    return slice(start, max(start, min(place.stop - first, count)))


# Without a mask function of the same name the layers would get no mask at all. There is no unregister: the
# functions stay, and do nothing until a model is set to them.
AttentionInterface.register(IMPLEMENTATION, capture_attention)
AttentionMaskInterface.register(IMPLEMENTATION, lazy_mask)
AttentionInterface.register(WITH_TENSOR_MASK, capture_attention)
AttentionMaskInterface.register(WITH_TENSOR_MASK, eager_mask)

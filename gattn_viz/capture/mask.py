"""The attention mask as a function: a tile at a time, never T x T.

transformers makes one mask for all layers of a kind and hands it to each. Instead of a tensor it is given this
object, which keeps the rule and evaluates it where it is asked. Layers that compute with their mask, such as those
that choose some keys for each query, need the tensor, and get it: they are T x T themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from gattn_viz.errors import GattnVizError


class NotATensor(GattnVizError, AttributeError):
    """A layer computes with its mask. (An AttributeError too, so that `hasattr` can ask.)"""


class Mask(Protocol):
    """Which keys each query sees, as attention asks for it; see `LazyMask`."""

    @property
    def plain(self) -> bool: ...
    @property
    def local_size(self) -> int | None: ...
    @property
    def first_query(self) -> int: ...
    @property
    def first_key(self) -> int: ...
    def bounds(self, queries: range) -> range: ...
    def tile(self, sequence: int, queries: range, keys: range) -> Tensor: ...
    def looks_ahead(self, queries: int) -> bool: ...


MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(sequence, head, query, key) indices -> whether the query sees the key, as transformers defines it."""


@dataclass(frozen=True, eq=False)
class LazyMask:
    """Which keys each query sees, padding aside.

    Queries and keys are counted from the first place of the batch, padding and cached tokens included.

    Attributes:
        function: the rule.
        first_query: the place of the first query; more than 0 with a cache.
        first_key: the place of the first key; more than 0 when a cache has let go of older ones.
        keys: how many keys attention gets.
        plain: every query sees all keys up to itself, and nothing else.
        causal: no query sees a key after itself.
        local_size: how many keys back a query sees at most; None is all of them, or unknown.
        vectorised: the rule takes tensors of indices; else single ones only.
    """

    function: MaskFunction
    first_query: int
    first_key: int
    keys: int
    plain: bool
    causal: bool
    local_size: int | None
    vectorised: bool
    device: torch.device | str

    def bounds(self, queries: range) -> range:
        """Keys that any of the queries may see."""
        first, end = self.first_key, self.first_key + self.keys
        if self.causal:
            end = min(end, queries.stop)
            if self.local_size is not None:
                first = max(first, queries.start - self.local_size + 1)
        return range(first, end)

    def tile(self, sequence: int, queries: range, keys: range) -> Tensor:
        """(queries, keys) boolean: True is visible."""
        q, k = (torch.arange(r.start, r.stop, device=self.device) for r in (queries, keys))
        b, h = torch.tensor(sequence, device=self.device), torch.tensor(0, device=self.device)
        if self.vectorised:
            visible = self.function(b, h, q[:, None], k[None, :])
        else:
            of_key = torch.vmap(self.function, in_dims=(None, None, None, 0))
            visible = torch.vmap(of_key, in_dims=(None, None, 0, None))(b, h, q, k)
        return visible.expand(len(queries), len(keys))

    def looks_ahead(self, queries: int) -> bool:
        """Whether any of the first so many queries sees the key right after it."""
        if self.causal:
            return False
        q = torch.arange(self.first_query, self.first_query + queries - 1, device=self.device)
        b = h = torch.tensor(0, device=self.device)
        rule = self.function if self.vectorised else torch.vmap(self.function, in_dims=(None, None, 0, 0))
        return len(q) > 0 and bool(rule(b, h, q, q + 1).any())

    def to(self, *args: Any, **kwargs: Any) -> LazyMask:
        """Itself: accelerate moves whatever a layer is given to the layer's device."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotATensor(
            f"this model's layers compute with their attention mask (its {name!r}), which is a rule here and no "
            "tensor: its attention cannot be captured"
        )

    def _compute(self, *args: Any) -> Any:
        return self.__getattr__("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = _compute
    __invert__ = __lt__ = __gt__ = __le__ = __ge__ = _compute

    def __getitem__(self, index: object) -> LazyMask:
        """Itself: some layers cut their mask to the keys that they have, which it ends at anyway."""
        return self


@dataclass(frozen=True, eq=False)
class GivenMask:
    """A mask that is a tensor, as it comes from a layer that computes with it.

    Attributes:
        visible: (1 or B, Q, K) boolean: True is visible.
        first_query, first_key: see `LazyMask`.
    """

    visible: Tensor
    first_query: int
    first_key: int
    plain = False
    local_size = None

    @classmethod
    def of(cls, mask: Tensor, chosen: Tensor | None, first_query: int, layer: str) -> GivenMask:
        """From what a layer hands to its attention function.

        Args:
            mask: (1 or B, 1, Q, K), additive or boolean.
            chosen: (B, Q, any) indices of the keys that each query is left with; None is all of them.
            first_query: its place in the batch.
            layer: what to call it in an error.

        Raises:
            GattnVizError: the mask is not one for all heads, adds anything but 0 to what is visible, or has keys
                that are no tokens.
        """
        if mask.dtype == torch.bool:
            visible = mask
        else:
            visible = mask > torch.finfo(mask.dtype).min / 2
            if mask.shape[1] != 1 or (mask[visible] != 0).any():
                raise NotATensor(
                    f"{layer} adds numbers of its own to its scores by way of the mask; expected a mask that "
                    "hides keys and nothing else: this model is not supported"
                )
        visible = visible[:, 0]
        if chosen is not None:
            kept = torch.zeros(len(chosen), *visible.shape[1:], dtype=torch.bool, device=visible.device)
            visible = visible & kept.scatter_(-1, chosen.long(), True)
        first_key = first_query + visible.shape[1] - visible.shape[2]
        if first_key < 0:
            raise NotATensor(
                f"{layer} attends to {-first_key} keys that are no tokens, such as summaries of several; expected "
                "tokens alone: this model is not supported with prompts of this length"
            )
        return cls(visible, first_query, first_key)

    def bounds(self, queries: range) -> range:
        """Keys that any of the queries may see."""
        return range(self.first_key, queries.stop)

    def tile(self, sequence: int, queries: range, keys: range) -> Tensor:
        """(queries, keys) boolean: True is visible."""
        rows = slice(queries.start - self.first_query, queries.stop - self.first_query)
        columns = slice(keys.start - self.first_key, keys.stop - self.first_key)
        return self.visible[sequence % len(self.visible), rows, columns]

    def looks_ahead(self, queries: int) -> bool:
        """Whether any query sees a key after it."""
        return bool(self.visible.triu(self.first_query - self.first_key + 1).any())


def lazy_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> LazyMask:
    """What transformers calls for a mask, see `transformers.masking_utils.sdpa_mask`.

    `allow_is_causal_skip` is False when something was laid over the rule (blocks that see each other, packed
    sequences): nothing is then supposed about it.

    Raises:
        GattnVizError: the cache's layers are of another kind than the mask.
    """
    known = allow_is_causal_skip
    oldest = 0 if local_size is None else max(q_offset - local_size + 1, 0)
    if kv_offset > oldest:
        raise GattnVizError(
            f"the model's cache has let go of keys that its queries see (it starts at {kv_offset + 1}, they at "
            f"{oldest + 1}); expected all of them: run without chunks"
        )
    within = mask_function is causal_mask_function or (
        local_size is not None and q_offset + q_length <= local_size
    )
    return LazyMask(
        mask_function,
        first_query=int(q_offset),
        first_key=kv_offset,
        keys=kv_length,
        plain=known and within and kv_offset == 0,
        causal=known,
        local_size=local_size if known else None,
        vectorised=not use_vmap,
        device=device,
    )

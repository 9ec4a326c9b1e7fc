"""The lazy mask against the tensor that transformers makes from the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from gattn_viz.capture.mask import LazyMask, lazy_mask


def whole(mask: LazyMask, sequence: int, queries: int) -> torch.Tensor:
    rows = range(mask.first_query, mask.first_query + queries)
    return mask.tile(sequence, rows, range(mask.first_key, mask.first_key + mask.keys))


def block_of_four(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query // 4 == key // 4


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "causal, cached": {"q_offset": 5, "kv_length": 12},
    "window": {"mask_function": sliding_window_causal_mask_function(3), "local_size": 3},
    "window, cached and let go of": {
        "mask_function": sliding_window_causal_mask_function(3),
        "local_size": 3,
        "q_offset": 9,
        "kv_offset": 7,
        "kv_length": 9,
    },
    "chunks": {
        "mask_function": chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int)),
        "local_size": 4,
    },
    "chunks, left padding": {
        "mask_function": chunked_causal_mask_function(4, torch.tensor([0, 3])),
        "local_size": 4,
    },
    "blocks that see each other": {
        "mask_function": or_masks(causal_mask_function, block_of_four),
        "allow_is_causal_skip": False,
    },
    "a rule for single indices": {
        "mask_function": and_masks(causal_mask_function, lambda b, h, q, k: (q - k) % 2 == 0),
        "allow_is_causal_skip": False,
        "use_vmap": True,
    },
}


@pytest.mark.parametrize("name", CASES)
class TestTiles:
    def both(self, name: str) -> tuple[LazyMask, torch.Tensor]:
        arguments = {"batch_size": 2, "q_length": 7, "kv_length": 7, "q_offset": 0, "kv_offset": 0, **CASES[name]}
        lazy = lazy_mask(**arguments, attention_mask=None, dtype=torch.float32, config=None)
        theirs = sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
        return lazy, theirs

    def test_are_parts_of_the_whole(self, name: str) -> None:
        lazy, theirs = self.both(name)
        for sequence in (0, 1):
            assert torch.equal(whole(lazy, sequence, 7), theirs[sequence, 0])
            rows = range(lazy.first_query + 2, lazy.first_query + 5)
            columns = range(lazy.first_key + 1, lazy.first_key + 4)
            assert torch.equal(lazy.tile(sequence, rows, columns), theirs[sequence, 0, 2:5, 1:4])

    def test_nothing_is_visible_out_of_bounds(self, name: str) -> None:
        lazy, theirs = self.both(name)
        for first, stop in ((0, 1), (0, 7), (2, 5), (6, 7)):
            bounds = lazy.bounds(range(lazy.first_query + first, lazy.first_query + stop))
            outside = theirs[:, 0, first:stop].clone()
            outside[..., bounds.start - lazy.first_key : bounds.stop - lazy.first_key] = False
            assert not outside.any()

    def test_plain_is_what_it_says(self, name: str) -> None:
        lazy, theirs = self.both(name)
        every_key_so_far = torch.ones(7, lazy.keys, dtype=torch.bool).tril(lazy.first_query - lazy.first_key)
        assert lazy.plain == (name in ("causal", "causal, cached"))
        if lazy.plain:
            assert torch.equal(theirs[0, 0], every_key_so_far)


def test_a_window_that_all_tokens_fit_into_is_plain() -> None:
    for length, plain in ((3, True), (4, False)):
        mask = lazy_mask(
            q_length=length,
            kv_length=length,
            mask_function=sliding_window_causal_mask_function(3),
            local_size=3,
        )
        assert mask.plain == plain
        assert whole(mask, 0, length).equal(torch.ones(length, length, dtype=torch.bool).tril()) == plain


def test_bounds_keep_a_window_short() -> None:
    mask = lazy_mask(
        q_length=1000, kv_length=1000, mask_function=sliding_window_causal_mask_function(10), local_size=10
    )
    assert mask.bounds(range(500, 520)) == range(491, 520)


def test_layers_may_cut_or_move_it() -> None:
    mask = lazy_mask(q_length=3, kv_length=3)
    assert mask[:, :, :, :3] is mask
    assert mask.to("cpu", torch.float16) is mask

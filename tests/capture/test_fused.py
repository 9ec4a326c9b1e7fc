"""The fused path against the block path, and who is let onto it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gattn_viz.capture import fused
from gattn_viz.capture.attention import Attention
from gattn_viz.capture.blocks import WantedMap, attend_in_blocks
from gattn_viz.capture.collector import OF_ATTENTION, Collector, LayerCapture, Request, _choose_path
from gattn_viz.capture.run import capture
from gattn_viz.metrics.layer import NEEDS
from gattn_viz.metrics.pooling import MapBuilder, MapView
from gattn_viz.metrics.sums import AttentionSums
from tests.capture.test_blocks import attention
from tests.conftest import tiny_model

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"tokens": 70},
    "one token": {"tokens": 1},
    "long": {"tokens": 700, "width": 8},
    "a cache": {"tokens": 70, "cached": 33},
    "one new query": {"tokens": 70, "cached": 69},
    "narrow values": {"tokens": 40, "width": 12, "value_width": 8},
    "wide values": {"tokens": 40, "width": 4, "value_width": 24},
    "one query head a KV head": {"tokens": 40, "group": 1, "kv_heads": 3},
    "a window that is never full": {"tokens": 40, "window": 40},
    "a sink far above the rest": {"tokens": 60, "spread": 30.0},
}


@pytest.mark.parametrize("name", SHAPES)
class TestAgainstBlocks:
    def test_output_first_token_and_entropy(self, name: str) -> None:
        a = attention(**SHAPES[name])
        assert fused.can_fuse(a)
        expected = a.q.new_empty(*a.q.shape[:3], a.v.shape[-1])
        sums = AttentionSums.zeros(a.heads, a.k.shape[1])
        attend_in_blocks(a, output=expected, sums=sums, needs=OF_ATTENTION)
        output, lse = fused.attend(a)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        assert sums.first_token is not None
        assert sums.entropy is not None
        count = len(a.q)
        assert sums.first_row is not None
        first = fused.first_token(a, lse).double().sum(0).flatten() / count
        torch.testing.assert_close(first, (sums.first_token + sums.first_row) / count, atol=2e-6, rtol=0)
        entropy = fused.entropy(a).double().sum(0).flatten() / count
        torch.testing.assert_close(entropy, sums.entropy / count, atol=2e-5, rtol=0)

    @pytest.mark.parametrize("buckets", [1, 3, 30])
    def test_bucket_sums(self, name: str, buckets: int) -> None:
        """More buckets than channels go into several calls; a key in no bucket goes nowhere."""
        a = attention(**SHAPES[name])
        tokens = a.k.shape[1]
        bucket_of_key = torch.arange(tokens) % buckets
        bucket_of_key[-1] = -1
        builder = MapBuilder(a.heads, tokens)
        attend_in_blocks(a, output=None, wanted=WantedMap(builder, list(range(a.heads))))
        p = builder.result()[:, a.first_query :]
        got = fused.bucket_sums(a, bucket_of_key, buckets).flatten(1, 2).transpose(0, 1)
        for bucket in range(buckets):
            torch.testing.assert_close(
                got[..., bucket], p[..., bucket_of_key == bucket].sum(-1), atol=2e-6, rtol=0
            )


@pytest.mark.parametrize("cached", [0, 33])
@pytest.mark.parametrize("heads", [None, [3, 0]])
@pytest.mark.parametrize(
    "view", [MapView(max_cells=7, pool="mean"), MapView((20, 61), (2, 50), max_cells=20, pool="mean")]
)
def test_pooled_map(view: MapView, heads: list[int] | None, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "QUERIES_TOGETHER", 9)
    a = attention(70, cached=cached)
    kernel, blocks = (MapBuilder(1 if heads is None else 2, 70, view) for _ in range(2))
    fused.add_pooled_map(a, WantedMap(kernel, heads))
    attend_in_blocks(a, output=None, wanted=WantedMap(blocks, heads))
    torch.testing.assert_close(kernel.result(), blocks.result(), atol=2e-6, rtol=0, equal_nan=True)


def test_pooled_maps_are_for_gpus_means_and_few_calls() -> None:
    on_cpu = attention(70)
    on_gpu = replace(on_cpu, q=on_cpu.q.to("meta"))  # says where it is, and no more
    few, many = (MapBuilder(4, 70, MapView(max_cells=cells, pool="mean")) for cells in (16, 18))
    assert fused.can_pool(on_gpu, few)
    assert not fused.can_pool(on_gpu, many)  # 18 buckets, 4 channels a call
    assert not fused.can_pool(on_cpu, few)
    assert not fused.can_pool(on_gpu, MapBuilder(4, 70, MapView(max_cells=16, pool="max")))


@pytest.mark.parametrize(
    "more",
    [{"softcap": 1.0}, {"sink_logit": torch.zeros(2, 2)}, {"bias": torch.zeros(9, 2, 2, 9)}, {"window": 4}],
)
def test_not_for_what_the_kernels_do_not_compute(more: dict[str, Any]) -> None:
    assert not fused.can_fuse(attention(**more))
    assert _choose_path(attention(**more), frozenset({"first_token"})) == "blocks"


def test_the_path_follows_from_what_is_asked() -> None:
    a = attention()
    for needs, path in (
        (frozenset(), "fused"),
        (frozenset({"first_token"}), "fused"),
        (frozenset({"entropy"}), "blocks"),
        (OF_ATTENTION, "blocks"),
    ):
        assert _choose_path(a, needs) == path
    for needs, path in ((frozenset({"first_token", "residual", "values", "gate"}), "fused"), (NEEDS, "blocks")):
        [layers] = capture(tiny_model("gate_headwise"), [[5, 6, 7, 8]], Request(needs=needs))
        assert {layer.paths for layer in layers.values()} == {frozenset({path})}


def entropy_in_float64(a: Attention) -> torch.Tensor:
    """(Q, K, G), from probabilities, in double precision."""
    scores = a.scale * torch.einsum("qhgd,htd->qhgt", a.q.double(), a.k.double())
    places = torch.arange(a.k.shape[1])
    hidden = places > a.first_query + torch.arange(len(a.q))[:, None]
    return torch.special.entr(scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)).sum(-1)


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
class TestEntropyOfLargeScores:
    @pytest.mark.parametrize("cached", [0, 20])
    def test_that_all_keys_have_in_common(self, size: float, cached: int) -> None:
        a = attention(50, cached=cached)
        common = torch.ones(4)
        a = replace(a, q=a.q + common, k=a.k + size * common)
        scores = a.scale * torch.einsum("qhgd,htd->qhgt", a.q, a.k)
        assert scores.abs().max() > size
        torch.testing.assert_close(fused.entropy(a).double(), entropy_in_float64(a), atol=1e-5, rtol=0)

    def test_of_a_sink_far_above(self, size: float) -> None:
        a = attention(50, kv_heads=1, group=1)
        a.q[..., 0] = size
        a.k[..., 0] = 0
        a.k[:, 0, 0] = 2  # the first key's score is `size` more
        found = fused.entropy(a)
        torch.testing.assert_close(found.double(), entropy_in_float64(a), atol=1e-6, rtol=0)
        assert size < 100 or found.max() < 1e-6

    def test_of_a_first_key_far_below_with_a_cache(self, size: float) -> None:
        """The two parts' shares add up to 1, however large the scores are that they are made from."""
        a = attention(50, cached=20)
        common = torch.ones(4)
        a = replace(a, q=a.q / 4 + common)
        a.k[:, 0] -= size * common
        off = (fused.entropy(a).double() - entropy_in_float64(a)).abs().max()
        assert off < 2e-6 + 2e-6 * size

    def test_that_differ_by_so_much(self, size: float) -> None:
        """The scores themselves are rounded to 6e-8 of their size: no more is to be had in float32."""
        a = attention(50, spread=size)
        off = (fused.entropy(a).double() - entropy_in_float64(a)).abs().max()
        assert off < 2e-6 + 1e-6 * size

    def test_lies_between_0_and_the_log_of_the_keys_seen(self, size: float) -> None:
        alike = replace(attention(50), q=torch.zeros(50, 2, 2, 4))
        for a in (attention(50, spread=size), alike, attention(50, cached=20, spread=size)):
            found = fused.entropy(a)
            seen = a.first_query + torch.arange(1, len(a.q) + 1)
            assert (found >= 0).all()
            assert (found <= seen.log()[:, None, None]).all()
            if a.first_query == 0:
                assert (found[0] == 0).all()
            assert (fused.first_token(a, fused.attend(a)[1]) <= 1).all()


def test_entropy_from_the_kernel_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; here the choice is forced."""
    model = tiny_model("gate_headwise")
    request = Request(needs=frozenset({"first_token", "entropy"}))
    [blocks] = capture(model, [[5, 6, 7, 8, 9]], request)
    monkeypatch.setattr("gattn_viz.capture.collector._choose_path", lambda attention, needs: "fused")
    [kernel] = capture(model, [[5, 6, 7, 8, 9]], request)
    for layer in blocks:
        assert (blocks[layer].paths, kernel[layer].paths) == ({"blocks"}, {"fused"})
        ours, other = blocks[layer].sums, kernel[layer].sums
        for name in ("first_token", "first_row", "entropy", "entropy_ratio"):
            assert getattr(ours, name) == pytest.approx(getattr(other, name), abs=2e-5)
        assert ours.ratio_queries == other.ratio_queries == 4


def wrong(q: Any, k: Any, v: Any, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A log-sum-exp in base 2, as a kernel might have it."""
    scores = (scale * q @ k.transpose(-1, -2)).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1) / 0.6931


def missing(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    raise AttributeError("'_OpNamespace' 'aten' object has no attribute '_scaled_dot_product_...'")


@pytest.mark.parametrize("kernel", [wrong, missing])
def test_a_kernel_that_is_not_trusted_is_not_used(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("baseline")
    request = Request(needs=frozenset({"first_token"}))
    [expected] = capture(model, [[5, 6, 7, 8, 9]], request)
    monkeypatch.setattr(fused, "_kernel", kernel)
    fused.lse_is_trusted.cache_clear()
    try:
        assert not fused.lse_is_trusted("cpu", torch.float32)
        [layers] = capture(model, [[5, 6, 7, 8, 9]], request)
    finally:
        fused.lse_is_trusted.cache_clear()
    for layer, other in zip(layers.values(), expected.values(), strict=True):
        assert (layer.paths, other.paths) == ({"blocks"}, {"fused"})
        assert layer.sums.first_token == pytest.approx(other.sums.first_token, abs=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_cuda(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    layers: dict[int, LayerCapture] = {}
    a = attention(tokens=70, width=12)
    moved = type(a)(
        a.q.to("cuda", dtype), a.scale, a.k.to("cuda", dtype), a.v.to("cuda", dtype), 0, 0, a.mask, 0, 0
    )
    collector = Collector(
        Request(needs=frozenset({"first_token"})),
        [slice(0, 70)],
        lambda _, one: layers.update({1: one}),
        range(70),
    )
    output = collector.attend(0, moved).cpu().float()
    torch.testing.assert_close(output, fused.attend(a)[0], atol=1e-4, rtol=1e-4)

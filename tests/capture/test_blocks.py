"""The block path, by torch and compiled, against loops in double precision from the definitions alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import sliding_window_causal_mask_function

from gattn_viz.capture import blocks
from gattn_viz.capture.attention import Attention
from gattn_viz.capture.blocks import WantedMap, attend_in_blocks
from gattn_viz.capture.collector import OF_ATTENTION
from gattn_viz.capture.compiled import RowKernel, trusted_kernel
from gattn_viz.capture.mask import lazy_mask
from gattn_viz.metrics.pooling import MapBuilder
from gattn_viz.metrics.sums import AttentionSums

Kernel = RowKernel | None


@pytest.fixture(scope="module", params=["torch", "compiled"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "torch":
        return None
    pytest.importorskip("numba")
    compiled = trusted_kernel()
    assert compiled is not None
    return compiled


def attention(
    tokens: int = 9,
    kv_heads: int = 2,
    group: int = 2,
    width: int = 4,
    value_width: int = 4,
    cached: int = 0,
    window: int | None = None,
    spread: float = 1.0,
    seed: int = 0,
    **more: Any,
) -> Attention:
    """Random queries, keys and values; the last `tokens - cached` tokens are queries."""
    torch.manual_seed(seed)
    rule: dict[str, Any] = {}
    if window is not None:
        rule = {"mask_function": sliding_window_causal_mask_function(window), "local_size": window}
    queries = tokens - cached
    mask = lazy_mask(q_length=queries, kv_length=tokens, q_offset=cached, **rule)
    q = torch.randn(queries, kv_heads, group, width)
    k, v = torch.randn(kv_heads, tokens, width), torch.randn(kv_heads, tokens, value_width)
    return Attention(q, spread * width**-0.5, k, v, cached, 0, mask, 0, 0, **more)


def by_loops(a: Attention) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The map (H, Q, T) and the sums over queries, with Python's floats."""
    queries, kv_heads, group, _ = a.q.shape
    tokens = a.k.shape[1]
    p = torch.zeros(kv_heads * group, queries, tokens, dtype=torch.float64)
    names = ("entropy", "entropy_ratio", "learned_sink")
    sums = {name: torch.zeros(kv_heads * group, dtype=torch.float64) for name in names}
    for head in range(kv_heads * group):
        kv, g = divmod(head, group)
        for i in range(queries):
            place = a.first_query + i
            seen = [
                j
                for j in range(tokens)
                if j <= place and (a.mask.local_size is None or j > place - a.mask.local_size)
            ]
            scores = []
            for j in seen:
                s = a.scale * float(a.q[i, kv, g].double() @ a.k[kv, j].double())
                if a.softcap is not None:
                    s = a.softcap * math.tanh(s / a.softcap)
                if a.bias is not None:
                    s += float(a.bias[i, kv, g, j])
                scores.append(s)
            sink = [] if a.sink_logit is None else [float(a.sink_logit[kv, g])]
            largest = max(scores + sink)
            total = sum(math.exp(s - largest) for s in scores + sink)
            entropy = 0.0
            for j, s in zip(seen, scores, strict=True):
                p[head, i, j] = math.exp(s - largest) / total
                if p[head, i, j] > 0:
                    entropy -= float(p[head, i, j]) * (s - largest - math.log(total))
            if sink and place > 0:  # of the queries after the first
                sums["learned_sink"][head] += math.exp(sink[0] - largest) / total
            sums["entropy"][head] += entropy
            if len(seen) > 1:
                sums["entropy_ratio"][head] += entropy / math.log(len(seen))
    sums["first_token"] = p[:, max(1 - a.first_query, 0) :, 0].sum(-1)  # of the queries after the first
    sums["received"] = p.sum(1)
    sums["row_max"] = p.amax(-1).sum(-1)
    return p, sums


def check(a: Attention, kernel: Kernel, needs: frozenset[Any] = OF_ATTENTION, atol: float = 2e-6) -> None:
    queries, kv_heads, group, _ = a.q.shape
    tokens = a.k.shape[1]
    p, expected = by_loops(a)
    output = a.q.new_empty(queries, kv_heads, group, a.v.shape[-1])
    sums = AttentionSums.zeros(a.heads, tokens, needs)
    builder = MapBuilder(a.heads, tokens)
    wanted = WantedMap(builder, list(range(a.heads)))
    attend_in_blocks(a, output=output, sums=sums, needs=needs, wanted=wanted, kernel=kernel)

    v = a.v.double().repeat_interleave(group, 0)
    torch.testing.assert_close(output.flatten(1, 2).double(), (p @ v).transpose(0, 1), atol=atol * 5, rtol=1e-5)
    torch.testing.assert_close(builder.result()[:, a.first_query :].double(), p, atol=atol, rtol=0)
    for name, value in expected.items():
        got = getattr(sums, name)
        if name.removesuffix("_ratio") in needs:
            torch.testing.assert_close(got.double() / queries, value / queries, atol=atol * 5, rtol=0)
        else:
            assert got is None


@pytest.mark.parametrize("width", [4, blocks.NARROW + 1])
@pytest.mark.parametrize("spread", [1e3, 1e5])
def test_entropy_of_large_scores_is_within_its_range(kernel: Kernel, width: int, spread: float) -> None:
    """A row's largest score takes all: 0, where a difference of scores would leave 1e-7 of them."""
    a = attention(tokens=7, width=width, spread=spread)
    output = a.q.new_empty(7, 2, 2, 4)
    sums = AttentionSums.zeros(a.heads, 7, {"entropy"})
    attend_in_blocks(a, output=output, sums=sums, needs={"entropy"}, kernel=kernel)
    assert sums.entropy is not None
    _, expected = by_loops(a)
    torch.testing.assert_close(sums.entropy.double(), expected["entropy"], atol=1e-4, rtol=0)


def test_a_learned_sink_next_to_0_and_to_1_keeps_its_digits(kernel: Kernel) -> None:
    """1 less the rest would have none of a share next to 0."""
    a = attention(tokens=7, sink_logit=torch.tensor([[-30.0, 0.0], [30.0, -70.0]]))
    sums = AttentionSums.zeros(a.heads, 7, {"learned_sink"})
    attend_in_blocks(a, output=a.q.new_empty(7, 2, 2, 4), sums=sums, needs={"learned_sink"}, kernel=kernel)
    assert sums.learned_sink is not None
    expected = by_loops(a)[1]["learned_sink"]
    assert expected[0] < 1e-11
    assert expected[2] / 6 > 1 - 1e-9
    torch.testing.assert_close(sums.learned_sink, expected, atol=0, rtol=1e-5)


def test_a_query_that_sees_one_key_has_no_entropy(kernel: Kernel) -> None:
    a = attention(tokens=1, spread=40)
    sums = AttentionSums.zeros(a.heads, 1, {"entropy"})
    attend_in_blocks(a, output=a.q.new_empty(1, 2, 2, 4), sums=sums, needs={"entropy"}, kernel=kernel)
    assert sums.entropy is not None
    assert not sums.entropy.any()


def test_a_first_token_out_of_sight_with_a_huge_score_has_no_mass(kernel: Kernel) -> None:
    a = attention(tokens=9, window=3)
    a.k[:, 0] = 1e4 * a.q[8, :, 0]
    sums = AttentionSums.zeros(a.heads, 9, {"first_token"})
    attend_in_blocks(a, output=a.q.new_empty(9, 2, 2, 4), sums=sums, needs={"first_token"}, kernel=kernel)
    assert sums.first_token is not None
    torch.testing.assert_close(sums.first_token.double(), by_loops(a)[1]["first_token"], atol=1e-5, rtol=0)


WITH: dict[str, dict[str, Any]] = {
    "nothing": {},
    "one query head a KV head": {"group": 1},
    "one token": {"tokens": 1},
    "narrow values": {"width": 6, "value_width": 3},
    "wide values": {"width": 2, "value_width": 5},
    "keys too wide to be values": {"width": blocks.NARROW + 1},
    "a cache": {"tokens": 11, "cached": 5},
    "one new query": {"tokens": 11, "cached": 10},
    "a window": {"tokens": 13, "window": 4},
    "a window and a cache": {"tokens": 13, "window": 4, "cached": 6},
    "softcap": {"softcap": 0.7},
    "learned sinks": {"sink_logit": torch.tensor([[0.5, -3.0], [2.0, 30.0]])},
    "a bias": {"bias": torch.linspace(-2, 2, 9 * 4 * 9).view(9, 2, 2, 9)},
}


@pytest.mark.parametrize("rows", [1, 2, 3, 128])
@pytest.mark.parametrize("name", WITH)
class TestAgainstLoops:
    @pytest.fixture(autouse=True)
    def small_blocks(self, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocks, "LEAST_ROWS", min(rows, blocks.LEAST_ROWS))
        monkeypatch.setattr(blocks, "MOST_ROWS", rows)

    def test_all_at_once(self, kernel: Kernel, name: str) -> None:
        check(attention(**WITH[name]), kernel)

    @pytest.mark.parametrize("need", sorted(OF_ATTENTION))
    def test_one_alone(self, kernel: Kernel, name: str, need: str) -> None:
        check(attention(**WITH[name]), kernel, frozenset({need}))

    @pytest.mark.parametrize("spread", [200.0, 2000.0])
    def test_scores_that_float32_cannot_exponentiate(self, kernel: Kernel, name: str, spread: float) -> None:
        """Some rows' sums would overflow, or vanish; scores of hundreds carry a rounding of their own."""
        check(attention(**WITH[name], spread=spread), kernel, atol=3e-7 * spread)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 40),
    cached=st.integers(0, 39),
    window=st.one_of(st.none(), st.integers(1, 50)),
    group=st.integers(1, 3),
    block=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_blocks_of_any_size(
    kernel: Kernel, tokens: int, cached: int, window: int | None, group: int, block: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "LEAST_ROWS", 1)
        patch.setattr(blocks, "MOST_ROWS", 7)
        patch.setattr(blocks, "BLOCK_SCORES", block)
        a = attention(tokens, group=group, cached=min(cached, tokens - 1), window=window, seed=seed)
        check(a, kernel, atol=5e-6)


def test_rows_that_see_nothing_are_zero(kernel: Kernel) -> None:
    """A rule under which the first queries see no key at all."""
    a = attention(6)
    mask = lazy_mask(
        q_length=6,
        kv_length=6,
        mask_function=lambda b, h, q, k: (k <= q) & (k >= 2),
        allow_is_causal_skip=False,
    )
    a = Attention(a.q, a.scale, a.k, a.v, 0, 0, mask, 0, 0)
    output = torch.empty(6, 2, 2, 4)
    sums = AttentionSums.zeros(4, 6)
    builder = MapBuilder(4, 6)
    wanted = WantedMap(builder, [0, 1, 2, 3])
    attend_in_blocks(a, output=output, sums=sums, needs=OF_ATTENTION, wanted=wanted, kernel=kernel)
    assert (output[:2] == 0).all()
    p = builder.result()
    torch.testing.assert_close(p.sum(-1), torch.tensor([0.0, 0, 1, 1, 1, 1]).expand(4, -1))
    assert sums.entropy is not None
    assert sums.first_token is not None
    expected = torch.special.entr(p).sum((1, 2))
    torch.testing.assert_close(sums.entropy.float(), expected)
    assert sums.first_token.tolist() == [0] * 4
    assert sums.ratio_queries == 3  # those that see two keys or more


def test_a_map_of_some_heads_and_of_their_mean(kernel: Kernel) -> None:
    a = attention(10)
    p, _ = by_loops(a)
    for heads, expected in (([3, 0], p[[3, 0]]), (None, p.mean(0, keepdim=True))):
        builder = MapBuilder(len(expected), 10)
        attend_in_blocks(a, output=None, wanted=WantedMap(builder, heads), kernel=kernel)
        torch.testing.assert_close(builder.result().double(), expected, atol=2e-6, rtol=0)


def test_nan_is_not_hidden(kernel: Kernel) -> None:
    a = attention(5)
    a.k[0, 2, 1] = torch.nan
    output = torch.empty(5, 2, 2, 4)
    sums = AttentionSums.zeros(4, 5)
    attend_in_blocks(a, output=output, sums=sums, needs=OF_ATTENTION, kernel=kernel)
    for value in (sums.first_token, sums.received, sums.entropy, sums.row_max):
        assert value is not None
        assert value[:2].isnan().any()
        assert value[2:].isfinite().all()


def test_low_precision_is_computed_in_float32() -> None:
    """Only so is a sum over thousands of keys right, which bf16 has no digits for."""
    from gattn_viz.capture.attention import active_taker, capture_attention

    seen = {}

    class Taker:
        first_query = 0

        def place(self, sequence: int) -> slice:
            return slice(0, 4)

        def attend(self, attention: Attention) -> torch.Tensor:
            seen.update(q=attention.q.dtype, k=attention.k.dtype, v=attention.v.dtype)
            return attention.q.new_zeros(attention.q.shape)

        def add_output(self, module: torch.nn.Module, output: torch.Tensor) -> None:
            seen["output"] = output.dtype

    module = torch.nn.Identity()
    module.layer_idx = 0  # type: ignore[assignment]
    token = active_taker.set(Taker())
    try:
        for dtype, inner in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
            x = torch.ones(1, 2, 4, 3, dtype=dtype)
            capture_attention(module, x, x, x, lazy_mask(q_length=4, kv_length=4))
            assert seen == {"q": inner, "k": inner, "v": inner, "output": dtype}
    finally:
        active_taker.reset(token)

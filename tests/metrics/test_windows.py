"""Measures of attention that does not see all: sliding windows, chunks, any mask; against loops over the mask."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn_viz.metrics.layer import LayerSums
from gattn_viz.metrics.measures import SINK_MEASURES, Options, sink_keys
from gattn_viz.metrics.sums import AttentionSums

MEASURES = {measure.name: measure for measure in SINK_MEASURES}
INCLUDE = Options(first_row="include")


def window(tokens: int, width: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - width)


def uniform(mask: torch.Tensor) -> torch.Tensor:
    return (mask / mask.sum(1, keepdim=True))[None]


def sums_of(p: torch.Tensor, mask: torch.Tensor, cuts: tuple[int, ...] = ()) -> LayerSums:
    """Of (H, T, T) probabilities, handed over in blocks of rows with the columns that any of them sees."""
    heads, tokens, _ = p.shape
    sums = AttentionSums.zeros(heads, tokens, {"first_token", "received"})
    every = slice(0, heads)
    for start, stop in zip((0, *cuts), (*cuts, tokens), strict=True):
        sums.add_first_token(every, start, p[:, start:stop, 0])
        sums.add_received(every, 0, p[:, start:stop].sum(1))
        first = int(mask[start:stop].any(0).int().argmax())
        sums.add_visible(start, first, mask[start:stop, first:stop])
    return layer(sums)


def layer(sums: AttentionSums) -> LayerSums:
    names = ("first_token", "first_row", "received", "queries_of_key", "uniform_first")
    return LayerSums(sums.tokens, sums.heads, **{name: getattr(sums, name).double().numpy() for name in names})


def value(name: str, sums: LayerSums, options: Options = Options()) -> list[float]:
    measure = MEASURES[name].function
    assert measure is not None
    return measure(sums, options).tolist()


def test_by_hand() -> None:
    """Four tokens, two in sight. Queries 2 to 4: .6 of the first token, then none, which query 2 alone sees."""
    p = torch.tensor([[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0, 0.2, 0.8, 0], [0, 0, 0.9, 0.1]])[None]
    sums = sums_of(p, window(4, 2))
    assert value("first_token_mass", sums) == pytest.approx([0.6 / 3])
    assert value("uniform_null", sums) == pytest.approx([0.5 / 3])
    assert value("first_token_visible", sums) == pytest.approx([1 / 3])
    assert value("uniform_null", sums, INCLUDE) == pytest.approx([1.5 / 4])
    assert value("first_token_visible", sums, INCLUDE) == pytest.approx([2 / 4])
    # alpha: (1 + .6)/2, (.4 + .2)/2, (.8 + .9)/2 and .1, of one query; at least half a query has to see a key
    assert value("sink_rate", sums, Options(sink_threshold=0.79)) == [1]
    assert value("sink_rate", sums, Options(sink_threshold=0.81)) == [0]
    assert value("top_sink_position", sums) == [3]
    assert value("top_sink_mass", sums) == pytest.approx([0.85])
    assert sink_keys(p[0].numpy(), sums.queries_of_key, 0.5).tolist() == [0, 2]


@pytest.mark.parametrize("width", [1, 2, 5, 12, 40])
@pytest.mark.parametrize("options", [Options(), INCLUDE])
def test_uniform_attention_has_the_null(width: int, options: Options) -> None:
    mask = window(12, width)
    sums = sums_of(uniform(mask), mask)
    assert value("first_token_mass", sums, options) == pytest.approx(value("uniform_null", sums, options))
    seen = min(width, 12) - (options.first_row == "exclude")
    assert value("first_token_visible", sums, options) == pytest.approx([seen / options.queries(12)])
    if width == 1 and options.first_row == "exclude":
        assert value("uniform_null", sums) == [0]  # and not what rounding leaves


@pytest.mark.parametrize("width", [3, 7, 20])
def test_the_first_token_s_sink_is_that_of_the_prompt_cut_to_the_window(width: int) -> None:
    mask = window(20, width)
    scores = 2 * torch.randn(3, 20, 20, generator=torch.Generator().manual_seed(0))
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    cut = p[:, :width, :width]
    alpha_first = cut[:, :, 0].mean(1).tolist()
    for head, alpha in enumerate(alpha_first):
        for eps in (alpha - 1e-4, alpha + 1e-4):
            rate = value("sink_rate", sums_of(p, mask), Options(sink_threshold=eps))[head]
            assert rate == float(alpha > eps)


def test_full_attention_said_or_unsaid_is_the_same() -> None:
    """To the last bit: a mask that hides nothing changes no number."""
    scores = torch.randn(2, 13, 13, generator=torch.Generator().manual_seed(1))
    mask = window(13, 13)
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    said = sums_of(p, mask, (4, 9))
    unsaid = LayerSums(13, 2, said.first_token, said.first_row, received=said.received)
    of_first = ("first_token_mass", "uniform_null", "first_token_visible", "sink_rate")
    for name in (*of_first, "top_sink_position", "top_sink_mass"):
        for options in (Options(), INCLUDE):
            assert value(name, said, options) == value(name, unsaid, options), name
    assert value("first_token_visible", unsaid) == [1, 1]
    assert math.isnan(value("first_token_visible", LayerSums(1, 1))[0])


def test_a_query_that_sees_nothing() -> None:
    """The first two of four, by a rule of its own: nothing divides by 0."""
    mask = window(4, 4)
    mask[:2] = mask[:, :2] = False
    sums = sums_of(torch.nan_to_num(uniform(mask)), mask)
    for name in ("first_token_mass", "uniform_null", "first_token_visible", "sink_rate"):
        assert value(name, sums) == value(name, sums, INCLUDE) == [0]
    assert value("top_sink_mass", sums) == [0.75]


@st.composite
def masked_maps(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps under a window, chunks or any causal mask; each query sees itself."""
    tokens, seed = draw(st.integers(1, 17)), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    causal = window(tokens, tokens)
    kind, size = draw(st.sampled_from(["window", "chunks", "any"])), draw(st.integers(1, 18))
    if kind == "window":
        mask = window(tokens, size)
    elif kind == "chunks":
        chunk = torch.arange(tokens) // size
        mask = causal & (chunk[:, None] == chunk)
    else:
        mask = causal & (torch.rand(tokens, tokens, generator=generator) < 0.5) | torch.eye(
            tokens, dtype=torch.bool
        )
    scores = torch.randn(2, tokens, tokens, generator=generator)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1), mask


@settings(deadline=None, max_examples=100)
@given(masked_maps(), st.sampled_from([Options(), INCLUDE]), st.data())
def test_against_naive_loops(of: tuple[torch.Tensor, torch.Tensor], options: Options, data: st.DataObject) -> None:
    p, mask = of
    tokens = len(mask)
    cuts = data.draw(st.sets(st.integers(1, tokens - 1), max_size=4)) if tokens > 1 else set()
    sums = sums_of(p, mask, tuple(sorted(cuts)))
    first = 0 if options.first_row == "include" else 1
    queries = range(first, tokens)
    if not queries:
        assert math.isnan(value("first_token_visible", sums, options)[0])
        return
    visible = sum(bool(mask[i, 0]) for i in queries)
    null = sum(1 / sum(mask[i].tolist()) for i in queries if mask[i, 0])
    assert value("first_token_visible", sums, options) == pytest.approx([visible / len(queries)] * 2)
    assert value("uniform_null", sums, options) == pytest.approx([null / len(queries)] * 2, abs=1e-12)
    seen_by = [sum(bool(mask[i, k]) for i in range(k, tokens)) for k in range(tokens)]
    for head, rows in enumerate(p.double().tolist()):
        alphas = [sum(rows[i][k] for i in range(k, tokens) if mask[i, k]) / seen_by[k] for k in range(tokens)]
        enough = [k for k in range(tokens) if seen_by[k] >= max(seen_by) / 4]
        assert value("top_sink_mass", sums)[head] == pytest.approx(max(alphas[k] for k in enough), abs=1e-6)
        eps = alphas[0] + (1e-5 if alphas[0] < 0.5 else -1e-5)
        expected = float(alphas[0] > eps)
        assert value("sink_rate", sums, Options(sink_threshold=eps))[head] == expected


@settings(deadline=None, max_examples=50)
@given(masked_maps(), st.data())
def test_blocks_in_any_order_give_the_whole(of: tuple[torch.Tensor, torch.Tensor], data: st.DataObject) -> None:
    """Some rows at a time, those that see all before them said or left unsaid."""
    _, mask = of
    tokens = len(mask)
    order = data.draw(st.permutations(range(tokens)))
    sums = AttentionSums.zeros(1, tokens, ())
    for row in order:
        if bool(mask[row, : row + 1].all()) and data.draw(st.booleans()):
            continue
        sums.add_visible(row, 0, mask[row : row + 1, : row + 1])
    if sums.queries_of_key is None:
        assert mask.equal(window(tokens, tokens))
        return
    assert sums.uniform_first is not None
    assert sums.queries_of_key.tolist() == mask.sum(0).tolist()
    np.testing.assert_allclose(sums.uniform_first, mask[:, 0] / mask.sum(1), rtol=1e-7)

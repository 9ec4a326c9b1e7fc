"""Capture of each family against transformers' own eager attention, and against formulas written here.

What capture says is compared with what the model's eager path returns for the same prompt: its weights, from which
each statistic is worked out anew from its definition, its residual stream and its loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from gattn_viz.capture import collector, fused
from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.compiled import trusted_kernel
from gattn_viz.capture.run import capture_batch, stream
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.layer import NEEDS, LayerSums, Need
from gattn_viz.metrics.measures import queries_of_key, uniform_first
from gattn_viz.metrics.pooling import MapView
from tests.capture.families import (
    FAMILIES,
    UNUSUAL,
    Visible,
    decoder_list,
    everything,
    family_model,
    family_model_in,
    final_norm,
    run_attending,
)

# Of probabilities, and of means over queries: absolute. Of hidden states: relative to the largest of them.
TOLERANCE = 2e-5

LENGTHS = (1, 2, 13, 150)

# Transformers has no SDPA for them, or in its older versions one that leaves the softcap out.
WITHOUT_SDPA = ("gemma2", "gpt_oss")

Array = NDArray[np.float64]

# ---------------------------------------------------------------------------------------------------- witnesses


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 300, (tokens,), generator=generator).tolist()


@dataclass
class Eager:
    """What the model itself says of one prompt; layers count from 1.

    Attributes:
        hidden: (T, hidden), after the final norm.
        logits: (T, vocabulary).
        weights: (H, T, T) for each layer with softmax attention.
        residual: (T, hidden), the residual stream after each layer.
        loss: the sum over its T - 1 predictions.
    """

    hidden: Tensor
    logits: Tensor
    weights: dict[int, Tensor]
    residual: dict[int, Tensor]
    loss: float


def run_eagerly(name: str, model: PreTrainedModel, prompt: list[int], implementation: str = "eager") -> Eager:
    residual: dict[int, Tensor] = {}
    hidden: list[Tensor] = []
    handles = [final_norm(name, model).register_forward_hook(lambda module, args, out: hidden.append(out[0]))]
    for layer, module in enumerate(decoder_list(name, model), start=1):

        def keep(module: nn.Module, args: Any, out: Any, layer: int = layer) -> None:
            residual[layer] = (out[0] if isinstance(out, tuple) else out)[0]

        handles.append(module.register_forward_hook(keep))
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    ids = torch.tensor([prompt])
    try:
        with torch.no_grad():
            out = model(ids, labels=ids, use_cache=False, output_attentions=implementation == "eager")
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
    # a hybrid model's tuple has its softmax layers only
    weights = [w[0] for w in out.attentions or () if w is not None]
    layers = FAMILIES[name].layers if weights else ()
    loss = 0.0 if len(prompt) == 1 else float(out.loss) * (len(prompt) - 1)
    return Eager(hidden[0], out.logits[0], dict(zip(layers, weights, strict=True)), residual, loss)


@cache
def eager(name: str, tokens: int) -> Eager:
    return run_eagerly(name, family_model(name), prompt_of(tokens))


@dataclass
class Exact:
    """A layer's attention from its own queries, keys and values, in float64."""

    weights: Tensor  # (H, T, T)
    values: Tensor  # (H, T, D)


def exact_attention(model: PreTrainedModel, prompt: list[int]) -> list[Exact]:
    """Each layer's, of a run with an attention of our own that follows the formula and nothing else."""
    seen: list[Exact] = []

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = (x.double() for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = torch.where(attention_mask < -1, -torch.inf, scores)
        if s_aux is not None:
            column = s_aux.double()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        p = scores.softmax(-1)[..., : k.shape[2]]
        seen.append(Exact(p[0], v[0]))
        return (p @ v).transpose(1, 2).to(query.dtype), None

    run_attending(model, attend, prompt)
    return seen


def statistics(weights: Tensor, visible: Visible) -> dict[str, Array]:
    """The statistics of (H, T, T) weights, from their definitions: of each query (H, T), received of each key."""
    p = weights.double().numpy()
    heads, tokens, _ = p.shape
    entropy, ratio, largest = np.zeros((3, heads, tokens))
    for head in range(heads):
        for query in range(tokens):
            row = [x for x in p[head, query] if x > 0]
            entropy[head, query] = -sum(x * np.log(x) for x in row)
            if visible(query + 1) > 1:
                ratio[head, query] = entropy[head, query] / np.log(visible(query + 1))
            largest[head, query] = max(row)
    return {
        "first_token": p[:, :, 0],
        "received": p.sum(1),
        "entropy": entropy,
        "ratio": ratio,
        "row_max": largest,
        "learned_sink": 1 - p.sum(-1),
    }


@cache
def expected_statistics(name: str, tokens: int, layer: int) -> dict[str, Array]:
    return statistics(eager(name, tokens).weights[layer], FAMILIES[name].layers[layer])


def assert_sums(sums: LayerSums, expected: dict[str, Array], visible: Visible, needs: Iterable[Need]) -> None:
    """Means over queries, to `TOLERANCE`; alpha of each key, which is a mean over the queries after it."""
    tokens = sums.tokens
    close = {"atol": TOLERANCE, "rtol": 0}
    assert_visible(sums, visible)
    if "first_token" in needs:
        first = expected["first_token"]
        of_others = first[:, 1:].sum(-1)
        np.testing.assert_allclose(sums.first_token / tokens, of_others / tokens, **close, err_msg="first_token")
        np.testing.assert_allclose(sums.first_row, first[:, 0], **close, err_msg="first_row")
    if "learned_sink" in needs:
        taken = expected["learned_sink"]
        found = np.zeros((2, sums.heads))
        if sums.learned_sink is not None:
            found[:] = sums.learned_sink, sums.learned_sink_first_row
        np.testing.assert_allclose(found[0] / tokens, taken[:, 1:].sum(-1) / tokens, **close)
        np.testing.assert_allclose(found[1], taken[:, 0], **close)
    if "received" in needs:
        queries = np.arange(tokens, 0, -1)
        alpha = expected["received"] / queries
        np.testing.assert_allclose(sums.received / queries, alpha, **close, err_msg="received")
    if "entropy" in needs:
        mean = expected["entropy"].mean(-1)
        np.testing.assert_allclose(sums.entropy / tokens, mean, **close, err_msg="entropy")
        several = sum(visible(query) > 1 for query in range(1, tokens + 1))
        assert sums.ratio_queries == several
        mean = expected["ratio"].sum(-1) / max(several, 1)
        np.testing.assert_allclose(sums.entropy_ratio / max(several, 1), mean, **close, err_msg="entropy_ratio")
    if "row_max" in needs:
        mean = expected["row_max"].mean(-1)
        np.testing.assert_allclose(sums.row_max / tokens, mean, **close, err_msg="row_max")


def assert_visible(sums: LayerSums, visible: Visible) -> None:
    """Which queries see which keys, by a mask written out; None is all before them."""
    tokens = sums.tokens
    mask = np.array([[i - visible(i) < k <= i for k in range(1, tokens + 1)] for i in range(1, tokens + 1)])
    assert queries_of_key(sums).tolist() == mask.sum(0).tolist()
    np.testing.assert_allclose(uniform_first(sums), mask[:, 0] / mask.sum(1), rtol=1e-12)


def summed(sums: LayerSums, need: Need) -> Array:
    """Over all queries: the first token's sum is kept without the first row."""
    return sums.first_token + sums.first_row if need == "first_token" else getattr(sums, need)


def assert_only(sums: LayerSums, needs: Iterable[Need]) -> None:
    """What was not asked for is not there."""
    names = {"first_token": "first_token", "received": "received", "entropy": "entropy", "row_max": "row_max"}
    for need, name in {**names, "values": "value_norm"}.items():
        assert (getattr(sums, name) is not None) == (need in needs)
    assert np.isnan(sums.max_activation) == ("residual" not in needs)


# ---------------------------------------------------------------------------------------------------- ours


@dataclass
class Ours:
    """What capture says.

    Attributes:
        layers, losses: of each prompt.
        passes: (B, Q, hidden) of each forward pass, after the final norm.
    """

    layers: list[dict[int, LayerCapture]]
    losses: list[float | None]
    passes: list[Tensor]

    @property
    def hidden(self) -> Tensor:
        """(T, hidden), of a single prompt; capture may run the model on a few tokens before."""
        [layers] = self.layers
        tokens = next(iter(layers.values())).sums.tokens
        return torch.cat(self.passes, 1)[0, -tokens:]


def run(name: str, model: PreTrainedModel, prompts: list[list[int]], request: Request, **options: Any) -> Ours:
    layers: list[dict[int, LayerCapture]] = [{} for _ in prompts]
    losses: list[float | None] = [None] * len(prompts)
    finished: list[int] = []
    passes: list[Tensor] = []

    def on_layer(prompt: int, layer: LayerCapture) -> None:
        assert prompt not in finished
        assert layer.layer not in layers[prompt]
        layers[prompt][layer.layer] = layer

    def on_prompt(prompt: int, loss: float | None) -> None:
        finished.append(prompt)
        losses[prompt] = loss

    handle = final_norm(name, model).register_forward_hook(lambda module, args, out: passes.append(out))
    try:
        stream(model, prompts, request, on_layer, on_prompt, **options)
    finally:
        handle.remove()
    assert sorted(finished) == list(range(len(prompts)))
    return Ours(layers, losses, passes)


def everything_of(name: str) -> Request:
    return Request(maps=frozenset(FAMILIES[name].layers), needs=NEEDS, loss=True)


@cache
def ours(name: str, tokens: int) -> Ours:
    return run(name, family_model(name), [prompt_of(tokens)], everything_of(name))


def assert_same(
    one: dict[int, LayerCapture], other: dict[int, LayerCapture], of_median: float = TOLERANCE
) -> None:
    """Two captures of one prompt; medians to a relative `of_median`."""
    assert one.keys() == other.keys()
    for layer in one:
        if other[layer].probabilities is not None:
            torch.testing.assert_close(
                one[layer].probabilities, other[layer].probabilities, atol=TOLERANCE, rtol=0
            )
        a, b = one[layer].sums, other[layer].sums
        assert (a.tokens, a.heads, a.ratio_queries) == (b.tokens, b.heads, b.ratio_queries)
        queries = {"first_row": 1, "learned_sink_first_row": 1, "received": np.arange(a.tokens, 0, -1)}
        fields = ["first_token", "first_row", "received", "entropy", "entropy_ratio", "row_max"]
        np.testing.assert_array_equal(queries_of_key(a), queries_of_key(b))
        np.testing.assert_array_equal(uniform_first(a), uniform_first(b))
        assert (a.learned_sink is None) == (b.learned_sink is None)
        if b.learned_sink is not None:
            fields += ["learned_sink", "learned_sink_first_row"]
        for field in fields:
            divisor = queries.get(field, a.tokens)
            x, y = getattr(a, field) / divisor, getattr(b, field) / divisor
            np.testing.assert_allclose(x, y, atol=TOLERANCE, rtol=0, err_msg=f"layer {layer}, {field}")
        np.testing.assert_allclose(a.value_norm, b.value_norm, rtol=TOLERANCE)
        assert a.max_activation == pytest.approx(b.max_activation, rel=TOLERANCE)
        assert a.max_activation_position == b.max_activation_position
        assert a.max_activation_channel == b.max_activation_channel
        assert a.median_activation == pytest.approx(b.median_activation, rel=of_median)
        if b.gate_mean is not None:
            np.testing.assert_allclose(a.gate_mean, b.gate_mean, atol=TOLERANCE)


def assert_close_to_largest(ours: Tensor, theirs: Tensor) -> None:
    assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


families = pytest.mark.parametrize("name", FAMILIES)
lengths = pytest.mark.parametrize("tokens", LENGTHS)


@families
class TestTheWitnesses:
    """Before they are relied on: they agree among themselves, and say something."""

    def test_eager_is_what_sdpa_computes(self, name: str) -> None:
        if name in WITHOUT_SDPA:
            pytest.skip("transformers has no SDPA for it")
        fused = run_eagerly(name, family_model(name), prompt_of(150), "sdpa")
        assert_close_to_largest(fused.logits, eager(name, 150).logits)

    def test_eager_weights_follow_the_formula(self, name: str) -> None:
        model = family_model(name)
        for layer, exact in zip(FAMILIES[name].layers, exact_attention(model, prompt_of(150)), strict=True):
            weights = eager(name, 150).weights[layer].double()
            torch.testing.assert_close(weights, exact.weights, atol=TOLERANCE, rtol=0)

    def test_attention_is_local_as_stated_and_far_from_uniform(self, name: str) -> None:
        for layer, visible in FAMILIES[name].layers.items():
            weights = eager(name, 150).weights[layer]
            seen = weights.amax(0) > 0
            for query in range(1, 151):
                first = query - visible(query)
                assert seen[query - 1].nonzero().flatten().tolist() == list(range(first, query))
            expected = expected_statistics(name, 150, layer)
            assert 0.1 < expected["ratio"].mean() < 0.85


@families
@lengths
class TestOnePass:
    def test_the_model_computes_what_it_always_does(self, name: str, tokens: int) -> None:
        assert_close_to_largest(ours(name, tokens).hidden, eager(name, tokens).hidden)

    def test_layers_are_those_with_softmax_attention(self, name: str, tokens: int) -> None:
        layers = ours(name, tokens).layers[0]
        assert list(layers) == [layer.layer for layer in layers.values()] == list(FAMILIES[name].layers)

    def test_maps(self, name: str, tokens: int) -> None:
        for layer, weights in eager(name, tokens).weights.items():
            probabilities = ours(name, tokens).layers[0][layer].probabilities
            torch.testing.assert_close(probabilities, weights, atol=TOLERANCE, rtol=0)

    def test_statistics(self, name: str, tokens: int) -> None:
        for layer, visible in FAMILIES[name].layers.items():
            sums = ours(name, tokens).layers[0][layer].sums
            assert sums.tokens == tokens
            assert sums.heads == 4
            sees_all = visible(tokens) == tokens
            assert (sums.queries_of_key is None) == sees_all  # then there is nothing to count
            assert_sums(sums, expected_statistics(name, tokens, layer), visible, NEEDS)

    def test_residual_stream(self, name: str, tokens: int) -> None:
        for layer in FAMILIES[name].layers:
            sums = ours(name, tokens).layers[0][layer].sums
            size = eager(name, tokens).residual[layer].abs().double().numpy()
            assert sums.max_activation == pytest.approx(size.max(), rel=TOLERANCE)
            # the first token within 1 %: rounding decides among equal ones
            first = next(token for token in range(tokens) if size[token].max() >= 0.99 * size.max())
            assert (sums.max_activation_position, sums.max_activation_channel) == (first, size[first].argmax())
            assert sums.median_activation == pytest.approx(np.median(size), rel=10 * TOLERANCE)

    def test_loss(self, name: str, tokens: int) -> None:
        assert ours(name, tokens).losses[0] == pytest.approx(eager(name, tokens).loss, rel=TOLERANCE)


@families
class TestAskedAlone:
    """A single statistic may be had on another path than all of them."""

    @pytest.mark.parametrize("need", ["first_token", "learned_sink", "received", "entropy", "row_max"])
    def test_statistics(self, name: str, need: Need) -> None:
        for tokens in LENGTHS:
            needs = frozenset({need})
            found = run(name, family_model(name), [prompt_of(tokens)], Request(needs=needs))
            assert_close_to_largest(found.hidden, eager(name, tokens).hidden)
            assert found.losses == [None]
            for layer, visible in FAMILIES[name].layers.items():
                sums = found.layers[0][layer].sums
                assert_sums(sums, expected_statistics(name, tokens, layer), visible, needs)
                assert_only(sums, needs)

    def test_nothing_but_the_loss(self, name: str) -> None:
        found = run(name, family_model(name), [prompt_of(13)], Request(loss=True))
        assert found.losses[0] == pytest.approx(eager(name, 13).loss, rel=TOLERANCE)
        assert all(layer.sums is None for layer in found.layers[0].values())

    def test_norms_of_values(self, name: str) -> None:
        exact = exact_attention(family_model(name), prompt_of(13))
        found = run(name, family_model(name), [prompt_of(13)], Request(needs=frozenset({"values"})))
        for layer, attention in zip(FAMILIES[name].layers, exact, strict=True):
            sums = found.layers[0][layer].sums
            np.testing.assert_allclose(sums.value_norm, attention.values.norm(dim=-1), rtol=TOLERANCE)
            assert_only(sums, {"values"})


@families
class TestPadding:
    """Prompts of several lengths in a batch, against each alone."""

    PROMPTS = (13, 150, 1, 40)

    @pytest.mark.parametrize(("batch_size", "chunk"), [(3, None), (4, 37)])
    def test_on_the_right(self, name: str, batch_size: int, chunk: int | None) -> None:
        prompts = [prompt_of(tokens) for tokens in self.PROMPTS]
        together = run(name, family_model(name), prompts, everything_of(name), batch_size=batch_size, chunk=chunk)
        for row, tokens in enumerate(self.PROMPTS):
            alone = ours(name, tokens)
            assert_same(together.layers[row], alone.layers[0], of_median=TOLERANCE if chunk is None else 1e-3)
            assert together.losses[row] == pytest.approx(alone.losses[0], rel=TOLERANCE)

    @pytest.mark.parametrize("chunk", [None, 64])
    def test_on_the_left(self, name: str, chunk: int | None) -> None:
        layers, losses = self.padded_on_the_left(name, everything_of(name), chunk)
        for row, tokens in enumerate(self.PROMPTS):
            alone = ours(name, tokens)
            assert_same(layers[row], alone.layers[0], of_median=TOLERANCE if chunk is None else 1e-3)
            assert losses[row] == pytest.approx(alone.losses[0], rel=TOLERANCE)

    @pytest.mark.parametrize("need", ["first_token", "entropy"])
    def test_of_one_statistic(self, name: str, need: Need) -> None:
        request = Request(needs=frozenset({need}))
        prompts = [prompt_of(tokens) for tokens in self.PROMPTS]
        for layers in (
            run(name, family_model(name), prompts, request, batch_size=3).layers,
            run(name, family_model(name), prompts, request, batch_size=4, chunk=37).layers,
            self.padded_on_the_left(name, request)[0],
        ):
            for row, tokens in enumerate(self.PROMPTS):
                for layer, visible in FAMILIES[name].layers.items():
                    expected = expected_statistics(name, tokens, layer)
                    assert_sums(layers[row][layer].sums, expected, visible, {need})

    def padded_on_the_left(
        self, name: str, request: Request, chunk: int | None = None
    ) -> tuple[list[dict[int, LayerCapture]], list[float]]:
        longest = max(self.PROMPTS)
        ids = torch.full((len(self.PROMPTS), longest), 7)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(self.PROMPTS):
            ids[row, longest - tokens :] = torch.tensor(prompt_of(tokens))
            mask[row, longest - tokens :] = 1
        layers: list[dict[int, LayerCapture]] = [{} for _ in self.PROMPTS]

        def keep(prompt: int, layer: LayerCapture) -> None:
            layers[prompt][layer.layer] = layer

        losses = capture_batch(family_model(name), ids, mask, request, keep, chunk=chunk)
        return layers, losses or []


@families
@pytest.mark.parametrize(("chunk", "tokens"), [(5, 43), (64, 150), (200, 150)])
class TestChunkedPrefill:
    def test_is_one_pass_in_parts(self, name: str, chunk: int, tokens: int) -> None:
        found = run(name, family_model(name), [prompt_of(tokens)], everything_of(name), chunk=chunk)
        parts = [len(part) for part in _parts(tokens, chunk)]
        assert [part.shape[1] for part in found.passes][-len(parts) :] == parts
        assert_close_to_largest(found.hidden, eager(name, tokens).hidden)
        assert_same(found.layers[0], ours(name, tokens).layers[0], of_median=1e-3)
        assert found.losses[0] == pytest.approx(eager(name, tokens).loss, rel=TOLERANCE)

    def test_of_one_statistic(self, name: str, chunk: int, tokens: int) -> None:
        need: Need
        for need in ("first_token", "entropy"):
            request = Request(needs=frozenset({need}))
            found = run(name, family_model(name), [prompt_of(tokens)], request, chunk=chunk)
            for layer, visible in FAMILIES[name].layers.items():
                sums = found.layers[0][layer].sums
                assert_sums(sums, expected_statistics(name, tokens, layer), visible, {need})


def _parts(tokens: int, chunk: int) -> list[range]:
    return [range(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
class TestLowPrecision:
    """The same weights, rounded; the truth is what they give in float64."""

    TOKENS = 70

    def test_attention_is_exact_for_its_queries_and_keys(self, name: str, dtype: torch.dtype) -> None:
        """Of the first layer: later ones have other inputs, rounded after ours or after theirs."""
        model, prompt = family_model_in(name, dtype), prompt_of(self.TOKENS)
        first, visible = next(iter(FAMILIES[name].layers.items()))
        weights = exact_attention(model, prompt)[0].weights
        exact = statistics(weights, visible)

        whole = run(name, model, [prompt], Request(maps=frozenset({first}), needs=NEEDS)).layers[0][first]
        assert whole.probabilities.dtype == torch.float32
        torch.testing.assert_close(whole.probabilities.double(), weights, atol=TOLERANCE, rtol=0)
        assert_sums(whole.sums, exact, visible, NEEDS)
        need: Need
        for need in ("first_token", "entropy"):
            alone = run(name, model, [prompt], Request(needs=frozenset({need}))).layers[0][first]
            assert_sums(alone.sums, exact, visible, {need})

        # theirs are not, so that this could fail
        eager_weights = run_eagerly(name, model, prompt).weights[first]
        theirs = statistics(eager_weights, visible)
        for need in ("first_token", "entropy", "row_max"):
            mean = exact[need].mean(-1)
            error = np.abs(summed(whole.sums, need) / self.TOKENS - mean).mean()
            assert 5 * error < np.abs(theirs[need].mean(-1) - mean).mean()

    def test_is_nearer_the_truth_than_their_eager_attention(self, name: str, dtype: torch.dtype) -> None:
        low, high = family_model_in(name, dtype), family_model_in(name, dtype).double()
        high.set_experts_implementation("eager")  # the others have no float64
        first = next(iter(FAMILIES[name].layers))

        def error(found: Tensor, exact: Tensor) -> float:
            return float((found.double() - exact).abs().mean())

        of_maps, of_hidden = [], []  # our error over theirs
        for seed in range(5):
            prompt = prompt_of(self.TOKENS, seed)
            truth, theirs = run_eagerly(name, high, prompt), run_eagerly(name, low, prompt)
            ours = run(name, low, [prompt], Request(maps=frozenset({first}), needs=NEEDS))
            maps = ours.layers[0][first].probabilities
            of_maps.append(error(maps, truth.weights[first]) / error(theirs.weights[first], truth.weights[first]))
            of_hidden.append(error(ours.hidden, truth.hidden) / error(theirs.hidden, truth.hidden))
        # What the linear layers of a hybrid model round comes before attention, ours and theirs.
        limit = 1.0 if first == 1 else 1.02
        assert max(of_maps) < limit
        # One prompt's hidden states may be off by luck: all layers round, and routers of experts flip.
        assert median(of_hidden) < limit


class TestExtremeScores:
    """Against the formula in float64, with scores that a careless sum of exponentials does not survive.

    Float32 queries and keys give scores with an error that grows with them: eager attention has it too.
    """

    TOKENS = 70

    def check(self, name: str, model: PreTrainedModel, largest: float) -> None:
        prompt = prompt_of(self.TOKENS)
        visible = FAMILIES[name].layers[1]
        weights = exact_attention(model, prompt)[0].weights
        exact = statistics(weights, visible)
        theirs = run_eagerly(name, model, prompt).weights[1]
        allowed = max(TOLERANCE, 2 * float((theirs - weights).abs().max()))
        assert allowed < largest

        for chunk in (None, 16):
            request = Request(maps=frozenset({1}), needs=NEEDS)
            whole = run(name, model, [prompt], request, chunk=chunk).layers[0][1]
            torch.testing.assert_close(whole.probabilities.double(), weights, atol=allowed, rtol=0)
            need: Need
            for need in ("first_token", "entropy", "row_max"):
                alone = run(name, model, [prompt], Request(needs=frozenset({need})), chunk=chunk).layers[0][1]
                for sums in (whole.sums, alone.sums):
                    found = summed(sums, need) / self.TOKENS
                    np.testing.assert_allclose(found, exact[need].mean(-1), atol=allowed, rtol=0)
            assert (whole.sums.entropy >= 0).all()

    @pytest.mark.parametrize("shift", [-400.0, -80.0, 80.0, 400.0])
    def test_far_from_zero(self, shift: float) -> None:
        """GPT-2 has no rotation: a bias on its keys adds the same to all scores of a query."""
        model = family_model_in("gpt2", torch.float32)
        attention = model.transformer.h[0].attn
        with torch.no_grad():
            query, key, _ = attention.c_attn.bias.view(3, 4, 8).unbind()
            query.copy_(5.0 * torch.ones(4, 8))
            # a head each: shifted, half as much, the other way, not at all
            for head, factor in enumerate((1.0, 0.5, -1.0, 0.0)):
                key[head] += factor * shift / 5.0 / 8**0.5
        self.check("gpt2", model, 2e-4)

    @pytest.mark.parametrize("factor", [6.0, 20.0])
    def test_of_nearly_one_hot_attention(self, factor: float) -> None:
        model = family_model_in("llama", torch.float32)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight *= factor
        self.check("llama", model, 2e-4)

    def test_of_learned_sinks(self) -> None:
        model = family_model_in("gpt_oss", torch.float32)
        with torch.no_grad():
            model.model.layers[0].self_attn.sinks.copy_(torch.tensor([-100.0, 3.0, 40.0, 120.0]))
        self.check("gpt_oss", model, 2e-4)


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("chunk", [None, 16])
def test_right_or_refused(name: str, chunk: int | None) -> None:
    """A model that capture cannot follow is an error for a person, not a wrong number nor a traceback."""
    if not hasattr(transformers, UNUSUAL[name].config):
        pytest.skip("not in this version of transformers")
    model, prompt = family_model(name), prompt_of(70)
    layers: list[LayerCapture] = []
    losses: list[float | None] = []
    request = Request(maps=frozenset(UNUSUAL[name].layers), needs=NEEDS, loss=True)
    try:
        stream(
            model,
            [prompt],
            request,
            lambda prompt, layer: layers.append(layer),
            lambda prompt, loss: losses.append(loss),
            chunk=chunk,
        )
    except GattnVizError:
        return
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model(ids, labels=ids, use_cache=False, output_attentions=True)
    assert [layer.layer for layer in layers] == list(UNUSUAL[name].layers)
    weights = [weights[0] for weights in out.attentions if weights.shape[-1] == len(prompt)]
    for layer, expected in zip(layers, weights, strict=True):
        torch.testing.assert_close(layer.probabilities, expected, atol=TOLERANCE, rtol=0)
        assert_sums(layer.sums, statistics(expected, everything), everything, NEEDS)
    assert losses == [pytest.approx(float(out.loss) * (len(prompt) - 1), rel=TOLERANCE)]


FUSED = [name for name in FAMILIES if everything in FAMILIES[name].layers.values() and name not in WITHOUT_SDPA]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("chunk", [None, 64])
def test_the_fused_path_on_request(name: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has entropy from blocks, a GPU from the fused kernel: that way must be right too."""
    monkeypatch.setattr(
        collector, "_choose_path", lambda attention, needs: "fused" if fused.can_fuse(attention) else "blocks"
    )
    needs: frozenset[Need] = frozenset({"first_token", "entropy"})
    found = run(name, family_model(name), [prompt_of(150)], Request(needs=needs), chunk=chunk)
    assert_close_to_largest(found.hidden, eager(name, 150).hidden)
    for layer, visible in FAMILIES[name].layers.items():
        assert (found.layers[0][layer].paths == {"fused"}) == (visible is everything)
        assert_sums(found.layers[0][layer].sums, expected_statistics(name, 150, layer), visible, needs)


@families
@pytest.mark.parametrize("chunk", [None, 64])
def test_the_compiled_path_on_request(name: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts longer than these by its own choice."""
    pytest.importorskip("numba")
    monkeypatch.setattr(collector, "kernel_for", lambda attention: trusted_kernel())
    found = run(name, family_model(name), [prompt_of(150)], everything_of(name), chunk=chunk)
    assert_close_to_largest(found.hidden, eager(name, 150).hidden)
    for layer, visible in FAMILIES[name].layers.items():
        capture = found.layers[0][layer]
        assert capture.paths == {"compiled"}
        assert_sums(capture.sums, expected_statistics(name, 150, layer), visible, NEEDS)
        torch.testing.assert_close(capture.probabilities, eager(name, 150).weights[layer], atol=TOLERANCE, rtol=0)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


class TestNothingOfSizeTxT:
    """Half of T x T is less than a mask of all queries and keys, or the map of a single head."""

    TOKENS = 1536
    BOUND = TOKENS**2 // 2
    REQUESTS = {  # noqa: RUF012
        "statistics and loss": Request(needs=NEEDS, loss=True),
        "first token": Request(needs=frozenset({"first_token"})),
        "entropy": Request(needs=frozenset({"entropy"})),
        "pooled maps": Request(maps=frozenset({1, 2}), view=MapView(max_cells=64)),
        "weighted maps": Request(maps=frozenset({1}), view=MapView(max_cells=64), weight="output"),
        "part of a map": Request(maps=frozenset({2}), view=MapView(queries=(1400, 1500), keys=(1, 20))),
    }

    def largest(self, name: str, request: Request, lengths: tuple[int, ...], **options: Any) -> int:
        prompts = [prompt_of(tokens) for tokens in lengths]
        with Largest() as probe:
            run(name, family_model(name), prompts, request, batch_size=len(prompts), **options)
        return probe.elements

    @pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "llama4", "gate_elementwise"])
    @pytest.mark.parametrize("asked", REQUESTS)
    def test_alone(self, name: str, asked: str) -> None:
        assert self.largest(name, self.REQUESTS[asked], (self.TOKENS,)) < self.BOUND

    @pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
    @pytest.mark.parametrize("chunk", [None, 512])
    def test_in_a_padded_batch(self, name: str, chunk: int | None) -> None:
        request = self.REQUESTS["statistics and loss"]
        assert self.largest(name, request, (self.TOKENS, 1000), chunk=chunk) < self.BOUND

    def test_with_a_window_nothing_exceeds_the_queries(self) -> None:
        request = Request(needs=NEEDS)
        config = family_model("mistral").config
        queries = self.TOKENS * config.num_attention_heads * config.head_dim
        assert self.largest("mistral", request, (self.TOKENS,)) == queries
        assert self.largest("mistral", Request(needs=frozenset({"first_token"})), (self.TOKENS,)) == queries
        # keys outside of it are not computed: with all of them in sight, a block of rows is larger
        assert self.largest("llama", request, (self.TOKENS,)) > queries

    def test_of_left_padding(self) -> None:
        ids = torch.tensor([prompt_of(self.TOKENS)] * 2)
        mask = torch.ones_like(ids)
        mask[0, :100] = 0
        with Largest() as probe:
            request = self.REQUESTS["statistics and loss"]
            capture_batch(family_model("mistral"), ids, mask, request, lambda sequence, layer: None)
        assert probe.elements < self.BOUND

    def test_the_probe_sees_what_eager_and_whole_maps_allocate(self) -> None:
        with Largest() as probe:
            run_eagerly("llama", family_model("llama"), prompt_of(self.TOKENS))
        assert probe.elements >= 4 * self.TOKENS**2
        whole = Request(maps=frozenset({1}), heads=(1,))
        assert self.largest("llama", whole, (self.TOKENS,)) >= self.TOKENS**2

    def test_the_probe_sees_a_mask(self) -> None:
        model = family_model("mistral")
        model.set_attn_implementation("sdpa")
        with Largest() as probe, torch.no_grad():
            model(torch.tensor([prompt_of(self.TOKENS)]), use_cache=False)
        assert probe.elements >= self.TOKENS**2

"""Families that compute attention by themselves: what they return, taken out a layer at a time.

The witnesses are all layers' weights at once, as `output_attentions=True` gives them, and for Falcon and BLOOM the
formula in float64, of queries and keys as they leave the projection.
"""

from __future__ import annotations

import gc
import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import RwkvConfig, RwkvForCausalLM, XLNetConfig, XLNetLMHeadModel
from transformers.models.gpt_neo import modeling_gpt_neo

from gattn_viz.capture.collector import Collector, LayerCapture, Request
from gattn_viz.capture.eager import reduce_weights
from gattn_viz.capture.layers import backbone, decoder_layers
from gattn_viz.capture.run import capture, capture_batch
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.layer import NEEDS
from gattn_viz.metrics.pooling import MapView
from gattn_viz.metrics.sums import AttentionSums
from tests.capture.families import EAGER, family_model, family_model_in
from tests.capture.test_families import TOLERANCE, assert_close_to_largest, assert_sums, prompt_of, statistics

OF_ATTENTION = ("first_token", "received", "entropy", "row_max")
ALL = Request(maps=frozenset({1, 2}), needs=NEEDS, loss=True)

# More tokens than the rows of a block
LONG = 140

families = pytest.mark.parametrize("name", EAGER)


@cache
def all_weights(name: str, tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """(H, T, T) of each layer, kept together."""
    model = family_model_in(name, dtype)
    model.config._attn_implementation = "eager"  # which `set_attn_implementation` refuses
    if name == "falcon_alibi":  # adds its ALiBi twice
        return [weights.float() for weights in of_formula(name, tokens)]
    with torch.no_grad():
        out = model(torch.tensor([prompt_of(tokens)]), output_attentions=True, use_cache=False)
    return [weights[0] for weights in out.attentions]


def of_formula(name: str, tokens: int) -> list[Tensor]:
    """(H, T, T) of each layer in float64; of H heads of 8 channels."""
    model = family_model(name)
    fused: list[Tensor] = []
    handles = [
        module.register_forward_hook(lambda module, args, out: fused.append(out[0].double()))
        for path, module in model.named_modules()
        if path.endswith("query_key_value")
    ]
    with torch.no_grad():
        model(torch.tensor([prompt_of(tokens)]), use_cache=False)
    for handle in handles:
        handle.remove()
    positions = torch.arange(tokens, dtype=torch.float64)
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8], dtype=torch.float64)  # Press et al. 2022, of 4 heads
    alibi = slopes[:, None, None] * (positions[None, :] - positions[:, None])
    weights = []
    for rows in fused:
        if name == "falcon":  # queries of 4 heads, then the key, then the value
            q, k = rotated(rows.view(tokens, 6, 8)[:, :4]), rotated(rows.view(tokens, 6, 8)[:, 4:5])
            scores = torch.einsum("qhd,khd->hqk", q, k.expand(-1, 4, -1)) / 8**0.5
        else:  # query, key and value of one head after the other
            q, k, _ = rows.view(tokens, 4, 3, 8).unbind(2)
            scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
            scores += alibi / 8**0.5 if name == "falcon_alibi" else alibi
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights.append(scores.masked_fill(hidden, -torch.inf).softmax(-1))
    return weights


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of (T, H, 8): channel c is turned with channel c + 4."""
    angle = torch.arange(len(x), dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(4.0).double() / 4)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :4], x[..., 4:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def assert_same(one: dict[int, LayerCapture], other: dict[int, LayerCapture]) -> None:
    assert one.keys() == other.keys()
    for layer in one:
        assert one[layer].paths == {"eager"}
        torch.testing.assert_close(
            one[layer].probabilities, other[layer].probabilities, atol=TOLERANCE, rtol=0, equal_nan=True
        )
        a, b = one[layer].sums, other[layer].sums
        for name in ("first_token", "first_row", "received", "entropy", "entropy_ratio", "row_max"):
            x, y = getattr(a, name) / a.tokens, getattr(b, name) / a.tokens
            np.testing.assert_allclose(x, y, atol=TOLERANCE, err_msg=name)
        assert (a.tokens, a.ratio_queries) == (b.tokens, b.ratio_queries)
        assert a.max_activation == pytest.approx(b.max_activation, rel=TOLERANCE)


class TestWeights:
    @pytest.mark.parametrize("name", ["falcon", "falcon_alibi", "bloom"])
    def test_follow_the_formula(self, name: str) -> None:
        [layers] = capture(family_model(name), [prompt_of(LONG)], ALL)
        for layer, weights in enumerate(of_formula(name, LONG), start=1):
            torch.testing.assert_close(
                layers[layer].probabilities.double(), weights, atol=TOLERANCE, rtol=0, msg=f"layer {layer}"
            )

    @families
    @pytest.mark.parametrize("tokens", [1, 2, 13, LONG])
    def test_are_those_of_all_layers_at_once(self, name: str, tokens: int) -> None:
        [layers] = capture(family_model(name), [prompt_of(tokens)], ALL)
        assert list(layers) == [1, 2]
        for layer, visible in EAGER[name].layers.items():
            weights, seen = all_weights(name, tokens)[layer - 1], layers[layer]
            assert seen.paths == {"eager"}
            torch.testing.assert_close(seen.probabilities, weights, atol=TOLERANCE, rtol=0)
            assert_sums(seen.sums, statistics(weights, visible), visible, OF_ATTENTION)
            assert seen.sums.value_norm is None
            assert seen.sums.output_before is None

    @families
    def test_the_model_computes_what_it_would(self, name: str) -> None:
        """The residual stream, the last hidden state and the loss are those of a run of its own."""
        model, prompt = family_model(name), prompt_of(13)
        states: list[Tensor] = []
        handle = backbone(model).register_forward_hook(
            lambda module, args, out: states.append(out.last_hidden_state)
        )
        losses: list[float | None] = []
        [layers] = capture(model, [prompt], ALL, lambda prompt, loss: losses.append(loss))
        handle.remove()
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model(ids, labels=ids, output_hidden_states=True)
            captured = next(state for state in states if state.shape[1] == len(prompt))
            assert_close_to_largest(captured, backbone(model)(ids).last_hidden_state)
        assert layers[1].sums.max_activation == pytest.approx(float(out.hidden_states[1].abs().max()), rel=1e-5)
        assert losses == [pytest.approx(float(out.loss) * 12, rel=1e-5)]

    @families
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_in_low_precision_are_the_models_own(self, name: str, dtype: torch.dtype) -> None:
        [layers] = capture(family_model_in(name, dtype), [prompt_of(13)], ALL)
        assert layers[2].probabilities.dtype == torch.float32
        if name != "falcon_alibi":
            for layer, weights in enumerate(all_weights(name, 13, dtype), start=1):
                assert torch.equal(layers[layer].probabilities, weights.float())

    @families
    def test_of_some_heads_their_mean_and_pooled(self, name: str) -> None:
        model, prompt, weights = family_model(name), prompt_of(LONG), all_weights(name, LONG)[1]
        for heads, expected in (((4, 2), weights[[3, 1]]), ("mean", weights.mean(0, keepdim=True))):
            [layers] = capture(model, [prompt], Request(maps=frozenset({2}), heads=heads))
            torch.testing.assert_close(layers[2].probabilities, expected, atol=TOLERANCE, rtol=0)
        view = MapView(queries=(8, 67), keys=(1, 60), max_cells=6)
        [layers] = capture(model, [prompt], Request(maps=frozenset({2}), view=view))
        buckets = weights[:, 7:67, :60].unflatten(1, (6, 10)).unflatten(3, (6, 10)).amax((2, 4))
        found = layers[2].probabilities
        torch.testing.assert_close(
            found, buckets.where(~found.isnan(), torch.nan), atol=TOLERANCE, rtol=0, equal_nan=True
        )


class TestBatches:
    @families
    def test_padding_on_the_right_changes_nothing(self, name: str) -> None:
        prompts = [prompt_of(9), prompt_of(4, seed=1), prompt_of(1, seed=2)]
        together = capture(family_model(name), prompts, ALL, batch_size=3)
        for prompt, layers in zip(prompts, together, strict=True):
            assert_same(layers, capture(family_model(name), [prompt], ALL)[0])

    @families
    def test_padding_on_the_left_changes_nothing(self, name: str) -> None:
        model, prompt = family_model(name), prompt_of(6)
        found: dict[int, dict[int, LayerCapture]] = {0: {}, 1: {}}
        ids = torch.tensor([[7, 7, 7, *prompt], prompt_of(9, seed=5)])
        mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
        capture_batch(model, ids, mask, ALL, lambda row, layer: found[row].update({layer.layer: layer}))
        assert_same(found[0], capture(model, [prompt], ALL)[0])

    @families
    @pytest.mark.parametrize("chunk", [1, 4])
    def test_chunks_change_nothing(self, name: str, chunk: int) -> None:
        if name == "openai_gpt":
            with pytest.raises(GattnVizError, match=r"OpenAIGPTLMHeadModel does not go on .*: run without chunks"):
                capture(family_model(name), [prompt_of(9)], ALL, chunk=chunk)
            return
        prompts = [prompt_of(9), prompt_of(6, seed=1)]
        together = capture(family_model(name), prompts, ALL, batch_size=2, chunk=chunk)
        for prompt, layers in zip(prompts, together, strict=True):
            assert_same(layers, capture(family_model(name), [prompt], ALL)[0])


@families
def test_no_two_layers_weights_are_alive_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    add_weights = Collector.add_weights

    def look(self: Collector, weights: Tensor, local_size: int | None) -> None:
        gc.collect()
        assert [before() for before in alive] == [None] * self.layer
        whole = weights if weights._base is None else weights._base
        alive.append(weakref.ref(whole))
        add_weights(self, weights, local_size)

    monkeypatch.setattr(Collector, "add_weights", look)
    capture(family_model(name), [prompt_of(9)], ALL)
    assert len(alive) == 2
    assert [before() for before in alive] == [None, None]


@families
def test_nothing_is_changed(name: str) -> None:
    model = family_model(name)

    def state() -> Any:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        return hooks, model.config._attn_implementation, model.config.to_dict()

    before = state()
    capture(model, [prompt_of(5)], ALL)
    assert state() == before


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            (Request(maps=frozenset({1}), weight="value"), "maps of the weight value"),
            (Request(maps=frozenset({1}), weight="output"), "maps of the weight output"),
            (Request(outputs=frozenset({2})), "attention output"),
            (Request(needs=frozenset({"values"})), "values"),
            (Request(needs=frozenset({"output_before", "output_histogram"})), "output_before, output_histogram"),
        ],
    )
    def test_of_what_only_queries_keys_and_values_would_give(self, request_: Request, message: str) -> None:
        with pytest.raises(
            GattnVizError, match=rf"^no {message} of BloomForCausalLM \(this model\), which .*expected .*"
        ):
            capture(family_model("bloom"), [prompt_of(3)], request_)

    def test_of_a_model_without_softmax_attention(self) -> None:
        model = RwkvForCausalLM(RwkvConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2))
        with pytest.raises(
            GattnVizError, match=r"^RwkvForCausalLM returns no attention weights, nor goes through"
        ):
            capture(model, [prompt_of(5)], ALL)

    def test_of_weights_of_another_shape(self) -> None:
        model = XLNetLMHeadModel(XLNetConfig(vocab_size=300, d_model=32, n_layer=2, n_head=4, d_inner=48))
        with pytest.raises(
            GattnVizError, match=r"layer 1 returns have the shape \(5, 5, 1, 4\), not \(1, 5, 5, 5\)"
        ):
            capture(model, [prompt_of(5)], ALL)

    def test_of_weights_that_look_ahead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = family_model_in("gpt_neo", torch.float32)
        for layer in decoder_layers(model):
            layer.attn.attention.bias[:] = True  # its causal mask
        monkeypatch.setattr(modeling_gpt_neo, "create_causal_mask", lambda **kwargs: None)
        with pytest.raises(
            GattnVizError, match=r"layer 1 returns do not sum to 1 .* \(off by (1|0\.\d+)\); expected"
        ):
            capture(model, [prompt_of(6)], ALL)


def test_reduced_by_hand() -> None:
    """Three queries, one head; weights that sum to more than 1 in the last row."""
    weights = torch.tensor([[[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.25, 0.375]]])
    sums = AttentionSums.zeros(1, 3)
    off = reduce_weights(weights, 0, sums=sums, needs=OF_ATTENTION)
    assert off == pytest.approx(0.125)
    assert (sums.first_row.tolist(), sums.first_token.tolist()) == ([1.0], [0.75])
    assert sums.received.tolist() == [[1.75, 1.0, 0.375]]
    assert sums.row_max.tolist() == [1 + 0.75 + 0.5]
    second = 0.25 * np.log(4) + 0.75 * np.log(4 / 3)
    third = 0.5 * np.log(2) + 0.25 * np.log(4) + 0.375 * np.log(1 / 0.375)
    assert sums.entropy.tolist() == pytest.approx([second + third])
    assert sums.entropy_ratio.tolist() == pytest.approx([second / np.log(2) + third / np.log(3)])
    assert sums.ratio_queries == 2


def test_entropy_is_never_above_that_of_uniform_attention() -> None:
    """Of weights that were rounded up."""
    weights = torch.tensor([[[1.0, 0, 0], [0.5, 0.5, 0], [0.34, 0.34, 0.34]]])
    sums = AttentionSums.zeros(1, 3)
    reduce_weights(weights, 0, sums=sums, needs=OF_ATTENTION)
    assert sums.entropy.tolist() == pytest.approx([np.log(2) + np.log(3)])
    assert sums.entropy_ratio.tolist() == pytest.approx([2.0])

"""The gated Qwen3 against a reference written from the formulas, and the reference against what is known of it."""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from gattn_viz.models.modeling import GatedQwen3ForCausalLM
from tests.models import reference
from tests.models.conftest import (
    CACHE,
    GATED,
    ROPE_THETA,
    VARIANTS,
    GateRecorder,
    arrays,
    padding_mask,
    random_ids,
    run_reference,
    tiny_config,
    tiny_model,
    with_implementation,
)

TOLERANCE = 1e-5
FAR = 1e-1  # a wrong layout is at least this far off: ten thousand times the tolerance

TOKENS = 5
LENGTHS = [5, 3]  # real tokens of the two prompts of a padded batch

CASES = list(itertools.product(VARIANTS, (False, True), (False, True), (False, True), (1, 2, 3)))


def case_id(case: tuple[str, bool, bool, bool, int]) -> str:
    variant, qkv_bias, use_qk_norm, tied, group = case
    words = [variant, "bias" * qkv_bias, "qknorm" * use_qk_norm, "tied" * tied, f"G{group}"]
    return "-".join(word for word in words if word)


every_case = pytest.mark.parametrize("case", CASES, ids=case_id)


def build(case: tuple[str, bool, bool, bool, int]) -> GatedQwen3ForCausalLM:
    variant, qkv_bias, use_qk_norm, tied, group = case
    config = tiny_config(
        variant, group=group, qkv_bias=qkv_bias, use_qk_norm=use_qk_norm, tie_word_embeddings=tied
    )
    return tiny_model(config, seed=group)


def distance(actual: Tensor, expected: np.ndarray, real: np.ndarray | None = None) -> float:
    """The largest difference; `real` picks the positions (B, T) of arrays that begin with B, T."""
    difference = np.abs(actual.detach().double().numpy() - expected)
    return float(difference.max() if real is None else difference[real].max())


def assert_agrees(
    model: GatedQwen3ForCausalLM, ids: Tensor, expected: reference.Result, mask: Tensor | None = None
) -> None:
    """Logits with and without the weights asked for, the weights, gate logits and scores; padded rows aside."""
    real = np.ones(ids.shape, dtype=bool) if mask is None else mask.bool().numpy()
    with torch.no_grad():
        plain = model(ids, attention_mask=mask)
        with GateRecorder(model) as gates:
            full = model(ids, attention_mask=mask, output_attentions=True)
    assert distance(plain.logits, expected.logits, real) < TOLERANCE
    assert distance(full.logits, expected.logits, real) < TOLERANCE

    assert len(full.attentions) == len(expected.attentions) == 2
    for actual, weights in zip(full.attentions, expected.attentions, strict=True):
        assert actual.shape == weights.shape
        assert distance(actual.transpose(1, 2), weights.swapaxes(1, 2), real) < TOLERANCE

    assert len(gates.scores) == (0 if model.config.variant == "baseline" else 2)
    for actual, logits in zip(gates.logits, expected.gate_logits, strict=False):
        assert actual.shape == logits.shape
        assert distance(actual, logits, real) < TOLERANCE
    for actual, scores in zip(gates.scores, expected.gate_scores, strict=False):
        assert actual.shape == scores.shape
        assert distance(actual, scores, real) < TOLERANCE


# --- the model against the reference ---------------------------------------------------------------------------


@every_case
def test_one_pass(case: tuple[str, bool, bool, bool, int]) -> None:
    """Unpadded, and padded on either side; sdpa, eager, and eager on request under sdpa."""
    model = build(case)
    ids = random_ids(2, TOKENS)
    unpadded = run_reference(model, ids)
    padded = {side: padding_mask(LENGTHS, TOKENS, side) for side in ("left", "right")}
    expected = {side: run_reference(model, ids, mask) for side, mask in padded.items()}
    for implementation in ("sdpa", "eager"):
        with_implementation(model, implementation)
        assert_agrees(model, ids, unpadded)
        for side, mask in padded.items():
            assert_agrees(model, ids, expected[side], mask)


@every_case
def test_cached_decoding(case: tuple[str, bool, bool, bool, int]) -> None:
    """A prefill and then one token at a time give what the reference gives in one pass."""
    model = build(case)
    ids = random_ids(2, TOKENS)
    mask = padding_mask(LENGTHS, TOKENS, "left")
    prefill = 3  # one token of the shorter prompt
    for given in (None, mask):
        expected = run_reference(model, ids, given)
        real = mask.bool().numpy() if given is not None else np.ones(ids.shape, dtype=bool)
        for implementation in ("sdpa", "eager"):
            with_implementation(model, implementation)
            cache = DynamicCache(config=model.config)
            logits, start = [], 0
            for stop in range(prefill, TOKENS + 1):
                seen = None if given is None else given[:, :stop]
                with torch.no_grad():
                    output = model(
                        ids[:, start:stop],
                        attention_mask=seen,
                        output_attentions=True,
                        use_cache=True,
                        **{CACHE: cache},
                    )
                logits.append(output.logits)
                for actual, weights in zip(output.attentions, expected.attentions, strict=True):
                    assert (
                        distance(
                            actual.transpose(1, 2),
                            weights[:, :, start:stop, :stop].swapaxes(1, 2),
                            real[:, start:stop],
                        )
                        < TOLERANCE
                    )
                start = stop
            assert cache.get_seq_length() == TOKENS
            assert distance(torch.cat(logits, dim=1), expected.logits, real) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_cached_decoding_without_asking_for_weights(variant: str, implementation: str) -> None:
    """Chunks of 3, 1, 4 and 1 tokens, through the implementation's own kernel."""
    model = with_implementation(tiny_model(tiny_config(variant, group=3, qkv_bias=True)), implementation)
    ids = random_ids(2, 9)
    mask = padding_mask([9, 7], 9, "left")
    expected = run_reference(model, ids, mask)
    cache, start, logits = DynamicCache(config=model.config), 0, []
    for stop in (3, 4, 8, 9):
        with torch.no_grad():
            output = model(ids[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **{CACHE: cache})
        logits.append(output.logits)
        start = stop
    assert distance(torch.cat(logits, dim=1), expected.logits, mask.bool().numpy()) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 9])
def test_lengths(variant: str, tokens: int) -> None:
    model = tiny_model(tiny_config(variant, group=3, qkv_bias=True))
    ids = random_ids(1, tokens, seed=tokens)
    expected = run_reference(model, ids)
    for implementation in ("sdpa", "eager"):
        assert_agrees(with_implementation(model, implementation), ids, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_layer_and_one_kv_head(variant: str) -> None:
    config = tiny_config(variant, num_attention_heads=3, num_key_value_heads=1, num_hidden_layers=1)
    model = tiny_model(config)
    ids = random_ids(1, 5)
    expected = run_reference(model, ids)
    with torch.no_grad():
        output = model(ids, output_attentions=True)
    assert distance(output.logits, expected.logits) < TOLERANCE
    assert distance(output.attentions[0], expected.attentions[0]) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_position_ids(variant: str) -> None:
    """Positions that are given, as `generate` gives them with left padding, here with gaps too."""
    model = tiny_model(tiny_config(variant))
    ids = random_ids(2, 6)
    mask = padding_mask([6, 4], 6, "left")
    positions = torch.tensor([[0, 1, 3, 4, 8, 11], [0, 0, 0, 2, 3, 4]])
    expected = run_reference(model, ids, mask, positions)
    with torch.no_grad():
        actual = model(ids, attention_mask=mask, position_ids=positions).logits
    real = mask.bool().numpy()
    assert distance(actual, expected.logits, real) < TOLERANCE
    in_a_row = run_reference(model, ids, mask)
    assert np.abs(in_a_row.logits - expected.logits)[real].max() > FAR


# --- negative controls -----------------------------------------------------------------------------------------


@lru_cache
def compared(variant: str, qkv_bias: bool, use_qk_norm: bool, group: int, layout: str) -> tuple[float, ...]:
    """How far logits and gate scores are from the reference that splits q_proj by `layout`."""
    model = build((variant, qkv_bias, use_qk_norm, False, group))
    ids = random_ids(2, TOKENS)
    expected = run_reference(model, ids, layout=layout)
    with torch.no_grad(), GateRecorder(model) as gates:
        logits = model(ids).logits
    return (
        distance(logits, expected.logits),
        *(distance(a, e) for a, e in zip(gates.scores, expected.gate_scores, strict=True)),
    )


@pytest.mark.parametrize("variant", GATED)
@pytest.mark.parametrize("qkv_bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("use_qk_norm", [False, True], ids=["nonorm", "qknorm"])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_wrong_layouts_fail(variant: str, qkv_bias: bool, use_qk_norm: bool, group: int) -> None:
    """The comparison can tell the true layout from the three wrong ones, except per head where G = 1."""
    assert max(compared(variant, qkv_bias, use_qk_norm, group, reference.TRUE_LAYOUT)) < TOLERANCE
    for layout in reference.WRONG_LAYOUTS:
        distances = compared(variant, qkv_bias, use_qk_norm, group, layout)
        if layout == "per_head" and group == 1:
            assert max(distances) < TOLERANCE, layout
        else:
            assert min(distances) > FAR, layout


@pytest.mark.parametrize("variant", GATED)
def test_wrong_layouts_are_not_seen_without_gates_or_with_one_block(variant: str) -> None:
    """Where layouts are the same rows, they must give the same numbers; so the controls test the rows alone."""
    baseline = build(("baseline", True, True, False, 2))
    ids = random_ids(1, 3)
    true = run_reference(baseline, ids)
    for layout in reference.WRONG_LAYOUTS:
        np.testing.assert_array_equal(run_reference(baseline, ids, layout=layout).logits, true.logits)
    one_block = tiny_model(tiny_config(variant, num_attention_heads=3, num_key_value_heads=1))
    np.testing.assert_array_equal(
        run_reference(one_block, ids, layout="queries_first").logits, run_reference(one_block, ids).logits
    )


# --- the weights that the tests are made with -------------------------------------------------------------------


@pytest.mark.parametrize("variant", GATED)
@pytest.mark.parametrize("use_qk_norm", [False, True])
def test_gates_and_attention_vary(variant: str, use_qk_norm: bool) -> None:
    """Near-constant gates or near-uniform attention would let mistakes pass."""
    model = build((variant, True, use_qk_norm, False, 2))
    result = run_reference(model, random_ids(2, 9))
    for scores, weights in zip(result.gate_scores, result.attentions, strict=True):
        assert scores.std() > 0.2
        assert scores.min() < 0.1
        assert scores.max() > 0.9
        last = weights[:, :, -1]  # (B, H, T), uniform would be 1/9
        assert last.max(-1).mean() > 0.25
        assert last.min(-1).mean() < 0.04
    for name, parameter in model.named_parameters():
        assert parameter.std() > 0.1, name
        assert not (parameter == 0).any(), name


# --- the reference against what is known of it -------------------------------------------------------------------


def test_reference_layouts_row_by_row() -> None:
    """Four heads in two groups, head_dim 2, one gate a head: the rows as one would draw them."""
    rows = {
        layout: [
            reference.head_rows(h, heads=4, kv_heads=2, head_dim=2, channels=1, layout=layout) for h in range(4)
        ]
        for layout in (reference.TRUE_LAYOUT, *reference.WRONG_LAYOUTS)
    }
    assert rows["kv_group"] == [([0, 1], [4]), ([2, 3], [5]), ([6, 7], [10]), ([8, 9], [11])]
    assert rows["per_head"] == [([0, 1], [2]), ([3, 4], [5]), ([6, 7], [8]), ([9, 10], [11])]
    assert rows["queries_first"] == [([0, 1], [8]), ([2, 3], [9]), ([4, 5], [10]), ([6, 7], [11])]
    assert rows["gates_first"] == [([2, 3], [0]), ([4, 5], [1]), ([8, 9], [6]), ([10, 11], [7])]


@pytest.mark.parametrize("layout", [reference.TRUE_LAYOUT, *reference.WRONG_LAYOUTS])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("channels", [0, 1, 4])
def test_reference_layouts_use_every_row_once(layout: str, heads: int, kv_heads: int, channels: int) -> None:
    used: list[int] = []
    for head in range(heads):
        query, gate = reference.head_rows(
            head, heads=heads, kv_heads=kv_heads, head_dim=4, channels=channels, layout=layout
        )
        used += query + gate
    assert sorted(used) == list(range(heads * (4 + channels)))


def test_reference_rotary_by_hand() -> None:
    """Channels 0 and 2 are a pair and turn by the position, 1 and 3 by a tenth of it (theta 100, D 4)."""
    np.testing.assert_allclose(
        reference.rotary(np.array([1.0, 0, 0, 0]), 2, 100), [np.cos(2), 0, np.sin(2), 0], atol=1e-15
    )
    np.testing.assert_allclose(
        reference.rotary(np.array([0.0, 0, 0, 1]), 2, 100), [0, -np.sin(0.2), 0, np.cos(0.2)], atol=1e-15
    )


def test_reference_norm_and_softmax_by_hand() -> None:
    np.testing.assert_allclose(
        reference.rms_norm(np.array([3.0, 4.0]), np.array([1.0, 2.0]), 0.0), [3 / 12.5**0.5, 8 / 12.5**0.5]
    )
    np.testing.assert_allclose(reference.softmax([0.0, np.log(3.0)]), [0.25, 0.75])
    np.testing.assert_allclose(reference.sigmoid(np.array([0.0, np.log(3.0)])), [0.5, 0.75])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_reference_agrees_with_stock_qwen3(tied: bool, bias: bool) -> None:
    """A baseline with qk-norm is a stock Qwen3, whose `attention_bias` is on the same four projections."""
    model = build(("baseline", bias, True, tied, 2))
    values = model.config.to_dict()
    values.pop("model_type")
    stock = Qwen3ForCausalLM(Qwen3Config(**(values | {"attention_bias": bias}))).eval()
    stock.load_state_dict(model.state_dict())
    ids = random_ids(2, TOKENS)
    with torch.no_grad():
        assert distance(stock(ids).logits, run_reference(model, ids).logits) < TOLERANCE


def test_reference_on_one_token_in_closed_form() -> None:
    """One token attends to itself alone: what is left is o_proj(sigmoid(gate) * value) and the MLP."""
    model = tiny_model(tiny_config("gate_headwise", num_hidden_layers=1, qkv_bias=True))
    state = arrays(model)
    prefix = "model.layers.0."
    x = state["model.embed_tokens.weight"][7]

    def norm(vector: np.ndarray, name: str) -> np.ndarray:
        return state[name] * vector / np.sqrt((vector**2).mean() + 1e-2)

    normed = norm(x, prefix + "input_layernorm.weight")
    projected = state[prefix + "self_attn.q_proj.weight"] @ normed + state[prefix + "self_attn.q_proj.bias"]
    gate = 1 / (1 + np.exp(-projected[[12, 13, 26, 27]]))  # two blocks of 2 x 6 query rows and 2 gate rows
    value = (state[prefix + "self_attn.v_proj.weight"] @ normed + state[prefix + "self_attn.v_proj.bias"]).reshape(
        2, 6
    )
    attended = gate[:, None] * value[[0, 0, 1, 1]]
    x = x + state[prefix + "self_attn.o_proj.weight"] @ attended.ravel()
    x = x + state[prefix + "self_attn.o_proj.bias"]
    normed = norm(x, prefix + "post_attention_layernorm.weight")
    hidden = state[prefix + "mlp.gate_proj.weight"] @ normed
    hidden = hidden / (1 + np.exp(-hidden)) * (state[prefix + "mlp.up_proj.weight"] @ normed)
    x = x + state[prefix + "mlp.down_proj.weight"] @ hidden
    expected = state["lm_head.weight"] @ norm(x, "model.norm.weight")

    actual = run_reference(model, torch.tensor([[7]]))
    np.testing.assert_allclose(actual.logits[0, 0], expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(actual.attentions[0], np.ones((1, 4, 1, 1)))
    np.testing.assert_allclose(actual.gate_scores[0][0, 0, :, 0], gate, rtol=1e-12)


def test_reference_refuses_a_wrong_set_of_parameters() -> None:
    """Otherwise a parameter that the model has and the formulas lack would go unnoticed."""
    model = build(("gate_headwise", True, True, False, 2))
    state = arrays(model)
    sizes = dict(
        layers=2, heads=4, kv_heads=2, head_dim=6, gate="headwise", tied=False, rope_theta=ROPE_THETA, eps=1e-2
    )
    ids = np.zeros((1, 1), dtype=int)
    with pytest.raises(ValueError, match=r"do not use.*model\.layers\.0\.self_attn\.k_norm\.weight"):
        reference.forward(state, ids, qkv_bias=True, use_qk_norm=False, **sizes)
    del state["model.layers.1.self_attn.o_proj.bias"]
    with pytest.raises(KeyError, match=r"model\.layers\.1\.self_attn\.o_proj\.bias"):
        reference.forward(state, ids, qkv_bias=True, use_qk_norm=True, **sizes)

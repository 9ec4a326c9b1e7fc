"""The parts of the gated attention, and properties that hold whatever the weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from gattn_viz.models.attention import GatedQwen3Attention, causal_mask, split_query_and_gate
from gattn_viz.models.modeling import GatedQwen3ForCausalLM
from tests.models.conftest import (
    GATED,
    VARIANTS,
    GateRecorder,
    padding_mask,
    random_ids,
    tiny_config,
    tiny_model,
    with_implementation,
)

few = settings(deadline=None, max_examples=25)


def attention_layers(model: nn.Module) -> list[GatedQwen3Attention]:
    return [module for module in model.modules() if isinstance(module, GatedQwen3Attention)]


# --- the split ---------------------------------------------------------------------------------------------------


def test_split_headwise_by_hand() -> None:
    """Two KV heads, G 2, D 2: the rows are numbered, so each head's query and gate can be read off."""
    config = tiny_config("gate_headwise", head_dim=2)
    query, gate = split_query_and_gate(torch.arange(12).reshape(1, 1, 12), config)
    assert query[0, 0].tolist() == [[0, 1], [2, 3], [6, 7], [8, 9]]
    assert gate[0, 0].tolist() == [[4], [5], [10], [11]]


def test_split_elementwise_by_hand() -> None:
    config = tiny_config("gate_elementwise", head_dim=2)
    query, gate = split_query_and_gate(torch.arange(16).reshape(1, 1, 16), config)
    assert query[0, 0].tolist() == [[0, 1], [2, 3], [8, 9], [10, 11]]
    assert gate[0, 0].tolist() == [[4, 5], [6, 7], [12, 13], [14, 15]]


def test_split_baseline_by_hand() -> None:
    config = tiny_config("baseline", head_dim=2)
    query, gate = split_query_and_gate(torch.arange(8).reshape(1, 1, 8), config)
    assert query[0, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert gate.shape == (1, 1, 4, 0)


def test_split_keeps_batch_and_tokens_apart() -> None:
    config = tiny_config("gate_headwise", group=3)
    projected = torch.randn(2, 5, 6 * 7)
    query, gate = split_query_and_gate(projected, config)
    assert query.shape == (2, 5, 6, 6)
    assert gate.shape == (2, 5, 6, 1)
    alone = split_query_and_gate(projected[1:, 3:4], config)
    assert torch.equal(query[1:, 3:4], alone[0])
    assert torch.equal(gate[1:, 3:4], alone[1])


# --- the mask of the eager path on request -----------------------------------------------------------------------

LOWEST = torch.finfo(torch.float32).min


def visible(mask: Tensor) -> list[list[int]]:
    """The one prompt's mask as 0 and 1, after a look that it holds only zeros and the lowest number."""
    assert mask.shape[:2] == (1, 1)
    assert set(mask.unique().tolist()) <= {0.0, LOWEST}
    return (mask[0, 0] == 0).int().tolist()


def test_causal_mask_from_nothing() -> None:
    query = torch.zeros(1, 4, 3, 6)
    assert visible(causal_mask(None, query, torch.zeros(1, 2, 3, 6))) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_causal_mask_counts_cached_keys() -> None:
    query = torch.zeros(1, 4, 2, 6)
    assert visible(causal_mask(None, query, torch.zeros(1, 2, 4, 6))) == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_causal_mask_from_padding() -> None:
    query = torch.zeros(1, 4, 3, 6)
    padding = torch.tensor([[0, 1, 1]])
    assert visible(causal_mask(padding, query, query)) == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert visible(causal_mask(padding.bool(), query, query)) == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_causal_mask_from_booleans() -> None:
    query = torch.zeros(1, 4, 2, 6)
    given_mask = torch.tensor([[[[True, False], [False, True]]]])
    assert visible(causal_mask(given_mask, query, query)) == [[1, 0], [0, 1]]


def test_causal_mask_of_the_prefill_of_a_static_cache() -> None:
    query = torch.zeros(1, 4, 2, 6)
    mask = causal_mask(None, query, torch.zeros(1, 2, 4, 6), implementation="sdpa")
    assert visible(mask) == [[1, 0, 0, 0], [1, 1, 0, 0]]


def test_causal_mask_with_a_window() -> None:
    """Flash attention is given the padding alone, and the window apart."""
    query, key = torch.zeros(1, 4, 3, 6), torch.zeros(1, 2, 4, 6)
    padding = torch.tensor([[0, 1, 1, 1]])
    assert visible(causal_mask(None, query, key, sliding_window=2)) == [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible(causal_mask(padding, query, key, sliding_window=2)) == [
        [0, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


def test_causal_mask_keeps_an_additive_one() -> None:
    query = torch.zeros(1, 4, 2, 6)
    additive = torch.tensor([[[[0.0, -3.0], [0.5, 0.0]]]])
    assert causal_mask(additive, query, query) is additive


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_causal_mask_has_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    query = torch.zeros(2, 4, 3, 6, dtype=dtype)
    mask = causal_mask(torch.tensor([[1, 1, 1], [0, 1, 1]]), query, query)
    assert mask.shape == (2, 1, 3, 3)
    assert mask.dtype is dtype
    assert torch.isfinite(mask).all()


# --- the module --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("qkv_bias", [False, True], ids=["nobias", "bias"])
def test_projection_sizes(variant: str, group: int, qkv_bias: bool) -> None:
    attention = GatedQwen3Attention(tiny_config(variant, group=group, qkv_bias=qkv_bias), 0)
    heads = 2 * group
    rows = {"baseline": 6, "gate_headwise": 7, "gate_elementwise": 12}[variant] * heads
    assert attention.q_proj.weight.shape == (rows, 20)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (12, 20)
    assert attention.o_proj.weight.shape == (20, 6 * heads)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        assert (projection.bias is not None) is qkv_bias


def test_qk_norm_is_there_or_not() -> None:
    with_norm = GatedQwen3Attention(tiny_config(use_qk_norm=True), 0)
    assert isinstance(with_norm.q_norm, Qwen3RMSNorm)
    assert with_norm.q_norm.weight.shape == with_norm.k_norm.weight.shape == (6,)
    assert with_norm.q_norm.variance_epsilon == with_norm.k_norm.variance_epsilon == 1e-2
    without = GatedQwen3Attention(tiny_config(use_qk_norm=False), 0)
    assert not [name for name in without.state_dict() if "norm" in name]


def test_attention_bias_is_a_bias_too() -> None:
    """Stock Qwen3's key, which a config may carry besides `qkv_bias`."""
    attention = GatedQwen3Attention(tiny_config(attention_bias=True, qkv_bias=False), 0)
    assert attention.q_proj.bias is not None
    assert attention.o_proj.bias is not None


def test_the_baseline_has_no_gate_module() -> None:
    for variant in VARIANTS:
        attention = GatedQwen3Attention(tiny_config(variant), 0)
        assert isinstance(getattr(attention, "gate_activation", None), nn.Sigmoid) is (variant != "baseline")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("variant", "channels"), [("gate_headwise", 1), ("gate_elementwise", 6)])
def test_a_hook_sees_logits_and_scores(implementation: str, variant: str, channels: int) -> None:
    model = with_implementation(tiny_model(tiny_config(variant, group=3)), implementation)
    with torch.no_grad(), GateRecorder(model) as gates:
        model(random_ids(2, 5))
    assert len(gates.logits) == len(gates.scores) == 2
    for logits, scores in zip(gates.logits, gates.scores, strict=True):
        assert logits.shape == scores.shape == (2, 5, 6, channels)  # (B, T, H, C)
        assert torch.equal(scores, 1 / (1 + torch.exp(-logits))) or torch.allclose(
            scores, torch.sigmoid(logits), atol=1e-7
        )
        assert logits.min() < 0
        assert logits.max() > 1


@pytest.mark.parametrize("variant", GATED)
def test_a_hook_can_change_the_gate(variant: str) -> None:
    """The scores that a hook returns are the ones used: all ones make it a baseline with the same query rows."""
    model = tiny_model(tiny_config(variant, qkv_bias=True))
    ids = random_ids(2, 5)
    baseline = tiny_model(tiny_config("baseline", qkv_bias=True))
    copy_all_but_gates(model, baseline)
    handles = [
        layer.gate_activation.register_forward_hook(lambda _m, _i, output: torch.ones_like(output))
        for layer in attention_layers(model)
    ]
    with torch.no_grad():
        opened = model(ids).logits
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(opened, baseline(ids).logits, rtol=1e-5, atol=1e-5)
        assert (model(ids).logits - opened).abs().max() > 0.1


@pytest.mark.parametrize("variant", GATED)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_output_times_gate_is_what_o_proj_gets(variant: str, implementation: str) -> None:
    """From the weights, the values and the scores that can be seen from outside, over the tensors alone."""
    model = with_implementation(tiny_model(tiny_config(variant, group=3, qkv_bias=True)), implementation)
    seen: dict[str, Tensor] = {}
    layer = attention_layers(model)[1]
    layer.v_proj.register_forward_hook(lambda _m, _i, output: seen.update(value=output))
    layer.o_proj.register_forward_pre_hook(lambda _m, inputs: seen.update(gated=inputs[0]))
    with torch.no_grad(), GateRecorder(model) as gates:
        output = model(random_ids(2, 5), output_attentions=True)
    value = seen["value"].view(2, 5, 2, 6).repeat_interleave(3, dim=2)  # (B, T, H, D)
    attended = torch.einsum("bhqk,bkhd->bqhd", output.attentions[1], value)
    expected = (attended * gates.scores[1]).reshape(2, 5, 36)
    torch.testing.assert_close(seen["gated"], expected, rtol=1e-5, atol=1e-6)


# --- equalities between the variants -----------------------------------------------------------------------------


def gate_rows(config_group: int, channels: int) -> Tensor:
    """(rows) True where a row of `q_proj` is a gate's, for two KV heads and D 6."""
    block = [False] * (6 * config_group) + [True] * (channels * config_group)
    return torch.tensor(block * 2)


def copy_all_but_gates(source: GatedQwen3ForCausalLM, target: GatedQwen3ForCausalLM) -> None:
    """Every parameter of a gated model into a baseline, less the gates' rows of q_proj."""
    config = source.config
    is_gate = gate_rows(config.num_attention_heads // 2, config.gate_channels)
    state = source.state_dict()
    for name in state:
        if "q_proj" in name:
            state[name] = state[name][~is_gate]
    target.load_state_dict(state)


@pytest.mark.parametrize("variant", GATED)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_constant_gate_scales_the_output(variant: str, implementation: str) -> None:
    """Gate weights 0 and bias log 3 make every score 3/4: a baseline with 3/4 of o_proj's weight."""
    model = tiny_model(tiny_config(variant, qkv_bias=True))
    baseline = tiny_model(tiny_config("baseline", qkv_bias=True))
    is_gate = gate_rows(2, model.config.gate_channels)
    copy_all_but_gates(model, baseline)
    with torch.no_grad():
        for gated, plain in zip(attention_layers(model), attention_layers(baseline), strict=True):
            gated.q_proj.weight[is_gate] = 0
            gated.q_proj.bias[is_gate] = torch.log(torch.tensor(3.0))
            plain.o_proj.weight *= 0.75
        ids = random_ids(2, 5)
        actual = with_implementation(model, implementation)(ids).logits
        expected = with_implementation(baseline, implementation)(ids).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_elementwise_with_equal_channels_is_headwise() -> None:
    headwise = tiny_model(tiny_config("gate_headwise", group=3, qkv_bias=True))
    elementwise = GatedQwen3ForCausalLM(tiny_config("gate_elementwise", group=3, qkv_bias=True)).eval()
    state = headwise.state_dict()
    for name in state:
        if "q_proj" in name:
            blocks = state[name].unflatten(0, (2, 3 * 7))  # (K, rows of a block, ...)
            gates = blocks[:, 18:].repeat_interleave(6, dim=1)
            state[name] = torch.cat([blocks[:, :18], gates], dim=1).flatten(0, 1)
    elementwise.load_state_dict(state)
    ids = random_ids(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(elementwise(ids).logits, headwise(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", GATED)
def test_the_gate_belongs_to_its_head(variant: str) -> None:
    """Shutting head 3 of 6 empties its own channels of o_proj's input and leaves the others as they are."""
    model = tiny_model(tiny_config(variant, group=3, qkv_bias=True, num_hidden_layers=1))
    (layer,) = attention_layers(model)
    inputs: list[Tensor] = []
    layer.o_proj.register_forward_pre_hook(lambda _m, args: inputs.append(args[0].view(2, 5, 6, 6)))
    ids = random_ids(2, 5)
    channels = model.config.gate_channels
    first = 18 + 2 * channels  # after the queries of the group and the gates of heads 1 and 2
    with torch.no_grad():
        model(ids)
        layer.q_proj.weight[first : first + channels] = 0
        layer.q_proj.bias[first : first + channels] = -1e4
        model(ids)
    before, after = inputs
    others = [0, 1, 3, 4, 5]
    assert torch.equal(before[:, :, others], after[:, :, others])
    assert (after[:, :, 2] == 0).all()
    assert (before[:, :, 2] != 0).all()


@pytest.mark.parametrize("variant", GATED)
def test_the_gate_does_not_touch_the_weights(variant: str) -> None:
    """It comes after attention: other gates, the same weights of the first layer, other ones of the second."""
    model = tiny_model(tiny_config(variant, qkv_bias=True))
    ids = random_ids(2, 5)
    is_gate = gate_rows(2, model.config.gate_channels)
    with torch.no_grad():
        before = model(ids, output_attentions=True).attentions
        for layer in attention_layers(model):
            layer.q_proj.weight[is_gate] *= -1
        after = model(ids, output_attentions=True).attentions
    assert torch.equal(before[0], after[0])
    assert (before[1] - after[1]).abs().max() > 0.01


# --- whatever the input ------------------------------------------------------------------------------------------


@st.composite
def padded_batches(draw: st.DrawFn) -> tuple[str, int, str, str, Tensor, Tensor]:
    """variant, G, implementation, side, token ids (B, T) and mask (B, T)."""
    tokens = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(1, tokens), min_size=1, max_size=3))
    side = draw(st.sampled_from(["left", "right"]))
    ids = random_ids(len(lengths), tokens, seed=draw(st.integers(0, 1000)))
    return (
        draw(st.sampled_from(VARIANTS)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(["sdpa", "eager"])),
        side,
        ids,
        padding_mask(lengths, tokens, side),
    )


@few
@given(padded_batches())
def test_rows_of_weights_sum_to_one(batch: tuple[str, int, str, str, Tensor, Tensor]) -> None:
    """And nothing goes to the future or to padding."""
    variant, group, implementation, _, ids, mask = batch
    model = with_implementation(tiny_model(tiny_config(variant, group=group)), implementation)
    with torch.no_grad():
        attentions = model(ids, attention_mask=mask, output_attentions=True).attentions
    real = mask.bool()
    for weights in attentions:
        rows = weights.transpose(1, 2)[real]  # (real queries, H, T)
        torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:2]), rtol=0, atol=1e-6)
        assert (rows >= 0).all()
        assert (weights.triu(1).transpose(1, 2)[real] == 0).all()
        to_padding = weights.masked_fill(real[:, None, None], 0).transpose(1, 2)[real]
        assert (to_padding == 0).all()


@few
@given(padded_batches(), st.integers(0, 28))
def test_padding_changes_nothing(batch: tuple[str, int, str, str, Tensor, Tensor], filler: int) -> None:
    """Each prompt of a padded batch has the logits and weights that it has alone, whatever token pads it."""
    variant, group, implementation, _, ids, mask = batch
    model = with_implementation(tiny_model(tiny_config(variant, group=group)), implementation)
    ids = ids.where(mask.bool(), filler)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        together = model(ids, attention_mask=mask, position_ids=positions, output_attentions=True)
        plain = model(ids, attention_mask=mask, position_ids=positions)
        for index, real in enumerate(mask.bool()):
            alone = model(ids[index : index + 1, real], output_attentions=True)
            close = {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(together.logits[index, real], alone.logits[0], **close)
            torch.testing.assert_close(plain.logits[index, real], alone.logits[0], **close)
            for padded, single in zip(together.attentions, alone.attentions, strict=True):
                torch.testing.assert_close(padded[index][:, real][:, :, real], single[0], **close)


@few
@given(st.sampled_from(VARIANTS), st.integers(1, 3), st.integers(2, 8), st.data())
def test_later_tokens_change_nothing_before_them(
    variant: str, group: int, tokens: int, data: st.DataObject
) -> None:
    model = tiny_model(tiny_config(variant, group=group))
    ids = random_ids(1, tokens, seed=data.draw(st.integers(0, 1000)))
    place = data.draw(st.integers(1, tokens - 1))
    changed = ids.clone()
    changed[0, place] = (changed[0, place] + 1) % 29
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :place], after[:, :place], rtol=1e-6, atol=1e-6)
    assert (before[:, place] - after[:, place]).abs().max() > 1e-3

"""Costs counted by hand for tiny sizes, and against torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig, MixtralConfig, Qwen3NextConfig

from gattn_viz.models.costs import Attention, count_costs
from tests.conftest import tiny_model

# 3 layers, hidden 32, MLP 48, 4 heads of 8, 2 KV heads, 300 tokens
ATTENTION = 32 * 32 + 2 * 32 * 16 + 32 * 32  # q, k and v, o
MLP = 3 * 32 * 48
HEAD = 32 * 300
LINEAR = 3 * (ATTENTION + MLP) + HEAD
NORMS = 3 * (2 * 32 + 2 * 8) + 32
GATES = {"baseline": 0, "gate_headwise": 3 * 4, "gate_elementwise": 3 * 4 * 8}


@pytest.mark.parametrize("variant", GATES)
def test_counted_by_hand(variant: str) -> None:
    costs = count_costs(tiny_model(variant))
    assert costs.gate_parameters == GATES[variant] * 32
    assert costs.parameters == LINEAR + NORMS + GATES[variant] * 32  # the tied embeddings once
    assert costs.gate_bytes == GATES[variant] * 4
    # 9 tokens see 1 to 9 keys, 5 on average; 4 heads of 8, for q k^T and for p v
    assert costs.multiply_adds(9) == LINEAR + GATES[variant] * 32 + 3 * (2 * 4 * 8) * 5
    assert costs.multiply_adds(1) == LINEAR + GATES[variant] * 32 + 3 * (2 * 4 * 8)


def test_biases_untied_embeddings_other_groups_and_half_precision() -> None:
    sizes: dict[str, Any] = {"qkv_bias": True, "use_qk_norm": False, "tie_word_embeddings": False}
    model = tiny_model("gate_elementwise", num_key_value_heads=1, **sizes).to(torch.bfloat16)
    costs = count_costs(model)
    linear = 3 * (2 * 32 * 32 + 2 * 32 * 8 + MLP) + HEAD
    assert costs.gate_parameters == 3 * 32 * (32 + 1)
    biases = 3 * (32 + 8 + 8 + 32) + 3 * 32
    assert costs.parameters == linear + HEAD + biases + 3 * 32 * 32 + 3 * 2 * 32 + 32
    assert costs.linear == linear + 3 * 32 * 32  # neither biases nor the embeddings
    assert costs.gate_bytes == 3 * 4 * 8 * 2


@pytest.mark.parametrize("variant", GATES)
def test_against_the_counter_of_torch(variant: str) -> None:
    """Eager attention computes all T x T products, ours counts those of visible keys."""
    model = tiny_model(variant)
    model.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 6, dtype=torch.long), use_cache=False)
    costs = count_costs(model)
    all_keys = sum(layer.width for layer in costs.attention) * 6
    assert counter.get_total_flops() / 2 / 6 == costs.linear + all_keys


def test_a_window_bounds_the_keys() -> None:
    seen = [min(position, 4) for position in range(1, 11)]
    assert Attention(16, 4).multiply_adds(10) == pytest.approx(16 * sum(seen) / 10)
    assert Attention(16, 4).multiply_adds(3) == Attention(16, None).multiply_adds(3) == 16 * 2


TINY: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def costs_of(config: Any) -> Any:
    with torch.device("meta"):
        return count_costs(AutoModelForCausalLM.from_config(config))


def test_other_families() -> None:
    mistral = costs_of(MistralConfig(**TINY, sliding_window=4))
    assert [layer.window for layer in mistral.attention] == [4, 4]
    assert mistral.linear == 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 16 * 40
    assert (mistral.gate_parameters, mistral.gate_bytes) == (None, None)  # whether it has a gate is not known

    gpt2 = costs_of(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32))
    assert gpt2.linear == 2 * (4 * 16 * 16 + 2 * 16 * 64) + 16 * 40
    assert gpt2.attention == (Attention(2 * 16, None),) * 2


def test_what_cannot_be_counted() -> None:
    experts = costs_of(MixtralConfig(**TINY, num_local_experts=2))
    assert "outside of linear layers" in experts.uncounted
    assert experts.multiply_adds(4) is None
    assert experts.parameters > 0
    hybrid = costs_of(Qwen3NextConfig(**TINY, num_experts=2, layer_types=["linear_attention", "full_attention"]))
    assert hybrid.multiply_adds(4) is None

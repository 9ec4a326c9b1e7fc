"""What the attention function refuses: a wrong guess at what is visible would give plausible numbers."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from gattn_viz.capture.attention import active_taker, capture_attention
from gattn_viz.capture.collector import Request
from gattn_viz.capture.mask import LazyMask, lazy_mask
from gattn_viz.capture.run import capture
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.layer import NEEDS
from tests.capture.families import SIZES
from tests.capture.test_families import prompt_of
from tests.conftest import tiny_model


def attend(mask: LazyMask | Tensor | None, keys: int) -> None:
    """Of 3 queries and some keys, in a capture that must not get as far as computing anything."""
    module = nn.Linear(1, 1)
    module.layer_idx = 0
    token = active_taker.set(object())
    try:
        capture_attention(module, *(torch.ones(1, 2, n, 4) for n in (3, keys, keys)), mask)
    finally:
        active_taker.reset(token)


@pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, 3, 3)])
def test_a_mask_that_is_not_ours(mask: Tensor | None) -> None:
    with pytest.raises(GattnVizError, match=r"^Linear made its own mask, or none"):
        attend(mask, 3)


def test_more_keys_than_tokens() -> None:
    """As where compressed keys follow those of the tokens (DeepSeek V4)."""
    with pytest.raises(GattnVizError, match=r"^Linear attends to 5 keys, of which the mask has 3; expected"):
        attend(lazy_mask(q_length=3, kv_length=3), 5)


@pytest.mark.parametrize("index", [None, -1])
def test_attention_that_layers_share(index: int | None) -> None:
    model = tiny_model("baseline")
    model.model.layers[1].self_attn.layer_idx = index
    with pytest.raises(GattnVizError, match=rf"does not know its layer \(its layer_idx is {index}\); expected"):
        capture(model, [prompt_of(3)], Request(maps=frozenset({1})))


def test_several_residual_streams() -> None:
    """Their layers' maps are right; where their largest activation would be is not known."""
    config = transformers.Gemma3nTextConfig(
        **{**SIZES, "intermediate_size": [48, 48], "activation_sparsity_pattern": [0.0, 0.0]},
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=300,
        laurel_rank=8,
        num_kv_shared_layers=0,
    )
    model = transformers.Gemma3nForCausalLM(config).eval()
    prompt = prompt_of(9)
    with pytest.raises(GattnVizError, match=r"^layer 1 gives \(4, 1, 9, 32\); expected one residual stream"):
        capture(model, [prompt], Request(needs=NEEDS))
    [layers] = capture(model, [prompt], Request(maps=frozenset({1, 2}), needs=NEEDS - {"residual"}))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([prompt]), output_attentions=True).attentions
    for layer in (1, 2):
        torch.testing.assert_close(layers[layer].probabilities, weights[layer - 1][0], atol=2e-5, rtol=0)

"""What the attention function refuses: a wrong guess at what is visible would give plausible numbers."""

from __future__ import annotations

from types import SimpleNamespace

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


def attend(mask: LazyMask | Tensor | None, keys: int, **more: Tensor) -> None:
    """Of 3 queries and some keys, in a capture that must not get as far as computing anything."""
    module = nn.Linear(1, 1)
    module.layer_idx = 0
    token = active_taker.set(SimpleNamespace(first_query=0))
    try:
        capture_attention(module, *(torch.ones(1, 2, n, 4) for n in (3, keys, keys)), mask, **more)
    finally:
        active_taker.reset(token)


def test_a_mask_that_is_not_ours() -> None:
    with pytest.raises(GattnVizError, match=r"^Linear made its own mask, or none"):
        attend(None, 3)


def test_a_mask_that_adds_to_scores() -> None:
    with pytest.raises(GattnVizError, match=r"^Linear adds numbers of its own to its scores by way of the mask"):
        attend(torch.ones(1, 1, 3, 3), 3)


def test_a_mask_that_looks_ahead() -> None:
    with pytest.raises(GattnVizError, match=r"^queries of Linear see keys after them"):
        attend(torch.zeros(1, 1, 3, 3), 3)


def test_what_is_not_known_to_take_part() -> None:
    """Inkling's sinks, one for each query."""
    with pytest.raises(
        GattnVizError, match=r"^Linear hands 'sinks' to its attention function, and what that does"
    ):
        attend(lazy_mask(q_length=3, kv_length=3), 3, sinks=torch.ones(1, 2, 3, 1))


def test_more_keys_than_tokens() -> None:
    """As where compressed keys follow those of the tokens (DeepSeek V4)."""
    with pytest.raises(GattnVizError, match=r"^Linear attends to 5 keys, of which the mask has 3; expected"):
        attend(lazy_mask(q_length=3, kv_length=3), 5)


@pytest.mark.parametrize("index", [None, -1])
def test_attention_that_does_not_know_its_layer(index: int | None) -> None:
    """As where layers share one."""
    model, request = tiny_model("baseline"), Request(maps=frozenset({2}))
    [expected] = capture(model, [prompt_of(3)], request)
    model.model.layers[1].self_attn.layer_idx = index
    [found] = capture(model, [prompt_of(3)], request)
    torch.testing.assert_close(found[2].probabilities, expected[2].probabilities)


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
    with pytest.raises(GattnVizError, match=r"^layer 1 gives \(4, 1, 9, 32\); expected a residual stream"):
        capture(model, [prompt], Request(needs=NEEDS))
    [layers] = capture(model, [prompt], Request(maps=frozenset({1, 2}), needs=NEEDS - {"residual"}))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([prompt]), output_attentions=True).attentions
    for layer in (1, 2):
        torch.testing.assert_close(layers[layer].probabilities, weights[layer - 1][0], atol=2e-5, rtol=0)

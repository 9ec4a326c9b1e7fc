"""What a run of a few tokens must show, or the model is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gattn_viz.capture.attention import IMPLEMENTATION, active_taker
from gattn_viz.capture.observation import TOKENS, observe
from gattn_viz.errors import GattnVizError
from tests.capture.families import family_model
from tests.conftest import tiny_model


def test_what_is_seen() -> None:
    """Of layer 1: its attention output from the values that its own modules give, and who ran before and after."""
    model = tiny_model("gate_headwise")
    layers, implementation = observe(model)
    assert implementation == IMPLEMENTATION
    first = layers[0]
    attention = model.model.layers[0].self_attn
    assert first.attention is attention
    assert (first.heads, first.query_width) == (4, 8)
    assert first.output is not None
    [values] = [call.given for call in first.before if call.module is attention.v_proj]
    assert values is not None
    of_heads = values.view(TOKENS, 2, 8).repeat_interleave(2, 1)
    torch.testing.assert_close(first.output[0], of_heads[0])  # the first query sees the first value alone
    names = {module: name for name, module in attention.named_modules()}
    before = [names[call.module] for call in first.before if call.module in names]
    after = [names[call.module] for call in first.after if call.module in names]
    assert set(before) == {"", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "gate_activation"}
    assert after == ["o_proj"]
    assert active_taker.get() is None


def test_a_model_that_gives_something_else_by_itself_is_refused() -> None:
    """As one that hands its attention function a thing which does not reach it."""
    model = tiny_model("baseline")
    attention = model.model.layers[1].self_attn
    right = attention.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        output, weights = right(*args, **kwargs)
        return output * (1 if model.config._attn_implementation == IMPLEMENTATION else 1.2), weights

    attention.forward = forward
    with pytest.raises(GattnVizError, match=r"^GatedQwen3ForCausalLM does not give when it is captured"):
        observe(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    for family in ("llama", "gemma2"):
        observe(copy.deepcopy(family_model(family)).to(dtype))

"""The output projection, found by what it receives."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from gattn_viz.capture.anatomy import anatomy
from gattn_viz.capture.projection import head_factors, output_projections
from gattn_viz.errors import GattnVizError
from tests.capture.families import SIZES, family_model
from tests.conftest import GATES, tiny_model

FIRST = frozenset({1})


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "o_proj"),
        ("gpt2", "c_proj"),
        ("gpt_neox", "dense"),
        ("opt", "out_proj"),
        *((variant, "o_proj") for variant in GATES),
    ],
)
def test_is_the_one_that_the_family_calls_by_its_name(family: str, name: str) -> None:
    model = family_model(family)
    for number, layer in enumerate(anatomy(model).layers, start=1):
        attention = next(
            module
            for module in model.modules()
            if getattr(module, "layer_idx", None) == number - 1 and hasattr(module, name)
        )
        assert layer.projection is getattr(attention, name)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_head_factors_give_the_norm_of_what_goes_through() -> None:
    projection = nn.Linear(12, 20)
    factors = head_factors(projection, 3)
    assert factors.shape == (3, 4, 4)
    x = torch.randn(3, 4)
    for head in range(3):
        whole = torch.zeros(12)
        whole[4 * head : 4 * head + 4] = x[head]
        torch.testing.assert_close((factors[head] @ x[head]).norm(), (projection.weight @ whole).norm())
    assert head_factors(nn.Linear(12, 2), 3).shape == (3, 2, 4)  # fewer rows than channels


def test_of_a_hybrid_model_where_there_is_attention() -> None:
    parts = anatomy(family_model("qwen3_next"))
    assert list(output_projections(parts, frozenset({1, 4}))) == [3]


def test_a_norm_in_between_is_refused() -> None:
    torch.manual_seed(0)
    model = transformers.BitNetForCausalLM(transformers.BitNetConfig(**SIZES)).eval()
    with pytest.raises(
        GattnVizError,
        match=r"layer 1: .* goes to a BitNetRMSNorm, no linear layer; expected an output projection, .*: choose "
        "the weight value or probability",
    ):
        output_projections(anatomy(model), FIRST)


def test_what_is_changed_before_any_module_gets_it_is_refused() -> None:
    model = tiny_model("baseline")
    attention = model.model.layers[0].self_attn
    attention.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    with pytest.raises(GattnVizError, match=r"layer 1: what its attention gives reaches no module unchanged"):
        output_projections(anatomy(model), FIRST)


@pytest.mark.parametrize("what", ["hook", "hook behind attention", "patch"])
def test_what_is_done_behind_the_projection_is_refused(what: str) -> None:
    """As in an ablation: what a key adds is then not what the weights say."""
    model = tiny_model("baseline")
    attention = model.model.layers[0].self_attn
    if what == "patch":
        attention.o_proj.forward = lambda x: 0 * x
    elif what == "hook":
        attention.o_proj.register_forward_hook(lambda module, args, output: 0 * output)
    else:
        attention.register_forward_hook(lambda module, args, output: (0 * output[0], None))
    with pytest.raises(GattnVizError, match=r"layer 1: a hook or a patch changes what .* gives; expected"):
        output_projections(anatomy(model), FIRST)
    assert list(output_projections(anatomy(model), frozenset({2}))) == [1]


def test_transformers_own_hooks_are_no_change() -> None:
    """It leaves some where weights were asked of it."""
    model = copy.deepcopy(family_model("llama"))
    expected = output_projections(anatomy(model), FIRST)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5]]), output_attentions=True)
    assert model.model.layers[0].self_attn._forward_hooks
    torch.testing.assert_close(output_projections(anatomy(model), FIRST)[0], expected[0])


class Scaled(nn.Linear):
    """As adapters and quantised layers are: linear layers that do more than their weights say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_linear_layer_of_a_class_of_its_own_is_refused() -> None:
    model = tiny_model("gate_headwise")
    model.model.layers[0].self_attn.o_proj = Scaled(32, 32)
    with pytest.raises(GattnVizError, match="goes to a Scaled, no linear layer"):
        output_projections(anatomy(model), FIRST)


def test_weights_that_are_elsewhere_are_refused() -> None:
    parts = anatomy(family_model("llama"))
    layer = replace(parts.layers[0], projection=nn.Linear(4, 4, device="meta"))
    with pytest.raises(GattnVizError, match="the weights of its output projection are not in memory"):
        output_projections(replace(parts, layers=(layer,)), FIRST)


@pytest.mark.parametrize("variant", GATES)
def test_in_half_precision(variant: str) -> None:
    model = copy.deepcopy(family_model(variant)).to(torch.bfloat16)
    found = output_projections(anatomy(model), FIRST)
    assert found[0].dtype == torch.float32
    expected = output_projections(anatomy(family_model(variant)), FIRST)
    torch.testing.assert_close(found[0].norm(), expected[0].norm(), rtol=0.01, atol=0)


def test_broken_weights_are_left_to_be_reported_where_they_are_measured() -> None:
    model = tiny_model("baseline")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] = torch.nan
    assert list(output_projections(anatomy(model), FIRST)) == [0]

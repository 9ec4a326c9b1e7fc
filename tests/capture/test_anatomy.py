"""What the layers are made of, as a run of a few tokens shows it."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from gattn_viz.capture.anatomy import _known, anatomy
from gattn_viz.capture.collector import Request
from gattn_viz.capture.run import capture
from gattn_viz.errors import GattnVizError
from gattn_viz.models import gate_adapters
from gattn_viz.models.gate_adapters import GateAdapter
from tests.capture.families import family_model
from tests.conftest import GATES, tiny_model


@pytest.mark.parametrize(
    ("variant", "kind"),
    [("baseline", None), ("gate_headwise", "headwise"), ("gate_elementwise", "elementwise")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_the_project_s_own_models(variant: str, kind: str | None, dtype: torch.dtype) -> None:
    parts = anatomy(tiny_model(variant).to(dtype))
    assert parts.gate_kind == kind
    assert parts.refusal is None
    assert not parts.is_looped
    assert [layer.shape for layer in parts.layers] == [gate_adapters.HeadShape(4, 8, 8)] * 3
    assert [gate.inferred for gate in parts.gates] == [False] * (3 if kind else 0)


def test_of_a_hybrid_model() -> None:
    layers = anatomy(family_model("qwen3_next")).layers
    assert [layer.kind for layer in layers] == ["linear_attention"] * 3 + ["full_attention"]
    assert [layer.attention is None for layer in layers] == [True, True, True, False]


def test_a_gate_that_something_stands_behind_is_refused() -> None:
    model = tiny_model("gate_headwise")
    projection = model.model.layers[1].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    parts = anatomy(model)
    assert parts.refusal is not None
    assert parts.refusal.startswith("layer 2: attention output x gate is not what o_proj receives (off by ")
    assert [layer.gate is None for layer in parts.layers] == [False, True, False]
    handle.remove()  # the model is looked at anew
    assert anatomy(model).refusal is None


class TestWithoutAnAdapter:
    """The classes of the project as if they were not known."""

    @pytest.fixture(autouse=True)
    def _no_adapters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gate_adapters, "ADAPTERS", {})

    def test_a_gate_is_found_by_its_effect(self) -> None:
        parts = anatomy(copy.deepcopy(family_model("qwen3_next")))
        [gate] = parts.gates
        assert gate.inferred
        assert gate.adapter == GateAdapter("q_proj", gate_adapters.after_query)
        assert gate.kind == "elementwise"

    @pytest.mark.parametrize("variant", [gate for gate in GATES if gate != "baseline"])
    def test_a_layout_that_is_not_known_is_a_suspicion(self, variant: str) -> None:
        """Per KV group, with more than one head in each."""
        model = tiny_model(variant)
        parts = anatomy(model)
        assert parts.gates == []
        assert parts.refusal is not None
        assert parts.refusal.startswith("layer 1: attention's output is multiplied by 0.")
        assert parts.refusal.endswith("before Linear receives it, a gate perhaps, but not one that is known")
        with pytest.raises(GattnVizError, match=r"no gate in this model \(layer 1: attention's output is mult"):
            capture(model, [[3, 4]], Request(maps=frozenset({1}), weight="gate"))

    def test_without_a_gate_nothing_is_suspected(self) -> None:
        for family in ("llama", "gpt2", "deepseek_v3", "baseline"):
            parts = anatomy(copy.deepcopy(family_model(family)))
            assert (parts.gates, parts.refusal) == ([], None)


def test_is_found_out_once() -> None:
    model = tiny_model("gate_headwise")
    runs: list[Any] = []
    forward = model.model.forward

    def count(*args: Any, **kwargs: Any) -> Any:
        runs.append(kwargs["input_ids"].shape)
        return forward(*args, **kwargs)

    model.model.forward = count
    for _ in range(3):
        capture(model, [[5, 6, 7, 8, 9]], Request(gates=frozenset({1})))
    assert [tuple(shape) for shape in runs] == [(1, 4), (1, 4), (1, 5), (1, 5), (1, 5)]


def test_a_module_of_another_model() -> None:
    """It has a configuration of its own, which is set and put back too."""
    model, other = tiny_model("gate_headwise"), tiny_model("gate_headwise")
    [expected] = capture(model, [[5, 6, 7]], Request(maps=frozenset({1})))
    model.model.layers[0].self_attn = other.model.layers[0].self_attn
    [found] = capture(model, [[5, 6, 7]], Request(maps=frozenset({1})))
    torch.testing.assert_close(found[1].probabilities, expected[1].probabilities)
    assert other.config._attn_implementation == model.config._attn_implementation == "sdpa"


def test_keeps_no_model_alive() -> None:
    model = tiny_model("gate_headwise")
    anatomy(model)
    assert model in _known
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None

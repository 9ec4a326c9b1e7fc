"""Families with a gate or a learned sink, each against its own eager attention and what its own modules receive.

The model runs once more by transformers' eager attention, which is listened to: its weights, its output, and what
the module behind the gate receives. The gate is the ratio of the last two, whatever it was computed from.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from gattn_viz.capture.anatomy import Anatomy, anatomy
from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.layers import backbone
from gattn_viz.capture.run import capture, capture_batch
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.layer import NEEDS
from gattn_viz.models import gate_adapters
from tests.capture.gated_families import GATED, gated_model, present

PROMPT = torch.randint(2, 300, (25,), generator=torch.Generator().manual_seed(3)).tolist()
TOLERANCE = 2e-5

NAMES = [pytest.param(name, marks=() if present(name) else pytest.mark.skip("not there")) for name in GATED]
WITH_GATE = [
    pytest.param(name, marks=() if present(name) else pytest.mark.skip("not there"))
    for name, family in GATED.items()
    if family.gate
]


@dataclass
class Seen:
    """One layer of an eager run.

    Attributes:
        weights: (H, T, T).
        output: (T, H, V), what the gate multiplies.
        gated: (T, H, V), what the module behind it receives; None without a gate.
    """

    weights: Tensor
    output: Tensor
    gated: Tensor | None = None


def run_eagerly(name: str, model: PreTrainedModel) -> dict[int, Seen]:
    """By the family's own eager attention; layers count in the order in which they attend."""
    family = GATED[name]
    seen: list[Seen] = []
    ids = torch.tensor([PROMPT])
    model.set_attn_implementation("eager")
    with torch.no_grad(), _eager_attention_heard(name, seen), _gates_heard(name, model, seen):
        backbone(model)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return dict(zip(family.layers, seen, strict=True))


@contextmanager
def _eager_attention_heard(name: str, seen: list[Seen]) -> Iterator[None]:
    """Keep what the function `eager_attention_forward` of the family's modeling code gives."""
    modeling = importlib.import_module(f"transformers.models.{GATED[name].module}.modeling_{GATED[name].module}")
    right = modeling.eager_attention_forward

    def heard(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        output, weights = right(module, query, *args, **kwargs)
        if getattr(module, "is_causal", True):
            tokens = query.shape[2]
            kept = weights[0, :, :, :tokens] if "granite" not in name else _with_sinks(module, query, args, kwargs)
            seen.append(Seen(kept, output[0].reshape(tokens, kept.shape[0], -1)))
        return output, weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "eager_attention_forward", heard)
        yield


def _with_sinks(module: nn.Module, query: Tensor, args: Any, kwargs: Any) -> Tensor:
    """Granite returns weights without the sink's part: anew, from the formula."""
    key, _, mask = args
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(-1, -2) * kwargs["scaling"] + mask
    sinks = module.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)  # type: ignore[operator]
    return torch.cat([scores, sinks], -1).softmax(-1)[0, :, :, :-1]


@contextmanager
def _gates_heard(name: str, model: PreTrainedModel, seen: list[Seen]) -> Iterator[None]:
    """Keep what the module behind each gate receives, and what a norm before it gives."""
    family, handles = GATED[name], []

    def on_reached(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if seen and seen[-1].gated is None:  # else it is a linear layer's
            seen[-1].gated = args[0][0].reshape(seen[-1].output.shape)

    def on_norm(module: nn.Module, args: Any, output: Tensor) -> None:
        seen[-1].output = output[0].reshape(seen[-1].output.shape)

    for path, module in model.named_modules():
        if family.gate and path.endswith(f"self_attn.{family.reaches}"):
            handles.append(module.register_forward_pre_hook(on_reached))
        elif family.norm and path.endswith(f"self_attn.{family.norm}"):
            handles.append(module.register_forward_hook(on_norm))
    yield
    for handle in handles:
        handle.remove()


@cache
def eager(name: str) -> dict[int, Seen]:
    return run_eagerly(name, copy.deepcopy(gated_model(name)))


def everything_of(name: str) -> Request:
    layers = frozenset(GATED[name].layers)
    return Request(maps=layers, needs=NEEDS, gates=layers, outputs=layers)


@cache
def ours(name: str) -> dict[int, LayerCapture]:
    [layers] = capture(gated_model(name), [PROMPT], everything_of(name))
    return layers


@pytest.mark.parametrize("name", NAMES)
def test_anatomy(name: str) -> None:
    family, parts = GATED[name], anatomy(gated_model(name))
    numbered = list(enumerate(parts.layers, start=1))
    attending = [(number, layer) for number, layer in numbered if layer.shape is not None]
    assert tuple(number for number, _ in attending) == family.layers
    assert tuple(layer.shape.heads for _, layer in attending) == family.heads  # type: ignore[union-attr]
    assert (parts.gate_kind, parts.refusal) == (family.gate, None)
    assert {gate.adapter.activation for gate in parts.gates} == ({family.activation} if family.gate else set())
    assert parts.is_looped == (name in ("hrm_text", "dory"))
    assert ("tensor_mask" in parts.implementation) == family.tensor_mask


@pytest.mark.parametrize("name", NAMES)
def test_maps_and_statistics(name: str) -> None:
    expected = eager(name)
    assert ours(name).keys() == expected.keys()
    for number, layer in ours(name).items():
        p = expected[number].weights
        assert layer.probabilities is not None
        assert layer.sums is not None
        torch.testing.assert_close(layer.probabilities, p, atol=TOLERANCE, rtol=0)
        assert (layer.sums.learned_sink is not None) == (number in GATED[name].sink)
        tokens = len(PROMPT)
        for found, wanted in (
            (layer.sums.first_token, p[:, 1:, 0].sum(-1)),
            (layer.sums.first_row, p[:, 0, 0]),
            (layer.sums.received, p.sum(1)),
            (layer.sums.entropy, torch.special.entr(p).sum((1, 2))),
            (layer.sums.row_max, p.amax(-1).sum(-1)),
        ):
            assert found is not None
            torch.testing.assert_close(
                torch.tensor(found).float() / tokens, wanted / tokens, atol=TOLERANCE, rtol=0
            )


@pytest.mark.parametrize("name", WITH_GATE)
def test_gates(name: str) -> None:
    family = GATED[name]
    for number, layer in ours(name).items():
        seen = eager(name)[number]
        assert seen.gated is not None
        assert layer.gate_scores is not None
        assert layer.gate_logits is not None
        assert layer.output_before is not None
        assert layer.output_after is not None
        assert layer.sums is not None
        largest = float(seen.output.abs().max())
        torch.testing.assert_close(layer.output_before, seen.output, atol=TOLERANCE * largest, rtol=0)
        torch.testing.assert_close(layer.output_after, seen.gated, atol=TOLERANCE * largest, rtol=0)
        scores = layer.gate_scores.expand_as(seen.output)
        large = seen.output.abs() > 0.01 * largest
        torch.testing.assert_close(scores[large], (seen.gated / seen.output)[large], atol=0.002, rtol=0.002)
        if family.activation == "sigmoid":
            assert 0 <= float(layer.gate_scores.min()) < float(layer.gate_scores.max()) <= 1
            torch.testing.assert_close(layer.gate_scores, 1 / (1 + (-layer.gate_logits).exp()))
        else:
            torch.testing.assert_close(
                layer.gate_scores, (1 + layer.gate_logits.exp()).log(), atol=1e-5, rtol=1e-5
            )
        mean = layer.gate_scores.mean((0, 2))
        torch.testing.assert_close(torch.tensor(layer.sums.gate_mean).float(), mean, atol=1e-6, rtol=1e-6)


def assert_same(found: dict[int, LayerCapture], expected: dict[int, LayerCapture]) -> None:
    """Their maps and gate scores."""
    assert found.keys() == expected.keys()
    for number, layer in expected.items():
        for field in ("probabilities", "gate_scores"):
            torch.testing.assert_close(
                getattr(found[number], field), getattr(layer, field), atol=TOLERANCE, rtol=0
            )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name: str, side: str) -> None:
    model, prompts = gated_model(name), [PROMPT, PROMPT[:9]]
    rows = [torch.tensor(prompt) for prompt in prompts]
    batch, mask = (
        pad_sequence(x, batch_first=True, padding_side=side)
        for x in (rows, [torch.ones_like(row) for row in rows])
    )
    found: list[dict[int, LayerCapture]] = [{}, {}]

    def keep(sequence: int, layer: LayerCapture) -> None:
        found[sequence][layer.layer] = layer

    capture_batch(model, batch, mask, everything_of(name), keep)
    [alone] = capture(model, prompts[1:], everything_of(name))
    assert_same(found[0], ours(name))
    assert_same(found[1], alone)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_change_nothing(name: str) -> None:
    if GATED[name].tensor_mask and name != "axk2":
        pytest.skip("chooses keys by scores that are 0 for many, and of equal ones others in another pass")
    if name == "dory":
        with pytest.raises(GattnVizError, match=r"does not go on from its cache .*: run without chunks"):
            capture(gated_model(name), [PROMPT], everything_of(name), chunk=10)
        return
    [layers] = capture(gated_model(name), [PROMPT], everything_of(name), chunk=10)
    assert_same(layers, ours(name))


@pytest.mark.parametrize("name", NAMES)
def test_bf16(name: str) -> None:
    """The gate is seen in low precision too, and maps are those of the model's own bf16 run, to its rounding."""
    model = copy.deepcopy(gated_model(name)).to(torch.bfloat16)
    parts = anatomy(model)
    assert (parts.gate_kind, parts.refusal) == (GATED[name].gate, None)
    first = GATED[name].layers[0]
    [layers] = capture(model, [PROMPT], Request(maps=frozenset({first}), gates=frozenset({first})))
    expected = run_eagerly(name, model)[first].weights.float()
    torch.testing.assert_close(layers[first].probabilities, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("name", WITH_GATE)
def test_inference_finds_what_the_table_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the table, a gate is found at the same place; where the formula has more to it, it is refused."""
    known = anatomy(gated_model(name))
    monkeypatch.setattr(gate_adapters, "ADAPTERS", {})
    found = anatomy(copy.deepcopy(gated_model(name)))
    if any(gate.adapter.adjust for gate in known.gates):
        assert found.gates == []
        return
    assert found.refusal is None
    assert _places(found) == _places(known)
    assert all(gate.inferred for gate in found.gates)


def _places(parts: Anatomy) -> list[object]:
    return [(gate.adapter, gate.shape, gate.channels) for gate in parts.gates]

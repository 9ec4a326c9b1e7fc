"""What cannot be meant is one line for a person, before the model has run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.run import capture, capture_batch, stream
from gattn_viz.errors import GattnVizError
from tests.conftest import tiny_model

MODEL = tiny_model("baseline")
NOTHING = Request(needs=frozenset({"first_token"}))
RAN: list[object] = []
MODEL.model.register_forward_pre_hook(lambda *args: RAN.append(args))
capture(MODEL, [[5]], NOTHING)  # what the layers are made of is known from now on


def refused(message: str, prompts: Any = ((5, 6, 7),), request: Any = NOTHING, **options: Any) -> None:
    RAN.clear()
    with pytest.raises(GattnVizError, match=message) as error:
        capture(MODEL, prompts, request, **options)
    assert "\n" not in str(error.value)
    assert RAN == []


@pytest.mark.parametrize("model", [None, "baseline", torch.nn.Linear(2, 2)])
def test_a_model_that_is_none(model: Any) -> None:
    with pytest.raises(GattnVizError, match=rf"^model is a {type(model).__name__}; expected a causal LM"):
        capture(model, [[5]], NOTHING)


@pytest.mark.parametrize("batch_size", [0, -1, 1.0, "2", True])
def test_batch_size(batch_size: Any) -> None:
    refused(rf"batch_size is {batch_size!r} prompts; expected a whole number, 1 or more", batch_size=batch_size)


@pytest.mark.parametrize("chunk", [0, -3, 2.5, "2", False])
def test_chunk(chunk: Any) -> None:
    refused(rf"chunk is {chunk!r} tokens; expected a whole number, 1 or more, or None", chunk=chunk)
    batch = torch.tensor([[5, 6, 7]])
    with pytest.raises(GattnVizError, match="chunk is"):
        capture_batch(MODEL, batch, torch.ones_like(batch), NOTHING, lambda *_: None, chunk=chunk)


@pytest.mark.parametrize("heads", [[1], (), (1.0,), (True,), "all", 2])
def test_heads_of_another_kind(heads: Any) -> None:
    refused(r"^heads is .*; expected a tuple of heads such as", request=Request(frozenset({1}), heads=heads))


@pytest.mark.parametrize("head", [0, -1, 5])
def test_heads_that_are_not_there(head: int) -> None:
    refused(rf"^no head {head}: this model has 4 heads", request=Request(frozenset({1}), heads=(1, head)))


@pytest.mark.parametrize("field", ["maps", "gates", "outputs"])
def test_layers(field: str) -> None:
    for layers in ([1], 1, frozenset({1.5}), frozenset({"1"}), frozenset({True}), None):
        refused(rf"^{field} is .*; expected a set of layers", request=Request(**{field: layers}))
    for layer in (0, 4):
        refused(rf"^no layer {layer}: this model has 3", request=Request(**{field: frozenset({layer})}))


@pytest.mark.parametrize("needs", [frozenset({"entropie"}), ["entropy"], "entropy"])
def test_needs(needs: Any) -> None:
    refused(r"^needs has .*entrop.*; expected a set of .*first_token", request=Request(needs=needs))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompt was given"),
        ([[5, 6], []], "^prompt 2 has no token ids; expected at least one"),
        ([5, 6, 7], r"^prompts is one list of token ids, \[5, 6, 7\]; expected a list of such lists"),
        (np.array([5, 6, 7]), "^prompts is one list of token ids"),
        ([[5.0, 6.0]], r"^prompt 1 is \[5\.0, 6\.0\]; expected a list of token ids, which are whole numbers"),
        ([[True, False]], r"^prompt 1 is \[True, False\]; expected"),
        ([["the", "cat"]], r"^prompt 1 is \['the', 'cat'\] \(.*\); expected"),
        ("the cat", r"^prompt 1 is 't' \(.*\); expected"),
        ([[5], None], r"^prompt 2 is None \(.*\); expected"),
        ([[[5, 6], [7, 8]]], r"^prompt 1 is \[\[5, 6\], \[7, 8\]\]; expected"),
        ([[5, 2**70]], r"^prompt 1 is .*; expected"),
        ([[5, -1]], "^prompt 1 has the token id -1; expected 0 to 299"),
        ([[5], [6, 300]], "^prompt 2 has the token id 300; expected 0 to 299"),
    ],
)
def test_prompts(prompts: Any, message: str) -> None:
    refused(message, prompts)


@pytest.mark.parametrize(
    "prompt", [[5, 6, 7], (5, 6, 7), range(5, 8), np.array([5, 6, 7], np.uint16), torch.tensor([5, 6, 7])]
)
def test_what_is_as_good_as_a_list(prompt: Any) -> None:
    expected = capture(MODEL, [[5, 6, 7]], NOTHING)[0][3]
    [found] = capture(MODEL, [prompt], NOTHING)
    np.testing.assert_array_equal(found[3].sums.first_token, expected.sums.first_token)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[5, 6, 7]], [[1, 0, 1]], "attention_mask of sequence 1 has a gap"),
        ([[5, 6], [5, 6]], [[1, 1], [0, 0]], "attention_mask of sequence 2 is all 0"),
        ([[5, 6, 7]], [[1, 1]], r"input_ids are \(1, 3\) and attention_mask \(1, 2\); expected both"),
        ([5, 6, 7], [1, 1, 1], r"input_ids are \(3,\)"),
        ([[5, 6, 7]], [[2, 1, 1]], "attention_mask has other values than 1"),
        ([[5, 6, -100]], [[1, 1, 0]], "input_ids has the token id -100; expected 0 to 299"),
        ([[5.0, 6.0]], [[1, 1]], "expected a list of token ids"),
    ],
)
def test_batches(ids: Any, mask: Any, message: str) -> None:
    with pytest.raises(GattnVizError, match=message):
        capture_batch(MODEL, torch.tensor(ids), torch.tensor(mask), NOTHING, lambda *_: None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
def test_masks_of_any_dtype(dtype: torch.dtype) -> None:
    found: list[LayerCapture] = []
    mask = torch.tensor([[0, 1, 1, 1]]).to(dtype)
    capture_batch(MODEL, torch.tensor([[0, 5, 6, 7]]), mask, NOTHING, lambda _, layer: found.append(layer))
    expected = capture(MODEL, [[5, 6, 7]], NOTHING)[0][3]
    np.testing.assert_allclose(found[2].sums.first_token, expected.sums.first_token, atol=1e-6)


@pytest.mark.parametrize("heads", [None, [4, 4, 4]])
def test_a_configuration_that_gives_no_one_number_of_heads(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("baseline")
    whole = capture(model, [[5, 6, 7]], Request(frozenset({2})))[0][2].probabilities
    text = SimpleNamespace(num_hidden_layers=3, **({} if heads is None else {"num_attention_heads": heads}))
    monkeypatch.setattr(type(model.config), "get_text_config", lambda self, **_: text)
    [layers] = capture(model, [[5, 6, 7]], Request(frozenset({2}), heads=(4, 1)))
    torch.testing.assert_close(layers[2].probabilities, whole[[3, 0]])
    with pytest.raises(GattnVizError, match=r"^no head 5: this model has 4 heads a layer; expected 1 to 4$"):
        capture(model, [[5, 6, 7]], Request(frozenset({2}), heads=(5,)))
    with pytest.raises(GattnVizError, match=r"^no head 0: this model has 4 heads a layer; expected 1 to 4$"):
        capture(model, [[5, 6, 7]], Request(frozenset({2}), heads=(0,)))


def test_stream_checks_too() -> None:
    with pytest.raises(GattnVizError, match="batch_size is 0"):
        stream(MODEL, [[5]], NOTHING, lambda *_: None, batch_size=0)

"""Weighted maps against loops over heads, queries and keys, in double precision, from the definitions alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gattn_viz.capture import blocks, weighing
from gattn_viz.capture.anatomy import anatomy
from gattn_viz.capture.collector import Collector, Request
from gattn_viz.capture.run import capture, capture_batch
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.layer import NEEDS
from gattn_viz.metrics.pooling import MapView
from gattn_viz.metrics.weights import Weight
from tests.capture.families import FAMILIES, family_model
from tests.capture.gated_families import GATED, gated_model, present
from tests.conftest import GATES, tiny_model

WEIGHTS: tuple[Weight, ...] = ("value", "gate", "output")
LAYER = 2
TOKENS = 9


def ids(tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(2, 300, (tokens,), generator=generator).tolist()


@cache
def model_of(name: str) -> PreTrainedModel:
    """4 heads and 2 KV heads, with biases, also on the output projection."""
    return tiny_model(name, qkv_bias=True) if name in GATES else family_model(name)


def parts(name: str, prompt: list[int]) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """p (H, T, T), v (T, K, D), gate scores (T, H, C) or None, and W (H, hidden, D) of an eager float64 run."""
    model = copy.deepcopy(model_of(name)).double()
    model.set_attn_implementation("eager")
    attention = next(module for module in model.modules() if getattr(module, "layer_idx", None) == LAYER - 1)
    heard: dict[str, Tensor] = {}

    def hear(what: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            heard[what] = output[0]

        return hook

    with ExitStack() as hooks, torch.no_grad():
        values = attention.c_attn if name == "gpt2" else attention.v_proj
        hooks.callback(values.register_forward_hook(hear("v")).remove)
        if name.startswith("gate"):
            hooks.callback(attention.gate_activation.register_forward_hook(hear("gate")).remove)
        out = model(torch.tensor([prompt]), output_attentions=True, use_cache=False)
    p = out.attentions[LAYER - 1][0]
    width = 8
    v = heard["v"][:, -32:] if name == "gpt2" else heard["v"]
    weight = attention.c_proj.weight.T if name == "gpt2" else attention.o_proj.weight
    w = torch.stack([weight.detach()[:, h * width : (h + 1) * width] for h in range(len(p))])
    return p, v.reshape(len(prompt), -1, width), heard.get("gate"), w


@cache
def by_loops(name: str, weight: Weight, tokens: int = TOKENS) -> Tensor:
    """(H, T, T) of layer `LAYER`."""
    p, v, gate, w = parts(name, ids(tokens))
    heads, group = len(p), len(p) // v.shape[1]
    result = torch.zeros_like(p)
    for h in range(heads):
        for i in range(tokens):
            for j in range(i + 1):
                value = v[j, h // group]
                g = torch.ones(1) if gate is None else gate[i, h]
                factor = {
                    "value": value.norm(),
                    "gate": g[0] if len(g) == 1 else (g * value).norm(),
                    "output": (w[h] @ (g * value)).norm(),
                }[weight]
                result[h, i, j] = p[h, i, j] * factor
    return result


def request(weight: Weight, **more: object) -> Request:
    return Request(maps=frozenset({LAYER}), weight=weight, **more)  # type: ignore[arg-type]


def captured(name: str, asked: Request, *lengths: int, **options: int) -> list[Tensor]:
    prompts = [ids(tokens) for tokens in lengths or (TOKENS,)]
    found = [layers[LAYER].probabilities for layers in capture(model_of(name), prompts, asked, **options)]
    assert all(found is not None for found in found)
    return [one.double() for one in found if one is not None]


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Of the map's largest value."""
    torch.testing.assert_close(
        found, expected, atol=1e-5 * float(expected.nan_to_num().max()), rtol=0, equal_nan=True
    )


CASES = [
    (name, weight)
    for name in ("baseline", "gate_headwise", "gate_elementwise", "llama", "gpt2")
    for weight in WEIGHTS
    if weight != "gate" or name.startswith("gate")
]


@pytest.mark.parametrize(("name", "weight"), CASES)
class TestAgainstLoops:
    def test_all_heads(self, name: str, weight: Weight) -> None:
        [found] = captured(name, request(weight))
        assert_close(found, by_loops(name, weight))

    def test_some_heads_and_their_mean(self, name: str, weight: Weight) -> None:
        """The mean of the weighted maps, which is not the mean map weighted."""
        [found] = captured(name, request(weight, heads=(4, 2)))
        assert_close(found, by_loops(name, weight)[[3, 1]])
        [found] = captured(name, request(weight, heads="mean"))
        assert_close(found, by_loops(name, weight).mean(0, keepdim=True))

    @pytest.mark.parametrize("rows", [1, 4])
    @pytest.mark.parametrize("numbers", [1, 300])
    def test_in_small_blocks(
        self, name: str, weight: Weight, rows: int, numbers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(blocks, "LEAST_ROWS", 1)
        monkeypatch.setattr(blocks, "MOST_ROWS", rows)
        monkeypatch.setattr(weighing, "MOST_NUMBERS", numbers)
        [found] = captured(name, request(weight))
        assert_close(found, by_loops(name, weight))

    @pytest.mark.parametrize("chunk", [1, 4, 8])
    def test_in_chunks(self, name: str, weight: Weight, chunk: int) -> None:
        [found] = captured(name, request(weight), chunk=chunk)
        assert_close(found, by_loops(name, weight))

    @pytest.mark.parametrize("chunk", [None, 3])
    def test_in_a_padded_batch(self, name: str, weight: Weight, chunk: int | None) -> None:
        """Each sequence has its own values and gates."""
        lengths = (5, TOKENS, 7)
        options = {"batch_size": 3} | ({} if chunk is None else {"chunk": chunk})
        for tokens, found in zip(lengths, captured(name, request(weight), *lengths, **options), strict=True):
            assert_close(found, by_loops(name, weight, tokens))

    @pytest.mark.parametrize("chunk", [None, 4])
    def test_padded_on_the_left(self, name: str, weight: Weight, chunk: int | None) -> None:
        lengths = (TOKENS, 6)
        batch = torch.zeros(2, TOKENS, dtype=torch.long)
        mask = torch.zeros_like(batch)
        for row, tokens in enumerate(lengths):
            batch[row, TOKENS - tokens :] = torch.tensor(ids(tokens))
            mask[row, TOKENS - tokens :] = 1
        found: dict[tuple[int, int], Tensor] = {}
        capture_batch(
            model_of(name),
            batch,
            mask,
            request(weight),
            lambda sequence, layer: found.update({(sequence, layer.layer): layer.probabilities}),
            chunk=chunk,
        )
        for sequence, tokens in enumerate(lengths):
            assert_close(found[sequence, LAYER].double(), by_loops(name, weight, tokens))

    @pytest.mark.parametrize("pool", ["max", "mean"])
    def test_pooled(self, name: str, weight: Weight, pool: str) -> None:
        """Cells are weighted, then pooled."""
        whole = by_loops(name, weight)
        expected = torch.full((4, 3, 3), torch.nan, dtype=torch.float64)
        for h in range(4):
            for row in range(3):
                for column in range(row + 1):
                    cells = [
                        float(whole[h, i, j])
                        for i in range(3 * row, 3 * row + 3)
                        for j in range(3 * column, 3 * column + 3)
                        if j <= i
                    ]
                    expected[h, row, column] = max(cells) if pool == "max" else sum(cells) / len(cells)
        [found] = captured(name, request(weight, view=MapView(max_cells=3, pool=pool)))  # type: ignore[arg-type]
        assert_close(found, expected)

    def test_a_part(self, name: str, weight: Weight) -> None:
        [found] = captured(name, request(weight, view=MapView((4, 7), (2, 5))))
        assert_close(found, by_loops(name, weight)[:, 3:7, 1:5])

    def test_beside_statistics(self, name: str, weight: Weight) -> None:
        """The other path, on which blocks give the output too; the statistics stay those of probabilities."""
        needs = frozenset({"received", "gate", "values"})
        prompt = [ids(TOKENS)]
        [layers] = capture(model_of(name), prompt, request(weight, needs=needs))
        [plain] = capture(model_of(name), prompt, Request(needs=needs))  # type: ignore[arg-type]
        assert layers[LAYER].paths == {"blocks"}
        assert layers[LAYER].probabilities is not None
        assert_close(layers[LAYER].probabilities.double(), by_loops(name, weight))
        assert (layers[LAYER].sums.received == plain[LAYER].sums.received).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"qwen3_next"}))
def test_the_first_query_writes_what_the_projection_makes_of_the_first_value(name: str) -> None:
    """Of any family, from what its projection receives: one key's value, times p below 1 with a learned sink."""
    model, layer = family_model(name), max(FAMILIES[name].layers)
    attention = next(
        module
        for module in model.modules()
        if getattr(module, "layer_idx", None) == layer - 1 and list(module.children())
        if any(hasattr(module, one) for one in ("o_proj", "out_proj", "dense", "c_proj"))
    )
    projection = next(
        getattr(attention, one) for one in ("o_proj", "out_proj", "dense", "c_proj") if hasattr(attention, one)
    )
    received = []
    handle = projection.register_forward_pre_hook(lambda module, args: received.append(args[0].detach()))
    with torch.no_grad():
        model(torch.tensor([ids(6)]), use_cache=False)
    handle.remove()
    weight = projection.weight.detach()
    weight = weight.T if name == "gpt2" else weight
    heads = model.config.num_attention_heads
    first = received[0][0, 0].view(heads, -1)  # (H, Dv)
    width = first.shape[1]
    expected = [(weight[:, h * width : (h + 1) * width] @ first[h]).norm() for h in range(heads)]
    [layers] = capture(model, [ids(6)], Request(maps=frozenset({layer}), weight="output"))
    found = layers[layer].probabilities
    assert found is not None
    torch.testing.assert_close(found[:, 0, 0], torch.stack(expected), atol=0, rtol=2e-5)


def test_a_headwise_gate_leaves_the_others_shape() -> None:
    """By definition: output = gate x what it is without one."""
    [gate], [output] = (captured("gate_headwise", request(weight)) for weight in ("gate", "output"))
    [p] = captured("gate_headwise", request("probability"))
    _, v, _, w = parts("gate_headwise", ids(TOKENS))
    norms = torch.stack([(v[:, h // 2] @ w[h].T).norm(dim=-1) for h in range(4)])
    assert_close(output, gate * norms[:, None])
    assert (gate <= p).all()


@pytest.mark.parametrize("weight", WEIGHTS)
def test_of_a_bf16_model_are_computed_in_float32(weight: Weight) -> None:
    low = copy.deepcopy(model_of("gate_elementwise")).to(torch.bfloat16)
    [layers] = capture(low, [ids(TOKENS)], request(weight))
    found = layers[LAYER].probabilities
    assert found is not None
    assert found.dtype == torch.float32
    expected = by_loops("gate_elementwise", weight)
    assert float((found - expected).abs().max() / expected.max()) < 0.05  # the model's own rounding


@pytest.mark.parametrize("name", ["baseline", "llama"])
def test_no_gate(name: str) -> None:
    with pytest.raises(GattnVizError, match="no gate in this model; expected one for maps of the weight gate"):
        capture(model_of(name), [ids(3)], request("gate"))


def test_a_gate_that_comes_after_attention_is_not_taken_for_none() -> None:
    collector = Collector(request("output"), [slice(0, 3)], lambda sequence, layer: None, range(3))
    scores = torch.ones(1, 3, 4, 1)
    for _ in range(LAYER):
        collector.begin_layer()
    collector.add_output(nn.Identity(), torch.ones(1, 3, 4, 8))
    collector.add_gate(scores, scores)
    with pytest.raises(GattnVizError, match="layer 2 computes its gate after its attention"):
        collector.end_layer(torch.ones(1, 3, 32))


@pytest.mark.parametrize("family", ["lfm3", "laguna", "laguna_per_channel", "muse_spark", "bailing_hybrid"])
@pytest.mark.parametrize("weight", ["value", "gate", "output"])
def test_of_families_that_compute_their_gate_after_attention(family: str, weight: Weight) -> None:
    """From what is captured without weighing: probabilities, gate scores, values where a query sees one."""
    if not present(family):
        pytest.skip("not in this version of transformers")
    model, layer = gated_model(family), GATED[family].layers[0]
    prompt = [5, 9, 77, 12, 30]
    if family == "muse_spark" and weight != "value":
        with pytest.raises(GattnVizError, match=r"o_norm stands between attention and the gate|reaches no module"):
            capture(model, [prompt], Request(maps=frozenset({layer}), weight=weight))
        return
    plain = Request(maps=frozenset({layer}), gates=frozenset({layer}), outputs=frozenset({layer}), needs=NEEDS)
    [expected] = capture(model, [prompt], plain)
    [found] = capture(model, [prompt], replace(plain, weight=weight))
    p, g = expected[layer].probabilities, expected[layer].gate_scores
    assert p is not None
    assert g is not None
    sums = found[layer].sums
    np.testing.assert_allclose(sums.gate_mean, expected[layer].sums.gate_mean, rtol=1e-6)  # once, not twice
    torch.testing.assert_close(found[layer].gate_scores, g)
    weighted = found[layer].probabilities
    if weight == "value":
        norms = torch.tensor(sums.value_norm).float()
        torch.testing.assert_close(weighted, p * norms[:, None], atol=1e-5, rtol=1e-5)
    elif weight == "gate" and g.shape[-1] == 1:
        torch.testing.assert_close(weighted, p * g[..., 0].T[:, :, None], atol=1e-5, rtol=1e-5)
    else:  # the first query sees the first value alone
        first = expected[layer].output_after[0]
        if weight == "output":
            projection = anatomy(model).layers[layer - 1].projection.weight.unflatten(1, (len(first), -1))
            first = torch.einsum("ohv,hv->ho", projection, first)
        torch.testing.assert_close(weighted[:, 0, 0], first.norm(dim=-1), atol=1e-5, rtol=1e-5)

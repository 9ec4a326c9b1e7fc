"""What a learned sink takes, in the families that have one, against the formula in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.run import capture, capture_batch
from gattn_viz.metrics.layer import Need
from gattn_viz.metrics.measures import Options, learned_sink_mass
from tests.capture.families import SIZES, family_model, run_attending

EXPERTS: dict[str, object] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

# Each with a layer that sees all and one with a window; by name the class, its options and the layers with a sink.
FAMILIES: dict[str, tuple[str, dict[str, object], set[int]]] = {
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, {1, 2}),
    "granite_swa": ("GraniteSWA", {"attention_multiplier": 0.5}, {1, 2}),
    "flint": ("Flint", {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS}, {1, 2}),
    "mimo_v2_flash": ("MiMoV2Flash", {"n_routed_experts": 4, "v_head_dim": 6, **EXPERTS}, {1}),
}
LOCAL: dict[str, object] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LENGTHS = (30, 7, 19)
TOLERANCE = 1e-5

NEEDS: frozenset[Need] = frozenset({"learned_sink"})
families = pytest.mark.parametrize("name", FAMILIES)


@cache
def model_of(name: str) -> PreTrainedModel:
    class_name, options, _ = FAMILIES[name]
    if not hasattr(transformers, f"{class_name}ForCausalLM"):
        pytest.skip("not in this version of transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{class_name}Config")(**{**SIZES, **LOCAL, **options})
    model: PreTrainedModel = getattr(transformers, f"{class_name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.copy_(torch.tensor([-9.0, 0.5, 2.0, 7.0]))  # from next to nothing to nearly all
    return model


def prompt_of(tokens: int) -> list[int]:
    return torch.randint(2, 300, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


def expected(name: str, prompt: list[int]) -> list[np.ndarray]:
    """(H, T) for each layer: the sink's share of each query, from the model's own queries and keys."""
    taken: list[np.ndarray] = []

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = (x[0].double() for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        seen = (attention_mask[0, 0] > -1)[: q.shape[1], : k.shape[1]]
        e = torch.exp(q @ k.transpose(1, 2) * scaling) * seen
        sink = torch.zeros(len(q), 1) if s_aux is None else s_aux.double().exp()[:, None]
        taken.append((sink / (e.sum(-1) + sink)).numpy())
        output = e @ v / (e.sum(-1) + sink)[..., None]
        return output.transpose(0, 1)[None].to(query.dtype), None

    run_attending(model_of(name), attend, prompt)
    return taken


def check(name: str, layers: dict[int, LayerCapture], tokens: int) -> None:
    shares = expected(name, prompt_of(tokens))
    for layer, captured in layers.items():
        assert captured.sums is not None
        for options, first in ((Options(), 1), (Options(first_row="include"), 0)):
            found = learned_sink_mass(captured.sums, options)
            if layer in FAMILIES[name][2]:
                np.testing.assert_allclose(found, shares[layer - 1][:, first:].mean(1), rtol=TOLERANCE)
            else:
                assert np.isnan(found).all()


@families
@pytest.mark.parametrize(("batch_size", "chunk"), [(1, None), (1, 4), (3, None), (3, 8)])
def test_the_mean_over_queries(name: str, batch_size: int, chunk: int | None) -> None:
    prompts = [prompt_of(tokens) for tokens in LENGTHS]
    found = capture(model_of(name), prompts, Request(needs=NEEDS), batch_size=batch_size, chunk=chunk)
    for tokens, layers in zip(LENGTHS, found, strict=True):
        assert set(layers) == {1, 2}
        check(name, layers, tokens)


@families
def test_padding_on_the_left(name: str) -> None:
    longest = max(LENGTHS)
    ids, mask = torch.full((len(LENGTHS), longest), 7), torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    for row, tokens in enumerate(LENGTHS):
        ids[row, -tokens:], mask[row, -tokens:] = torch.tensor(prompt_of(tokens)), 1
    found: list[dict[int, LayerCapture]] = [{} for _ in LENGTHS]

    def keep(row: int, layer: LayerCapture) -> None:
        found[row][layer.layer] = layer

    capture_batch(model_of(name), ids, mask, Request(needs=NEEDS), keep)
    for tokens, layers in zip(LENGTHS, found, strict=True):
        check(name, layers, tokens)


@families
def test_rows_of_maps_lack_what_it_takes(name: str) -> None:
    request = Request(maps=frozenset({1, 2}), needs=NEEDS)
    [layers] = capture(model_of(name), [prompt_of(30)], request)
    for layer, captured in layers.items():
        assert captured.sums is not None
        assert captured.probabilities is not None
        lacks = 1 - captured.probabilities.double().sum(-1).mean(-1).numpy()
        mass = learned_sink_mass(captured.sums, Options(first_row="include"))
        np.testing.assert_allclose(lacks, np.nan_to_num(mass), atol=1e-6)
        assert np.isnan(mass).all() == (layer not in FAMILIES[name][2])


def test_it_costs_a_model_without_one_nothing() -> None:
    """Nothing is kept, and the fused kernel stays in use."""
    request = Request(needs=frozenset({"first_token", "learned_sink"}))
    [layers] = capture(family_model("llama"), [prompt_of(30)], request)
    for captured in layers.values():
        assert captured.paths == {"fused"}
        assert captured.sums is not None
        assert captured.sums.learned_sink is None
        assert np.isnan(learned_sink_mass(captured.sums, Options())).all()

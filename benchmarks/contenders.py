"""Who is timed: the plain forward pass, ours, and other ways to the attention of every layer.

Axis letters: L layers, H query heads, T tokens. Every contender runs on one prompt of (1, T) token ids.
"""

from __future__ import annotations

import copy
import math
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from gattn_viz.capture import compiled
from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.run import stream
from gattn_viz.metrics.layer import LayerSums, Need
from gattn_viz.metrics.measures import SINK_MEASURES
from gattn_viz.metrics.pooling import MapView

ALL: frozenset[Need] = frozenset(measure.needs for measure in SINK_MEASURES if measure.needs is not None)
"""What `sink-stats` needs."""

Found = dict[str, Tensor]
"""What a contender has found out about the attention, by the names of `agreement.from_maps`."""


class Contender:
    """One way through the model.

    Attributes:
        name: on the command line and in the CSV.
        title: in tables and figures.
        package: the package it needs beyond ours, as it is imported.
    """

    name: str
    title: str
    package: str | None = None

    @property
    def installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None

    def prepare(self, model: Qwen3ForCausalLM) -> None:
        """Get ready; not timed. `model` is shared: whoever changes it takes a copy."""
        self.model = model

    def run(self, ids: Tensor) -> Any:
        """What is timed."""
        raise NotImplementedError

    def found(self, result: Any) -> Found:
        """What `run` returned, to compare it with eager attention; not timed."""
        raise NotImplementedError


class Plain(Contender):
    """The model without its head, fused attention, no cache: the denominator."""

    name = "plain"
    title = "plain forward (SDPA)"

    def run(self, ids: Tensor) -> Tensor:
        return self.model.base_model(ids, use_cache=False).last_hidden_state

    def found(self, result: Tensor) -> Found:
        return {"output": result}


class Ours(Contender):
    """`gattn_viz.capture.run.stream`, as the commands call it, but numba helps always, or never."""

    request: Request

    def run(self, ids: Tensor) -> list[LayerCapture]:
        layers: list[LayerCapture] = []
        least_scores = 0 if self.package == "numba" else math.inf
        with patch.multiple(compiled, LEAST_SCORES=least_scores, MOST_THREADS=math.inf):
            stream(self.model, ids.tolist(), self.request, lambda prompt, layer: layers.append(layer))
        return layers


class OursSums(Ours):
    """What `gattn-viz sink-stats` asks for."""

    def __init__(self, name: str, title: str, needs: frozenset[Need], package: str | None = None) -> None:
        self.name, self.title, self.request, self.package = name, title, Request(needs=needs), package

    def found(self, result: list[LayerCapture]) -> Found:
        """Those of the sums that follow from attention alone, as means over the queries."""
        layers = [layer.sums for layer in result if layer.sums is not None]
        asked = [need for need in ("first_token", "received", "entropy", "row_max") if need in self.request.needs]
        return {need: torch.stack([_sum_of(need, sums) / sums.tokens for sums in layers]) for need in asked}


def _sum_of(need: str, sums: LayerSums) -> Tensor:
    total = torch.from_numpy(getattr(sums, need))
    if need == "first_token":
        total = total + torch.from_numpy(sums.first_row)
    return total


class OursMaps(Ours):
    """What `gattn-viz maps` asks for: the mean over the heads, neighbours pooled above 512 cells a side.

    Of four layers; the whole model has no others, so each layer pays for a map.
    """

    name = "ours_maps"
    title = "ours, 4 maps"

    def prepare(self, model: Qwen3ForCausalLM) -> None:
        super().prepare(model)
        layers = range(1, min(4, model.config.num_hidden_layers) + 1)
        self.request = Request(maps=frozenset(layers), heads="mean", view=MapView(max_cells=512))

    def found(self, result: list[LayerCapture]) -> Found:
        maps = [layer.probabilities for layer in result]
        return {"mean_map": torch.cat([map_ for map_ in maps if map_ is not None])}


class Eager(Contender):
    """transformers' `output_attentions=True`: the maps of every layer and head."""

    name = "eager"
    title = "eager, output_attentions"

    def prepare(self, model: Qwen3ForCausalLM) -> None:
        self.model = eager_copy(model)

    def run(self, ids: Tensor) -> Any:
        return self.model.base_model(ids, use_cache=False, output_attentions=True)

    def found(self, result: Any) -> Found:
        return {"output": result.last_hidden_state, "maps": torch.cat(result.attentions)}


class TransformerLens(Contender):
    """`run_with_cache` of the attention patterns alone: the maps of every layer and head."""

    name = "transformer_lens"
    title = "TransformerLens, run_with_cache"
    package = "transformer_lens"

    def prepare(self, model: Qwen3ForCausalLM) -> None:
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        # as TransformerBridge.boot_transformers, which asks the Hub for a tokenizer
        model = eager_copy(model)
        self.bridge = build_bridge_from_module(model, "Qwen3ForCausalLM", hf_config=model.config)
        self.hooks = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.config.num_hidden_layers)]

    def run(self, ids: Tensor) -> Any:
        _, cache = self.bridge.run_with_cache(ids, return_type=None, names_filter=self.hooks)
        return cache

    def found(self, result: Any) -> Found:
        return {"maps": torch.cat([result[hook] for hook in self.hooks])}


class NNsight(Contender):
    """A trace that reads each layer's eager weights and keeps their first-token mass, so that a map can go."""

    name = "nnsight"
    title = "nnsight, first-token mass"
    package = "nnsight"

    def prepare(self, model: Qwen3ForCausalLM) -> None:
        from nnsight import NNsight, save

        self.save = save
        self.traced = NNsight(eager_copy(model).base_model)

    def run(self, ids: Tensor) -> Any:
        with self.traced.trace(ids, use_cache=False):
            mass = [layer.self_attn.output[1][..., 0].mean(-1) for layer in self.traced.layers]
            saved = self.save(torch.cat(mass))
        return saved  # noqa: RET504, the block above ends before it

    def found(self, result: Tensor) -> Found:
        return {"first_token": result}


def eager_copy(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The same model with attention that returns its weights."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return model


PLAIN = Plain.name

# Made anew in each process: a prepared contender holds a model.
CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Plain(),
        OursSums("ours_first_token", "ours, first-token mass", frozenset({"first_token"})),
        OursSums("ours_all", "ours, all measures", ALL),
        OursSums("ours_all_numba", "ours, all measures, numba", ALL, "numba"),
        OursMaps(),
        Eager(),
        TransformerLens(),
        NNsight(),
    )
}

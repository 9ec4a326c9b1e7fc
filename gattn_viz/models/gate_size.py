"""How large a model's gate is, from its modules alone: on the meta device too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from gattn_viz.models.configuration import GatedQwen3Config
from gattn_viz.models.gate_adapters import adapter_of, after_query, find_module, head_shape


@dataclass(frozen=True)
class GateSize:
    """What computes the gate.

    Attributes:
        kind: `headwise`, `elementwise`, both if layers differ; None without a gate, or without one that is known.
        place: where it comes from, such as `sigmoid of g_proj`; None as above.
        scores: of one token, L x H x C.
        parameters: that compute them, biases included.
    """

    kind: str | None
    place: str | None
    scores: int
    parameters: int


def gate_size(model: PreTrainedModel) -> GateSize:
    """As the modules have it; whether it is at work is seen when the model is run, see `capture.anatomy`."""
    config = model.config
    if isinstance(config, GatedQwen3Config):
        scores = config.num_hidden_layers * config.num_attention_heads * config.gate_channels
        parameters = scores * (config.hidden_size + (config.qkv_bias or config.attention_bias))
        return GateSize(config.gate, "per KV group in q_proj" if config.gate else None, scores, parameters)
    kinds, place, scores, parameters = set(), None, 0, 0
    for module in model.modules():
        adapter = adapter_of(module)
        source = None if adapter is None else find_module(module, adapter.source)
        if adapter is None or not isinstance(source, nn.Linear):
            continue
        output = torch.empty(1, 1, source.out_features, device="meta")
        logits = adapter.layout(output, head_shape(module, config.get_text_config()))
        if logits is None:
            continue
        kinds.add("headwise" if logits.shape[-1] == 1 else "elementwise")
        place = f"{adapter.activation} of {adapter.source}{', per head' * (adapter.layout is after_query)}"
        scores += logits.numel()
        parameters += logits.numel() * (source.in_features + (source.bias is not None))
    return GateSize(" and ".join(sorted(kinds, reverse=True)) or None, place, scores, parameters)

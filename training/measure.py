"""The figures that are watched during training and stated in the model card.

They are measured from the formula, on the model's own queries and keys, apart from the rest of the project:
`gattn-viz sink-stats` must come to the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from gattn_viz.models.modeling import GatedQwen3ForCausalLM


@dataclass(frozen=True)
class Figures:
    """What one model does on one set of sequences.

    Args:
        loss: mean next-token loss, nats.
        first_token_mass: (layers, heads), mean over queries 2 to T of the attention to the first token.
        gate_mean: (layers, heads), mean gate score over tokens and channels; empty without a gate.
        max_activation: (layers,), largest absolute value of the residual stream after each layer.
        tokens: T.
    """

    loss: float
    first_token_mass: NDArray[np.float64]
    gate_mean: NDArray[np.float64]
    max_activation: NDArray[np.float64]
    tokens: int

    @property
    def uniform_null(self) -> float:
        """The first-token mass of uniform causal attention, first row left out: (H_T - 1) / (T - 1)."""
        return (sum(1 / i for i in range(1, self.tokens + 1)) - 1) / (self.tokens - 1)

    @property
    def layers(self) -> list[float]:
        """First-token mass of each layer: the mean over its heads."""
        return [float(value) for value in self.first_token_mass.mean(axis=1)]


@torch.no_grad()
def measure(model: GatedQwen3ForCausalLM, sequences: Tensor, rows: int = 16) -> Figures:
    """Run `model` eagerly over `sequences` (N, T), equally long and without padding."""
    was_training, implementation = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    scores: list[Tensor] = []
    peaks: list[Tensor] = []
    handles = []
    layers: Any = model.model.layers
    for layer in layers:
        handles.append(layer.register_forward_hook(lambda *args: peaks.append(args[2].abs().max())))
        if model.config.gate:
            gate = layer.self_attn.gate_activation
            handles.append(gate.register_forward_hook(lambda *args: scores.append(args[2])))
    loss = torch.zeros((), dtype=torch.float64)
    mass: list[Tensor] = []
    gates: list[Tensor] = []
    peak: list[Tensor] = []
    try:
        for chunk in sequences.split(rows):
            out = model(input_ids=chunk, output_attentions=True, use_cache=False)
            logits = out.logits[:, :-1].float()
            loss += F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum").double()
            mass.append(torch.stack([p[:, :, 1:, 0].double().mean(2).sum(0) for p in out.attentions]))
            if scores:
                gates.append(torch.stack([g.double().mean((1, 3)).sum(0) for g in scores]))
                scores.clear()
            peak.append(torch.stack(peaks))
            peaks.clear()
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(implementation)
        model.train(was_training)
    count, length = sequences.shape
    return Figures(
        loss=float(loss) / (count * (length - 1)),
        first_token_mass=(torch.stack(mass).sum(0) / count).numpy(),
        gate_mean=(torch.stack(gates).sum(0) / count).numpy() if gates else np.empty((0, 0)),
        max_activation=torch.stack(peak).amax(0).double().numpy(),
        tokens=length,
    )

"""What may be asked of a capture, what comes back, and the object that gathers it while the model runs.

Axis letters: B batch, H query heads, K KV heads, Q query rows of a block, T tokens, D head_dim, C gate channels.
Layers and heads are 1-based in `Request` and `LayerCapture`, as everywhere a person sees one; the model's own
`layer_idx`, and the methods called from hooks, are 0-based.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gattn_viz.metrics.layer import LayerSums
from gattn_viz.metrics.sums import AttentionSums


@dataclass(frozen=True)
class Request:
    """What to take out of each layer.

    Attributes:
        maps: layers whose attention probabilities are kept.
        heads: of which heads; None is all of them, and "mean" their mean, a single map.
        sums: reduce every layer to `LayerSums`, from which all sink measures follow.
        gates: layers whose gate logits and gate scores are kept.
        outputs: layers whose attention output is kept, before and after the gate.
    """

    maps: frozenset[int] = frozenset()
    heads: tuple[int, ...] | Literal["mean"] | None = None
    sums: bool = False
    gates: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()


@dataclass
class LayerCapture:
    """What was taken out of one layer for one prompt; None for what was not asked. Float32, on the CPU.

    Attributes:
        layer: from 1.
        probabilities: (heads kept, T, T), or (1, T, T) for their mean; rows are queries.
        gate_logits, gate_scores: (T, H, C), before and after the activation; None without a gate too.
        output_before, output_after: (T, H, D), the attention output before and after the gate. Without a gate the
            second is None: the output projection receives the first.
        sums: the layer reduced, with its gate mean, value norms and the residual stream's extremes.
    """

    layer: int
    probabilities: Tensor | None = None
    gate_logits: Tensor | None = None
    gate_scores: Tensor | None = None
    output_before: Tensor | None = None
    output_after: Tensor | None = None
    sums: LayerSums | None = None


OnLayer = Callable[[int, LayerCapture], None]


@dataclass
class _Partial:
    """One layer of one sequence, while the layer runs."""

    capture: LayerCapture
    sums: AttentionSums | None = None
    gate_mean: Tensor | None = None
    value_norm: Tensor | None = None
    max_activation: float = float("nan")
    max_position: int = -1
    max_channel: int = -1
    median_activation: float = float("nan")


@dataclass
class Collector:
    """Gathers one batch. A layer is handed on, and forgotten, as soon as the model is through with it.

    Attributes:
        request: what to keep.
        real: for each sequence, where its tokens lie that are not padding.
        on_layer: called with (sequence, layer's capture) at the end of each layer.
    """

    request: Request
    real: list[slice]
    on_layer: OnLayer
    running: dict[int, list[_Partial]] = field(default_factory=dict)
    layers_seen: set[int] = field(default_factory=set)

    def real_tokens(self, sequence: int) -> slice:
        return self.real[sequence]

    def start_attention(self, layer: int, sequence: int, value: Tensor, heads: int) -> None:
        partial = self._partials(layer)[sequence]
        kv_heads, tokens, _ = value.shape
        if self.request.sums:
            partial.sums = AttentionSums.zeros(heads, tokens, value.device)
            partial.value_norm = value.norm(dim=-1).repeat_interleave(heads // kv_heads, 0)
        if layer + 1 in self.request.maps:
            asked = self.request.heads
            kept = heads if asked is None else 1 if asked == "mean" else len(asked)
            partial.capture.probabilities = torch.empty(kept, tokens, tokens)

    def add_block(self, layer: int, sequence: int, first_query: int, p: Tensor, visible: Tensor) -> None:
        partial = self._partials(layer)[sequence]
        if partial.sums is not None:
            partial.sums.add(p, first_query, visible)
        if partial.capture.probabilities is not None:
            if self.request.heads == "mean":
                p = p.mean(0, keepdim=True)
            elif self.request.heads is not None:
                p = p[[head - 1 for head in self.request.heads]]
            partial.capture.probabilities[:, first_query : first_query + p.shape[1]] = p

    def add_output(self, layer: int, output: Tensor) -> None:
        if layer + 1 in self.request.outputs:
            for partial, tokens in self._each(layer, output):
                partial.capture.output_before = _keep(tokens)

    def add_gated_output(self, layer: int, output: Tensor, heads: int) -> None:
        """`output` is (B, T, H * D), what the output projection receives."""
        if layer + 1 in self.request.outputs:
            for partial, tokens in self._each(layer, output):
                partial.capture.output_after = _keep(tokens.unflatten(-1, (heads, -1)))

    def add_gate(self, layer: int, logits: Tensor, scores: Tensor) -> None:
        """`logits` and `scores` are (B, T, H, C)."""
        if layer + 1 in self.request.gates:
            for partial, tokens in self._each(layer, logits):
                partial.capture.gate_logits = _keep(tokens)
            for partial, tokens in self._each(layer, scores):
                partial.capture.gate_scores = _keep(tokens)
        if self.request.sums:
            for partial, tokens in self._each(layer, scores):
                partial.gate_mean = tokens.float().mean((0, 2))

    def end_layer(self, layer: int, residual: Tensor) -> None:
        """The model is through with a layer; `residual` (B, T, hidden) is the residual stream after it."""
        if layer not in self.running:
            return  # not softmax attention: a hybrid model's linear layers have nothing to show
        if self.request.sums:
            for partial, tokens in self._each(layer, residual):
                size = tokens.float().abs()  # (T, hidden)
                largest = int(size.argmax())
                partial.max_activation = float(size.flatten()[largest])
                partial.max_position, partial.max_channel = divmod(largest, size.shape[1])
                # NumPy's: torch's median is the lower of the two middle values, and its kthvalue takes seconds
                partial.median_activation = float(np.median(size.cpu().numpy()))
        for sequence, partial in enumerate(self.running.pop(layer)):
            self.on_layer(sequence, _finish(partial))

    def _partials(self, layer: int) -> list[_Partial]:
        if layer not in self.running:
            self.layers_seen.add(layer)
            self.running[layer] = [_Partial(LayerCapture(layer + 1)) for _ in self.real]
        return self.running[layer]

    def _each(self, layer: int, batch: Tensor) -> Iterator[tuple[_Partial, Tensor]]:
        """Each sequence with its own part of a (B, T, ...) tensor, padding left out."""
        for sequence, (partial, real) in enumerate(zip(self._partials(layer), self.real, strict=True)):
            yield partial, batch[sequence, real]


def _finish(partial: _Partial) -> LayerCapture:
    if partial.sums is not None:
        sums = partial.sums
        partial.capture.sums = LayerSums(
            tokens=sums.received.shape[1],
            received=_to_numpy(sums.received),
            first_row=_to_numpy(sums.first_row),
            entropy=_to_numpy(sums.entropy),
            entropy_ratio=_to_numpy(sums.entropy_ratio),
            ratio_queries=sums.ratio_queries,
            gate_mean=None if partial.gate_mean is None else _to_numpy(partial.gate_mean),
            value_norm=None if partial.value_norm is None else _to_numpy(partial.value_norm),
            max_activation=partial.max_activation,
            max_activation_position=partial.max_position,
            max_activation_channel=partial.max_channel,
            median_activation=partial.median_activation,
        )
    return partial.capture


def _keep(tensor: Tensor) -> Tensor:
    """A copy that outlives the forward pass: float32, on the CPU, sharing no memory with the model's."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _to_numpy(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.detach().cpu().double().numpy()

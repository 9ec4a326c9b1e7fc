"""What a model costs, by count: parameters, multiply-adds, memory of the gate. Nothing is run or measured.

Axis letters: L layers, H query heads, D head_dim, C gate channels of one head (1 headwise, D elementwise), T the
prompt's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gattn_viz.models.configuration import GatedQwen3Config
from gattn_viz.models.gate_size import gate_size


@dataclass(frozen=True)
class Attention:
    """One layer's attention, for counting.

    Attributes:
        width: H x (head_dim of queries and keys + head_dim of values): multiply-adds of a query for each key.
        window: how many keys a query sees at most; None is all that are not after it.
    """

    width: int
    window: int | None

    def multiply_adds(self, tokens: int) -> float:
        """Of a token, on average over the T tokens of a prompt; keys that are not seen do not count."""
        seen = min(tokens, self.window or tokens)
        keys = seen * (seen + 1) / 2 + (tokens - seen) * seen
        return self.width * keys / tokens


@dataclass(frozen=True)
class Costs:
    """What a model costs.

    Attributes:
        parameters: all of them, tied ones once.
        gate_parameters: those that compute the gate, biases included. None where it is not known whether there is
            a gate: one of another family in which none is known.
        gate_bytes: of one token's gate scores, L x H x C of the model's dtype. In a forward pass each layer's are
            there while the layer runs; training keeps them all for the backward pass. None as above.
        linear: the weights of all linear layers, the language-model head with them and embeddings without.
        attention: of each layer.
        uncounted: what keeps multiply-adds from being counted, in words; empty if nothing.
    """

    parameters: int
    gate_parameters: int | None
    gate_bytes: int | None
    linear: int
    attention: tuple[Attention, ...]
    uncounted: str

    def multiply_adds(self, tokens: int) -> float | None:
        """Multiply-adds of one token, the mean over a prompt of T tokens.

        Each weight of a linear layer is used once a token; q k^T and p v take H x D each for each key that the
        query sees, (T + 1)/2 keys on average. Not in it: embeddings, and what is done element by element (norms,
        activations, RoPE, softmax, biases, and the product of gate and output). None if it cannot be counted.
        """
        if self.uncounted:
            return None
        return self.linear + sum(layer.multiply_adds(tokens) for layer in self.attention)


def count_costs(model: PreTrainedModel) -> Costs:
    """Count what a model costs; on the meta device too."""
    config = model.config
    attention, unknown_layers = _attention(config.get_text_config())
    outside = [
        name
        for name, module in model.named_modules()
        if not isinstance(module, (nn.Linear, Conv1D, nn.Embedding))
        and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    ]
    uncounted = f"weights outside of linear layers, such as {outside[0]}" if outside else unknown_layers
    gate = gate_size(model)
    is_known = gate.kind is not None or isinstance(config, GatedQwen3Config)
    return Costs(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gate_parameters=gate.parameters if is_known else None,
        gate_bytes=gate.scores * model.dtype.itemsize if is_known else None,
        linear=sum(_linear_weights(model)),
        attention=attention,
        uncounted=uncounted,
    )


def _linear_weights(model: PreTrainedModel) -> Iterator[int]:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield module.in_features * module.out_features  # quantised weights are stored in other shapes
        elif isinstance(module, Conv1D):  # GPT-2's linear layer
            yield module.weight.numel()


def _attention(config: Any) -> tuple[tuple[Attention, ...], str]:
    """Each layer's attention, and what is not known of it."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_keys = getattr(config, "qk_head_dim", None) or head_dim
    of_values = getattr(config, "v_head_dim", None) or head_dim
    width = config.num_attention_heads * (of_keys + of_values)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    every = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [every] * config.num_hidden_layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    layers = tuple(Attention(width, window if kind == "sliding_attention" else None) for kind in kinds)
    return layers, f"layers of {unknown[0]}" if unknown else ""

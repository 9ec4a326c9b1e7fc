"""Tiny models with weights that vary enough for a mistake to show, and the reference run on the same weights."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gattn_viz.models.configuration import GatedQwen3Config
from gattn_viz.models.modeling import GatedQwen3ForCausalLM
from tests.models import reference

VARIANTS = ("baseline", "gate_headwise", "gate_elementwise")
GATED = VARIANTS[1:]
ROPE_THETA = 50.0  # small, so that every channel turns within a few tokens

# transformers 5.2x renames the cache argument and output
CACHE = "cache" if "cache" in inspect.signature(GatedQwen3ForCausalLM.forward).parameters else "past_key_values"


def tiny_config(variant: str = "gate_headwise", *, group: int = 2, **options: Any) -> GatedQwen3Config:
    """Two layers, two KV heads with `group` query heads each, head_dim unlike hidden / heads, a visible eps."""
    values: dict[str, Any] = {
        "vocab_size": 29,
        "hidden_size": 20,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2 * group,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-2,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "headwise_attn_output_gate": variant == "gate_headwise",
        "elementwise_attn_output_gate": variant == "gate_elementwise",
        "attn_implementation": "sdpa",
    }
    return GatedQwen3Config(**(values | options))


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Weights with which gates spread over (0, 1), attention is far from uniform, and no bias or norm is idle."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif name == "model.norm.weight":
                parameter.copy_(0.6 + 0.2 * noise)  # logits of order 1, for 1e-5 to be well above rounding
            elif "norm" in name:
                parameter.copy_(1.1 + 0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(0.3 * noise)
            elif "q_proj" in name or "k_proj" in name:
                parameter.copy_(1.4 * noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def tiny_model(config: GatedQwen3Config, seed: int = 0) -> GatedQwen3ForCausalLM:
    model = GatedQwen3ForCausalLM(config).eval()
    randomize(model, seed)
    return model


def with_implementation(model: GatedQwen3ForCausalLM, implementation: str) -> GatedQwen3ForCausalLM:
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    return model


def random_ids(batch: int, tokens: int, seed: int = 0, vocab: int = 29) -> Tensor:
    return torch.randint(vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def padding_mask(lengths: list[int], tokens: int, side: str) -> Tensor:
    """(B, T), 1 for real tokens."""
    index = torch.arange(tokens)[None]
    length = torch.tensor(lengths)[:, None]
    return (index >= tokens - length if side == "left" else index < length).long()


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    """The state dict as numpy; a tied output embedding once, under the input's name."""
    state = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def run_reference(
    model: GatedQwen3ForCausalLM,
    input_ids: Tensor,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    layout: str = reference.TRUE_LAYOUT,
) -> reference.Result:
    """The reference with the model's weights. Sizes come from the config's own keys, none is worked out."""
    config = model.config
    gate = {(False, False): None, (True, False): "headwise", (False, True): "elementwise"}[
        config.headwise_attn_output_gate, config.elementwise_attn_output_gate
    ]
    return reference.forward(
        arrays(model),
        input_ids.numpy(),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        gate=gate,
        qkv_bias=config.qkv_bias,
        use_qk_norm=config.use_qk_norm,
        tied=config.tie_word_embeddings,
        rope_theta=ROPE_THETA,
        eps=config.rms_norm_eps,
        real=None if mask is None else mask.bool().numpy(),
        positions=None if positions is None else positions.numpy(),
        layout=layout,
    )


class GateRecorder:
    """Hooks on every layer's `gate_activation`: the logits that went in and the scores that came out."""

    def __init__(self, model: nn.Module) -> None:
        self.logits: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.handles = [
            module.register_forward_hook(self._record)
            for name, module in model.named_modules()
            if name.endswith("gate_activation")
        ]

    def _record(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.logits.append(inputs[0].detach())
        self.scores.append(output.detach())

    def __enter__(self) -> GateRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

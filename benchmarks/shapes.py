"""The two models that are timed: Qwen3 with random weights, and no language-model head to speak of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

SEED = 0

# TransformerLens runs the head, the others do not: with 128 entries it is 1 or 2 % of the model's products.
VOCABULARY = 128


@dataclass(frozen=True)
class Shape:
    """A Qwen3 and the prompt lengths it is timed at.

    Attributes:
        name: on the command line and in the CSV.
        title: in tables and figures.
        intermediate: the MLP's width.
        lengths: tokens of a prompt, unless others are asked for.
    """

    name: str
    title: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    lengths: tuple[int, ...]

    def model(self, device: str, dtype: torch.dtype) -> Qwen3ForCausalLM:
        """The model in evaluation mode, with fused attention (SDPA); the same weights at each call."""
        torch.manual_seed(SEED)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            max_position_embeddings=1 << 20,
            attn_implementation="sdpa",
        )
        return Qwen3ForCausalLM(config).to(device=device, dtype=dtype).eval()

    def prompt(self, tokens: int, device: str) -> Tensor:
        """(1, T) random token ids, the same at each call."""
        generator = torch.Generator().manual_seed(SEED)
        return torch.randint(VOCABULARY, (1, tokens), generator=generator).to(device)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "model",
            "whole model: 4 layers, hidden 256, 8 heads, 2 KV heads, head_dim 32",
            layers=4,
            hidden=256,
            heads=8,
            kv_heads=2,
            head_dim=32,
            intermediate=768,
            lengths=(512, 1024, 2048, 4096, 8192),
        ),
        # a decoder layer, whose MLP is too narrow to count: projections, rotary embedding, attention
        Shape(
            "layer",
            "one attention layer: hidden 2048, 16 heads, 8 KV heads, head_dim 128",
            layers=1,
            hidden=2048,
            heads=16,
            kv_heads=8,
            head_dim=128,
            intermediate=64,
            lengths=(1024, 2048, 4096, 8192),  # 16384 and 32768 when asked: they take the longest
        ),
    )
}

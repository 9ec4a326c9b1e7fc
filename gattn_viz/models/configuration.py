"""The configuration of a Qwen3 with a gate on the attention output."""

# No `from __future__ import annotations` here: `strict` does not check fields whose annotation is a string.
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

# A config.json that has any of these keys is one of ours, whatever its `model_type` says: the official
# checkpoints come as `qwen2` or `qwen3`.
GATE_KEYS = ("qkv_bias", "use_qk_norm", "headwise_attn_output_gate", "elementwise_attn_output_gate")


@strict
class GatedQwen3Config(Qwen3Config):
    """Qwen3's configuration and four keys more, named as in the official checkpoints of arXiv 2505.06708.

    Args:
        qkv_bias: a bias on the query, key, value **and output** projections.
        use_qk_norm: RMSNorm over head_dim on queries and keys before the rotary embedding, as in Qwen3.
        headwise_attn_output_gate: one gate score for each head.
        elementwise_attn_output_gate: one gate score for each head and channel.

    Raises:
        ValueError: both gates are set, or the query heads do not divide into the KV heads.
    """

    model_type = "gated_qwen3"

    qkv_bias: bool = False
    use_qk_norm: bool = True
    headwise_attn_output_gate: bool = False
    elementwise_attn_output_gate: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.headwise_attn_output_gate and self.elementwise_attn_output_gate:
            raise ValueError(
                "headwise_attn_output_gate and elementwise_attn_output_gate are both true; "
                "a model has one of them or none: set one to false in config.json"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads do not divide into "
                f"{self.num_key_value_heads} key/value heads"
            )

    @property
    def gate(self) -> str | None:
        """`"headwise"`, `"elementwise"` or None."""
        if self.headwise_attn_output_gate:
            return "headwise"
        return "elementwise" if self.elementwise_attn_output_gate else None

    @property
    def variant(self) -> str:
        """`baseline`, `gate_headwise` or `gate_elementwise`."""
        return f"gate_{self.gate}" if self.gate else "baseline"

    @property
    def gate_channels(self) -> int:
        """Gate scores of one head at one token: 0, 1 (headwise) or head_dim (elementwise)."""
        return {None: 0, "headwise": 1, "elementwise": self.head_dim}[self.gate]


def is_without_gate(config: object) -> bool:
    """Whether a configuration rules a gate out. That of another family's model says nothing."""
    return isinstance(config, GatedQwen3Config) and config.gate is None

"""Qwen3 with a gate on the attention output: transformers' classes with one module exchanged.

The parameter names are those of the official checkpoints. Importing this module registers the classes with
transformers' Auto classes under the model type `gated_qwen3`.
"""

from __future__ import annotations

from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3PreTrainedModel,
)

from gattn_viz.models.attention import GatedQwen3Attention
from gattn_viz.models.configuration import GatedQwen3Config


class GatedQwen3DecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: GatedQwen3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = GatedQwen3Attention(config, layer_idx)


class GatedQwen3PreTrainedModel(Qwen3PreTrainedModel):
    config_class = GatedQwen3Config
    _no_split_modules = ["GatedQwen3DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": GatedQwen3DecoderLayer,
        "attentions": GatedQwen3Attention,
    }


class GatedQwen3Model(GatedQwen3PreTrainedModel, Qwen3Model):
    def __init__(self, config: GatedQwen3Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            GatedQwen3DecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)
        )
        self.post_init()


class GatedQwen3ForCausalLM(GatedQwen3PreTrainedModel, Qwen3ForCausalLM):
    def __init__(self, config: GatedQwen3Config) -> None:
        super().__init__(config)
        self.model = GatedQwen3Model(config)
        self.post_init()


AutoConfig.register(GatedQwen3Config.model_type, GatedQwen3Config)
AutoModel.register(GatedQwen3Config, GatedQwen3Model)
AutoModelForCausalLM.register(GatedQwen3Config, GatedQwen3ForCausalLM)

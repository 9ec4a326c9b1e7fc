"""What a checkpoint is, from its config and tokenizer alone: no weights are read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gattn_viz.errors import GattnVizError, first_line
from gattn_viz.models.checkpoint_config import load_config
from gattn_viz.models.configuration import GatedQwen3Config
from gattn_viz.models.gate_size import gate_size
from gattn_viz.models.libraries import quiet
from gattn_viz.models.loading import load_tokenizer
from gattn_viz.models.modeling import GatedQwen3ForCausalLM
from gattn_viz.models.names import ModelSource


@dataclass(frozen=True)
class ModelDescription:
    """The sizes of a model.

    Attributes:
        model_type: what transformers calls the family.
        variant: `baseline`, `gate_headwise` or `gate_elementwise`; None when it is not one of the paper's models.
        gate: `none`, `headwise` or `elementwise`, as its modules have it; at work it is seen when the model is
            loaded.
        gate_place: where it comes from, such as `per KV group in q_proj`; None without a gate.
        parameters: all of them, tied ones once.
        gate_parameters: those that compute the gate, biases included.
        dtype: of the checkpoint, as its config says; None when it does not.
        qkv_bias: whether the attention projections have biases; None when the family has no `q_proj`.
        qk_norm: whether queries and keys are normalised.
        tied: whether the input and output embeddings are one.
        max_positions: the longest input; None when there is no limit.
        layer_types: kinds of layers and how many of each; empty when all are full attention.
        sliding_window: how many keys a windowed layer sees; None without windows.
        tokenizer: its class.
        vocabulary: how many tokens the tokenizer has.
        bos_token: None when it has none.
    """

    source: ModelSource
    model_type: str
    variant: str | None
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    gate: str
    gate_place: str | None
    parameters: int
    gate_parameters: int
    dtype: str | None
    qkv_bias: bool | None
    qk_norm: bool
    tied: bool
    max_positions: int | None
    layer_types: dict[str, int]
    sliding_window: int | None
    tokenizer: str
    vocabulary: int
    bos_token: str | None

    @property
    def gate_share(self) -> float:
        """The gate's part of the parameters, 0 to 1."""
        return self.gate_parameters / self.parameters


def describe(source: ModelSource, trust_remote_code: bool = False) -> ModelDescription:
    """Describe a checkpoint. What a config.json of the paper's leaves out is taken as the config class's default.

    Args:
        trust_remote_code: as for `load`.

    Raises:
        GattnVizError: the config or the tokenizer cannot be had or read, or it is not a causal LM.
    """
    config = load_config(source, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(source, config, trust_remote_code=trust_remote_code)
    model = _without_weights(source, config, trust_remote_code)
    text = config.get_text_config()
    gate = gate_size(model)
    heads = text.num_attention_heads
    kinds = Counter(getattr(text, "layer_types", None) or [])
    windowed = getattr(text, "use_sliding_window", True)
    modules = dict(model.named_modules())
    queries = [module for name, module in modules.items() if name.endswith(".q_proj")]
    return ModelDescription(
        source=source,
        model_type=config.model_type,
        variant=config.variant if isinstance(config, GatedQwen3Config) else None,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        hidden_size=text.hidden_size,
        gate=gate.kind or "none",
        gate_place=gate.place,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gate_parameters=gate.parameters,
        dtype=str(config.dtype).removeprefix("torch.") if config.dtype else None,
        qkv_bias=any(module.bias is not None for module in queries) if queries else None,
        qk_norm=any(
            name.endswith((".q_norm", ".q_layernorm")) and any(True for _ in module.parameters())
            for name, module in modules.items()
        ),
        tied=_tied(model),
        max_positions=getattr(text, "max_position_embeddings", None),
        layer_types={} if set(kinds) <= {"full_attention"} else dict(kinds),
        sliding_window=getattr(text, "sliding_window", None) if windowed else None,
        tokenizer=type(tokenizer).__name__,
        vocabulary=len(tokenizer),
        bos_token=tokenizer.bos_token,
    )


def _without_weights(source: ModelSource, config: Any, trust_remote_code: bool) -> Any:
    """The model on the meta device: its modules and shapes, no numbers."""
    try:
        with quiet(), torch.device("meta"):
            if isinstance(config, GatedQwen3Config):
                return GatedQwen3ForCausalLM(config)
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise GattnVizError(
            f"model {source.name!r}: no model can be made from config.json ({first_line(error)}); expected sizes "
            "that fit together: correct it"
        ) from error


def _tied(model: Any) -> bool:
    output = model.get_output_embeddings()
    return output is not None and output.weight is model.get_input_embeddings().weight

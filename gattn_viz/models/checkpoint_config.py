"""Reading config.json: is it one of the paper's models, or one that transformers knows?

A config.json with any of `GATE_KEYS` is one of the paper's and becomes a `GatedQwen3Config`, whatever its
`model_type` and `auto_map` say; all others go to transformers' own classes. A key that transformers' own class for
the model type has does not count: Cohere and GLM-4.5 have a `use_qk_norm`, Qwen2-MoE has a `qkv_bias`.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from gattn_viz.errors import GattnVizError
from gattn_viz.models.configuration import GATE_KEYS, GatedQwen3Config
from gattn_viz.models.gguf import place
from gattn_viz.models.libraries import explained, no_file, quiet, where
from gattn_viz.models.names import ModelSource

# What a config.json of the paper's may leave out and the weights tell. The paper's code has defaults for the
# first and the last (true, 128) and none for the second.
SETTLED_BY_WEIGHTS = ("use_qk_norm", "qkv_bias", "head_dim")


def load_config(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """A checkpoint's configuration: a `GatedQwen3Config` for the paper's models, else transformers' own class.

    Raises:
        GattnVizError: it cannot be had or read, both gates are set, or it is not of a causal LM.
    """
    return read_config(source, trust_remote_code)[0]


def read_config(source: ModelSource, trust_remote_code: bool) -> tuple[Any, frozenset[str]]:
    """The configuration, and which of `SETTLED_BY_WEIGHTS` a config.json of the paper's leaves out."""
    location = place(source)
    with quiet(), explained(source, "config.json"):
        values, _ = PretrainedConfig.get_config_dict(location, **where(source))
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, expected an object with model_type and sizes")
        if not values:  # also what transformers makes of a repository without the file
            raise GattnVizError(f"model {source.name!r}: {no_file(source, 'config.json')}")
        _check_quantisation(source, values)
        if _is_gated(values):
            unstated = frozenset(key for key in SETTLED_BY_WEIGHTS if values.get(key) is None)
            return _gated_config({key: values[key] for key in values.keys() - unstated}), unstated
        _check_model_type(source, values, trust_remote_code)
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code, **where(source))
        _check_causal(source, config)
        return config, frozenset()


def is_quantised(config: Any) -> bool:
    """Whether config.json says that the weights are quantised."""
    return getattr(config, "quantization_config", None) is not None


def _is_gated(values: dict[str, Any]) -> bool:
    """Whether a config.json has a gate key that says something new, see the module's docstring."""
    stock: Any = PretrainedConfig
    if values.get("model_type") in CONFIG_MAPPING:
        stock = CONFIG_MAPPING[values["model_type"]]
    return stock is GatedQwen3Config or any(key in values and not hasattr(stock, key) for key in GATE_KEYS)


def _gated_config(values: dict[str, Any]) -> GatedQwen3Config:
    """The project's configuration from one of the paper's, which may call itself qwen2 or qwen3."""
    ours = {key: value for key, value in values.items() if key not in ("model_type", "auto_map", "architectures")}
    if "head_dim" not in ours and ours.get("hidden_size") and ours.get("num_attention_heads"):
        ours["head_dim"] = ours["hidden_size"] // ours["num_attention_heads"]
    return GatedQwen3Config.from_dict(ours)


def _check_model_type(source: ModelSource, values: dict[str, Any], trust_remote_code: bool) -> None:
    model_type = values.get("model_type")
    if model_type in CONFIG_MAPPING or (trust_remote_code and "auto_map" in values):
        return
    if "auto_map" in values:
        raise GattnVizError(
            f"model {source.name!r} (model_type {model_type!r}) needs the code that comes with it; expected a "
            "model type that transformers has: read that code, and if you trust it pass --trust-remote-code"
        )
    raise GattnVizError(
        f"model {source.name!r} has model_type {model_type!r} in config.json; expected one that transformers "
        f"{transformers.__version__} knows, or one of the keys {', '.join(GATE_KEYS)}: correct it, or upgrade "
        "transformers"
    )


def _check_quantisation(source: ModelSource, values: dict[str, Any]) -> None:
    """Refuse a method that transformers does not know: it would take the weights for what they are not."""
    stated = values.get("quantization_config")
    if not isinstance(stated, dict) or "quant_method" not in stated:  # which transformers itself reports
        return
    known = {name.partition("_4bit")[0].partition("_8bit")[0] for name in AUTO_QUANTIZATION_CONFIG_MAPPING}
    if stated["quant_method"] not in known:
        raise GattnVizError(
            f"model {source.name!r} is quantised by {stated['quant_method']!r}, says config.json; expected a "
            f"method that transformers {transformers.__version__} knows ({', '.join(sorted(known))}): choose "
            "another checkpoint of the model"
        )


def _check_causal(source: ModelSource, config: Any) -> None:
    """Refuse what is not a decoder that predicts the next token."""
    # The encoders that can be turned into decoders have both keys; others keep a stray `is_decoder`.
    encoder = getattr(config, "is_decoder", None) is False and hasattr(config, "add_cross_attention")
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder"
    elif encoder:
        kind = "an encoder"
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return
    else:
        kind = "not a causal language model"
    raise GattnVizError(
        f"model {source.name!r} (model_type {config.model_type!r}) is {kind}; expected a decoder-only causal "
        "LM, such as Llama, Qwen3, Mistral or GPT-2: choose another model"
    )

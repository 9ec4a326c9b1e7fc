"""Tiny random models of other people's families, each with what attention in it must be seen right.

Weights are drawn wide enough that attention is far from uniform, and nothing is left at an initial value that
hides a mistake: biases, norms and learned sinks are moved by noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from tests.conftest import GATES, tiny_model

Visible = Callable[[int], int]
"""How many keys a query sees, itself included; queries count from 1."""


def everything(query: int) -> int:
    return query


def window(width: int) -> Visible:
    return lambda query: min(query, width)


def chunks(size: int) -> Visible:
    return lambda query: (query - 1) % size + 1


@dataclass(frozen=True)
class Family:
    """How to build one model, and what is known of it without running it.

    Attributes:
        model, config: the names of its classes in transformers; empty for the project's own.
        options: of the configuration, beside `SIZES`.
        layers: the layers with softmax attention, from 1, and what their queries see.
        norm, list: where its final norm and its decoder layers are.
    """

    model: str
    config: str
    layers: dict[int, Visible]
    options: dict[str, object] = field(default_factory=dict)
    norm: str = "model.norm"
    list: str = "model.layers"


# Heads of 8 channels unless a family says otherwise: some are wider than the hidden size divided by the heads.
SIZES: dict[str, object] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

CAUSAL: dict[int, Visible] = {1: everything, 2: everything}


def _local(visible: Visible, *rest: Visible) -> dict[int, Visible]:
    return dict(enumerate((visible, *rest), start=1))


# layers of linear attention, and a last one of softmax attention
LINEAR: dict[str, object] = {
    "num_hidden_layers": 4,
    # with wider weights float32 rounding in the linear layers, transformers' own, exceeds what the tests allow
    "initializer_range": 0.05,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, object] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
# multi-head latent attention: keys of 8 + 4 channels, of which 4 are rotated; values of 6
LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", CAUSAL, {"attention_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", CAUSAL, {"head_dim": 40}),
    "mistral": Family(
        "MistralForCausalLM",
        "MistralConfig",
        _local(window(10), window(10)),
        {"sliding_window": 10, "head_dim": 36},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _local(window(7), everything),
        {
            "sliding_window": 7,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 5,
        },
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _local(window(9), everything, window(9)),
        {
            "num_hidden_layers": 3,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 5,
        },
    ),
    "gpt2": Family(
        "GPT2LMHeadModel", "GPT2Config", CAUSAL, {"n_inner": 48}, norm="transformer.ln_f", list="transformer.h"
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        CAUSAL,
        {"rotary_pct": 0.5},
        norm="gpt_neox.final_layer_norm",
        list="gpt_neox.layers",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        _local(window(8), everything),
        {"sliding_window": 8, "head_dim": 36, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", CAUSAL),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", _local(window(20), window(20)), {"sliding_window": 20}),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", "DeepseekV3Config", CAUSAL, {**LATENT, "head_dim": 4}),
    # hybrid: three layers of linear attention, then one of softmax attention with an elementwise gate
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {4: everything},
        {**LINEAR, **EXPERTS, "partial_rotary_factor": 0.5},
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _local(chunks(16), everything),
        {
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
        },
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        _local(window(12), everything),
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
            "logit_scale": 0.25,
        },
    ),
    "granite": Family(
        "GraniteForCausalLM",
        "GraniteConfig",
        CAUSAL,
        {
            "attention_multiplier": 0.5,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.6,
            "embedding_multiplier": 2.0,
        },
    ),
    # calls a part of its base model, and has absolute positions
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        CAUSAL,
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3, "dropout": 0.0},
        norm="model.decoder.final_layer_norm",
        list="model.decoder.layers",
    ),
    **{variant: Family("", "", dict.fromkeys((1, 2, 3), everything)) for variant in GATES},
}

# What need not work, but must not give wrong numbers.
UNUSUAL: dict[str, Family] = {
    # its cache goes on from one token to the next, but not from one chunk to the next
    "jamba": Family(
        "JambaForCausalLM",
        "JambaConfig",
        {2: everything},
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    # takes a cache of its own only
    "minimax": Family(
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {1: everything},
        {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    # a key of Mistral's left in a config.json: the cache heeds it, the mask does not
    "llama_with_a_window": Family("LlamaForCausalLM", "LlamaConfig", CAUSAL, {"sliding_window": 9}),
    # logits of a sink for each query
    "inkling2": Family(
        "Inkling2ForCausalLM",
        "Inkling2TextConfig",
        CAUSAL,
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    # computes with its mask
    "doge": Family("DogeForCausalLM", "DogeConfig", CAUSAL),
    # goes through its two layers twice
    "dory": Family(
        "DoryForCausalLM",
        "DoryConfig",
        dict.fromkeys((1, 2, 3, 4), everything),
        {"num_experts": 4, "num_experts_per_tok": 2},
    ),
}

# Attention that does not go through transformers' interface, nor has KV heads that its configuration counts.
EAGER_SIZES = {name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}

EAGER: dict[str, Family] = {
    # rotary embeddings, one KV head
    "falcon": Family("FalconForCausalLM", "FalconConfig", CAUSAL),
    # rotary embeddings, grouped KV heads
    "falcon_grouped": Family(
        "FalconForCausalLM", "FalconConfig", CAUSAL, {"new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "falcon_alibi": Family(
        "FalconForCausalLM",
        "FalconConfig",
        CAUSAL,
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "bloom": Family("BloomForCausalLM", "BloomConfig", CAUSAL),
    "mpt": Family("MptForCausalLM", "MptConfig", CAUSAL, {"max_seq_len": 2048}),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        _local(everything, window(5)),
        {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    ),
    "xglm": Family("XGLMForCausalLM", "XGLMConfig", CAUSAL, {"ffn_dim": 48, "init_std": 0.3}),
    "gpt_neox_japanese": Family("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseConfig", CAUSAL),
    # its modules return lists; it has no cache
    "openai_gpt": Family("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", CAUSAL),
}


@cache
def family_model(name: str) -> PreTrainedModel:
    """The model of a family, in float32, the same at each call: leave it as it was."""
    family = (FAMILIES | UNUSUAL | EAGER)[name]
    torch.manual_seed(0)
    if not family.model:
        model: PreTrainedModel = tiny_model(name, max_position_embeddings=2048, qkv_bias=True)
    else:
        sizes = EAGER_SIZES if name in EAGER else SIZES
        config = getattr(transformers, family.config)(**{**sizes, **family.options})
        model = getattr(transformers, family.model)(config).eval()
    move_what_is_trivial(model)
    model.generation_config.pad_token_id = 0
    return model


def family_model_in(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a family's model in another dtype."""
    return copy.deepcopy(family_model(name)).to(dtype)


def run_attending(model: PreTrainedModel, attend: Callable[..., Any], prompt: list[int]) -> None:
    """A forward pass with another attention function."""
    AttentionInterface.register("of_a_test", attend)
    AttentionMaskInterface.register("of_a_test", eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("of_a_test")
    try:
        with torch.no_grad():
            model(torch.tensor([prompt]), use_cache=False)
    finally:
        model.set_attn_implementation(before)


def final_norm(name: str, model: PreTrainedModel) -> nn.Module:
    return model.get_submodule(FAMILIES[name].norm)


def decoder_list(name: str, model: PreTrainedModel) -> list[nn.Module]:
    return list(model.get_submodule(FAMILIES[name].list).children())


def move_what_is_trivial(model: PreTrainedModel) -> None:
    """Add noise to every vector, and to whatever else is still all zeros or all ones.

    The norms of queries and keys are doubled too: at 1 they make attention over few channels nearly uniform.
    """
    generator = torch.Generator().manual_seed(1)

    def noise(tensor: Tensor) -> Tensor:
        return 0.3 * torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter += 1  # from 1; from 0 where the factor is 1 + weight
            if parameter.dim() == 1 or (parameter == parameter.flatten()[0]).all():
                parameter += noise(parameter)

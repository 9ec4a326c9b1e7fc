"""Tiny random models of the families with a gate on their attention output, or a learned sink in its softmax."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import cache

import torch
import transformers
from transformers import PreTrainedModel

from tests.capture.families import EXPERTS, LATENT, LINEAR, SIZES, move_what_is_trivial


@dataclass(frozen=True)
class GatedFamily:
    """How to build one model, and what is known of it without running it.

    Attributes:
        module: of transformers' modeling code.
        model, config: names of its classes.
        layers: those with softmax attention, from 1 in the order of running.
        heads: of each of them.
        gate: `headwise`, `elementwise` or None.
        place: where the gate comes from, in words.
        sink: which of the layers have a learned sink, from 1.
        options: of the configuration, beside `SIZES`.
        activation: of the gate.
        reaches: the module that receives the gated output; beside the attention module's own.
        norm: a module of the attention between its output and the gate.
        tensor_mask: whether its layers compute with their mask.
    """

    module: str
    model: str
    config: str
    layers: tuple[int, ...] = (1, 2)
    heads: tuple[int, ...] = (4, 4)
    gate: str | None = None
    place: str = ""
    sink: tuple[int, ...] = ()
    options: dict[str, object] = field(default_factory=dict)
    activation: str = "sigmoid"
    reaches: str = "o_proj"
    norm: str | None = None
    tensor_mask: bool = False


WINDOWED: dict[str, object] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
INDEXED: dict[str, object] = {"index_topk": 12, "index_n_heads": 2, "index_head_dim": 8}

IN_QUERIES = "rows of `q_proj`, per head"

GATED: dict[str, GatedFamily] = {
    "qwen3_next": GatedFamily(
        "qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig", (4,), (4,), "elementwise", IN_QUERIES,
        options={"partial_rotary_factor": 0.5, **LINEAR, **EXPERTS},
    ),
    "qwen3_5": GatedFamily(
        "qwen3_5", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", (4,), (4,), "elementwise", IN_QUERIES, options=LINEAR
    ),
    "qwen3_5_moe": GatedFamily(
        "qwen3_5_moe", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", (4,), (4,), "elementwise", IN_QUERIES,
        options={**LINEAR, **EXPERTS},
    ),
    # each query attends to the blocks of keys that an indexer chooses
    "qwen4_exp": GatedFamily(
        "qwen4_exp", "Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", (4,), (4,), "elementwise", IN_QUERIES,
        options={
            **LINEAR,
            **EXPERTS,
            "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
            "indexer_budget": 8, "indexer_compress_ratio": 2,
            "ple_embed_dim": 16, "ngram_size": 2, "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
            "make_ngram_vocab_size_divisible_by": 1, "split_ngram_parts": 1, "ple_layer_ids": [1],
        },
        tensor_mask=True,
    ),
    "afmoe": GatedFamily(
        "afmoe", "AfmoeForCausalLM", "AfmoeConfig", gate="elementwise", place="`gate_proj`",
        options={**WINDOWED, **EXPERTS, "num_dense_layers": 1},
    ),
    "beam": GatedFamily(
        "beam", "BeamForCausalLM", "BeamConfig", gate="elementwise", place="`gate_proj` and a bias for each head",
        options={"sliding_window": 8},
    ),
    # two stacks of two layers: the low one runs twice, then the high one
    "hrm_text": GatedFamily(
        "hrm_text", "HrmTextForCausalLM", "HrmTextConfig", (1, 2, 3, 4, 5, 6), (4,) * 6, "elementwise",
        "`gate_proj`",
        options={
            "num_layers_per_stack": 2, "H_cycles": 1, "L_cycles": 2, "num_hidden_layers": 6,
            "num_key_value_heads": 4,
        },
    ),
    "muse_glimmer_text": GatedFamily(
        "muse_glimmer", "MuseGlimmerTextModel", "MuseGlimmerTextConfig", gate="elementwise", place="`gate_proj`",
        options=WINDOWED,
    ),
    "muse_spark": GatedFamily(
        "muse_spark", "MuseSparkTextModel", "MuseSparkTextConfig", gate="elementwise",
        place="`gate_proj`, after a norm of the output",
        options={**WINDOWED, **EXPERTS, "n_routed_experts": 4, "num_local_experts": 4}, norm="o_norm",
    ),
    "lfm3": GatedFamily(
        "lfm3", "Lfm3ForCausalLM", "Lfm3Config", gate="headwise", place="`g_proj`",
        options={**WINDOWED, "use_attention_gate": True},
    ),
    "laguna": GatedFamily(
        "laguna", "LagunaForCausalLM", "LagunaConfig", heads=(2, 4), gate="headwise", place="`g_proj`",
        options={**WINDOWED, **EXPERTS, "gating": True, "num_attention_heads_per_layer": [2, 4]},
        activation="softplus",
    ),
    "laguna_per_channel": GatedFamily(
        "laguna", "LagunaForCausalLM", "LagunaConfig", heads=(2, 4), gate="elementwise", place="`g_proj`",
        options={**WINDOWED, **EXPERTS, "gating": "per-element", "num_attention_heads_per_layer": [2, 4]},
        activation="softplus",
    ),
    "bailing_hybrid": GatedFamily(
        "bailing_hybrid", "BailingHybridForCausalLM", "BailingHybridConfig", (2, 4), gate="headwise",
        place="`g_proj`",
        options={
            **LATENT, "num_hidden_layers": 4, "layer_group_size": 2, "initializer_range": 0.05,
            "linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 4,
        },
    ),
    "dots3_note": GatedFamily(
        "dots3_note", "Dots3NoteForCausalLM", "Dots3NoteTextConfig", gate="headwise", place="`g_proj`",
        options={**LATENT, **INDEXED}, tensor_mask=True,
    ),
    "step3p7": GatedFamily(
        "step3p7", "Step3p7TextModel", "Step3p7TextConfig", gate="headwise", place="`g_proj`", options=WINDOWED
    ),
    "hy_v4": GatedFamily(
        "hy_v4", "HYV4ForCausalLM", "HYV4Config", gate="elementwise", place="`gate_proj`", sink=(1, 2),
        options={**LATENT, **INDEXED}, tensor_mask=True,
    ),
    "axk2": GatedFamily(
        "axk2", "AXK2ForCausalLM", "AXK2Config", gate="elementwise", place="rows of `q_gate_proj`, per head",
        options={**LATENT, **INDEXED}, tensor_mask=True,
    ),
    # goes through its two layers twice
    "dory": GatedFamily(
        "dory", "DoryForCausalLM", "DoryConfig", (1, 2, 3, 4), (4,) * 4, "elementwise",
        "`gate_proj` and a factor for each channel, before a norm",
        options={"num_experts": 4, "num_experts_per_tok": 2}, reaches="attn_sub_norm",
    ),
    "gpt_oss": GatedFamily(
        "gpt_oss", "GptOssForCausalLM", "GptOssConfig", sink=(1, 2),
        options={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "flint": GatedFamily("flint", "FlintForCausalLM", "FlintConfig", sink=(1, 2), options=WINDOWED),
    "mimo_v2_flash": GatedFamily(
        "mimo_v2_flash", "MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", sink=(1,),
        options={**WINDOWED, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "granite_swa": GatedFamily(
        "granite_swa", "GraniteSWAForCausalLM", "GraniteSWAConfig", sink=(1, 2), options=WINDOWED
    ),
    # layers that attend to summaries of several tokens are refused: these have windows alone
    "deepseek_v4": GatedFamily(
        "deepseek_v4", "DeepseekV4ForCausalLM", "DeepseekV4Config", sink=(1, 2),
        options={"sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
    ),
}  # fmt: skip


def present(name: str) -> bool:
    """Whether the installed transformers has the family."""
    return importlib.util.find_spec(f"transformers.models.{GATED[name].module}") is not None


@cache
def gated_model(name: str) -> PreTrainedModel:
    """The model of a family, in float32, the same at each call: leave it as it was."""
    family = GATED[name]
    modeling = importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**{**SIZES, **family.options})
    model: PreTrainedModel = getattr(modeling, family.model)(config).eval()
    move_what_is_trivial(model)
    return model

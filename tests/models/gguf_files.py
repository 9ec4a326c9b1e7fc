"""A tiny Llama, and the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama() -> LlamaForCausalLM:
    """2 layers of 4 heads, 2 of them KV; all widths are whole blocks of 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def gguf_name(name: str) -> str:
    """`model.layers.1.mlp.up_proj.weight` as `blk.1.ffn_up.weight`."""
    base = name.removesuffix(".weight")
    if base.startswith("model.layers."):
        _, _, number, rest = base.split(".", 3)
        return f"blk.{number}.{NAMES[rest]}.weight"
    return f"{NAMES[base]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key projection as llama.cpp rotates them: pairs of channels beside each other."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    kind: str = "F32",
    *,
    architecture: str = "llama",
    leave_out: str = "",
    extra: str = "",
    scaling: str = "",
) -> Path:
    """Matrices are quantised to `kind`, vectors stay float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if scaling:
        writer.add_string(f"{architecture}.rope.scaling.type", scaling)
    _add_tokenizer(writer, tokenizer)
    for name, parameter in model.state_dict().items():
        weight = parameter.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, weight.shape[0] // config.head_dim)
        if gguf_name(name) == leave_out:
            continue
        if weight.ndim == 2 and kind != "F32":
            quantised = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name(name), weight)
    if extra:
        writer.add_tensor(extra, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    special = set(tokenizer.all_special_ids)
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id[number] for number in range(len(by_id))])
    writer.add_token_types([control if number in special else normal for number in range(len(by_id))])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.pad_token_id)

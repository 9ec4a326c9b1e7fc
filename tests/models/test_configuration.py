"""The configuration: the official keys, the variants, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, Qwen3Config

import gattn_viz.models.modeling  # noqa: F401  (registers the model type)
from gattn_viz.models.configuration import GATE_KEYS, GatedQwen3Config
from tests.models.conftest import tiny_config

HEADWISE = {"headwise_attn_output_gate": True}
ELEMENTWISE = {"elementwise_attn_output_gate": True}

# The sizes of the official 1B checkpoints, keys as in their config.json
OFFICIAL = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 4096,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "qkv_bias": False,
    "use_qk_norm": True,
    "headwise_attn_output_gate": True,
    "elementwise_attn_output_gate": False,
}


def test_gate_keys_are_the_official_ones() -> None:
    assert set(GATE_KEYS) == {
        "qkv_bias",
        "use_qk_norm",
        "headwise_attn_output_gate",
        "elementwise_attn_output_gate",
    }
    assert not set(GATE_KEYS) & set(Qwen3Config().to_dict())  # so that any of them tells ours from stock


def test_defaults_are_a_stock_qwen3() -> None:
    config = GatedQwen3Config()
    assert (config.qkv_bias, config.use_qk_norm) == (False, True)
    assert (config.gate, config.variant, config.gate_channels) == (None, "baseline", 0)
    stock = Qwen3Config().to_dict()
    ours = config.to_dict()
    assert {key: ours[key] for key in stock if key != "model_type"} == {
        key: stock[key] for key in stock if key != "model_type"
    }


@pytest.mark.parametrize(
    ("flags", "gate", "variant", "channels"),
    [
        ({}, None, "baseline", 0),
        (HEADWISE, "headwise", "gate_headwise", 1),
        (ELEMENTWISE, "elementwise", "gate_elementwise", 64),
    ],
)
def test_variants(flags: dict[str, bool], gate: str | None, variant: str, channels: int) -> None:
    config = GatedQwen3Config(head_dim=64, **flags)
    assert (config.gate, config.variant, config.gate_channels) == (gate, variant, channels)


def test_both_gates_are_refused(tmp_path: Path) -> None:
    both = HEADWISE | ELEMENTWISE
    names = r"(?=.*\bheadwise_attn_output_gate\b)(?=.*\belementwise_attn_output_gate\b)"
    with pytest.raises(ValueError, match=names):
        GatedQwen3Config(**both)
    with pytest.raises(ValueError, match=names):
        GatedQwen3Config.from_dict(tiny_config().to_dict() | both)
    values = tiny_config().to_dict() | both
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=names):
        AutoConfig.from_pretrained(tmp_path)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\b6\b.*\b4\b"):
        GatedQwen3Config(num_attention_heads=6, num_key_value_heads=4)


def test_no_kv_heads_means_as_many_as_heads() -> None:
    assert GatedQwen3Config(num_attention_heads=6, num_key_value_heads=None).num_key_value_heads == 6


@pytest.mark.parametrize("key", GATE_KEYS)
def test_flags_are_booleans(key: str) -> None:
    """A string in config.json would be true, whatever it says."""
    with pytest.raises(StrictDataclassError, match=key):
        GatedQwen3Config(**{key: "false"})


@pytest.mark.parametrize("flags", [{}, HEADWISE, ELEMENTWISE], ids=["baseline", "headwise", "elementwise"])
@pytest.mark.parametrize("others", [{}, {"qkv_bias": True, "use_qk_norm": False}], ids=["", "bias-nonorm"])
def test_round_trip(tmp_path: Path, flags: dict[str, bool], others: dict[str, Any]) -> None:
    config = tiny_config("baseline", **(flags | others))
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "gated_qwen3"
    assert {key: written[key] for key in GATE_KEYS} == {key: getattr(config, key) for key in GATE_KEYS}
    for loaded in (GatedQwen3Config.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is GatedQwen3Config
        assert loaded.to_diff_dict() | {"_name_or_path": ""} == config.to_diff_dict() | {"_name_or_path": ""}
        assert loaded.variant == config.variant


def test_auto_config_knows_the_model_type() -> None:
    config = AutoConfig.for_model("gated_qwen3", **HEADWISE)
    assert type(config) is GatedQwen3Config
    assert config.variant == "gate_headwise"


def test_an_official_config_is_understood() -> None:
    """Its older spellings too: rope_theta at the top, torch_dtype."""
    config = GatedQwen3Config.from_dict(dict(OFFICIAL))
    assert config.variant == "gate_headwise"
    assert config.model_type == "gated_qwen3"
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert str(config.dtype).endswith("bfloat16")
    assert config.tie_word_embeddings
    assert config.layer_types == ["full_attention"] * 28

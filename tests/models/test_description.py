"""What is said about a checkpoint without reading its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoModelForCausalLM

from gattn_viz.errors import GattnVizError
from gattn_viz.models.description import describe
from gattn_viz.models.names import resolve
from tests.models.checkpoints import SIZES, edit_config, gated_model, save, save_as_official


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True, "use_qk_norm": False, "tie_word_embeddings": True}])
@pytest.mark.parametrize("variant", ["baseline", "gate_headwise", "gate_elementwise"])
def test_counts_are_those_of_the_model(variant: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = gated_model(variant, **options)
    directory = save(model, tmp_path / variant)
    (directory / "model.safetensors").unlink()
    found = describe(resolve(str(directory)))

    assert found.variant == variant
    assert found.gate == {"baseline": "none"}.get(variant, variant.removeprefix("gate_"))
    assert found.gate_place == (None if variant == "baseline" else "per KV group in q_proj")
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    baseline = sum(parameter.numel() for parameter in gated_model("baseline", **options).parameters())
    assert found.gate_parameters == found.parameters - baseline
    assert found.gate_share == found.gate_parameters / found.parameters
    assert (found.layers, found.heads, found.kv_heads, found.head_dim, found.hidden_size) == (2, 4, 2, 8, 32)
    assert (found.qkv_bias, found.qk_norm, found.tied) == (bool(options), not options, bool(options))
    assert (found.dtype, found.max_positions) == ("bfloat16", 64)
    assert (found.tokenizer, found.vocabulary, found.bos_token) == ("TokenizersBackend", 257, "<bos>")
    assert (found.layer_types, found.sliding_window) == ({}, None)


def test_official_layout(tmp_path: Path) -> None:
    model = gated_model("gate_elementwise", tie_word_embeddings=True)
    found = describe(resolve(str(save_as_official(model, tmp_path / "m", tmp_path / "ran"))))
    assert (found.gate, found.head_dim, found.dtype, found.tied) == ("elementwise", 8, "bfloat16", True)
    assert found.bos_token is None
    assert found.sliding_window is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("LlamaConfig", {}),
        ("Qwen3Config", {"qk_norm": True}),
        ("MistralConfig", {"sliding_window": 16}),
        (
            "Gemma2Config",
            {"sliding_window": 16, "layer_types": {"sliding_attention": 1, "full_attention": 1}, "tied": True},
        ),
    ],
)
def test_stock_models(config: str, expected: dict[str, Any], tmp_path: Path) -> None:
    window = {"sliding_window": 16} if "sliding_window" in expected else {}
    model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES, **window))
    found = describe(resolve(str(save(model, tmp_path / "m"))))
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (found.variant, found.gate, found.gate_place, found.gate_parameters) == (None, "none", None, 0)
    defaults = {"qk_norm": False, "sliding_window": None, "layer_types": {}, "tied": False}
    assert {key: getattr(found, key) for key in defaults} == defaults | expected


def test_gpt2_has_other_names_for_its_sizes(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=260, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    found = describe(resolve(str(save(AutoModelForCausalLM.from_config(config), tmp_path / "m"))))
    assert (found.layers, found.heads, found.kv_heads, found.head_dim, found.max_positions) == (2, 4, 4, 8, 64)
    assert found.qkv_bias is None


def test_sizes_that_do_not_fit(tmp_path: Path) -> None:
    directory = save(gated_model(), tmp_path / "m")
    edit_config(directory, hidden_act="nonsense")
    with pytest.raises(GattnVizError) as caught:
        describe(resolve(str(directory)))
    assert str(caught.value) == (
        f"model '{directory}': no model can be made from config.json ('nonsense'); expected sizes that fit "
        "together: correct it"
    )

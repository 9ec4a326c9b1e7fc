"""Quantised checkpoints: capture sees what their linear layers give, and what cannot be read has one line.

fp8 needs no further library, on a CPU it is dequantised; the others run where their library is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from gattn_viz.capture.collector import Request
from gattn_viz.capture.run import capture
from gattn_viz.errors import GattnVizError
from gattn_viz.models.loading import load
from gattn_viz.models.names import resolve, resolve_adapter
from tests.models.checkpoints import SIZES, byte_tokenizer, edit_config, save

WIDER = SIZES | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.2}
IDS = list(range(3, 20))

BLOCK = 32
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "format": "int-quantized",
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        }
    },
}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save(AutoModelForCausalLM.from_config(LlamaConfig(**WIDER)), tmp_path / "plain")


def to_fp8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As in the checkpoint, and what it stands for: a scale a block."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    small = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    stands_for = (small.float() * scale[:, None, :, None]).reshape(rows, columns)
    return {name: small.reshape(rows, columns), f"{name}_scale_inv": scale}, stands_for


def to_int8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same with a scale a row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    small = (weight / scale).round().to(torch.int8)
    return {name: small, f"{name}_scale": scale}, small.float() * scale


@pytest.mark.parametrize(
    ("library", "stated", "quantise"), [(None, FP8, to_fp8), ("compressed_tensors", INT8, to_int8)]
)
def test_weights_that_stand_for_others(
    library: str | None,
    stated: dict[str, Any],
    quantise: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
    plain: Path,
    tmp_path: Path,
) -> None:
    if library is not None:
        pytest.importorskip(library)
    stored, stands_for = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            small, stands_for[name] = quantise(name, weight)
            stored |= small
        else:
            stored[name] = stands_for[name] = weight
    quantised = save(AutoModelForCausalLM.from_config(LlamaConfig(**WIDER)), tmp_path / "quantised")
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    edit_config(quantised, quantization_config=stated)
    save_file(stands_for, plain / "model.safetensors", {"format": "pt"})
    assert_captures_agree(maps_of(load(resolve(str(quantised))).model), maps_of(load(resolve(str(plain))).model))


def torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def bitsandbytes(**options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


@pytest.mark.parametrize(
    ("library", "config", "refusal"),
    [
        ("torchao", torchao_int8, "the weights of its output projection are quantised"),
        ("bitsandbytes", lambda: bitsandbytes(load_in_8bit=True), "goes to a Linear8bitLt, no linear layer"),
        ("bitsandbytes", lambda: bitsandbytes(load_in_4bit=True), "goes to a Linear4bit, no linear layer"),
    ],
)
def test_against_the_models_own_attention(
    library: str, config: Callable[[], Any], refusal: str, plain: Path, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config(), dtype=torch.float32)
    model.save_pretrained(tmp_path / "quantised")
    byte_tokenizer().save_pretrained(tmp_path / "quantised")
    loaded = load(resolve(str(tmp_path / "quantised"))).model
    found = maps_of(loaded)
    loaded.set_attn_implementation("eager")
    with torch.no_grad():
        weights = loaded(torch.tensor([IDS]), output_attentions=True).attentions
    assert_captures_agree(found, [layer[0].float() for layer in weights])
    unquantised = maps_of(load(resolve(str(plain))).model)
    assert max(float((a - b).abs().max()) for a, b in zip(found, unquantised, strict=True)) > 1e-3
    with pytest.raises(GattnVizError, match=f"^layer 1: .*{refusal}.*choose the weight value or probability"):
        capture(loaded, [IDS], Request(maps=frozenset({1}), weight="output"))


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_an_adapter_stays_beside_quantised_weights(library: str, plain: Path, tmp_path: Path) -> None:
    """The difference that it makes is that of B A, to what the quantisation of W makes of it."""
    pytest.importorskip(library)
    pytest.importorskip("peft")
    from tests.models.test_adapter import save_adapter

    config = torchao_int8() if library == "torchao" else bitsandbytes(load_in_8bit=True)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=torch.float32).save_pretrained(
        tmp_path / "quantised"
    )
    byte_tokenizer().save_pretrained(tmp_path / "quantised")
    lora = save_adapter(AutoModelForCausalLM.from_pretrained(plain), tmp_path / "lora", ("q_proj", "o_proj"))
    adapter = resolve_adapter(str(lora))
    adapted = load(replace(resolve(str(tmp_path / "quantised")), adapter=adapter)).model
    merged = maps_of(load(replace(resolve(str(plain)), adapter=adapter)).model)
    found = maps_of(adapted)
    without = maps_of(load(resolve(str(tmp_path / "quantised"))).model)
    off = [float((a - b).abs().mean()) for a, b in zip(found, merged, strict=True)]
    made = [float((a - b).abs().mean()) for a, b in zip(found, without, strict=True)]
    assert max(off) < 0.1 * max(made)
    adapted.set_attn_implementation("eager")
    with torch.no_grad():
        weights = adapted(torch.tensor([IDS]), output_attentions=True).attentions
    assert_captures_agree(found, [layer[0].float() for layer in weights])


def maps_of(model: Any) -> list[Tensor]:
    [layers] = capture(model, [IDS], Request(maps=frozenset({1, 2})))
    return [layers[1].probabilities, layers[2].probabilities]


def assert_captures_agree(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-6)


# --- what cannot be read ----------------------------------------------------------------------------------------

END = (
    "; expected what quantization_config in config.json says, the library that reads it and a device that it runs "
    "on: install it, or choose a checkpoint of the model that is not quantised"
)


def error_of(directory: Path, **stated: Any) -> str:
    edit_config(directory, quantization_config=stated)
    with pytest.raises(GattnVizError) as caught:
        load(resolve(str(directory)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("library", "stated"),
    [
        ("gptqmodel", {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}),
        (
            "gptqmodel",
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        ),
        ("hqq", {"quant_method": "hqq", "quant_config": {}}),
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("torchao", {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}),
        ("compressed_tensors", INT8),
        ("optimum.quanto", {"quant_method": "quanto", "weights": "int8"}),
    ],
)
def test_a_library_that_is_not_installed(library: str, stated: dict[str, Any], plain: Path) -> None:
    try:
        __import__(library)
    except ImportError:
        pass
    else:
        pytest.skip(f"{library} is installed")
    message = error_of(plain, **stated)
    assert message.startswith(f"model '{plain}': the quantised weights cannot be used (")
    assert message.endswith(END)


def test_a_method_that_nobody_knows(plain: Path) -> None:
    message = error_of(plain, quant_method="own")
    assert message.startswith(f"model '{plain}' is quantised by 'own', says config.json; expected a method that ")
    assert "bitsandbytes" in message
    assert "gptq" in message


def test_no_method(plain: Path) -> None:
    message = error_of(plain, bits=4)
    assert message.startswith(f"model '{plain}': the quantised weights cannot be used (")

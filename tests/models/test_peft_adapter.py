"""PEFT adapters: the same numbers as weights added by hand, and one line for whatever does not fit."""

from __future__ import annotations

import builtins
import hashlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from gattn_viz.errors import GattnVizError
from gattn_viz.models.loading import load
from gattn_viz.models.names import ModelSource, resolve, resolve_adapter
from gattn_viz.models.peft_adapter import adapter_commit
from gattn_viz.models.weights import adapter_sha256
from gattn_viz.pipeline import attention_maps, sink_stats
from gattn_viz.pipeline.run import Run
from tests.models.checkpoints import COMMIT, SIZES, gated_model, hub_cache, save

peft = pytest.importorskip("peft")

PROMPTS = ["the cat sat on the mat", "a dog"]


def save_adapter(model: Any, directory: Path, targets: tuple[str, ...], **options: Any) -> Path:
    """A LoRA with random A and B, as after training."""
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(targets), **options)
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(directory)
    return directory


def add_by_hand(directory: Path, adapter: Path) -> None:
    """W + scale B A in a checkpoint's file; a linear layer of GPT-2 holds its transpose."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    lora = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(directory / "model.safetensors")
    changed = 0
    for name in list(weights):
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" not in lora:
            key = f"base_model.model.transformer.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in lora:
            delta = scale * lora[f"{key}.lora_B.weight"].double() @ lora[f"{key}.lora_A.weight"].double()
            delta = delta.T if config["fan_in_fan_out"] else delta
            weights[name] = (weights[name].double() + delta).float()
            changed += 1
    assert changed == len(lora) // 2
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def stock_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return AutoModelForCausalLM.from_config(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))


@pytest.mark.parametrize(
    ("kind", "targets", "options"),
    [
        ("llama", ("q_proj", "o_proj"), {}),
        ("gpt2", ("c_attn", "c_proj"), {"fan_in_fan_out": True}),
        ("gate_headwise", ("q_proj", "o_proj"), {}),  # the gate's rows are in q_proj
        ("gate_elementwise", ("q_proj", "o_proj", "down_proj"), {"layers_to_transform": [1]}),
    ],
)
def test_the_numbers_are_those_of_weights_added_by_hand(
    kind: str, targets: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    gated = kind.startswith("gate_")
    model = gated_model(kind).float() if gated else stock_model(kind)
    base, by_hand = save(model, tmp_path / "base"), save(model, tmp_path / "by_hand")
    adapter = save_adapter(model, tmp_path / "lora", targets, **options)
    add_by_hand(by_hand, adapter)

    loaded = load(resolve_with(base, adapter))
    assert loaded.variant == (kind if gated else None)
    expected = load(resolve(str(by_hand)))
    assert type(loaded.model) is type(expected.model)
    assert not loaded.model.training
    wanted = expected.model.state_dict()
    assert wanted.keys() == loaded.model.state_dict().keys()
    for name, tensor in loaded.model.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6)

    found = sink_stats([str(base)], PROMPTS, run=Run(adapter=str(adapter)))
    numbers = found.select_dtypes("number")
    by_hand_numbers = sink_stats([str(by_hand)], PROMPTS).select_dtypes("number")
    torch.testing.assert_close(
        torch.tensor(numbers.to_numpy(float)), torch.tensor(by_hand_numbers.to_numpy(float)),
        rtol=1e-3, atol=1e-5, equal_nan=True,
    )  # fmt: skip
    assert set(found.model) == {"base+lora"}
    without = sink_stats([str(base)], PROMPTS).select_dtypes("number")
    assert (without.first_token_mass - numbers.first_token_mass).abs().max() > 1e-3, "the adapter does something"


def resolve_with(base: Path | str, adapter: Path | str) -> ModelSource:
    return replace(resolve(str(base)), adapter=resolve_adapter(str(adapter)))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(stock_model("llama"), tmp_path / "base")


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return save_adapter(stock_model("llama"), tmp_path / "lora", ("q_proj", "o_proj"))


def error_of(base: Path, adapter: Path | str) -> str:
    with pytest.raises(GattnVizError) as caught:
        load(resolve_with(base, adapter))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_it_is_called(llama: Path, lora: Path) -> None:
    source = resolve_with(llama, lora)
    assert source.label == "base+lora"
    assert source.checkpoint == f"directory {llama} with adapter directory {lora}"
    assert source.without_path == "directory base with adapter directory lora"
    [maps] = attention_maps([str(llama)], PROMPTS[:1], layers=[1], run=Run(adapter=str(lora)))
    assert (maps.model, maps.checkpoint) == (source.label, source.without_path)
    assert resolve_with("baseline", lora).label == "baseline+lora"
    assert resolve_with("baseline", "org/tuned@v2:last").checkpoint == (
        "bundled demo baseline with adapter Hub org/tuned, revision v2, subfolder last"
    )


def test_the_hash_is_of_config_and_weights(lora: Path) -> None:
    names = ("adapter_config.json", "adapter_model.safetensors")
    lines = [f"{hashlib.sha256((lora / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    assert adapter_sha256(resolve_adapter(str(lora))) == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_from_the_cache_of_the_hub(
    llama: Path, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    lora.rename(hub_cache(tmp_path / "hub", "org/tuned") / "last")
    source = resolve_with(llama, "org/tuned:last")
    loaded = load(source)
    plain = load(resolve(str(llama))).model.state_dict()
    changed = [name for name, tensor in loaded.model.state_dict().items() if not torch.equal(tensor, plain[name])]
    assert len(changed) == 4
    assert source.adapter is not None
    assert adapter_commit(source.adapter) == COMMIT
    assert error_of(llama, "org/none").startswith(
        "adapter 'org/none': the adapter of Hub org/none, revision main is not in the cache and "
    )


# --- what does not fit ------------------------------------------------------------------------------------------


def test_no_peft(llama: Path, lora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "peft":
            raise ImportError("No module named 'peft'")
        return before(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert error_of(llama, lora) == (
        f"adapter '{lora}' needs PEFT, which cannot be imported (No module named 'peft'); expected peft beside "
        "transformers: pip install 'gattn-viz[peft]'"
    )


def test_an_adapter_without_weights(
    llama: Path, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative name such as a/b is a Hub id too: PEFT would look there for what a directory lacks."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    shutil.copy(lora / "adapter_config.json", tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path)
    source = replace(resolve(str(llama)), adapter=resolve_adapter("a/b"))
    message = r"^adapter 'a/b': the adapter has no weights; expected adapter_model\.safetensors or"
    with pytest.raises(GattnVizError, match=message):
        load(source)


def test_no_adapter_directory(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(GattnVizError) as caught:
        resolve_adapter(str(llama))
    assert str(caught.value) == (
        f"adapter directory '{llama}' holds no adapter_config.json; expected what PEFT's save_pretrained wrote: "
        "pass that directory, or a whole model with --model"
    )
    for name in ("./nowhere", "lora", "baseline", "a/b/c", f"{tmp_path}@v1"):
        with pytest.raises(GattnVizError, match=r"there is no adapter .*; expected a directory with "):
            resolve_adapter(name)
    with pytest.raises(GattnVizError, match="adapter 'org/x@' has an empty revision"):
        resolve_adapter("org/x@")


def test_an_adapter_for_a_model(lora: Path) -> None:
    with pytest.raises(GattnVizError) as caught:
        resolve(str(lora))
    assert str(caught.value) == (
        f"model directory '{lora}' holds a PEFT adapter and no model; expected config.json, weights and "
        "tokenizer: pass the adapter's base model with --model, and this with --adapter"
    )


def test_a_model_with_an_adapter_beside_it(llama: Path, lora: Path) -> None:
    """transformers would apply it, or another version of PEFT would not: so it is to be said."""
    for path in lora.iterdir():
        path.rename(llama / path.name)
    with pytest.raises(GattnVizError) as caught:
        load(resolve(str(llama)))
    assert str(caught.value) == (
        f"model '{llama}' has a PEFT adapter (adapter_config.json) beside its config.json; expected one of the "
        "two in a folder: pass the base model with --model and the adapter with --adapter, or move the file away"
    )


def test_several_models(llama: Path, lora: Path) -> None:
    with pytest.raises(GattnVizError) as caught:
        sink_stats(["baseline", str(llama)], PROMPTS, run=Run(adapter=str(lora)))
    assert str(caught.value) == (
        f"the adapter '{lora}' was given with 2 models, baseline, {llama}; expected the one that it was trained "
        "on: name it alone with --model"
    )


@pytest.mark.parametrize("sizes", [{"hidden_size": 40}, {"num_attention_heads": 2}])
def test_of_another_width(sizes: dict[str, Any], lora: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | sizes))
    message = error_of(save(model, tmp_path / "other"), lora)
    assert message.startswith(f"adapter '{lora}': the adapter cannot be used (RuntimeError: ")
    assert "size mismatch for model.layers.0.self_attn.q_proj.lora_" in message.replace("base_model.model.", "")
    assert message.endswith(
        "; expected what PEFT's save_pretrained wrote, for a model of these shapes: choose the one that it was "
        "trained on, or copy the adapter again"
    )


@pytest.mark.parametrize(("layers", "fault"), [(1, "4 unexpected ("), (3, "4 missing (")])
def test_of_another_depth(layers: int, fault: str, lora: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"num_hidden_layers": layers}))
    message = error_of(save(model, tmp_path / "other"), lora)
    assert message.startswith(f"adapter '{lora}': its weights are not those that it has in this model: {fault}")
    assert message.endswith("; expected each once: choose the model that the adapter was trained on")


def test_of_another_family(llama: Path, tmp_path: Path) -> None:
    lora = save_adapter(stock_model("gpt2"), tmp_path / "of_gpt2", ("c_attn",), fan_in_fan_out=True)
    message = error_of(llama, lora)
    assert message.startswith(f"adapter '{lora}': the adapter cannot be used (")
    assert "arget modules {'c_attn'}" in message


def test_one_that_adds_tokens(llama: Path, tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(load(resolve(str(llama))).model, config).save_pretrained(tmp_path / "prompt")
    assert error_of(llama, tmp_path / "prompt") == (
        f"adapter '{tmp_path / 'prompt'}' (PROMPT_TUNING) puts tokens of its own before the prompt; expected one "
        "that changes weights, such as LoRA: choose another"
    )


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("change", ["cut", "gone"])
def test_damaged_files(name: str, change: str, llama: Path, lora: Path) -> None:
    path = lora / name
    if change == "cut":
        path.write_bytes(path.read_bytes()[:50])
    elif name == "adapter_model.safetensors":
        path.unlink()
    else:
        return
    assert error_of(llama, lora).startswith(f"adapter '{lora}': the adapter ")


def test_it_is_said_when_the_base_has_another_name(
    llama: Path, lora: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("gattn_viz").propagate = True
    for base, warned in (("org/base", False), (None, False), ("/home/someone/other", True)):
        path = lora / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": base}))
        caplog.clear()
        load(resolve_with(llama, lora))
        said = [record.getMessage() for record in caplog.records if record.name == "gattn_viz"]
        expected = ["adapter lora was trained on other: on base it may mean nothing"] if warned else []
        assert said == expected


def test_half_precision(llama: Path, lora: Path) -> None:
    """What is merged has the model's dtype: the sum, rounded once."""
    loaded = load(resolve_with(llama, lora), dtype="bfloat16")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    exact = load(resolve_with(llama, lora)).model.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        torch.testing.assert_close(tensor.float(), exact[name], rtol=2e-2, atol=2e-3)

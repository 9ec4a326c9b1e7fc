"""Loading: every weight in its place, old and new checkpoints, and one line for whatever is wrong."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants as hub_constants
from huggingface_hub import utils as hub_utils
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from gattn_viz.errors import GattnVizError
from gattn_viz.models import checkpoint_config, libraries
from gattn_viz.models.configuration import GATE_KEYS, GatedQwen3Config
from gattn_viz.models.loading import load
from gattn_viz.models.modeling import GatedQwen3ForCausalLM
from gattn_viz.models.names import resolve
from tests.models.checkpoints import (
    COMMIT,
    GATES,
    REFUSED,
    SIZES,
    FakeHub,
    edit_config,
    gated_model,
    hub_cache,
    save,
    save_as_official,
)

VARIANTS = ("baseline", "gate_headwise", "gate_elementwise")
PROMPT = torch.arange(12)[None]


@pytest.fixture
def headwise(tmp_path: Path) -> Path:
    return save(gated_model("gate_headwise"), tmp_path / "m")


def error_of(directory: Path | str, **options: Any) -> str:
    with pytest.raises(GattnVizError) as caught:
        load(resolve(str(directory)), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_same_weights(loaded: Any, model: Any) -> None:
    wanted, found = model.state_dict(), loaded.state_dict()
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].float(), tensor.float()), name


# --- what loads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True, "use_qk_norm": False, "tie_word_embeddings": True}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gated_variants(variant: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = gated_model(variant, **options)
    loaded = load(resolve(variant, str(save(model, tmp_path / variant).parent)), device="cpu")
    assert isinstance(loaded.model, GatedQwen3ForCausalLM)
    assert not loaded.model.training
    assert (loaded.variant, loaded.dtype, loaded.device.type) == (variant, torch.float32, "cpu")
    assert loaded.config is loaded.model.config
    assert loaded.tokenizer("ab")["input_ids"]
    assert_same_weights(loaded.model, model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_official_checkpoints(variant: str, tmp_path: Path) -> None:
    model = gated_model(
        variant, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    directory = save_as_official(model, tmp_path / f"1B_{variant}", tmp_path / "ran")
    loaded = load(resolve(variant, str(tmp_path)), device="cpu", trust_remote_code=True)
    assert isinstance(loaded.model, GatedQwen3ForCausalLM)
    assert loaded.variant == variant
    assert loaded.config.rope_parameters["rope_theta"] == 5e5
    assert (loaded.config.head_dim, loaded.config.sliding_window) == (8, None)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert_same_weights(loaded.model, model)
    torch.testing.assert_close(loaded.model(PROMPT).logits, model.float()(PROMPT).logits)
    assert not (tmp_path / "ran").exists(), f"code of {directory} ran"


def test_what_an_official_config_leaves_out_is_told_by_the_weights(tmp_path: Path) -> None:
    model = gated_model("gate_headwise", qkv_bias=True, use_qk_norm=False, head_dim=12)
    directory = save(model, tmp_path / "m")
    edit_config(directory, remove=("qkv_bias", "use_qk_norm", "head_dim"))
    loaded = load(resolve(str(directory)))
    assert (loaded.config.qkv_bias, loaded.config.use_qk_norm, loaded.config.head_dim) == (True, False, 12)
    assert_same_weights(loaded.model, model)


def test_any_gate_key_marks_a_gated_model(tmp_path: Path) -> None:
    directory = save(gated_model("baseline", use_qk_norm=False), tmp_path / "m")
    others = ("qkv_bias", "headwise_attn_output_gate", "elementwise_attn_output_gate")
    edit_config(directory, remove=others, model_type="qwen3")
    loaded = load(resolve(str(directory)))
    assert isinstance(loaded.model, GatedQwen3ForCausalLM)
    assert loaded.variant == "baseline"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaConfig", SIZES),
        ("Qwen3Config", SIZES),
        ("MistralConfig", SIZES),
        ("GPT2Config", {"vocab_size": 260, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}),
        ("GPTNeoXConfig", {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}),
        ("CohereConfig", SIZES | {"use_qk_norm": True}),  # a stock key that is also one of ours
    ],
)
def test_stock_models(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, name)(**options, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    loaded = load(resolve(str(save(model, tmp_path / "m"))))
    assert type(loaded.model) is type(model)
    assert (loaded.variant, loaded.dtype) == (None, torch.float32)
    assert_same_weights(loaded.model, model)


def test_glm4_moe_has_a_use_qk_norm_of_its_own(tmp_path: Path) -> None:
    config = transformers.Glm4MoeConfig(
        **SIZES, moe_intermediate_size=8, n_routed_experts=2, num_experts_per_tok=1
    )
    config.save_pretrained(tmp_path)
    assert type(checkpoint_config.load_config(resolve(str(tmp_path)))) is transformers.Glm4MoeConfig


def test_sharded_safetensors(tmp_path: Path) -> None:
    model = gated_model()
    directory = save(model, tmp_path / "m")
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    assert_same_weights(load(resolve(str(directory))).model, model)
    next(directory.glob("model-00002*")).unlink()
    assert "the weights cannot be used" in error_of(directory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(dtype: str, headwise: Path) -> None:
    loaded = load(resolve(str(headwise)), dtype=dtype, device="cpu")
    assert loaded.dtype == getattr(torch, dtype)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {loaded.dtype}


def test_device_map(headwise: Path) -> None:
    loaded = load(resolve(str(headwise)), device_map="auto")
    assert_same_weights(loaded.model.cpu(), gated_model("gate_headwise"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_keeps_the_checkpoints_dtype(headwise: Path) -> None:
    loaded = load(resolve(str(headwise)))
    assert (loaded.dtype, loaded.device.type) == (torch.bfloat16, "cuda")
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"cuda"}
    assert "there are" in error_of(headwise, device="cuda:99")


def test_verbosity_is_as_before(headwise: Path) -> None:
    def state() -> tuple[Any, ...]:
        bars = transformers_logging.is_progress_bar_enabled(), hub_utils.are_progress_bars_disabled()
        return transformers_logging.get_verbosity(), hub_utils.logging.get_verbosity(), bars

    before = state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(resolve(str(headwise)))
        assert state() == before
        with pytest.raises(RuntimeError), libraries.quiet():
            raise RuntimeError
    assert state() == before
    assert before[0] <= logging.WARNING


def save_one_that_warns(directory: Path) -> Path:
    """GPT-2's BOS outside of this vocabulary, and a head unlike the embeddings that it is said to be tied to."""
    config = transformers.GPT2Config(vocab_size=260, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    save(AutoModelForCausalLM.from_config(config), directory)
    state = load_file(directory / "model.safetensors")
    save_file(state | {"lm_head.weight": torch.randn(260, 32)}, directory / "model.safetensors", {"format": "pt"})
    return directory


# --- weights that do not fit ------------------------------------------------------------------------------------

FIRST_QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("written", VARIANTS)
@pytest.mark.parametrize("said", VARIANTS)
def test_gate_flags_that_disagree_with_the_weights(written: str, said: str, tmp_path: Path) -> None:
    directory = save(gated_model(written), tmp_path / "m")
    flags = {"headwise_attn_output_gate": False, "elementwise_attn_output_gate": False} | GATES[said]
    edit_config(directory, **flags)
    if written == said:
        load(resolve(str(directory)))
        return
    rows = {"baseline": 32, "gate_headwise": 36, "gate_elementwise": 64}
    remedy = {
        "baseline": "set both gate keys to false",
        "gate_headwise": "set headwise_attn_output_gate to true and the other gate key to false",
        "gate_elementwise": "set elementwise_attn_output_gate to true and the other gate key to false",
    }[written]
    assert error_of(directory) == (
        f"model '{directory}': the weights are not those that config.json asks for: 2 of the wrong shape "
        f"({FIRST_QUERY} is {rows[written]}x32 in the checkpoint and {rows[said]}x32 in the model, ...); the "
        f"{rows[written]} rows of q_proj look like {written}, config.json says {said}: if it is {written}, "
        f"{remedy} in config.json"
    )


def test_gated_weights_under_a_plain_config(headwise: Path) -> None:
    edit_config(headwise, remove=GATE_KEYS, model_type="qwen3")
    assert "the 36 rows of q_proj look like gate_headwise, config.json says no gate" in error_of(headwise)


def test_both_gate_flags(headwise: Path) -> None:
    edit_config(headwise, elementwise_attn_output_gate=True)
    assert error_of(headwise) == (
        f"model '{headwise}': config.json cannot be used (ValueError: headwise_attn_output_gate and "
        "elementwise_attn_output_gate are both true; a model has one of them or none: set one to false in "
        "config.json); " + libraries.REMEDIES["config.json"]
    )


def test_missing_weights(headwise: Path) -> None:
    edit_config(headwise, qkv_bias=True)
    start = f"model '{headwise}': the weights are not those that config.json asks for: "
    names = ", ".join(f"model.layers.0.self_attn.{part}_proj.bias" for part in "koq")
    end = "; expected each parameter once: correct config.json"
    assert error_of(headwise) == f"{start}8 missing ({names}, ...){end}"


def test_unexpected_weights(headwise: Path) -> None:
    edit_config(headwise, use_qk_norm=False)
    assert "4 unexpected (model.layers.0.self_attn.k_norm.weight, " in error_of(headwise)


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_stock_models_load_strictly_too(change: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    directory = save(AutoModelForCausalLM.from_config(config), tmp_path / "m")
    state = load_file(directory / "model.safetensors")
    if change == "missing":
        del state["model.norm.weight"]
    elif change == "unexpected":
        state["model.extra.weight"] = torch.zeros(2)
    else:
        state["model.norm.weight"] = torch.zeros(31)
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    fault = {
        "missing": "1 missing (model.norm.weight)",
        "unexpected": "1 unexpected (model.extra.weight)",
        "mismatched": "1 of the wrong shape (model.norm.weight is 31 in the checkpoint and 32 in the model)",
    }[change]
    assert f"the weights are not those that config.json asks for: {fault}; expected" in error_of(directory)


def test_untied_config_for_a_tied_checkpoint(tmp_path: Path) -> None:
    directory = save(gated_model(tie_word_embeddings=True), tmp_path / "m")
    edit_config(directory, tie_word_embeddings=False)
    assert "1 missing (lm_head.weight)" in error_of(directory)


# --- files that cannot be read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [5, 100, -100])
def test_truncated_safetensors(kept: int, headwise: Path) -> None:
    path = headwise / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    message = error_of(headwise)
    assert message.startswith(f"model '{headwise}': the weights cannot be used (SafetensorError: ")
    assert message.endswith(
        "); expected a whole model.safetensors or pytorch_model.bin: copy or download it again"
    )


@pytest.mark.parametrize("kept", [5, 2000, -100])
def test_truncated_bin(kept: int, tmp_path: Path) -> None:
    directory = save_as_official(gated_model(), tmp_path / "m", tmp_path / "ran")
    path = directory / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:kept])
    message = error_of(directory)
    assert message.startswith(f"model '{directory}': the weights cannot be used (")
    assert message.endswith(
        "); expected a whole model.safetensors or pytorch_model.bin: copy or download it again"
    )


class RunsWhenUnpickled:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this ran",)


def test_a_bin_that_would_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_as_official(gated_model(), tmp_path / "m", tmp_path / "ran")
    torch.save({"x": RunsWhenUnpickled()}, directory / "pytorch_model.bin")
    assert error_of(directory) == (
        f"model '{directory}': pytorch_model.bin is damaged or holds more than tensors, which would run code; "
        "expected tensors alone: download it again, or if you trust it save it as safetensors"
    )
    assert capsys.readouterr().out == ""


def test_no_weights(headwise: Path) -> None:
    (headwise / "model.safetensors").unlink()
    assert error_of(headwise) == (
        f"model '{headwise}': the weights cannot be used (OSError: Error no file named model.safetensors, or "
        f"pytorch_model.bin, found in directory {headwise}.); expected a whole model.safetensors or "
        "pytorch_model.bin: copy or download it again"
    )


@pytest.mark.parametrize("files", [(), ("tokenizer_config.json",)])
@pytest.mark.parametrize("tokenizer_class", ["Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_no_tokenizer(files: tuple[str, ...], tokenizer_class: str, headwise: Path) -> None:
    (headwise / "tokenizer.json").unlink()
    (headwise / "tokenizer_config.json").unlink()
    for name in files:
        (headwise / name).write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    message = error_of(headwise)
    assert message.startswith(f"model '{headwise}': the tokenizer ")
    assert message.endswith(
        "; expected tokenizer.json and tokenizer_config.json: put the model's own beside config.json"
    )


def test_a_tokenizer_that_transformers_makes_up_is_refused(headwise: Path) -> None:
    (headwise / "tokenizer.json").unlink()
    (headwise / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    assert "the tokenizer (Qwen2Tokenizer) has no vocabulary; expected tokenizer.json and" in error_of(headwise)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a":', "is not a valid JSON file"),
        ("[1]", "list"),
        ("\xff", "is not a valid JSON file"),
    ],
)
def test_config_that_is_no_config(text: str, reason: str, headwise: Path) -> None:
    (headwise / "config.json").write_text(text, encoding="latin-1")
    message = error_of(headwise)
    assert message.startswith(f"model '{headwise}': config.json cannot be used (")
    assert reason in message
    assert message.endswith("); expected a model's sizes in JSON: correct it, or copy the checkpoint again")


@pytest.mark.parametrize(
    "changes", [{"headwise_attn_output_gate": "yes"}, {"num_hidden_layers": "2"}, {"num_key_value_heads": 3}]
)
def test_config_with_wrong_values(changes: dict[str, Any], headwise: Path) -> None:
    edit_config(headwise, **changes)
    assert "config.json cannot be used (" in error_of(headwise)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(GattnVizError, match=r"holds no config\.json"):
        resolve(str(tmp_path))


# --- models that are not for this tool --------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["nonsense", None])
def test_unknown_model_type(model_type: str | None, headwise: Path) -> None:
    edit_config(headwise, remove=GATE_KEYS, model_type=model_type)
    assert error_of(headwise) == (
        f"model '{headwise}' has model_type {model_type!r} in config.json; expected one that transformers "
        f"{transformers.__version__} knows, or one of the keys qkv_bias, use_qk_norm, headwise_attn_output_gate, "
        "elementwise_attn_output_gate: correct it, or upgrade transformers"
    )


def test_remote_code_runs_only_when_trusted(headwise: Path, tmp_path: Path) -> None:
    (headwise / "configuration_own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise RuntimeError('it ran')\n"
    )
    auto_map = {"AutoConfig": "configuration_own.OwnConfig"}
    edit_config(headwise, remove=GATE_KEYS, model_type="own", auto_map=auto_map)
    assert error_of(headwise) == (
        f"model '{headwise}' (model_type 'own') needs the code that comes with it; expected a model type that "
        "transformers has: read that code, and if you trust it pass --trust-remote-code"
    )
    assert not (tmp_path / "ran").exists()
    assert "it ran" in error_of(headwise, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


BERT = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (transformers.BertConfig(**BERT), "an encoder"),
        (transformers.RobertaConfig(**BERT), "an encoder"),
        (transformers.BartConfig(), "an encoder-decoder"),
        (transformers.T5Config(), "an encoder-decoder"),
        (transformers.ViTConfig(), "not a causal language model"),
    ],
)
def test_models_that_are_no_causal_lm(config: Any, kind: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    assert error_of(tmp_path) == (
        f"model '{tmp_path}' (model_type '{config.model_type}') is {kind}; expected a decoder-only causal LM, "
        "such as Llama, Qwen3, Mistral or GPT-2: choose another model"
    )


# --- devices and dtypes -----------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_no_cuda(device: str, headwise: Path) -> None:
    assert error_of(headwise, device=device) == (
        f"device '{device}' was asked for, but torch {torch.__version__} finds no accelerator here; expected a "
        "device that is there: pass --device cpu, or install torch and a driver for cuda"
    )


def test_unknown_device_dtype_and_device_map(headwise: Path) -> None:
    assert error_of(headwise, device="gpu") == (
        "unknown device 'gpu'; expected auto, cpu, cuda, cuda:N or mps: pass one of them"
    )
    assert error_of(headwise, dtype="int8") == (
        "unknown dtype 'int8'; expected auto, float32, bfloat16, float16: pass one of them"
    )
    assert error_of(headwise, device_map="cpu") == (
        "unknown device map 'cpu'; expected auto, balanced, balanced_low_0, sequential: pass one of them, or "
        "--device for a single device"
    )
    assert error_of(headwise, device="cpu", device_map="auto") == (
        "both device 'cpu' and device map 'auto' were given; expected one: leave the other out"
    )


def test_out_of_memory(headwise: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")

    monkeypatch.setattr(GatedQwen3ForCausalLM, "from_pretrained", fail)
    assert error_of(headwise) == (
        f"model '{headwise}': the device has too little memory (OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 9 GiB); expected room for every weight: pass --dtype bfloat16, --device-map auto or --device cpu"
    )


# --- the Hub ----------------------------------------------------------------------------------------------------

# The libraries read the environment once, when they are imported: so each of these is a process of its own.
LOAD_ALL = """
import json, sys, time
waited, sleep = [], time.sleep
def nap(seconds):
    waited.append(seconds)
    sleep(min(seconds, .01))
time.sleep = nap  # the Hub's library waits before it tries again
from gattn_viz.errors import GattnVizError
from gattn_viz.models.loading import load
from gattn_viz.models.names import resolve
results = {}
for name, checkpoints in json.loads(sys.argv[1]):
    try:
        loaded = load(resolve(name, checkpoints), device="cpu")
        results[name] = [loaded.variant, type(loaded.model).__name__, loaded.model.lm_head.weight.sum().item()]
    except GattnVizError as error:
        results[name] = str(error)
print(json.dumps(results | {"waited": waited}))
"""


def load_in_a_process(
    names: list[tuple[str, str]], before: str = "", **environment: str
) -> tuple[dict[str, Any], str]:
    """What each becomes, and stderr; `before` is run first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", before + LOAD_ALL, json.dumps(names)],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


def test_offline_from_a_filled_cache(tmp_path: Path) -> None:
    cache = tmp_path / "home" / "hub"
    official = gated_model("gate_headwise", tie_word_embeddings=True)
    snapshot = hub_cache(cache, "QwQZh/gated_attention")
    save_as_official(official, snapshot / "1B_gate_headwise", tmp_path / "ran")
    llama = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    save(llama, hub_cache(cache, "org/llama"))
    (save(llama, hub_cache(cache, "org/empty")) / "model.safetensors").unlink()
    save_one_that_warns(hub_cache(cache, "org/gpt2"))

    names = [
        ("gate_headwise", "official"),
        ("QwQZh/gated_attention:1B_gate_headwise", "demo"),
        (f"QwQZh/gated_attention:1B_gate_headwise@{COMMIT}", "demo"),
        ("org/llama@main", "demo"),
        ("org/gpt2", "demo"),
        ("baseline", "official"),
        ("org/empty", "demo"),
        ("org/unknown", "demo"),
    ]
    found, stderr = load_in_a_process(names, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")

    gated = ["gate_headwise", "GatedQwen3ForCausalLM", pytest.approx(official.lm_head.weight.float().sum().item())]
    assert found["gate_headwise"] == gated
    assert found["QwQZh/gated_attention:1B_gate_headwise"] == gated
    assert found[f"QwQZh/gated_attention:1B_gate_headwise@{COMMIT}"] == gated
    assert found["org/llama@main"] == [None, "LlamaForCausalLM", pytest.approx(llama.lm_head.weight.sum().item())]
    assert not (tmp_path / "ran").exists()

    end = (
        "is not in the cache and https://huggingface.co cannot be reached (HF_HUB_OFFLINE is set); expected a "
        "network or a filled cache: run hf download {} where there is a network and set HF_HOME to that cache, or "
        "pass a local directory"
    )
    assert found["org/unknown"] == (
        f"model 'org/unknown': config.json of Hub org/unknown, revision main {end.format('org/unknown')}"
    )
    assert found["baseline"] == (
        "model 'baseline': config.json of Hub QwQZh/gated_attention, revision main, subfolder 1B_baseline "
        + end.format("QwQZh/gated_attention")
    )
    assert found["org/empty"].startswith("model 'org/empty': the weights ")
    assert found["org/gpt2"][1] == "GPT2LMHeadModel"
    assert stderr == "", "transformers' warnings and progress bars are not for the person who uses this"


def test_from_a_hub(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path / "hub")
    official = gated_model("gate_elementwise", tie_word_embeddings=True)
    save_as_official(official, hub.root / "QwQZh/gated_attention" / "1B_gate_elementwise", tmp_path / "ran")
    llama = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    save(llama, hub.root / "org/llama")
    (save(llama, hub.root / "org/empty") / "model.safetensors").unlink()
    names = [
        ("gate_elementwise", "official"),
        ("org/empty", "demo"),
        ("org/llama", "demo"),
        ("org/llama@v9", "demo"),
        ("org/llama:sub", "demo"),
        ("org/gated", "demo"),
        ("org/unknown", "demo"),
    ]
    with hub.running():
        found, stderr = load_in_a_process(
            names, HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret"
        )
    assert found.pop("waited") == []
    assert found == {
        "gate_elementwise": [
            "gate_elementwise",
            "GatedQwen3ForCausalLM",
            pytest.approx(official.lm_head.weight.float().sum().item()),
        ],
        "org/llama": [None, "LlamaForCausalLM", pytest.approx(llama.lm_head.weight.sum().item())],
        "org/llama@v9": (
            "model 'org/llama@v9': the Hub repository org/llama has no revision 'v9'; expected a branch, tag or "
            "commit of it: correct what stands after @"
        ),
        "org/llama:sub": (
            "model 'org/llama:sub': Hub org/llama, revision main, subfolder sub does not have config.json; "
            "expected config.json, weights and tokenizer in one folder: name that folder, "
            "as org/name:folder on the Hub"
        ),
        "org/empty": (
            "model 'org/empty': the weights cannot be used (OSError: org/empty does not appear to have a file "
            "named pytorch_model.bin or model.safetensors.); expected a whole model.safetensors or "
            "pytorch_model.bin: copy or download it again"
        ),
        "org/gated": (
            "model 'org/gated': the Hub repository org/gated is gated and this account may not read it; expected "
            "one with access: ask for it on the repository's page, then set HF_TOKEN or run hf auth login"
        ),
        "org/unknown": (
            "model 'org/unknown': there is no Hub repository org/unknown that this account can see, and no such "
            "directory here; expected a public repository, or access to a private one: check the name, or set "
            "HF_TOKEN"
        ),
    }
    assert "Bearer hf_secret" in hub.tokens
    assert "hf_secret" not in stderr + json.dumps(found)
    assert (tmp_path / "home" / "hub" / "models--org--llama").is_dir()
    assert not (tmp_path / "ran").exists()


def test_what_the_hub_refuses(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path / "hub")
    save(AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)), hub.root / "org/cut")
    names = [*REFUSED, "org/cut", "org/down"]
    with hub.running():
        found, stderr = load_in_a_process(
            [(name, "demo") for name in names], HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=hub.url
        )
    assert stderr == ""

    def refused(name: str, why: str) -> str:
        return (
            f"model 'org/{name}': config.json of Hub org/{name}, revision main is not in the cache and the Hub "
            f"did not give it ({why}): check the access that HF_TOKEN gives, or try again later"
        )

    def broken(name: str, what: str, why: str) -> str:
        return (
            f"model 'org/{name}': {what} of Hub org/{name}, revision main did not come whole: the connection to "
            f"{hub.url} broke off (RemoteProtocolError: {why}); expected every file to its end: run it again, or "
            f"run hf download org/{name} first"
        )

    assert found.pop("waited"), "what is down or busy is asked again, as the Hub's library does"
    cut = found.pop("org/cut")
    assert re.sub(r"\d+ bytes, expected \d+", "N", cut) == broken(
        "cut", "the weights", "peer closed connection without sending complete message body (received N)"
    )
    assert found == {
        "org/gated": (
            "model 'org/gated': the Hub repository org/gated is gated and this account may not read it; expected "
            "one with access: ask for it on the repository's page, then set HF_TOKEN or run hf auth login"
        ),
        "org/private": (
            "model 'org/private': there is no Hub repository org/private that this account can see, and no such "
            "directory here; expected a public repository, or access to a private one: check the name, or set "
            "HF_TOKEN"
        ),
        "org/refused": refused("refused", "403 Forbidden"),
        "org/bad-token": refused("bad-token", "401 Unauthorized: Invalid credentials in Authorization header"),
        "org/disabled": refused("disabled", "403 Forbidden: Access to this resource is disabled."),
        "org/busy": refused("busy", "429 Too Many Requests"),
        "org/ill": refused("ill", "503 Service Unavailable"),
        "org/down": broken("down", "config.json", "Server disconnected without sending a response."),
    }


def test_a_cache_that_takes_nothing(tmp_path: Path) -> None:
    """Each repository is called like the error that the disk has for its files."""
    hub = FakeHub(tmp_path / "hub")
    llama = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    reasons = {"ENOSPC": "OSError", "EROFS": "OSError", "EACCES": "PermissionError"}
    for reason in reasons:
        save(llama, hub.root / "org" / reason)
    full = (
        "import errno, os\nfrom huggingface_hub import file_download\n"
        "def full(url, *_, **__):\n"
        "    number = getattr(errno, url.split('/')[4])\n"
        "    raise OSError(number, os.strerror(number))\n"
        "file_download.http_get = full\n"
    )
    home = tmp_path / "home"
    names = [(f"org/{reason}", "demo") for reason in reasons]
    with hub.running():
        found, stderr = load_in_a_process(names, full, HF_HOME=str(home), HF_ENDPOINT=hub.url)
    for reason, kind in reasons.items():
        number = getattr(errno, reason)
        assert found[f"org/{reason}"] == (
            f"model 'org/{reason}': config.json of Hub org/{reason}, revision main cannot be written to the cache "
            f"{home}/hub ({kind}: [Errno {number}] {os.strerror(number)}); expected a directory with room for the "
            "whole checkpoint: make room, or set HF_HOME to another"
        )
    assert stderr == ""


def test_a_hub_out_of_reach(tmp_path: Path) -> None:
    """It is asked once a process, and the cache is used without waiting."""
    llama = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    save(llama, hub_cache(tmp_path / "home" / "hub", "org/llama"))
    save(gated_model(), hub_cache(tmp_path / "home" / "hub", "org/ours"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"  # where nobody is, once it is closed
    names = ["org/llama", "org/ours", "org/unknown"]
    found, stderr = load_in_a_process(
        [(name, "demo") for name in names], HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=url
    )
    assert found["org/llama"][1:] == ["LlamaForCausalLM", pytest.approx(llama.lm_head.weight.sum().item())]
    assert found["org/ours"][:2] == ["gate_headwise", "GatedQwen3ForCausalLM"]
    assert found["org/unknown"] == (
        f"model 'org/unknown': config.json of Hub org/unknown, revision main is not in the cache and {url} cannot "
        "be reached; expected a network or a filled cache: run hf download org/unknown where there is a network "
        "and set HF_HOME to that cache, or pass a local directory"
    )
    assert stderr == f"{url} cannot be reached: only what is in the cache is there\n"
    assert found["waited"] == [1, 0]


def test_an_endpoint_that_is_no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_constants, "ENDPOINT", "mirror.example")
    assert error_of("org/x") == (
        "HF_ENDPOINT is 'mirror.example'; expected a URL, such as https://huggingface.co: correct or unset it"
    )


def test_the_model_still_belongs_to_auto_classes(headwise: Path) -> None:
    """What `load` needs not, but a notebook may: the saved demo models open with transformers alone."""
    config = transformers.AutoConfig.from_pretrained(headwise)
    assert isinstance(config, GatedQwen3Config)

"""Models whose weights are spread over memory and disk: the same numbers, each layer where it lives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from gattn_viz.capture.anatomy import anatomy
from gattn_viz.capture.collector import Request
from gattn_viz.capture.run import capture
from gattn_viz.errors import GattnVizError
from gattn_viz.models.loading import load
from gattn_viz.models.modeling import GatedQwen3ForCausalLM
from gattn_viz.models.names import resolve
from gattn_viz.models.placement import memory_limits, places
from gattn_viz.pipeline import sink_stats
from gattn_viz.pipeline.run import Run
from tests.models.checkpoints import SIZES, edit_config, gated_model, save, save_as_official

PROMPTS = [list(range(3, 15)), [7, 8, 9]]
LAYERS = frozenset({1, 2, 3, 4})
FITS_HALF = "cpu=100KB"  # of some 250 KB in float32
TEXTS = ["the cat sat on the mat", "a dog"]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A checkpoint of four layers in several files."""
    directory = save(gated_model(num_hidden_layers=4), tmp_path / "m")
    (directory / "model.safetensors").unlink()
    gated_model(num_hidden_layers=4).save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


def request_everything() -> Request:
    needs = frozenset({"first_token", "entropy", "received", "row_max", "residual", "values"})
    return Request(maps=LAYERS, gates=LAYERS, outputs=LAYERS, needs=needs, loss=True)


def assert_same_captures(found: Any, expected: Any) -> None:
    tensors = 0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys() == LAYERS
        for layer, one in mine.items():
            for name, value in vars(theirs[layer]).items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(getattr(one, name), value, rtol=0, atol=0, msg=f"{layer} {name}")
                    tensors += 1
    assert tensors > 20


def test_layers_on_disk_are_captured_like_those_in_memory(shards: Path, tmp_path: Path) -> None:
    """The map is the caller's, as for a model that a notebook has dispatched."""
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.3", "model.norm", "model.rotary_emb", "lm_head")
    device_map = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk", "model.layers.2": "disk"}
    model = GatedQwen3ForCausalLM.from_pretrained(
        shards, device_map=device_map, offload_folder=str(tmp_path / "offload"), dtype=torch.float32
    ).eval()
    weights = [layer.self_attn.q_proj.weight.device.type for layer in model.model.layers]
    assert weights == ["cpu", "meta", "meta", "cpu"]
    assert places(model) == "cpu and disk"
    assert anatomy(model).gate_kind == "headwise"
    plain = load(resolve(str(shards))).model
    expected = capture(plain, PROMPTS, request_everything())
    assert_same_captures(capture(model, PROMPTS, request_everything()), expected)
    batched = capture(plain, PROMPTS, request_everything(), batch_size=2, chunk=5)
    assert_same_captures(capture(model, PROMPTS, request_everything(), batch_size=2, chunk=5), batched)
    assert [layer.self_attn.q_proj.weight.device.type for layer in model.model.layers] == [
        "cpu",
        "meta",
        "meta",
        "cpu",
    ]


@pytest.mark.parametrize("family", ["gated", "llama", "gpt2"])
def test_dispatched_by_accelerate(family: str, tmp_path: Path) -> None:
    """Weights that accelerate itself has written to a folder."""
    from accelerate import disk_offload

    from tests.models.test_peft_adapter import stock_model

    model = gated_model().float() if family == "gated" else stock_model(family)
    expected = capture(model, PROMPTS, Request(maps=frozenset({1, 2})))
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    found = capture(model, PROMPTS, Request(maps=frozenset({1, 2})))
    for mine, theirs in zip(found, expected, strict=True):
        for layer in (1, 2):
            assert torch.equal(mine[layer].probabilities, theirs[layer].probabilities)


def numbers(directory: Path, **options: Any) -> torch.Tensor:
    table = sink_stats([str(directory)], TEXTS, run=Run(**options))
    return torch.tensor(table.select_dtypes("number").to_numpy(float))


def test_max_memory(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    spread = {"device_map": "auto", "max_memory": FITS_HALF}
    loaded = load(resolve(str(shards)), **spread)
    assert places(loaded.model) == "cpu and disk"
    assert loaded.device.type == "cpu"
    assert not caplog.records, "accelerate's warnings are not for the person who uses this"
    expected = numbers(shards)
    torch.testing.assert_close(numbers(shards, **spread), expected, rtol=0, atol=0, equal_nan=True)
    all_on_disk = {"device_map": "auto", "max_memory": "cpu=1KB"}
    torch.testing.assert_close(numbers(shards, **all_on_disk), expected, rtol=0, atol=0, equal_nan=True)


def test_a_pytorch_model_bin_needs_a_folder(tmp_path: Path) -> None:
    model = gated_model(num_hidden_layers=4)
    directory = save_as_official(model, tmp_path / "m", tmp_path / "ran")
    edit_config(directory, num_hidden_layers=4)
    spread = {"device_map": "auto", "max_memory": FITS_HALF}
    with pytest.raises(GattnVizError) as caught:
        load(resolve(str(directory)), **spread)
    assert str(caught.value) == (
        f"model '{directory}': not all weights fit into memory, and these files cannot be read in parts; expected "
        "a directory for the rest: pass --offload-folder DIR, or a larger --max-memory"
    )
    folder = tmp_path / "offload"
    found = numbers(directory, **spread, offload_folder=str(folder))
    assert list(folder.iterdir())
    torch.testing.assert_close(found, numbers(directory), rtol=0, atol=0, equal_nan=True)


def test_a_shard_that_is_missing(shards: Path) -> None:
    next(shards.glob("model-00002*")).unlink()
    with pytest.raises(GattnVizError) as caught:
        load(resolve(str(shards)), device_map="auto", max_memory=FITS_HALF)
    assert "model-00002-of-" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapter_on_weights_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from tests.models.test_peft_adapter import save_adapter

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    base = save(model, tmp_path / "m")
    adapter = str(save_adapter(model, tmp_path / "lora", ("q_proj", "o_proj")))
    with pytest.raises(GattnVizError) as caught:
        numbers(base, adapter=adapter, device_map="auto", max_memory="cpu=60KB")
    assert str(caught.value) == (
        f"adapter '{adapter}' cannot be merged into weights that are on disk or were left out of memory; expected "
        "them in memory: leave out --device-map or give more --max-memory, or save the merged model once and pass "
        "that"
    )
    found = numbers(base, adapter=adapter, device_map="auto")
    torch.testing.assert_close(found, numbers(base, adapter=adapter), rtol=0, atol=0, equal_nan=True)


def test_memory_limits() -> None:
    assert memory_limits("cpu=20GiB") == {"cpu": 20 * 2**30}
    assert memory_limits("cpu=500MB") == {"cpu": 500 * 10**6}


@pytest.mark.parametrize(
    "text", ["20GiB", "cpu=", "=2GB", "gpu=2GB", "cpu=20GiB,", "cpu=20XB", "cpu=-1", "-1=2GB", "cpu=1GB,cpu=2GB"]
)
def test_limits_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(GattnVizError, match=f"^max memory '{text}': .*expected"):
        memory_limits(text)


def test_limits_of_a_gpu_that_is_not_there() -> None:
    with pytest.raises(GattnVizError, match=r"max memory '99=10GiB,cpu=1GiB' is of GPU 99, but there are \d"):
        memory_limits("99=10GiB,cpu=1GiB")


def test_without_a_device_map(shards: Path) -> None:
    for name, value in {"max_memory": "cpu=1GiB", "offload_folder": "x"}.items():
        with pytest.raises(GattnVizError) as caught:
            load(resolve(str(shards)), **{name: value})
        assert str(caught.value) == (
            f"the {name.replace('_', ' ')} '{value}' was given without a device map; expected both: add "
            "--device-map auto"
        )


@pytest.mark.parametrize(
    ("spread", "words"),
    [
        ({"a": 1, "b": 0, "c": "disk", "d": "cpu"}, "cuda:0, cuda:1, cpu and disk"),
        ({"": "disk"}, "disk"),
        ({"": torch.device("cuda", 1)}, "cuda:1"),
        (None, "cpu"),
    ],
)
def test_places(spread: dict[str, Any] | None, words: str) -> None:
    assert places(SimpleNamespace(hf_device_map=spread, device=torch.device("cpu"))) == words

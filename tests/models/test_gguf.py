"""GGUF files, against the model they were written from and blocks that are taken apart by hand."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from gattn_viz.errors import GattnVizError
from gattn_viz.models import gguf as module
from gattn_viz.models.description import describe
from gattn_viz.models.gguf import place
from gattn_viz.models.loading import load
from gattn_viz.models.names import resolve
from gattn_viz.models.weights import weights_sha256
from tests.conftest import tiny_tokenizer
from tests.models import gguf_files as files


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return files.tiny_llama()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    monkeypatch.setenv("GATTN_VIZ_CACHE", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "gattn_viz")
    return tmp_path / "cache"


def error_of(path: Path) -> str:
    with pytest.raises(GattnVizError) as caught:
        place(resolve(str(path)))
    return str(caught.value)


def test_a_file_gives_the_model_it_was_made_of(llama: LlamaForCausalLM, cache: Path, tmp_path: Path) -> None:
    loaded = load(resolve(str(files.write_gguf(tmp_path / "my.tiny.gguf", llama, tiny_tokenizer()))))
    assert loaded.source.label == "my.tiny"
    assert loaded.dtype == torch.float32
    ids = tiny_tokenizer()("the cat sat on the mat")["input_ids"]
    assert loaded.tokenizer("the cat sat on the mat", add_special_tokens=False)["input_ids"] == ids[1:]
    assert loaded.tokenizer.bos_token == "<s>"
    with torch.no_grad():
        expected, found = llama(torch.tensor([ids])).logits, loaded.model(torch.tensor([ids])).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def q8_0(block: np.ndarray) -> np.ndarray:
    """32 whole numbers, and a scale in half precision."""
    scale = np.abs(block).max() / 127
    return np.float32(np.float16(scale)) * np.trunc(block / scale + np.copysign(0.5, block))


def q4_1(block: np.ndarray) -> np.ndarray:
    """32 numbers from 0 to 15, and a scale and the smallest value in half precision."""
    low, scale = block.min(), (block.max() - block.min()) / 15
    return np.float32(np.float16(scale)) * np.trunc((block - low) / scale + 0.5) + np.float32(np.float16(low))


@pytest.mark.parametrize(("kind", "in_blocks"), [("Q8_0", q8_0), ("Q4_1", q4_1)])
def test_blocks_are_dequantised_and_that_is_said(
    kind: str,
    in_blocks: Callable[[np.ndarray], np.ndarray],
    llama: LlamaForCausalLM,
    cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = files.write_gguf(tmp_path / "tiny.gguf", llama, tiny_tokenizer(), kind)
    weights = load(resolve(str(path))).model.state_dict()
    assert f"tiny: weights dequantised to float32 from {kind}, F32" in caplog.messages
    name = "model.layers.1.mlp.down_proj.weight"
    original = llama.state_dict()[name].numpy()
    expected = np.array([[in_blocks(block) for block in row.reshape(-1, 32)] for row in original])
    np.testing.assert_allclose(weights[name].numpy(), expected.reshape(original.shape), rtol=0, atol=1e-6)
    assert np.abs(expected.reshape(original.shape) - original).max() > 1e-4  # else nothing was quantised


def test_the_second_time_nothing_is_converted(
    llama: LlamaForCausalLM,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = files.write_gguf(tmp_path / "tiny.gguf", llama, tiny_tokenizer())
    first = place(resolve(str(path)))
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "tiny: converting tiny.gguf",
        f"tiny: kept in {first}",
        "tiny: weights dequantised to float32 from F32",
    ]
    assert [child.name for child in cache.iterdir()] == [Path(first).name]
    caplog.clear()
    monkeypatch.setattr(module, "find_spec", lambda name: None)  # as if gguf were gone
    renamed = path.rename(tmp_path / "other.gguf")
    assert place(resolve(str(renamed))) == first
    assert caplog.messages == ["other: weights dequantised to float32 from F32"]

    caplog.clear()
    monkeypatch.setattr(module, "find_spec", importlib.util.find_spec)
    other = files.write_gguf(tmp_path / "tiny.gguf", llama, tiny_tokenizer(), "Q8_0")
    assert place(resolve(str(other))) != first
    monkeypatch.setattr(module.transformers, "__version__", "99")
    assert "transformers-99" in module._converted.__wrapped__(resolve(str(other)), cache, 0, 0).name


@pytest.mark.parametrize("damage", ["no file", "cut file", "no about", "broken about", "empty about", "a file"])
def test_a_damaged_conversion_is_made_anew(
    damage: str, llama: LlamaForCausalLM, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = files.write_gguf(tmp_path / "tiny.gguf", llama, tiny_tokenizer())
    made = Path(place(resolve(str(path))))
    weights = (made / "model.safetensors").read_bytes()
    match damage:
        case "no file":
            (made / "config.json").unlink()
        case "cut file":
            (made / "model.safetensors").write_bytes(weights[:-10])
        case "no about":
            (made / module.ABOUT).unlink()
        case "broken about":
            (made / module.ABOUT).write_bytes(b"\xff{")
        case "empty about":
            (made / module.ABOUT).write_text("{}")
        case "a file":
            shutil.rmtree(made)
            made.write_text("mine")
    module._converted.cache_clear()
    caplog.clear()
    assert place(resolve(str(path))) == str(made)
    assert (made / "model.safetensors").read_bytes() == weights
    assert ("is damaged: it is made anew" in caplog.text) == (damage != "a file")


def test_what_lies_beside_the_file_is_not_taken(llama: LlamaForCausalLM, cache: Path, tmp_path: Path) -> None:
    path = files.write_gguf(tmp_path / "tiny.gguf", llama, tiny_tokenizer())
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert describe(resolve(str(path))).model_type == "llama"


def test_the_hash_of_its_weights_is_that_of_the_file(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "any.gguf"
    path.write_bytes(b"abc")
    # of FIPS 180-2, appendix B.1
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert weights_sha256(resolve(str(path))) == expected


class TestRefusals:
    def test_another_file(self, cache: Path, tmp_path: Path) -> None:
        path = tmp_path / "any.gguf"
        path.write_bytes(b"PK\3\4")
        assert "is not a GGUF file: it starts with b'PK\\x03\\x04'; expected b'GGUF'" in error_of(path)
        assert not cache.exists()

    def test_without_the_library(
        self, llama: LlamaForCausalLM, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = files.write_gguf(tmp_path / "tiny.gguf", llama, tiny_tokenizer())
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        assert error_of(path).endswith(
            "is a GGUF file, and gguf, which reads it, is not installed; expected it: pip install "
            "'gattn-viz[gguf]'"
        )

    def test_a_truncated_file(self, llama: LlamaForCausalLM, cache: Path, tmp_path: Path) -> None:
        path = files.write_gguf(tmp_path / "tiny.gguf", llama, tiny_tokenizer())
        path.write_bytes(path.read_bytes()[:9000])
        assert "the GGUF file cannot be used (" in error_of(path)
        assert list(cache.iterdir()) == []

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architecture": "nonesuch"}, "nonesuch is not supported yet.); expected one whole file of an"),
            ({"leave_out": "blk.1.ffn_up.weight"}, "lacks 1 weights, such as model.layers.1.mlp.up_proj.weight"),
            (
                {"extra": "blk.1.attn_v.bias"},
                "the GGUF file has 100,164 weights, and transformers makes a model of 100,160 of it",
            ),
        ],
    )
    def test_what_transformers_cannot_read_whole(
        self, changes: dict[str, str], message: str, llama: LlamaForCausalLM, cache: Path, tmp_path: Path
    ) -> None:
        assert message in error_of(files.write_gguf(tmp_path / "tiny.gguf", llama, tiny_tokenizer(), **changes))
        assert list(cache.iterdir()) == []

    @pytest.mark.parametrize("changes", [{"extra": "rope_freqs.weight"}, {"scaling": "yarn"}])
    def test_scaled_frequencies_are_warned_of(
        self,
        changes: dict[str, str],
        llama: LlamaForCausalLM,
        cache: Path,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        place(resolve(str(files.write_gguf(tmp_path / "tiny.gguf", llama, tiny_tokenizer(), **changes))))
        name = changes.get("extra", "llama.rope.scaling.type")
        assert f"transformers leaves out {name}, by which the model scales its rotary" in caplog.text

    def test_a_cache_that_is_a_file(self, llama: LlamaForCausalLM, cache: Path, tmp_path: Path) -> None:
        cache.write_text("")
        path = files.write_gguf(tmp_path / "tiny.gguf", llama, tiny_tokenizer())
        assert error_of(path).startswith(f"cannot write to the cache {cache} (File exists); expected")

    def test_a_conversion_that_breaks_leaves_nothing(
        self, llama: LlamaForCausalLM, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(self: LlamaForCausalLM, to: Path) -> None:
            (to / "model.safetensors").write_text("half")
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
        path = files.write_gguf(tmp_path / "tiny.gguf", llama, tiny_tokenizer())
        assert "(No space left on device); expected a directory with room" in error_of(path)
        assert list(cache.iterdir()) == []

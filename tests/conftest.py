"""What all tests share: no network, and three tiny random checkpoints that differ in the gate."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.pop("GATTN_VIZ_CHECKPOINTS", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads would only wait for each other

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from gattn_viz.cache import cache_directory
from gattn_viz.models.configuration import GatedQwen3Config
from gattn_viz.models.modeling import GatedQwen3ForCausalLM

GATES = {
    "baseline": {},
    "gate_headwise": {"headwise_attn_output_gate": True},
    "gate_elementwise": {"elementwise_attn_output_gate": True},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The README's commands, which run one after the other, come first: the others run beside them."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """The command line sets the package's logger up, and `-q` makes it silent: not for the next test."""
    log = logging.getLogger("gattn_viz")
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


TEXT = "the cat sat on the mat and the dog sat on the log while the rain fell on the roof of the house\n" * 20


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that puts `<s>` in front of every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>")


def tiny_config(variant: str, **changes: object) -> GatedQwen3Config:
    """3 layers of 4 heads, 2 of them KV, with weights large enough that attention is far from uniform."""
    sizes: dict[str, object] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "pad_token_id": 1,
    }
    return GatedQwen3Config(**{**sizes, **GATES[variant], **changes})


def tiny_model(variant: str, seed: int = 0, **changes: object) -> GatedQwen3ForCausalLM:
    torch.manual_seed(seed)
    return GatedQwen3ForCausalLM(tiny_config(variant, **changes)).eval()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: that of GATTN_VIZ_SMOLLM2, or fetched into the cache."""
    given = os.environ.get("GATTN_VIZ_SMOLLM2")
    if given:
        return Path(given).resolve()
    script = Path(__file__).parents[1] / "scripts" / "fetch_smollm2.py"
    done = subprocess.run(
        [sys.executable, script, cache_directory()], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def converted_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for the tests of real weights, which they share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny_trio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for `--checkpoints` with the three variants in it."""
    directory = tmp_path_factory.mktemp("trio")
    for variant in GATES:
        tiny_model(variant).save_pretrained(directory / variant)
        tiny_tokenizer().save_pretrained(directory / variant)
    return directory

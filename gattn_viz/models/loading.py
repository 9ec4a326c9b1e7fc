"""Loading a causal LM strictly: every weight in its place, or one line that says which is not.

One of the paper's models goes to the project's own classes (see `checkpoint_config`), all others to transformers'
Auto classes. Code from a checkpoint is never run unless the caller trusts it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gattn_viz.errors import GattnVizError
from gattn_viz.models.checkpoint_config import is_quantised, read_config
from gattn_viz.models.configuration import GatedQwen3Config
from gattn_viz.models.gguf import place
from gattn_viz.models.libraries import REMEDIES, explained, listed, no_conversion, quiet, where
from gattn_viz.models.modeling import GatedQwen3ForCausalLM
from gattn_viz.models.names import ModelSource
from gattn_viz.models.peft_adapter import add_adapter, check_no_adapter
from gattn_viz.models.placement import check_placement, input_device, memory_limits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class LoadedModel:
    """A model that is ready to run, and what it was made from.

    Attributes:
        model: in eval mode.
        variant: `baseline`, `gate_headwise` or `gate_elementwise`; None when it is not one of the paper's models.
        dtype: of the parameters.
        device: of the embeddings, where token ids go.
    """

    source: ModelSource
    model: Any
    tokenizer: Any
    config: Any
    variant: str | None
    dtype: torch.dtype
    device: torch.device


def load(
    source: ModelSource,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    max_memory: str | None = None,
    offload_folder: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a checkpoint's model and tokenizer.

    Args:
        dtype: float32, bfloat16, float16, or `auto`: float32 on a CPU, the checkpoint's own on an accelerator.
        device: `auto` is cuda where there is one, else cpu; or a torch device such as `cuda:1` or `mps`.
        device_map: instead of `device`, how accelerate spreads the layers over devices: one of
            `placement.DEVICE_MAPS`. What does not fit stays in the CPU's memory, or on disk, and is fetched layer
            by layer.
        max_memory: with a device map, at most how much of each device, such as `0=10GiB,cpu=20GiB`.
        offload_folder: with a device map, a directory for weights that are to lie on disk, where the checkpoint's
            own files cannot be read in parts, as pytorch_model.bin.
        trust_remote_code: run the code that comes with a checkpoint. Never used for the paper's models.

    Raises:
        GattnVizError: the checkpoint cannot be had or read, is not a causal LM, its weights are not exactly those
            its config asks for, its adapter does not fit, or the dtype or device is not there.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise GattnVizError(f"unknown dtype {dtype!r}; expected auto, {', '.join(DTYPES)}: pass one of them")
    check_placement(device, device_map, max_memory, offload_folder)
    target = find_device(device)
    wanted_dtype = DTYPES.get(dtype, torch.float32 if target.type == "cpu" else "auto")
    placement: Any = device_map
    if device_map is None and target.type != "cpu":
        placement = {"": str(target)}

    config, unstated = read_config(source, trust_remote_code)
    check_no_adapter(source)
    tokenizer = load_tokenizer(source, config, trust_remote_code=trust_remote_code)
    options = {"dtype": wanted_dtype, "device_map": placement, "trust_remote_code": trust_remote_code}
    if max_memory is not None:
        options["max_memory"] = memory_limits(max_memory)
    if offload_folder is not None:
        options["offload_folder"] = offload_folder
    model, report = _load_weights(source, config, options)
    completed = _completed(config, unstated, report)
    if completed is not None:
        config = completed
        model, report = _load_weights(source, config, options)
    _check_weights(source, config, report)
    if is_quantised(config):
        _first_pass(source, model)
    if source.adapter is not None:
        model = add_adapter(model, source)
    return LoadedModel(
        source=source,
        model=model.eval(),
        tokenizer=tokenizer,
        config=model.config,
        variant=config.variant if isinstance(config, GatedQwen3Config) else None,
        dtype=model.dtype,
        device=input_device(model),
    )


def load_tokenizer(source: ModelSource, config: Any, *, trust_remote_code: bool = False) -> Any:
    """A checkpoint's tokenizer.

    Raises:
        GattnVizError: there is none, or it cannot be read.
    """
    trusted = trust_remote_code and not isinstance(config, GatedQwen3Config)
    with quiet(), explained(source, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            place(source), config=config, trust_remote_code=trusted, **where(source)
        )
    # without files, transformers makes some tokenizers that know nothing but their special tokens
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    if not tokenizer.get_vocab().keys() - special:
        raise GattnVizError(
            f"model {source.name!r}: the tokenizer ({type(tokenizer).__name__}) has no vocabulary; "
            f"{REMEDIES['the tokenizer']}"
        )
    return tokenizer


def find_device(device: str) -> torch.device:
    """The torch device of that name; `auto` is cuda where there is one, else cpu.

    Raises:
        GattnVizError: there is no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise GattnVizError(
            f"unknown device {device!r}; expected auto, cpu, cuda, cuda:N or mps: pass one of them"
        ) from error
    if found.type == "cpu":
        return found
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type != found.type:
        raise GattnVizError(
            f"device {device!r} was asked for, but torch {torch.__version__} finds "
            f"{'no accelerator' if present is None else f'only {present.type} and cpu'} here; expected a device "
            f"that is there: pass --device {'cpu' if present is None else present.type}, or install torch and a "
            f"driver for {found.type}"
        )
    count = torch.accelerator.device_count()
    if found.index is not None and found.index >= count:
        raise GattnVizError(
            f"device {device!r} was asked for, but there are {count}; expected {found.type}:0 to "
            f"{found.type}:{count - 1}: pass one of them"
        )
    return found


def _load_weights(source: ModelSource, config: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model, and transformers' report of what did not fit."""
    model_class: Any = AutoModelForCausalLM
    if isinstance(config, GatedQwen3Config):
        model_class = GatedQwen3ForCausalLM
        options = {**options, "trust_remote_code": False}
    found = where(source)
    what = "the quantised weights" if is_quantised(config) else "the weights"
    with quiet(), no_conversion(), explained(source, what):
        return model_class.from_pretrained(
            place(source),
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report has them, see _check_weights
            adapter_kwargs={name: found[name] for name in ("local_files_only",) if name in found},
            **options,
            **found,
        )


def _first_pass(source: ModelSource, model: Any) -> None:
    """Run the whole of a quantised model on a token, before its parts are run.

    compressed-tensors unpacks weights then and not before, and a kernel that this device does not have shows.

    Raises:
        GattnVizError: it cannot be run.
    """
    # it says in each layer of each pass to what it casts
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with quiet(), explained(source, "the quantised weights"), torch.no_grad():
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=input_device(model)))


def _completed(config: Any, unstated: frozenset[str], report: dict[str, Any]) -> GatedQwen3Config | None:
    """The configuration with what config.json left out and the weights tell; None if there is nothing."""
    told: dict[str, Any] = {}
    if any(key.endswith("self_attn.q_norm.weight") for key in report["missing_keys"]):
        told["use_qk_norm"] = False
    if any(key.endswith("self_attn.q_proj.bias") for key in report["unexpected_keys"]):
        told["qkv_bias"] = True
    for key, found, _ in report["mismatched_keys"]:
        if key.endswith("self_attn.k_proj.weight"):
            told["head_dim"] = found[0] // config.num_key_value_heads
    told = {key: value for key, value in told.items() if key in unstated}
    return GatedQwen3Config.from_dict({**config.to_dict(), **told}) if told else None


def _check_weights(source: ModelSource, config: Any, report: dict[str, Any]) -> None:
    """Every parameter must have come from the checkpoint, and everything in it must have been used."""
    mismatched = [
        f"{key} is {_shape(found)} in the checkpoint and {_shape(wanted)} in the model"
        for key, found, wanted in sorted(report["mismatched_keys"])
    ]
    problems = [
        listed(sorted(report["missing_keys"]), "missing"),
        listed(sorted(report["unexpected_keys"]), "unexpected"),
        listed(mismatched, "of the wrong shape", limit=1),
    ]
    found_problems = ", ".join(problem for problem in problems if problem)
    if found_problems:
        raise GattnVizError(
            f"model {source.name!r}: the weights are not those that config.json asks for: {found_problems}; "
            f"{_weights_look_like(config, report) or 'expected each parameter once: correct config.json'}"
        )


def _weights_look_like(config: Any, report: dict[str, Any]) -> str | None:
    """What the rows of a `q_proj` of the wrong shape say about the gate."""
    heads = getattr(config, "num_attention_heads", None)
    rows = next((found[0] for key, found, _ in report["mismatched_keys"] if key.endswith("q_proj.weight")), None)
    if rows is None or not heads:
        return None
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    looks = {
        width: ("baseline", "set both gate keys to false"),
        width + heads: (
            "gate_headwise",
            "set headwise_attn_output_gate to true and the other gate key to false",
        ),
        2 * width: (
            "gate_elementwise",
            "set elementwise_attn_output_gate to true and the other gate key to false",
        ),
    }
    if rows not in looks:
        return None
    variant, remedy = looks[rows]
    said = config.variant if isinstance(config, GatedQwen3Config) else "no gate"
    return (
        f"the {rows} rows of q_proj look like {variant}, config.json says {said}: if it is {variant}, {remedy} in "
        "config.json"
    )


def _shape(size: Any) -> str:
    return "x".join(map(str, size)) or "a scalar"

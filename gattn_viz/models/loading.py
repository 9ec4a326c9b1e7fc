"""Loading a causal LM strictly: every weight in its place, or one line that says which is not.

A config.json with any of `GATE_KEYS` is one of the paper's models and goes to the project's own classes, whatever
its `model_type` and `auto_map` say; all others go to transformers' Auto classes. A key that transformers' own
class for the model type has does not count: Cohere and GLM-4.5 have a `use_qk_norm`, Qwen2-MoE has a `qkv_bias`.
Code from a checkpoint is never run unless the caller trusts it.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from huggingface_hub import constants as hub_constants
from huggingface_hub import errors as hub_errors
from huggingface_hub import utils as hub_utils
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
)
from transformers.utils import logging as transformers_logging

from gattn_viz.errors import GattnVizError
from gattn_viz.models.configuration import GATE_KEYS, GatedQwen3Config
from gattn_viz.models.modeling import GatedQwen3ForCausalLM
from gattn_viz.models.names import ModelSource

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What a config.json of the paper's may leave out and the weights tell. The paper's code has defaults for the
# first and the last (true, 128) and none for the second.
SETTLED_BY_WEIGHTS = ("use_qk_norm", "qkv_bias", "head_dim")

# What is expected of each part of a checkpoint, and what to do if it cannot be used.
REMEDIES = {
    "config.json": "expected a model's sizes in JSON: correct it, or copy the checkpoint again",
    "the tokenizer": "expected tokenizer.json and tokenizer_config.json: put the model's own beside config.json",
    "the weights": "expected a whole model.safetensors or pytorch_model.bin: copy or download it again",
}


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
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a checkpoint's model and tokenizer.

    Args:
        dtype: float32, bfloat16, float16, or `auto`: float32 on a CPU, the checkpoint's own on an accelerator.
        device: `auto` is cuda where there is one, else cpu; or a torch device such as `cuda:1` or `mps`.
        device_map: instead of `device`, how accelerate spreads the layers over devices: one of `DEVICE_MAPS`.
        trust_remote_code: run the code that comes with a checkpoint. Never used for the paper's models.

    Raises:
        GattnVizError: the checkpoint cannot be had or read, is not a causal LM, its weights are not exactly those
            its config asks for, or the dtype or device is not there.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise GattnVizError(f"unknown dtype {dtype!r}; expected auto, {', '.join(DTYPES)}: pass one of them")
    if device_map is not None and device_map not in DEVICE_MAPS:
        raise GattnVizError(
            f"unknown device map {device_map!r}; expected {', '.join(DEVICE_MAPS)}: pass one of them, or --device "
            "for a single device"
        )
    if device_map is not None and device != "auto":
        raise GattnVizError(
            f"both device {device!r} and device map {device_map!r} were given; expected one: leave the other out"
        )
    target = find_device(device)
    wanted_dtype = DTYPES.get(dtype, torch.float32 if target.type == "cpu" else "auto")
    placement: Any = device_map
    if device_map is None and target.type != "cpu":
        placement = {"": str(target)}

    config, unstated = _read_config(source, trust_remote_code)
    tokenizer = load_tokenizer(source, config, trust_remote_code=trust_remote_code)
    options = {"dtype": wanted_dtype, "device_map": placement, "trust_remote_code": trust_remote_code}
    model, report = _load_weights(source, config, options)
    completed = _completed(config, unstated, report)
    if completed is not None:
        config = completed
        model, report = _load_weights(source, config, options)
    _check_weights(source, config, report)
    home = model.get_input_embeddings().weight.device
    return LoadedModel(
        source=source,
        model=model.eval(),
        tokenizer=tokenizer,
        config=model.config,
        variant=config.variant if isinstance(config, GatedQwen3Config) else None,
        dtype=model.dtype,
        device=torch.device("cpu") if home.type == "meta" else home,  # accelerate moves ids of offloaded layers
    )


def load_config(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """A checkpoint's configuration: a `GatedQwen3Config` for the paper's models, else transformers' own class.

    Raises:
        GattnVizError: it cannot be had or read, both gates are set, or it is not of a causal LM.
    """
    return _read_config(source, trust_remote_code)[0]


def load_tokenizer(source: ModelSource, config: Any, *, trust_remote_code: bool = False) -> Any:
    """A checkpoint's tokenizer.

    Raises:
        GattnVizError: there is none, or it cannot be read.
    """
    trusted = trust_remote_code and not isinstance(config, GatedQwen3Config)
    with quiet(), _explained(source, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            source.location, config=config, trust_remote_code=trusted, **_where(source)
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


# --- config.json ------------------------------------------------------------------------------------------------


def _read_config(source: ModelSource, trust_remote_code: bool) -> tuple[Any, frozenset[str]]:
    """The configuration, and which of `SETTLED_BY_WEIGHTS` a config.json of the paper's leaves out."""
    with quiet(), _explained(source, "config.json"):
        values, _ = PretrainedConfig.get_config_dict(source.location, **_where(source))
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, expected an object with model_type and sizes")
        if not values:  # also what transformers makes of a repository without the file
            raise GattnVizError(f"model {source.name!r}: {_no_file(source, 'config.json')}")
        if _is_gated(values):
            unstated = frozenset(key for key in SETTLED_BY_WEIGHTS if values.get(key) is None)
            return _gated_config({key: values[key] for key in values.keys() - unstated}), unstated
        _check_model_type(source, values, trust_remote_code)
        config = AutoConfig.from_pretrained(source.location, trust_remote_code=trust_remote_code, **_where(source))
        _check_causal(source, config)
        return config, frozenset()


def _is_gated(values: dict[str, Any]) -> bool:
    """Whether a config.json has a gate key that says something new, see the module's docstring."""
    stock: Any = PretrainedConfig
    if values.get("model_type") in CONFIG_MAPPING:
        stock = CONFIG_MAPPING[values["model_type"]]
    return stock is GatedQwen3Config or any(key in values and not hasattr(stock, key) for key in GATE_KEYS)


def _gated_config(values: dict[str, Any]) -> GatedQwen3Config:
    """The project's configuration from one of the paper's, which may call itself qwen2 or qwen3."""
    ours = {key: value for key, value in values.items() if key not in ("model_type", "auto_map", "architectures")}
    if "head_dim" not in ours and ours.get("hidden_size") and ours.get("num_attention_heads"):
        ours["head_dim"] = ours["hidden_size"] // ours["num_attention_heads"]
    return GatedQwen3Config.from_dict(ours)


def _check_model_type(source: ModelSource, values: dict[str, Any], trust_remote_code: bool) -> None:
    model_type = values.get("model_type")
    if model_type in CONFIG_MAPPING or (trust_remote_code and "auto_map" in values):
        return
    if "auto_map" in values:
        raise GattnVizError(
            f"model {source.name!r} (model_type {model_type!r}) needs the code that comes with it; expected a "
            "model type that transformers has: read that code, and if you trust it pass --trust-remote-code"
        )
    raise GattnVizError(
        f"model {source.name!r} has model_type {model_type!r} in config.json; expected one that transformers "
        f"{transformers.__version__} knows, or one of the keys {', '.join(GATE_KEYS)}: correct it, or upgrade "
        "transformers"
    )


def _check_causal(source: ModelSource, config: Any) -> None:
    """Refuse what is not a decoder that predicts the next token."""
    # The encoders that can be turned into decoders have both keys; others keep a stray `is_decoder`.
    encoder = getattr(config, "is_decoder", None) is False and hasattr(config, "add_cross_attention")
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder"
    elif encoder:
        kind = "an encoder"
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return
    else:
        kind = "not a causal language model"
    raise GattnVizError(
        f"model {source.name!r} (model_type {config.model_type!r}) is {kind}; expected a decoder-only causal "
        "LM, such as Llama, Qwen3, Mistral or GPT-2: choose another model"
    )


# --- weights ----------------------------------------------------------------------------------------------------


def _load_weights(source: ModelSource, config: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model, and transformers' report of what did not fit."""
    model_class: Any = AutoModelForCausalLM
    if isinstance(config, GatedQwen3Config):
        model_class = GatedQwen3ForCausalLM
        options = {**options, "trust_remote_code": False}
    with quiet(), _no_conversion(), _explained(source, "the weights"):
        return model_class.from_pretrained(
            source.location,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report has them, see _check_weights
            **options,
            **_where(source),
        )


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
        _listed(sorted(report["missing_keys"]), "missing"),
        _listed(sorted(report["unexpected_keys"]), "unexpected"),
        _listed(mismatched, "of the wrong shape", limit=1),
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


def _listed(items: list[str], kind: str, limit: int = 3) -> str:
    if not items:
        return ""
    more = ", ..." if len(items) > limit else ""
    return f"{len(items)} {kind} ({', '.join(items[:limit])}{more})"


def _shape(size: Any) -> str:
    return "x".join(map(str, size)) or "a scalar"


# --- talking to the libraries -----------------------------------------------------------------------------------


def _where(source: ModelSource) -> dict[str, str]:
    """The arguments that every `from_pretrained` needs besides the location."""
    given = {"revision": source.revision, "subfolder": source.subfolder}
    return {key: value for key, value in given.items() if value is not None}


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no progress bars from transformers; those of a download stay as they were."""
    verbosity = transformers_logging.get_verbosity()
    hub_verbosity = hub_utils.logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    # transformers' switch for its bars moves the hub's too
    reset_hub_bars = (
        hub_utils.disable_progress_bars
        if hub_utils.are_progress_bars_disabled()
        else hub_utils.enable_progress_bars
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity(transformers_logging.CRITICAL)
        hub_utils.logging.set_verbosity(hub_utils.logging.CRITICAL)
        transformers_logging.disable_progress_bar()
        reset_hub_bars()
        try:
            yield
        finally:
            if bars:
                transformers_logging.enable_progress_bar()
                reset_hub_bars()
            hub_utils.logging.set_verbosity(hub_verbosity)
            transformers_logging.set_verbosity(verbosity)


@contextmanager
def _no_conversion() -> Iterator[None]:
    """Keep transformers from asking the Hub, in a thread, to convert a repository's pytorch_model.bin."""
    name = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _explained(source: ModelSource, what: str) -> Iterator[None]:
    """Turn whatever the libraries raise while they read `what` into one line."""
    try:
        yield
    except GattnVizError:
        raise
    except Exception as error:
        raise GattnVizError(f"model {source.name!r}: {_explanation(source, what, error)}") from error


def _explanation(source: ModelSource, what: str, error: Exception) -> str:
    """What is wrong and what to do, from the error or one that it was raised from."""
    causes = tuple(_chain(error))

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    repo = f"Hub repository {source.location}"
    if caused_by(hub_errors.GatedRepoError):
        return (
            f"the {repo} is gated and this account may not read it; expected one with access: ask for it on the "
            "repository's page, then set HF_TOKEN or run hf auth login"
        )
    if caused_by(hub_errors.RevisionNotFoundError):
        return (
            f"the {repo} has no revision {source.revision!r}; expected a branch, tag or commit of it: correct "
            "what stands after @"
        )
    if caused_by(hub_errors.RepositoryNotFoundError):
        return (
            f"there is no {repo} that this account can see, and no such directory here; expected a public "
            "repository, or access to a private one: check the name, or set HF_TOKEN"
        )
    if caused_by(hub_errors.RemoteEntryNotFoundError):
        return _no_file(source, what)
    answers = [cause for cause in causes if getattr(cause, "response", None) is not None]
    if answers:
        return (
            f"{what} of {source.checkpoint} is not in the cache and the Hub did not give it "
            f"({_reason(answers[0])}): check the access that HF_TOKEN gives, or try again later"
        )
    # a connection that breaks is an error of httpx or httpx2, as the hub's version has it
    broken = any(type(cause).__module__.startswith("httpx") for cause in causes)
    if broken or caused_by(hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled):
        offline = " (HF_HUB_OFFLINE is set)" if hub_constants.HF_HUB_OFFLINE else ""
        return (
            f"{what} of {source.checkpoint} is not in the cache and {hub_constants.ENDPOINT} cannot be reached"
            f"{offline}; expected a network or a filled cache: run hf download {source.location} where there is a "
            "network and set HF_HOME to that cache, or pass a local directory"
        )
    if caused_by(torch.OutOfMemoryError):
        return (
            f"the device has too little memory ({_reason(error)}); expected room for every weight: pass --dtype "
            "bfloat16, --device-map auto or --device cpu"
        )
    if caused_by(pickle.UnpicklingError):
        return (
            "pytorch_model.bin is damaged or holds more than tensors, which would run code; expected tensors "
            "alone: download it again, or if you trust it save it as safetensors"
        )
    return f"{what} cannot be used ({_reason(error)}); {REMEDIES[what]}"


def _no_file(source: ModelSource, what: str) -> str:
    return (
        f"{source.checkpoint} does not have {what}; expected config.json, weights and tokenizer in one folder: "
        "name that folder, as org/name:folder on the Hub"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those it was raised from, the outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: BaseException, limit: int = 200) -> str:
    """A library's message on one line, and not a page of it."""
    text = " ".join(str(error).split())
    text = text if len(text) <= limit else text[: limit - 4] + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

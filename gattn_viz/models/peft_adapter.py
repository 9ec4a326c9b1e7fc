"""A PEFT adapter, such as LoRA, on top of a model.

It is merged: a layer's W becomes W + scale B A, and the model is then one like any other, with plain linear layers
that every measure knows. Quantised weights would be rounded by that; on them the adapter stays beside the weights.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from huggingface_hub import errors as hub_errors
from huggingface_hub import hf_hub_download
from transformers.utils.peft_utils import find_adapter_config_file

from gattn_viz.errors import GattnVizError
from gattn_viz.models.libraries import explained, listed, quiet, where
from gattn_viz.models.names import ADAPTER_CONFIG, ModelSource
from gattn_viz.models.weights import ADAPTER_WEIGHTS

log = logging.getLogger("gattn_viz")


def check_no_adapter(source: ModelSource) -> None:
    """Refuse a checkpoint with an adapter in it, which transformers would apply where PEFT is installed.

    Raises:
        GattnVizError: there is one.
    """
    if not source.is_gguf and find_adapter_config_file(source.location, **where(source)) is not None:
        raise GattnVizError(
            f"model {source.name!r} has a PEFT adapter ({ADAPTER_CONFIG}) beside its config.json; expected one of "
            "the two in a folder: pass the base model with --model and the adapter with --adapter, or move the "
            "file away"
        )


def add_adapter(model: Any, source: ModelSource) -> Any:
    """A model with its source's adapter in it.

    Returns:
        a model of the same class, the same object unless PEFT decides otherwise.

    Raises:
        GattnVizError: PEFT is not installed; the adapter cannot be had or read, is for a model of other shapes,
            or adds tokens and no weights; the model's weights are not in memory.
    """
    adapter = source.adapter
    assert adapter is not None
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise GattnVizError(
            f"adapter {adapter.name!r} needs PEFT, which cannot be imported ({error}); expected peft beside "
            "transformers: pip install 'gattn-viz[peft]'"
        ) from error

    if any(parameter.is_meta for parameter in model.parameters()):
        raise GattnVizError(
            f"adapter {adapter.name!r} cannot be merged into weights that are on disk or were left out of memory; "
            "expected them in memory: leave out --device-map or give more --max-memory, or save the merged model "
            "once and pass that"
        )
    directory = adapter_directory(adapter).resolve()  # PEFT takes a relative a/b that lacks a file for a Hub id
    if not any((directory / name).is_file() for name in ADAPTER_WEIGHTS):
        raise GattnVizError(
            f"adapter {adapter.name!r}: the adapter has no weights; expected {' or '.join(ADAPTER_WEIGHTS)} "
            f"beside {ADAPTER_CONFIG}: copy the adapter again"
        )
    with quiet(), explained(adapter, "the adapter"):
        config = PeftConfig.from_pretrained(str(directory))
    if config.is_prompt_learning:
        raise GattnVizError(
            f"adapter {adapter.name!r} ({config.peft_type.value}) puts tokens of its own before the prompt; "
            "expected one that changes weights, such as LoRA: choose another"
        )
    _warn_of_another_base(source, adapter, config.base_model_name_or_path)
    with quiet(), explained(adapter, "the adapter"):
        adapted = PeftModel.from_pretrained(model, str(directory), config=config)
        report = adapted.load_adapter(str(directory), "default")  # again, for what did not fit: only this tells
    _check_complete(adapter, report)
    with quiet(), explained(adapter, "the adapter"):
        if getattr(model, "hf_quantizer", None) is not None:
            return adapted.get_base_model()
        return adapted.merge_and_unload(safe_merge=True)


def adapter_commit(adapter: ModelSource) -> str | None:
    """Which commit of a Hub repository the adapter in the cache is of; None of a local one."""
    if adapter.is_local:
        return None
    parts = adapter_directory(adapter).parts
    return parts[parts.index("snapshots") + 1]


def adapter_directory(adapter: ModelSource) -> Path:
    """Where the adapter's files lie; those of a Hub repository are brought into the cache.

    Raises:
        GattnVizError: they cannot be had.
    """
    if adapter.is_local:
        return Path(adapter.location)
    with explained(adapter, "the adapter"):
        config = hf_hub_download(adapter.location, ADAPTER_CONFIG, **where(adapter))
        try:
            hf_hub_download(adapter.location, ADAPTER_WEIGHTS[0], **where(adapter))
        except hub_errors.EntryNotFoundError:
            hf_hub_download(adapter.location, ADAPTER_WEIGHTS[1], **where(adapter))
    return Path(config).parent


def _warn_of_another_base(source: ModelSource, adapter: ModelSource, base: str | None) -> None:
    """A base of another name may be the same model in another place, so it is no error."""
    names = [Path(name).name for name in (source.location, source.subfolder) if name]
    if base and Path(base).name not in names:
        log.warning(
            "adapter %s was trained on %s: on %s it may mean nothing", adapter.label, Path(base).name, names[-1]
        )


def _check_complete(adapter: ModelSource, report: Any) -> None:
    """PEFT only warns of weights that are missing, and says nothing of those that have no place."""
    problems = [listed(report.missing_keys, "missing"), listed(report.unexpected_keys, "unexpected")]
    found = ", ".join(problem for problem in problems if problem)
    if found:
        raise GattnVizError(
            f"adapter {adapter.name!r}: its weights are not those that it has in this model: {found}; expected "
            "each once: choose the model that the adapter was trained on"
        )

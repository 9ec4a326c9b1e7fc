"""Talking to transformers and the Hub: quietly, and with what they raise turned into one line."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from huggingface_hub import constants as hub_constants
from huggingface_hub import errors as hub_errors
from huggingface_hub import utils as hub_utils
from transformers.utils import logging as transformers_logging

from gattn_viz.errors import GattnVizError
from gattn_viz.models.names import ModelSource

# What is expected of each part of a checkpoint, and what to do if it cannot be used.
REMEDIES = {
    "config.json": "expected a model's sizes in JSON: correct it, or copy the checkpoint again",
    "the tokenizer": "expected tokenizer.json and tokenizer_config.json: put the model's own beside config.json",
    "the weights": "expected a whole model.safetensors or pytorch_model.bin: copy or download it again",
    "the GGUF file": "expected one whole file of an architecture that transformers reads: take the model's own "
    "checkpoint in its place",
}


def where(source: ModelSource) -> dict[str, str]:
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
def no_conversion() -> Iterator[None]:
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
def explained(source: ModelSource, what: str) -> Iterator[None]:
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
        return no_file(source, what)
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


def no_file(source: ModelSource, what: str) -> str:
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

"""Talking to transformers and the Hub: quietly, and with what they raise turned into one line."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from huggingface_hub import constants as hub_constants
from huggingface_hub import errors as hub_errors
from huggingface_hub import utils as hub_utils
from transformers.utils import logging as transformers_logging

from gattn_viz.errors import GattnVizError
from gattn_viz.models.names import ModelSource

log = logging.getLogger("gattn_viz")

# What is expected of each part of a checkpoint, and what to do if it cannot be used.
REMEDIES = {
    "config.json": "expected a model's sizes in JSON: correct it, or copy the checkpoint again",
    "the tokenizer": "expected tokenizer.json and tokenizer_config.json: put the model's own beside config.json",
    "the weights": "expected a whole model.safetensors or pytorch_model.bin: copy or download it again",
    "the quantised weights": "expected what quantization_config in config.json says, the library that reads "
    "it and a device that it runs on: install it, or choose a checkpoint of the model that is not quantised",
    "the adapter": "expected what PEFT's save_pretrained wrote, for a model of these shapes: choose the one that "
    "it was trained on, or copy the adapter again",
    "the GGUF file": "expected one whole file of an architecture that transformers reads: take the model's own "
    "checkpoint in its place",
}

# Of a disk that is full, a quota, a file system or folder where nothing may be written.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def where(source: ModelSource) -> dict[str, Any]:
    """The arguments that every `from_pretrained` needs besides the location."""
    given: dict[str, Any] = {"revision": source.revision, "subfolder": source.subfolder}
    if not source.is_local and not hub_constants.HF_HUB_OFFLINE and hub_is_out_of_reach():
        given["local_files_only"] = True
    return {key: value for key, value in given.items() if value is not None}


@lru_cache(maxsize=1)
def hub_is_out_of_reach() -> bool:
    """Whether nothing takes a connection at the Hub's address, asked once a process.

    Its library would try again for half a minute, with each file, before it looks into the cache.
    """
    for wait in (1, 0):
        try:
            hub_utils.get_session().head(hub_constants.ENDPOINT, timeout=hub_constants.HF_HUB_ETAG_TIMEOUT)
        except Exception as error:
            if type(error).__name__ in ("UnsupportedProtocol", "InvalidURL"):
                raise GattnVizError(
                    f"HF_ENDPOINT is {hub_constants.ENDPOINT!r}; expected a URL, such as https://huggingface.co: "
                    "correct or unset it"
                ) from error
            if not _no_connection(error):
                return False
            time.sleep(wait)
        else:
            return False
    log.warning("%s cannot be reached: only what is in the cache is there", hub_constants.ENDPOINT)
    return True


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no progress bars from transformers; those of a download stay as they were."""
    verbosity = transformers_logging.get_verbosity()
    hub_verbosity = hub_utils.logging.get_verbosity()
    accelerate_logger = logging.getLogger("accelerate")
    accelerate_verbosity = accelerate_logger.level
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
        accelerate_logger.setLevel(logging.CRITICAL)
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
            accelerate_logger.setLevel(accelerate_verbosity)
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
        kind = "adapter" if what == "the adapter" else "model"
        raise GattnVizError(f"{kind} {source.name!r}: {_explanation(source, what, error)}") from error


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
    answer = next((cause for cause in causes if getattr(cause, "response", None) is not None), None)
    if answer is not None:
        return (
            f"{what} of {source.checkpoint} is not in the cache and the Hub did not give it "
            f"({_answer(answer)}): check the access that HF_TOKEN gives, or try again later"
        )
    broken = next((cause for cause in causes if _is_of_httpx(cause)), None)
    if broken is not None and not _no_connection(broken):
        return (
            f"{what} of {source.checkpoint} did not come whole: the connection to {hub_constants.ENDPOINT} broke "
            f"off ({_reason(broken)}); expected every file to its end: run it again, or run hf download "
            f"{source.location} first"
        )
    if broken is not None or caused_by(hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled):
        offline = " (HF_HUB_OFFLINE is set)" if hub_constants.HF_HUB_OFFLINE else ""
        return (
            f"{what} of {source.checkpoint} is not in the cache and {hub_constants.ENDPOINT} cannot be reached"
            f"{offline}; expected a network or a filled cache: run hf download {source.location} where there is a "
            "network and set HF_HOME to that cache, or pass a local directory"
        )
    unwritable = next((cause for cause in causes if getattr(cause, "errno", None) in UNWRITABLE), None)
    if unwritable is not None and not source.is_local:
        return (
            f"{what} of {source.checkpoint} cannot be written to the cache {hub_constants.HF_HUB_CACHE} "
            f"({_reason(unwritable)}); expected a directory with room for the whole checkpoint: make room, or set "
            "HF_HOME to another"
        )
    if caused_by(torch.OutOfMemoryError):
        return (
            f"the device has too little memory ({_reason(error)}); expected room for every weight: pass --dtype "
            "bfloat16, --device-map auto or --device cpu"
        )
    if "provide an `offload_folder`" in str(error):
        return (
            "not all weights fit into memory, and these files cannot be read in parts; expected a directory for "
            "the rest: pass --offload-folder DIR, or a larger --max-memory"
        )
    if caused_by(pickle.UnpicklingError):
        return (
            "pytorch_model.bin is damaged or holds more than tensors, which would run code; expected tensors "
            "alone: download it again, or if you trust it save it as safetensors"
        )
    return f"{what} cannot be used ({_reason(error)}); {REMEDIES[what]}"


def no_file(source: ModelSource, what: str) -> str:
    files = "config.json, weights and tokenizer"
    if what == "the adapter":
        files = "adapter_config.json and adapter_model.safetensors"
    return (
        f"{source.checkpoint} does not have {what}; expected {files} in one folder: name that folder, as "
        "org/name:folder on the Hub"
    )


def _is_of_httpx(error: BaseException) -> bool:
    """Or of httpx2, as the hub's version has it."""
    return type(error).__module__.startswith("httpx")


def _no_connection(error: BaseException) -> bool:
    """Whether nobody was there, as opposed to somebody who did not answer to the end."""
    return _is_of_httpx(error) and type(error).__name__ in ("ConnectError", "ConnectTimeout", "ProxyError")


def _answer(error: BaseException) -> str:
    """What the Hub said when it refused: the status, and its own words if there are any."""
    response = error.response  # type: ignore[attr-defined]
    status = f"{response.status_code} {response.reason_phrase}"
    said = " ".join((getattr(error, "server_message", None) or "").split())
    return f"{status}: {said[:200]}" if said else status


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


def listed(items: Sequence[str], kind: str, limit: int = 3) -> str:
    """`2 missing (a, b)`, with no more than `limit` of them; empty if there is none."""
    if not items:
        return ""
    more = ", ..." if len(items) > limit else ""
    return f"{len(items)} {kind} ({', '.join(items[:limit])}{more})"

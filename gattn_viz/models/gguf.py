"""A GGUF file as a directory that transformers' loaders take: converted once, and kept in a cache.

transformers reads the file and dequantises every weight; what comes of it is saved as safetensors, config and
tokenizer. It is saved in float32, in which weights are dequantised: nothing is lost that the file has.

A conversion is known by what the file holds (its sha256), by transformers' version and by `FORMAT`. It is made in
a temporary directory and renamed: there is a whole one or none.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from gattn_viz.cache import cache_directory
from gattn_viz.errors import GattnVizError, first_line
from gattn_viz.models.libraries import REMEDIES, explained, quiet
from gattn_viz.models.names import ModelSource
from gattn_viz.models.weights import file_sha256

FORMAT = 2
"""Of a conversion: a change of this module that changes its files is a new one."""

ABOUT = "gguf.json"
"""Beside a conversion: what is to be said of it."""

# How a model scales its rotary frequencies, as tensors and as a key: transformers mostly does not ask.
FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
SCALING = ".rope.scaling.type"

log = logging.getLogger("gattn_viz")


def place(source: ModelSource) -> str:
    """Where `from_pretrained` finds a checkpoint: its location, or of a GGUF file its conversion, made if need be.

    Raises:
        GattnVizError: the file is no GGUF, or transformers cannot read it whole; `gguf` is not installed, or the
            cache cannot be written to, where there is no conversion yet.
    """
    if not source.is_gguf:
        return source.location
    stat = Path(source.location).stat()
    return str(_converted(source, cache_directory(), stat.st_size, stat.st_mtime_ns))


@lru_cache
def _converted(source: ModelSource, cache: Path, size: int, changed: int) -> Path:
    """The conversion of a file as it is at the moment, looked up once in a process."""
    file = Path(source.location)
    _check_magic(source, file)
    name = f"gguf-{file_sha256(file)[:16]}-transformers-{transformers.__version__}-{FORMAT}"
    directory = cache / name
    about = _about(directory)
    if about is None:
        _remove_damaged(directory)
        with _new_directory(directory) as temporary:
            _convert(source, file, temporary)
        log.info("%s: kept in %s", source.label, directory)
        about = _about(directory)
        assert about is not None
    log.info("%s: weights dequantised to float32 from %s", source.label, ", ".join(about["types"]))
    if about["left_out"]:
        log.warning(
            "%s: transformers leaves out %s, by which the model scales its rotary frequencies: what it does is "
            "only near to what it does elsewhere",
            source.label,
            " and ".join(about["left_out"]),
        )
    return directory


def _about(directory: Path) -> dict[str, Any] | None:
    """What `_convert` wrote about a conversion; None if it, or a file of it, is not there as it was written."""
    try:
        about = json.loads((directory / ABOUT).read_text(encoding="utf-8"))
        whole = all((directory / name).stat().st_size == size for name, size in about["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return about if whole else None


def _remove_damaged(directory: Path) -> None:
    if directory.is_symlink() or directory.is_file():
        directory.unlink()
    elif directory.exists():
        log.warning("%s is damaged: it is made anew", directory)
        shutil.rmtree(directory, ignore_errors=True)


def _check_magic(source: ModelSource, file: Path) -> None:
    with explained(source, "the weights"), file.open("rb") as opened:
        start = opened.read(4)
    if start != b"GGUF":
        raise GattnVizError(
            f"model {source.name!r} is not a GGUF file: it starts with {start!r}; expected b'GGUF': check that it "
            "is the right file, and whole"
        )


@contextlib.contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes `path` if the block ends well, and is removed if not."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".", dir=path.parent))
        yield temporary
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():  # else another process was faster
                raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise GattnVizError(
            f"cannot write to the cache {path.parent} ({reason}); expected a directory with "
            "room for a converted model: set GATTN_VIZ_CACHE to another"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _convert(source: ModelSource, file: Path, to: Path) -> None:
    """Write a GGUF file's model, tokenizer and `ABOUT` to an empty directory."""
    if find_spec("gguf") is None:
        raise GattnVizError(
            f"model {source.name!r} is a GGUF file, and gguf, which reads it, is not installed; expected it: pip "
            "install 'gattn-viz[gguf]'"
        )
    log.info("%s: converting %s (%.0f MB), this once", source.label, file.name, file.stat().st_size / 1e6)
    link = to / "model.gguf"  # alone there: transformers would take a tokenizer that lies beside the file itself
    link.symlink_to(file.resolve())
    from_file: dict[str, Any] = {"pretrained_model_name_or_path": str(to), "gguf_file": link.name}
    with quiet(), _progress(), explained(source, "the GGUF file"):
        tensors, scaling = _contents(file)
        tokenizer = AutoTokenizer.from_pretrained(**from_file)
        model, report = AutoModelForCausalLM.from_pretrained(
            **from_file, dtype=torch.float32, output_loading_info=True, **_unpacked()
        )
    _check_whole(source, model, report, tensors)
    link.unlink()
    with quiet():
        model.save_pretrained(to)
        tokenizer.save_pretrained(to)
    is_scaled = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    files = [path for path in to.iterdir() if path.is_file()]
    for path in files:  # a crash after the rename must not leave holes in them
        with path.open("rb") as written:
            os.fsync(written.fileno())
    about = {
        "files": {path.name: path.stat().st_size for path in files},
        "types": list(dict.fromkeys(kind for _, kind, _ in tensors)),
        "left_out": [] if is_scaled else [*(name for name, *_ in tensors if name in FREQUENCIES), *scaling],
    }
    (to / ABOUT).write_text(json.dumps(about), encoding="utf-8")


def _unpacked() -> dict[str, Any]:
    """What tells a transformers that can keep weights in their blocks not to."""
    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    """Show transformers' bar over the tensors in a terminal only, and only where messages are shown."""
    shown = log.isEnabledFor(logging.INFO) and sys.__stderr__ is not None and sys.__stderr__.isatty()
    with contextlib.redirect_stderr(sys.__stderr__ if shown else io.StringIO()):
        yield


def _contents(file: Path) -> tuple[list[tuple[str, str, int]], list[str]]:
    """(name, type such as Q4_1, number of elements) of each tensor, the commonest type first; keys of scaling."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    tensors = [(tensor.name, tensor.tensor_type.name, int(tensor.n_elements)) for tensor in reader.tensors]
    of_type = Counter[str]()
    for _, kind, elements in tensors:
        of_type[kind] += elements
    scaling = [key for key, field in reader.fields.items() if key.endswith(SCALING) and field.contents() != "none"]
    return sorted(tensors, key=lambda tensor: -of_type[tensor[1]]), scaling


def _check_whole(
    source: ModelSource, model: Any, report: dict[str, Any], tensors: list[tuple[str, str, int]]
) -> None:
    """Every parameter must have come from the file, and every number in it must have been used.

    transformers passes over tensors that it has no place for, so these are found by their count.
    """
    missing = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if missing:
        raise GattnVizError(
            f"model {source.name!r}: the GGUF file lacks {len(missing)} weights, such as {missing[0]}; expected "
            f"all of them in one file: {REMEDIES['the GGUF file']}"
        )
    held = sum(elements for name, _, elements in tensors if name not in FREQUENCIES)
    if held != model.num_parameters():
        raise GattnVizError(
            f"model {source.name!r}: the GGUF file has {held:,} weights, and transformers makes a model of "
            f"{model.num_parameters():,} of it; expected the same: {REMEDIES['the GGUF file']}"
        )

"""Which weights a checkpoint holds: a hash of their files."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from gattn_viz.models.names import ADAPTER_CONFIG, ModelSource

# What transformers looks for, in its order. An index names the files that the weights are spread over.
NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# What PEFT looks for, in its order.
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def weights_sha256(source: ModelSource, commit: str | None = None) -> str | None:
    """The sha256 of a checkpoint's file of weights; of several that of the lines `sha256sum` prints for them.

    A file from the Hub is not read: the cache names it by its hash. Of a GGUF file it is that file's.

    Args:
        commit: of the Hub, which of the cached ones; None is that of the source's revision.

    Returns:
        64 hex digits; None if there is none of the usual files.
    """
    if source.is_gguf:
        return file_sha256(Path(source.location))
    for name in NAMES:
        path = _file(source, name, commit)
        if path is None:
            continue
        if not name.endswith(".json"):
            return file_sha256(path)
        parts = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [(part, _file(source, part, commit)) for part in parts]
        lines = "".join(f"{file_sha256(file)}  {part}\n" for part, file in files if file is not None)
        return hashlib.sha256(lines.encode()).hexdigest()
    return None


def adapter_sha256(adapter: ModelSource, commit: str | None = None) -> str | None:
    """The sha256 of the lines that `sha256sum` prints for an adapter's config, which has its scale, and weights.

    Returns:
        64 hex digits; None if either is not there.
    """
    found = [(name, _file(adapter, name, commit)) for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS)]
    files = [(name, path) for name, path in found if path is not None][:2]
    if len(files) < 2:
        return None
    return hashlib.sha256("".join(f"{file_sha256(path)}  {name}\n" for name, path in files).encode()).hexdigest()


def _file(source: ModelSource, name: str, commit: str | None) -> Path | None:
    """A checkpoint's file, if it is there; of a Hub repository in the cache."""
    if source.is_local:
        path = Path(source.location) / name
        return path if path.is_file() else None
    inside = f"{source.subfolder}/{name}" if source.subfolder else name
    cached = try_to_load_from_cache(source.location, inside, revision=commit or source.revision)
    return Path(cached) if isinstance(cached, str) else None


def file_sha256(path: Path) -> str:
    """Of one file, as `sha256sum` prints it."""
    real = path.resolve()
    if real.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", real.name):
        return real.name
    with real.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

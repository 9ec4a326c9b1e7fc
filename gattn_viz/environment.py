"""What a bug report needs to know of a machine: versions, devices, caches, settings. No secret is in it.

Only the variables of `SHOWN` are shown, without credentials; of others that may matter it is said that they are
set. The home directory, which may be a person's name, is `~`. Everything is optional: a report on a broken
installation must not need what is broken.
"""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gattn_viz.cache import cache_directory
from gattn_viz.errors import first_line

LIBRARIES = (
    "gattn-viz", "torch", "transformers", "accelerate", "tokenizers", "safetensors", "huggingface-hub", "numpy",
    "pandas", "matplotlib", "seaborn", "typer", "rich",
)  # fmt: skip
OPTIONAL = (
    "numba", "peft", "gguf", "pyarrow", "bitsandbytes", "torchao", "optimum-quanto", "compressed-tensors",
    "gptqmodel", "autoawq", "hqq", "kernels", "hf-xet",
)  # fmt: skip

SHOWN = (
    "CUDA_VISIBLE_DEVICES", "GATTN_VIZ_CACHE", "GATTN_VIZ_CHECKPOINTS", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE",
    "HF_HUB_DISABLE_XET", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_OFFLINE", "HTTPS_PROXY",
    "HTTP_PROXY", "MKL_NUM_THREADS", "MPLBACKEND", "NO_COLOR", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "SOURCE_DATE_EPOCH", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME", "http_proxy",
    "https_proxy",
)  # fmt: skip
PREFIXES = ("ACCELERATE_", "GATTN_VIZ_", "HF_", "HUGGING_FACE_", "NUMBA_", "PYTORCH_", "TORCH_", "TRANSFORMERS_")

NOT_INSTALLED = "not installed"


def environment() -> dict[str, dict[str, str]]:
    """What is here, by section and name: `versions`, `devices`, `caches`, `variables`."""
    found = {
        "versions": {"python": f"{platform.python_version()} ({platform.python_implementation()})"} | _versions(),
        "devices": {"platform": platform.platform()} | _devices(),
        "caches": _caches(),
        "variables": _variables(),
    }
    return {
        section: {name: _without_secrets(value) for name, value in entries.items()}
        for section, entries in found.items()
    }


def _versions() -> dict[str, str]:
    found = {name: _version(name) for name in LIBRARIES + OPTIONAL}
    return {name: value for name, value in found.items() if name in LIBRARIES or value != NOT_INSTALLED}


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return NOT_INSTALLED


def _devices() -> dict[str, str]:
    found = {"cpu": f"{os.cpu_count()} cores"}
    try:
        import torch

        found["cpu"] += f", {torch.get_num_threads()} threads"
        found["cuda of torch"] = torch.version.cuda or torch.version.hip or "none"
        for number in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(number)
            free, total = torch.cuda.mem_get_info(number)
            found[f"cuda:{number}"] = f"{device.name}, {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
        if torch.backends.mps.is_available():
            found["mps"] = "available"
    except Exception as error:  # a broken torch is what the report is about
        found["torch"] = f"cannot be used ({type(error).__name__}: {first_line(error)[:200]})"
    return found


def _caches() -> dict[str, str]:
    found = {}
    try:
        from huggingface_hub import constants

        found["Hub"] = _folder(Path(constants.HF_HUB_CACHE))
        found["Hub's saved token"] = "there" if Path(constants.HF_TOKEN_PATH).is_file() else "not there"
    except Exception as error:
        found["Hub"] = f"huggingface_hub cannot be used ({type(error).__name__}: {first_line(error)[:200]})"
    if cache_directory().is_dir():
        found["gattn-viz"] = _folder(cache_directory())
    return found


def _folder(path: Path) -> str:
    """Where it is and what it holds, without going through all of it."""
    if not path.is_dir():
        return f"{path} (not there)"
    count = sum(1 for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    writable = "" if os.access(path, os.W_OK) else ", not writable"
    return f"{path} ({count} folders{writable})"


def _variables() -> dict[str, str]:
    names = [name for name in os.environ if name in SHOWN or name.startswith(PREFIXES)]
    found = {name: os.environ[name] if name in SHOWN else "set" for name in sorted(names)}
    return {"HF_TOKEN": "not set"} | found


def _without_secrets(text: str) -> str:
    """On one line, without a URL's user and query, a token, or the home directory."""
    text = " ".join(text.split())
    text = re.sub(r"^(\w+://)?.*@", r"\1", text)
    text = re.sub(r"(://[^?#\s]*)[?#]\S*", r"\1", text)
    text = re.sub(r"\b(hf|api_org)_\w{8,}", "***", text)
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text

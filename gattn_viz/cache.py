"""Where the project keeps what it makes for itself: conversions of GGUF files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`GATTN_VIZ_CACHE`, else `gattn-viz` in `XDG_CACHE_HOME` or in `~/.cache`. It may not exist."""
    own = os.environ.get("GATTN_VIZ_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "gattn-viz"

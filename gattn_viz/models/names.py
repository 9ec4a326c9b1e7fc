"""From what a person writes after `--model` to where a checkpoint lies.

A name is one of

- a variant: `baseline`, `gate_headwise` or `gate_elementwise`, looked up in `checkpoints`: `demo` (bundled with
  the package), `official` (the paper's, on the Hub) or a directory that holds `1B_<variant>` or `<variant>`;
- a local directory, `DIR` or `DIR:subfolder` (write `./baseline` for a directory that is called like a variant);
- a local GGUF file, `FILE.gguf`;
- a Hub repository, `org/name`, with `@revision` and `:subfolder` in either order: `org/name@rev:sub`.

An adapter is written like one of the last two.

Nothing is loaded here and no hub is asked, so this module imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from gattn_viz.errors import GattnVizError

VARIANTS = ("baseline", "gate_headwise", "gate_elementwise")
OFFICIAL_REPO = "QwQZh/gated_attention"
OFFICIAL_PREFIX = "1B_"

ADAPTER_CONFIG = "adapter_config.json"

EXPECTED = (
    f"a variant ({', '.join(VARIANTS)}), a directory, a .gguf file, or a Hub id org/name[@revision][:subfolder]"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class ModelSource:
    """Which checkpoint a name stands for.

    Attributes:
        name: what the person wrote.
        location: a local directory or GGUF file, or a Hub id.
        revision: branch, tag or commit on the Hub; None is the repository's main branch.
        subfolder: the folder inside the Hub repository (a local one is part of `location`).
        is_local: whether `location` is a directory or a file.
        adapter: the PEFT adapter that is added to it, a source of the same kind.
    """

    name: str
    location: str
    revision: str | None
    subfolder: str | None
    is_local: bool
    adapter: ModelSource | None = None

    @property
    def is_bundled(self) -> bool:
        """Whether this is one of the models that come with the package."""
        return self.is_local and Path(self.location).parent == demo_directory()

    @property
    def is_gguf(self) -> bool:
        """Whether this is a GGUF file, see `models.gguf`."""
        return self.is_local and _is_gguf(self.location)

    @property
    def last_part(self) -> str:
        """Of a local path: the directory's or file's own name."""
        if self.is_gguf:
            return Path(self.location).name  # in the Hub's cache it is a link to a hash
        return Path(self.location).resolve().name

    @property
    def label(self) -> str:
        """A short name for figures and tables: the variant, a path's last part, the Hub id without its owner.

        With an adapter `model+adapter`.
        """
        if self.adapter is not None:
            return f"{replace(self, adapter=None).label}+{self.adapter.label}"
        if self.name in VARIANTS:
            return self.name
        if self.is_gguf:
            return Path(self.location).stem
        if self.is_local:
            return self.last_part or self.location
        revision = f"@{self.revision}" if self.revision else ""
        subfolder = f":{self.subfolder}" if self.subfolder else ""
        return self.location.partition("/")[2] + revision + subfolder

    @property
    def checkpoint(self) -> str:
        """Which checkpoint it is, in words; a bundled one without the path of the package."""
        if self.adapter is not None:
            return f"{replace(self, adapter=None).checkpoint} with adapter {self.adapter.checkpoint}"
        if self.is_bundled:
            return f"bundled demo {Path(self.location).name}"
        if self.is_local:
            return f"{self._kind} {self.location}"
        parts = [f"Hub {self.location}", f"revision {self.revision or 'main'}"]
        if self.subfolder:
            parts.append(f"subfolder {self.subfolder}")
        return ", ".join(parts)

    @property
    def without_path(self) -> str:
        """As `checkpoint`, a directory or file by its last part: for what is handed on, such as a figure."""
        if self.adapter is not None:
            return f"{replace(self, adapter=None).without_path} with adapter {self.adapter.without_path}"
        if self.is_local and not self.is_bundled:
            return f"{self._kind} {self.last_part}"
        return self.checkpoint

    @property
    def sentence(self) -> str:
        """What is said to the person: `gate_headwise -> bundled demo gate_headwise`."""
        return f"{self.name} -> {self.checkpoint}"

    @property
    def _kind(self) -> str:
        return "GGUF file" if self.is_gguf else "directory"


def demo_directory() -> Path:
    """Where the bundled models and prompts lie. It is in the package; it may not exist in a source checkout."""
    return Path(str(resources.files("gattn_viz"))) / "demo"


def resolve(name: str, checkpoints: str = "demo") -> ModelSource:
    """Find the checkpoint that `name` stands for. A local one must exist; the Hub is not asked.

    Args:
        name: a variant, a directory, a GGUF file or a Hub id, see the module's docstring.
        checkpoints: where a variant is looked up: `demo`, `official` or a directory.

    Raises:
        GattnVizError: the name is none of these, or the directory or file is missing or holds no config.json.
    """
    if _is_gguf(name):
        return _gguf(name)
    if name not in VARIANTS and os.path.isdir(os.path.expanduser(name)):
        return _local(name, Path(os.path.expanduser(name)))
    base, revision, subfolder = _split(name)
    if base in VARIANTS:
        return _variant(name, base, revision, subfolder, checkpoints)
    directory = Path(os.path.expanduser(base))
    if base and os.path.isdir(directory):
        if revision is not None:
            raise GattnVizError(
                f"model {name!r} asks for a revision of a local directory; expected a Hub id org/name@revision: "
                f"leave out @{revision}"
            )
        return _local(name, directory / (subfolder or ""))
    if _looks_like_a_path(base):
        what = "is a file, not a directory" if os.path.isfile(directory) else "does not exist"
        raise GattnVizError(
            f"model directory {base!r} {what}; expected a directory with config.json, weights and tokenizer: "
            "check the path"
        )
    if _HUB_ID.fullmatch(base):
        return ModelSource(name, base, revision, subfolder, is_local=False)
    raise GattnVizError(f"unknown model {name!r}{_suggestion(base, VARIANTS)}; expected {EXPECTED}")


def resolve_adapter(name: str) -> ModelSource:
    """Find the PEFT adapter that `name` stands for: `DIR`, `DIR:subfolder` or a Hub id. The Hub is not asked.

    Raises:
        GattnVizError: the name is none of these, or the directory is missing or holds no adapter_config.json.
    """
    expected = f"a directory with {ADAPTER_CONFIG}, or a Hub id org/name[@revision][:subfolder]"
    if os.path.isdir(os.path.expanduser(name)):
        base, revision, subfolder = name, None, None
    else:
        base, revision, subfolder = _split(name, "adapter", expected)
    directory = Path(os.path.expanduser(base))
    if base and os.path.isdir(directory) and revision is None:
        directory /= subfolder or ""
        if not (directory / ADAPTER_CONFIG).is_file():
            raise GattnVizError(
                f"adapter directory '{directory}' holds no {ADAPTER_CONFIG}; expected what PEFT's save_pretrained "
                "wrote: pass that directory, or a whole model with --model"
            )
        return ModelSource(name, str(directory), None, None, is_local=True)
    if _HUB_ID.fullmatch(base):
        return ModelSource(name, base, revision, subfolder, is_local=False)
    raise GattnVizError(f"there is no adapter {name!r}; expected {expected}: check the path")


def _is_gguf(name: str) -> bool:
    """By the suffix; a directory may be called so too."""
    return name.lower().endswith(".gguf") and not os.path.isdir(os.path.expanduser(name))


def _gguf(name: str) -> ModelSource:
    path = os.path.expanduser(name)
    if not os.path.isfile(path):
        raise GattnVizError(f"model file {name!r} does not exist; expected a GGUF file: check the path")
    return ModelSource(name, path, None, None, is_local=True)


def _split(name: str, kind: str = "model", expected: str = EXPECTED) -> tuple[str, str | None, str | None]:
    """`base`, `@revision` and `:subfolder`, the last two in either order. Neither may be empty or come twice."""
    base, *rest = re.split(r"([@:])", name)
    parts: dict[str, str] = {}
    for mark, value in zip(rest[::2], rest[1::2], strict=True):
        what = "revision" if mark == "@" else "subfolder"
        if mark in parts or not value.strip("/"):
            fault = "two" if mark in parts else "an empty"
            raise GattnVizError(
                f"{kind} {name!r} has {fault} {what}{'s' if mark in parts else ''}; expected {expected}"
            )
        parts[mark] = value
    subfolder = parts.get(":")
    return base, parts.get("@"), subfolder.strip("/") if subfolder else None


def _looks_like_a_path(text: str) -> bool:
    separators = ("/", os.sep)
    return text.startswith((".", "~", *separators)) or text.endswith(separators) or text.count("/") > 1


def _suggestion(word: str, choices: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, choices, n=1)
    return f", did you mean {close[0]}?" if close else ""


def _folders(directory: Path) -> list[str]:
    """The names of the folders in a directory; none if it may not be read."""
    try:
        return sorted(child.name for child in directory.iterdir() if child.is_dir())
    except OSError:
        return []


def _local(name: str, directory: Path) -> ModelSource:
    """A directory with a config.json, or an error that tells what it holds instead."""
    if (directory / "config.json").is_file():
        return ModelSource(name, str(directory), None, None, is_local=True)
    if not os.path.isdir(directory):
        raise GattnVizError(
            f"model directory '{directory}' does not exist; expected a directory with config.json: check the path"
        )
    if (directory / ADAPTER_CONFIG).is_file():
        raise GattnVizError(
            f"model directory '{directory}' holds a PEFT adapter and no model; expected config.json, weights and "
            "tokenizer: pass the adapter's base model with --model, and this with --adapter"
        )
    found = [name for name in _folders(directory) if os.path.isfile(directory / name / "config.json")]
    todo = (
        f"it holds {', '.join(found[:4])}: choose one, as {directory / found[0]}"
        if found
        else "pass the directory that save_pretrained wrote"
    )
    raise GattnVizError(
        f"model directory '{directory}' holds no config.json; expected config.json, weights and tokenizer: {todo}"
    )


def _variant(
    name: str, variant: str, revision: str | None, subfolder: str | None, checkpoints: str
) -> ModelSource:
    if subfolder is not None or (revision is not None and checkpoints != "official"):
        raise GattnVizError(
            f"model {name!r}: a variant takes no :subfolder, and @revision only with --checkpoints official "
            f"(got --checkpoints {checkpoints}): write {variant}"
        )
    if checkpoints == "official":
        return ModelSource(name, OFFICIAL_REPO, revision, OFFICIAL_PREFIX + variant, is_local=False)
    if checkpoints == "demo":
        if not (demo_directory() / variant / "config.json").is_file():
            raise GattnVizError(
                f"the bundled demo model {variant!r} is not in this installation; expected "
                f"gattn_viz/demo/{variant}/config.json: reinstall gattn-viz, or pass --checkpoints official or a "
                "directory"
            )
        return ModelSource(name, str(demo_directory() / variant), None, None, is_local=True)

    directory = Path(os.path.expanduser(checkpoints))
    if not checkpoints or not os.path.isdir(directory):
        raise GattnVizError(
            f"checkpoints {checkpoints!r} is not a directory{_suggestion(checkpoints, ('demo', 'official'))}; "
            f"expected demo, official, or a directory that holds {OFFICIAL_PREFIX}{variant} or {variant}"
        )
    for candidate in (OFFICIAL_PREFIX + variant, variant):
        if (directory / candidate).is_dir():
            return _local(name, directory / candidate)
    held = _folders(directory)
    raise GattnVizError(
        f"checkpoints directory '{directory}' holds neither {OFFICIAL_PREFIX}{variant} nor {variant}; it holds "
        f"{', '.join(held[:6]) if held else 'no directory'}: pass the directory above the variants, or "
        "--model DIR for one model"
    )

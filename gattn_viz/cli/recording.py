"""Noting a command's recipe while it runs, for the files that it writes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from gattn_viz.models.names import VARIANTS

if TYPE_CHECKING:
    from gattn_viz.models.loading import LoadedModel
    from gattn_viz.models.names import ModelSource
    from gattn_viz.prompts import EncodedPrompt
    from gattn_viz.recipe.content import AdapterUsed, FileMade, ModelUsed, Recipe

# No number depends on them, and where a file was written is where it is.
NOT_RECORDED = ("output", "quiet", "debug", "recipe-paths", "max-memory", "offload-folder")

FONT_FILES = (".ttf", ".otf", ".ttc")

LIBRARIES = ("gattn-viz", "numpy", "pandas", "torch", "transformers")


class Recorder:
    """A command's recipe, complete when it has seen every model.

        recorder = Recorder(ctx, paths=False, libraries=["matplotlib"])
        ... run the models with on_model=recorder.on_model ...
        recorder.recipe(file, attention={"baseline": "fused"})

    Args:
        ctx: of the command.
        paths: whether paths go into it.
        libraries: which take part beside `LIBRARIES`.
    """

    def __init__(self, ctx: typer.Context, paths: bool, libraries: Sequence[str] = ()) -> None:
        from gattn_viz.recipe.content import date_now

        self._date = date_now()
        self._command = ctx.info_name or ""
        self._paths = paths
        self._libraries = sorted((*LIBRARIES, *libraries))
        self._values, self._defaults = _options(ctx)
        self._models: list[ModelUsed] = []
        self._sources: list[ModelSource] = []
        self._prompts: list[tuple[str, str]] = []

    def on_model(self, label: str, loaded: LoadedModel, encoded: Sequence[EncodedPrompt]) -> None:
        """Note a model and its prompts, see `gattn_viz.pipeline.run.OnModel`."""
        from gattn_viz.models.weights import weights_sha256
        from gattn_viz.recipe.content import ModelUsed, tokens_sha256

        source = loaded.source
        commit = None if source.is_local else getattr(loaded.config, "_commit_hash", None)
        lengths = [len(prompt.ids) for prompt in encoded]
        path = os.path.abspath(source.location) if self._paths and source.is_local else None
        self._sources.append(source)
        self._prompts = [(prompt.prompt.id, prompt.prompt.text) for prompt in encoded]
        self._models.append(
            ModelUsed(
                label=label,
                kind=_kind(source),
                name=source.last_part if source.is_local else source.location,
                revision=source.revision,
                commit=commit,
                subfolder=source.subfolder,
                weights_sha256=weights_sha256(source, commit),
                dtype=str(loaded.dtype).removeprefix("torch."),
                device=loaded.device.type,
                attention="",
                tokens=sum(lengths),
                shortest=min(lengths),
                longest=max(lengths),
                tokens_sha256=tokens_sha256([prompt.ids for prompt in encoded]),
                path=path,
                adapter=None if source.adapter is None else _adapter_used(source.adapter, self._paths),
            )
        )

    def _models_option(self) -> dict[str, Any]:
        given = self._values["model"] is not None
        named: dict[str, Any] = {"model": [_argument(source) for source in self._sources] if given else None}
        adapters = [_argument(source.adapter) for source in self._sources if source.adapter is not None]
        return named | ({"adapter": adapters[0]} if adapters else {})

    def _label(self, written: str) -> str:
        """That of a model which may have been named as it was written."""
        found = zip(self._models, self._sources, strict=True)
        return next(model.label for model, source in found if written in (model.label, source.name))

    def recipe(self, file: FileMade, attention: Mapping[str, str]) -> Recipe:
        """That of one file.

        Args:
            attention: by a model's label, how it was computed; `none` for a model that was left out.
        """
        from gattn_viz.recipe.content import PromptsUsed, Recipe, texts_sha256

        adapted = any(model.adapter is not None for model in self._models)
        libraries = sorted([*self._libraries, "peft"]) if adapted else self._libraries
        prompts = self._values["prompts"]
        has_path = self._paths and prompts not in (None, "-")
        options = self._values if self._paths else _without_folders(self._values) | self._models_option()
        if options.get("baseline") is not None:
            options = options | {"baseline": self._label(options["baseline"])}
        return Recipe(
            command=self._command,
            options=options,
            given=tuple(name for name, value in self._values.items() if value != self._defaults[name]),
            models=tuple(replace(model, attention=attention.get(model.label, "none")) for model in self._models),
            prompts=PromptsUsed(
                ids=tuple(prompt_id for prompt_id, _ in self._prompts),
                sha256=texts_sha256(text for _, text in self._prompts),
                file=None if prompts is None else Path(prompts).name,
                path=str(Path(prompts).expanduser().resolve()) if has_path else None,
            ),
            file=file,
            versions={library: version(library) for library in libraries},
            date=self._date,
        )


def _adapter_used(adapter: ModelSource, paths: bool) -> AdapterUsed:
    from gattn_viz.models.peft_adapter import adapter_commit
    from gattn_viz.models.weights import adapter_sha256
    from gattn_viz.recipe.content import AdapterUsed

    directory = Path(adapter.location).resolve() if adapter.is_local else None
    commit = adapter_commit(adapter)
    return AdapterUsed(
        label=adapter.label,
        kind="directory" if adapter.is_local else "hub",
        name=directory.name if directory is not None else adapter.location,
        revision=adapter.revision,
        commit=commit,
        subfolder=adapter.subfolder,
        weights_sha256=adapter_sha256(adapter, commit),
        path=str(directory) if paths and directory is not None else None,
    )


def _options(ctx: typer.Context) -> tuple[dict[str, Any], dict[str, Any]]:
    """A command's options by their long names: their values, whatever they came from, and their defaults."""
    values, defaults = {}, {}
    for option in ctx.command.params:
        name = max(option.opts, key=len).removeprefix("--")
        if name in NOT_RECORDED or option.name not in ctx.params:
            continue
        value = ctx.params[option.name]
        values[name] = list(value) or None if isinstance(value, (list, tuple)) else value
        defaults[name] = option.default
    return values, defaults


def _argument(source: ModelSource) -> str:
    """What was written after --model, a directory or file without the folders above it and marked by `./`."""
    if source.name in VARIANTS or not source.is_local:
        return source.name
    return source.last_part if source.is_bundled else f"./{source.last_part}"


def _kind(source: ModelSource) -> Literal["bundled", "directory", "file", "hub"]:
    if not source.is_local:
        return "hub"
    return "bundled" if source.is_bundled else "file" if source.is_gguf else "directory"


def _without_folders(options: dict[str, Any]) -> dict[str, Any]:
    """The other options that may be paths, each cut to its last part."""
    cut = dict(options)
    if cut["checkpoints"] not in ("demo", "official"):
        cut["checkpoints"] = f"./{Path(cut['checkpoints']).expanduser().resolve().name}"
    for name in ("prompts", "table"):
        if cut.get(name) is not None:
            cut[name] = Path(cut[name]).name
    if str(cut.get("font")).lower().endswith(FONT_FILES):
        cut["font"] = Path(cut["font"]).name
    return cut

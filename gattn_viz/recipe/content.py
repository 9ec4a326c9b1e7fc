"""What a recipe says, and its JSON.

It names no folder of the machine it was made on: a directory or a file is known by the last part of its path and
by the hash of what it holds. Paths are in it only if asked for (`path` of a model and of the prompts).
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from gattn_viz.errors import GattnVizError

FORMAT = 1
"""Of the JSON; a reader of another one cannot know what is meant."""

KEY = "gattn_viz_recipe"
"""Where the recipe is among a file's metadata, and the key of its JSON that holds `FORMAT`."""


@dataclass(frozen=True)
class AdapterUsed:
    """A PEFT adapter that was added to a model: the attributes are those of `ModelUsed`.

    Attributes:
        weights_sha256: of the lines that `sha256sum` prints for adapter_config.json, which has the scale, and for
            the file of weights.
    """

    label: str
    kind: Literal["directory", "hub"]
    name: str
    revision: str | None
    commit: str | None
    subfolder: str | None
    weights_sha256: str | None
    path: str | None = None


@dataclass(frozen=True)
class ModelUsed:
    """A model, on the prompts of its recipe.

    Attributes:
        label: as figures and tables name it.
        kind: `bundled` with the package, a local `directory` or GGUF `file`, or from the `hub`.
        name: the bundled variant, the last part of the directory's or file's path, or the Hub id.
        revision, commit: what was asked of the Hub, and the commit that this was.
        subfolder: of the Hub repository.
        weights_sha256: of the file of weights, as `sha256sum` prints it; of several the sha256 of those lines.
            None when they could not be found.
        attention: how it was computed, see `LayerCapture.path`.
        tokens, shortest, longest: of all prompts together; T of the shortest and of the longest.
        tokens_sha256: of the JSON of the prompts' token ids, without spaces.
        path: of the directory or file, if asked for.
        adapter: that was added to it.
    """

    label: str
    kind: Literal["bundled", "directory", "file", "hub"]
    name: str
    revision: str | None
    commit: str | None
    subfolder: str | None
    weights_sha256: str | None
    dtype: str
    device: str
    attention: str
    tokens: int
    shortest: int
    longest: int
    tokens_sha256: str
    path: str | None = None
    adapter: AdapterUsed | None = None

    @property
    def label_alone(self) -> str:
        """Without the adapter's."""
        return self.label if self.adapter is None else self.label.removesuffix(f"+{self.adapter.label}")


@dataclass(frozen=True)
class PromptsUsed:
    """The prompts.

    Attributes:
        ids: of each, in order.
        sha256: of the JSON of their texts, without spaces, see `texts_sha256`.
        file: the last part of the path of the file they came from, `-` for stdin; None without one.
        path: of that file, if asked for.
    """

    ids: tuple[str, ...]
    sha256: str
    file: str | None
    path: str | None = None


@dataclass(frozen=True)
class MapSummary:
    """One drawn map in a few numbers, by which a figure is compared with another.

    Attributes:
        model: its label.
        layer, head: from 1; a head of None is the mean over the heads asked for, or all of them, a layer of None
            all layers.
        mean, largest: over the cells that are not blank.
        grid: means over at most 4 x 4 parts of the map, row by row; None where a part is blank.
        measure: which, in a figure of several.
    """

    model: str
    layer: int | None
    head: int | None
    mean: float | None
    largest: float | None
    grid: tuple[float | None, ...]
    measure: str | None = None


@dataclass(frozen=True)
class FileMade:
    """Which of a command's files this is.

    Attributes:
        what: a `table`, a figure of `maps`, a figure with a `grid` of models, the `raw` maps; a figure of measures
            of `heads`, of `gates` token by token, or a `gate text`; of `compare` its `curves` and the `layers`
            behind them; of `figures` a `figure` or a `text`, whose numbers are those of the CSV beside it.
        format: `csv`, `json`, `parquet`, `png`, `pdf`, `svg`, `safetensors`, `md` or `tex`.
        models: the labels of those in it.
        prompt: the id of its prompt, where it has one.
        view: of maps, in words; of heads the measures and their colour ranges, and the table they came from.
        quantity: what the cells of maps hold, with its unit.
        color_scale: `kind`, `low` and `high` of a figure.
        sha256: of the file, where the recipe lies beside it.
        numbers: of a figure of maps.
        figure: the name of the figure of `figures`; None is that of another command, or all of its captions.
    """

    what: Literal[
        "table", "maps", "grid", "raw", "heads", "gates", "gate text", "curves", "layers", "figure", "text"
    ]
    format: str
    models: tuple[str, ...]
    prompt: str | None = None
    view: str | None = None
    color_scale: dict[str, Any] | None = None
    sha256: str | None = None
    numbers: tuple[MapSummary, ...] = ()
    quantity: str | None = None
    figure: str | None = None


@dataclass(frozen=True)
class Recipe:
    """What a file was made with.

    Attributes:
        command: its name, such as `maps`.
        options: all of the command's options as they were in effect, by their long names. Those of output are
            left out: no number depends on them.
        given: the names of those options that were not at their defaults.
        versions: of the libraries that make the numbers.
        date: when the command began, in UTC; that of SOURCE_DATE_EPOCH where it is set.
    """

    command: str
    options: dict[str, Any]
    given: tuple[str, ...]
    models: tuple[ModelUsed, ...]
    prompts: PromptsUsed
    file: FileMade
    versions: dict[str, str]
    date: str

    @property
    def command_line(self) -> str:
        """The command as it can be typed, its options in the order of the help."""
        arguments = command_arguments(self.command, {name: self.options[name] for name in self.given})
        return shlex.join(["gattn-viz", *arguments])

    def to_json(self, indent: int | None = None) -> str:
        """ASCII, which every format takes as it is."""
        return json.dumps({KEY: FORMAT, "command_line": self.command_line, **asdict(self)}, indent=indent)

    @classmethod
    def from_json(cls, text: str, where: str) -> Recipe:
        """A recipe from its JSON, which came from `where`.

        Raises:
            GattnVizError: it is not the JSON of a recipe, or one of another version of gattn-viz.
        """
        try:
            entries = json.loads(text)
            written = entries.pop(KEY)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(where, error) from error
        if written != FORMAT:
            raise GattnVizError(
                f"the recipe of {where} has format {written!r}; expected {FORMAT}: read it with the version of "
                "gattn-viz that wrote it"
            )
        try:
            entries.pop("command_line", None)
            entries["given"] = tuple(entries["given"])
            entries["models"] = tuple(_model_used(model) for model in entries["models"])
            entries["prompts"] = PromptsUsed(**_with_tuples(entries["prompts"], "ids"))
            numbers = [MapSummary(**_with_tuples(one, "grid")) for one in entries["file"].pop("numbers")]
            entries["file"] = FileMade(**_with_tuples(entries["file"], "models"), numbers=tuple(numbers))
            recipe = cls(**entries)
            _ = recipe.command_line  # its options must be there
        except (KeyError, TypeError, AttributeError) as error:
            raise _damaged(where, error) from error
        return recipe


def _damaged(where: str, error: Exception) -> GattnVizError:
    return GattnVizError(
        f"the recipe of {where} is damaged ({type(error).__name__}: {error}); expected the JSON that gattn-viz "
        "wrote: take the file as it was written"
    )


def _model_used(entries: dict[str, Any]) -> ModelUsed:
    adapter = entries.get("adapter")
    return ModelUsed(**{**entries, "adapter": None if adapter is None else AdapterUsed(**adapter)})


def _with_tuples(entries: dict[str, Any], name: str) -> dict[str, Any]:
    return {**entries, name: tuple(entries[name])}


def command_arguments(command: str, options: dict[str, Any]) -> list[str]:
    """`maps`, {"layers": "1,7", "raw": True, "prompt": ["a", "b"]} as words of a command line.

    An option that is None or False is left out.
    """
    words = [command]
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            for one in value if isinstance(value, list) else [value]:
                words += [f"--{name}", str(one)]
    return words


def texts_sha256(texts: Iterable[str]) -> str:
    """Of the JSON list of the texts, in UTF-8, with no spaces between them."""
    return _json_sha256(list(texts))


def tokens_sha256(prompts: Sequence[Sequence[int]]) -> str:
    """Of the JSON list of the lists of token ids, without spaces."""
    return _json_sha256([list(ids) for ids in prompts])


def _json_sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def date_now() -> str:
    """Now in UTC, such as 2025-05-10T09:00:00Z; SOURCE_DATE_EPOCH, for builds that are the same each time.

    Raises:
        GattnVizError: SOURCE_DATE_EPOCH is no time.
    """
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        now = datetime.fromtimestamp(int(fixed), UTC) if fixed else datetime.now(UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise GattnVizError(
            f"SOURCE_DATE_EPOCH is {fixed!r}; expected seconds since 1970, such as 1746867600: correct or unset it"
        ) from error
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")

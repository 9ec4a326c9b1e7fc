"""Running the command of a recipe again, and comparing what it writes with what it wrote."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gattn_viz.cli import messages, options
from gattn_viz.cli.recording import FONT_FILES
from gattn_viz.errors import GattnVizError
from gattn_viz.models.names import VARIANTS, demo_directory, resolve, resolve_adapter
from gattn_viz.recipe.content import ModelUsed, Recipe, command_arguments, texts_sha256
from gattn_viz.recipe.stored import read_recipe, sidecar

if TYPE_CHECKING:
    from gattn_viz.recipe.agreement import Agreement, Place

TO_DIRECTORY = ("maps", "heads", "gate-maps", "compare", "figures")
"""The commands that write files with names of their own."""


@dataclass(frozen=True)
class Given:
    """Where things are here that a recipe knows by name and hash only.

    Attributes:
        models: directories and GGUF files by the recipe's labels.
        checkpoints: a directory with the variants.
        prompts: the prompts file.
        adapter: the directory of the model's adapter.
        allow_changed: whether they may be others than the recipe's.
        trust_remote_code: whether code that comes with a checkpoint may run, if the command ran it.
    """

    models: Mapping[str, str]
    checkpoints: str | None
    prompts: Path | None
    adapter: str | None
    allow_changed: bool
    trust_remote_code: bool


def rerun_and_compare(
    file: Path, old: Recipe, output: Path, given: Given, tolerance: float | None, quiet: bool
) -> tuple[Agreement, list[Place]]:
    """Run the command of `file` again, writing to `output`.

    Returns:
        whether the numbers agree, and what changed that may explain why not.

    Raises:
        GattnVizError: something that the command needs is not here or is not the same, `output` is there already,
            or whatever the command itself raises.
    """
    from gattn_viz.recipe.agreement import agreement, changes, labels

    file = file.expanduser()
    if file.name.endswith(".recipe.json") and not sidecar(file).is_file():
        file = file.with_name(file.name.removesuffix(".recipe.json"))
    unknown = sorted(given.models.keys() - set(labels(old)))
    if unknown:
        raise GattnVizError(
            f"--model {unknown[0]}=...: the recipe of {file.name} has no such model; expected one of "
            f"{', '.join(labels(old))}"
        )
    if old.options.get("table") is not None:
        raise GattnVizError(
            f"{file.name} was drawn from the table {old.options['table']}, without a model; expected what a model "
            "was run for: rerun the table's own recipe, then draw it again with heads --table"
        )
    if old.options["trust-remote-code"] and not given.trust_remote_code:
        raise GattnVizError(
            f"the command of {file.name} ran code that came with a checkpoint; expected --trust-remote-code "
            "again: pass it if you trust the checkpoint"
        )
    if old.command == "compare" and old.file.format == "md":
        raise GattnVizError(
            f"{file.name} has rounded numbers for reading; expected the CSV beside it: run that one's recipe again"
        )
    table = _table_beside(file, old)
    _check_output(old, output)
    arguments = command_arguments(
        old.command, {**_options(old, given), "output": str(output), "quiet": True if quiet else None}
    )
    _run(arguments)
    if table is not None:
        file, old = table, read_recipe(table)
    now = _counterpart(old, output)
    new = read_recipe(now)
    return agreement(file, old, now, new, tolerance), changes(old, new)


def _table_beside(file: Path, old: Recipe) -> Path | None:
    """The CSV that has the numbers of a file of `figures`; None of another command's.

    Raises:
        GattnVizError: it is not there, or is another one's.
    """
    if old.command != "figures":
        return None
    if old.file.figure is None:
        raise GattnVizError(
            f"{file.name} has the captions of several figures, and no numbers to compare; expected one of the "
            "figures: name its CSV"
        )
    table = file.with_name(f"{old.file.figure}.csv") if old.file.what != "table" else file
    if not table.is_file():
        raise GattnVizError(
            f"{file.name} is compared by its table, {table.name}, which is not beside it; expected it there: put "
            "it back, or name a figure that has its own"
        )
    if replace(read_recipe(table), file=old.file) != old:
        raise GattnVizError(
            f"{table.name} beside {file.name} is of another run; expected the one written with it: name the CSV "
            "itself to compare that"
        )
    return table


def _check_output(old: Recipe, output: Path) -> None:
    """Nothing that is there may be overwritten."""
    if old.command in TO_DIRECTORY:
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            raise GattnVizError(
                f"--output {output} is there already; expected a new or empty directory, since a rerun overwrites "
                "nothing: name another"
            )
        return
    for path in (output, sidecar(output)):
        if path.exists():
            raise GattnVizError(
                f"--output: {path} is there already; expected a new file, since a rerun overwrites nothing: name "
                "another"
            )


def _options(old: Recipe, given: Given) -> dict[str, Any]:
    """The command's options, with what was a name made a path, and what was left to the machine made fixed."""
    from gattn_viz.recipe.agreement import labels

    found = dict(old.options)
    if found["checkpoints"] not in ("demo", "official"):
        found["checkpoints"] = given.checkpoints or "demo"
    found["model"] = [_model(model, old, given, found["checkpoints"]) for model in old.models]
    if found.get("baseline") is not None:
        found["baseline"] = found["model"][labels(old).index(found["baseline"])]
    found["adapter"] = _adapter(old, given)
    found["revision"] = None  # each model has its commit
    found["trust-remote-code"] = given.trust_remote_code  # never because a file says so
    dtypes = {model.dtype for model in old.models}
    if len(dtypes) == 1:
        [found["dtype"]] = dtypes
    if found.get("ci") is None:  # there is no bootstrap for them
        found["seed"] = found["resamples"] = None
    found["prompts"] = _prompts_file(old, given)
    if str(found.get("font")).lower().endswith(FONT_FILES):
        found["font"] = None  # no number depends on it
    return found


def _model(model: ModelUsed, old: Recipe, given: Given, checkpoints: str) -> str:
    """What to pass after --model, after a look at its weights if they are here."""
    if model.kind == "hub":
        commit = f"@{model.commit or model.revision}" if model.commit or model.revision else ""
        if model.label_alone in VARIANTS and old.options["checkpoints"] == "official":
            return f"{model.label_alone}{commit}"
        return f"{model.name}{commit}" + (f":{model.subfolder}" if model.subfolder else "")
    where = _place(model, old, given)
    from gattn_viz.models.weights import weights_sha256

    now = weights_sha256(resolve(where, checkpoints))
    if now != model.weights_sha256 and not given.allow_changed:
        raise GattnVizError(
            f"the weights of {model.label} are not the recipe's: sha256 {_short(now)}, expected "
            f"{_short(model.weights_sha256)}: pass the right ones with --model {model.label}=PATH, or "
            "--allow-changed to see which numbers change"
        )
    return where


def _place(model: ModelUsed, old: Recipe, given: Given) -> str:
    if model.label in given.models:
        return str(Path(given.models[model.label]).expanduser())
    if model.kind == "bundled":
        by_name = model.name in VARIANTS and old.options["checkpoints"] == "demo"
        return model.name if by_name else str(demo_directory() / model.name)
    if model.path is not None and Path(model.path).exists():
        return model.path
    if model.label_alone in VARIANTS and given.checkpoints not in (None, "demo", "official"):
        return model.label_alone
    raise GattnVizError(
        f"the recipe's model {model.label} is a local {model.kind}, which it knows by name only; expected it "
        f"again: pass --model {model.label}=PATH (weights of sha256 {_short(model.weights_sha256)})"
    )


def _adapter(old: Recipe, given: Given) -> str | None:
    """What to pass after --adapter, after a look at it if it is here."""
    adapter = next((model.adapter for model in old.models if model.adapter is not None), None)
    if adapter is None:
        if given.adapter is not None:
            raise GattnVizError(
                f"--adapter {given.adapter}, but the recipe has none; expected no --adapter: leave it out"
            )
        return None
    if adapter.kind == "hub":
        commit = f"@{adapter.commit or adapter.revision}" if adapter.commit or adapter.revision else ""
        return f"{adapter.name}{commit}" + (f":{adapter.subfolder}" if adapter.subfolder else "")
    where = given.adapter
    if where is None and adapter.path is not None and Path(adapter.path).is_dir():
        where = adapter.path
    if where is None:
        raise GattnVizError(
            f"the recipe's adapter {adapter.label} is a local directory, which it knows by name only; expected it "
            f"again: pass --adapter PATH (sha256 {_short(adapter.weights_sha256)})"
        )
    from gattn_viz.models.weights import adapter_sha256

    now = adapter_sha256(resolve_adapter(where))
    if now != adapter.weights_sha256 and not given.allow_changed:
        raise GattnVizError(
            f"the adapter {adapter.label} is not the recipe's: sha256 {_short(now)}, expected "
            f"{_short(adapter.weights_sha256)}: pass the right one with --adapter PATH, or --allow-changed to see "
            "which numbers change"
        )
    return where


def _prompts_file(old: Recipe, given: Given) -> str | None:
    if old.prompts.file is None:
        if given.prompts is not None:
            raise GattnVizError(
                f"--prompts {given.prompts.name}, but the recipe's prompts are "
                f"{'its own --prompt' if old.options['prompt'] else 'the bundled ones'}; expected no --prompts: "
                "leave it out"
            )
        return None
    path = given.prompts
    if path is None and old.prompts.path is not None and Path(old.prompts.path).is_file():
        path = Path(old.prompts.path)
    if path is None:
        name = "standard input" if old.prompts.file == "-" else f"the file {old.prompts.file}"
        raise GattnVizError(
            f"the recipe's prompts came from {name}, which it knows by name only; expected them again: pass "
            f"--prompts PATH (texts of sha256 {_short(old.prompts.sha256)})"
        )
    prompts = options.chosen_prompts(old.options["prompt"], str(path), bool(old.options["whole-file"]))
    now = texts_sha256(prompt.text for prompt in prompts or [])
    if now != old.prompts.sha256 and not given.allow_changed:
        raise GattnVizError(
            f"the prompts of {path.name} are not the recipe's: sha256 {_short(now)}, expected "
            f"{_short(old.prompts.sha256)}: pass the right file with --prompts PATH, or --allow-changed to see "
            "which numbers change"
        )
    return str(path)


def _short(sha256: str | None) -> str:
    return "unknown" if sha256 is None else f"{sha256[:12]}..."


def _run(arguments: list[str]) -> None:
    """As from the command line, but what it prints is a message here."""
    from gattn_viz.cli.app import app

    printed = io.StringIO()
    with redirect_stdout(printed):
        typer.main.get_command(app)(arguments, prog_name="gattn-viz", standalone_mode=False)
    for line in printed.getvalue().splitlines():
        messages.log.info("wrote %s", line)


def _counterpart(old: Recipe, output: Path) -> Path:
    """Of the new files the one that corresponds to the old."""
    if old.command not in TO_DIRECTORY:
        return output
    for path in sorted(output.glob(f"*.{old.file.format}")):
        new = read_recipe(path)
        if _identity(new) == _identity(old):
            return path
    raise GattnVizError(
        f"the rerun wrote no {old.file.what} of {', '.join(old.file.models)} to compare with; expected one in "
        f"{output}: see what is there"
    )


def _identity(recipe: Recipe) -> tuple[str, list[int], int | None, str | None]:
    """Which of its command's files it is, by the places of its models and prompt: their names may have changed."""
    labels = [model.label for model in recipe.models]
    prompt = None if recipe.file.prompt is None else recipe.prompts.ids.index(recipe.file.prompt)
    places = [labels.index(label) for label in recipe.file.models]
    return recipe.file.what, places, prompt, recipe.file.figure

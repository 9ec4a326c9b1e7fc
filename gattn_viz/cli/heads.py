"""`gattn-viz heads`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gattn_viz.cli import figure_output, messages, options
from gattn_viz.cli.recording import Recorder
from gattn_viz.cli.table_output import write_csv
from gattn_viz.errors import GattnVizError

if TYPE_CHECKING:
    import pandas as pd

    from gattn_viz.recipe.content import FileMade, MapSummary, Recipe

HELP = (
    "Measures of every head as heatmaps: layers down, heads across, a panel a measure, a row a model.\n\n"
    "Any columns of sink-stats and gate-stats, each with one colour range for all models; or those of a table "
    "that one of them wrote (--table). Where a model has no gate its panel says so. The figure's path goes to "
    "stdout."
)
EXAMPLE = "Example: gattn-viz heads --model baseline --model gate_headwise"


def heads(
    ctx: typer.Context,
    model: options.Models = None,
    checkpoints: options.Checkpoints = "demo",
    revision: options.Revision = None,
    adapter: options.Adapter = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    max_memory: options.MaxMemory = None,
    offload_folder: options.OffloadFolder = None,
    trust_remote_code: options.TrustRemoteCode = False,
    prompt: options.PromptTexts = None,
    prompts: options.PromptsFile = None,
    whole_file: options.WholeFile = False,
    max_tokens: options.MaxTokens = None,
    bos: options.Bos = "auto",
    chat: options.Chat = False,
    batch_size: options.BatchSize = 1,
    chunk: options.Chunk = None,
    measures: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Columns of sink-stats or gate-stats, with commas between; each is a panel. Default: "
            "first_token_mass,gate_mean.",
            show_default=False,
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw this table (.csv, .json, .parquet), by head, and run no model.",
            show_default=False,
        ),
    ] = None,
    scale: figure_output.Scale = "linear",
    font: figure_output.Font = None,
    output: figure_output.Directory = Path("figs"),
    output_format: figure_output.Format = "png",
    dpi: figure_output.Dpi = 200,
    with_csv: figure_output.WithCsv = False,
    recipe_paths: options.RecipePaths = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    given = {
        "--model": model,
        "--prompt": prompt,
        "--prompts": prompts,
        "--max-tokens": max_tokens,
        "--chat": chat or None,
    }
    for name, value in given.items():
        if table is not None and value is not None:
            raise typer.BadParameter(f"{name} is given with --table, which runs no model; expected one of the two")

    os.environ["MPLBACKEND"] = "agg"  # figures go to files: no display is needed, whatever the environment says
    from gattn_viz.drawing.heads import DEFAULT_MEASURES, draw_heads
    from gattn_viz.figures.fonts import user_family
    from gattn_viz.figures.save import save_figure
    from gattn_viz.models.names import VARIANTS
    from gattn_viz.pipeline import head_table
    from gattn_viz.recipe.content import KEY, FileMade

    asked = [name.strip() for name in ",".join(measures or DEFAULT_MEASURES).split(",")]
    names = list(dict.fromkeys(asked))
    recorder = Recorder(ctx, recipe_paths, ["matplotlib"])
    if font is not None:
        user_family(font)  # a font that is not there is said before a model is loaded
    if table is not None:
        found = _read(table)
    else:
        with messages.progress(quiet) as progress:
            found = head_table(
                model or VARIANTS,
                options.chosen_prompts(prompt, prompts, whole_file),
                measures=names,
                run=options.run_of(ctx),
                progress=progress,
                on_model=recorder.on_model,
            )
    figure = draw_heads(found, names, scale=scale, font=font)
    models = tuple(dict.fromkeys(found["model"]))

    def noted(file: FileMade) -> Recipe:
        paths = found.attrs.get("attention_path", {})
        recipe = recorder.recipe(file, {label: " and ".join(used) for label, used in paths.items()})
        return recipe if table is None else _of_the_table(recipe, table)

    file = FileMade("heads", output_format, models, view=_view(table), numbers=_summaries(found, names))
    metadata = {KEY: noted(file).to_json()}
    print(save_figure(figure, output / f"heads.{output_format}", dpi=dpi, metadata=metadata))
    if with_csv:
        drawn = found[["model", "layer", "head", *names]]
        print(write_csv(drawn, output / "heads.csv", noted(FileMade("table", "csv", models, view=_view(table)))))


def _read(path: Path) -> pd.DataFrame:
    """The table of a file, by its suffix."""
    from gattn_viz.recipe.agreement import read_table

    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("csv", "json", "parquet"):
        raise typer.BadParameter(f"--table {path}: expected a .csv, .json or .parquet file")
    path = path.expanduser()
    if not path.is_file():
        raise GattnVizError(
            f"--table {path} is no file; expected what sink-stats or gate-stats wrote: check the path"
        )
    table = read_table(path, kind)
    _warn_of_holes(table, path.name)
    return table


def _warn_of_holes(table: pd.DataFrame, name: str) -> None:
    """A table that was cut or edited looks like one of a model with fewer heads in some layers."""
    if not {"model", "layer", "head"} <= set(table.columns):
        return  # which is an error of its own
    for model, rows in table.groupby("model", sort=False):
        expected = rows["layer"].nunique() * rows["head"].nunique()
        if len(rows) < expected:
            messages.log.warning(
                "%s has %d of %d heads of %s: the others are blank", name, len(rows), expected, model
            )


def _view(table: Path | None) -> str | None:
    from gattn_viz.recipe.stored import file_sha256

    return None if table is None else f"from {table.name}, sha256 {file_sha256(table.expanduser())}"


def _of_the_table(recipe: Recipe, table: Path) -> Recipe:
    """With the models and prompts that the table's own recipe names, if it has one."""
    from dataclasses import replace

    from gattn_viz.recipe.stored import read_recipe

    try:
        of_table = read_recipe(table)
    except GattnVizError:
        messages.log.warning("%s has no recipe: that of the figure names no models and prompts", table.name)
        return recipe
    return replace(recipe, models=of_table.models, prompts=of_table.prompts)


def _summaries(table: pd.DataFrame, measures: list[str]) -> tuple[MapSummary, ...]:
    from gattn_viz.drawing.heads import heads_of
    from gattn_viz.recipe.agreement import summarise_map

    return tuple(
        summarise_map(model, None, None, values, name)
        for model, of_model in heads_of(table, measures).items()
        for name, values in of_model.items()
    )

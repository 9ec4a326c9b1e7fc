"""`gattn-viz compare`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gattn_viz.cli import figure_output, messages, options
from gattn_viz.cli.recording import Recorder

if TYPE_CHECKING:
    import pandas as pd

    from gattn_viz.pipeline import AttentionMaps, Comparison

HELP = (
    "Models beside each other on the same prompts: what each costs, and what its attention does.\n\n"
    "Parameters, multiply-adds and memory of the gate are counted; a plain forward pass is timed; measures get "
    "their difference to the baseline with a paired interval. In a terminal a table, into a pipe CSV; with -o a "
    "directory with comparison.csv, comparison.md and two figures, their paths on stdout. For timing all models "
    "are in memory together, unless --no-time."
)
EXAMPLE = "Example: gattn-viz compare -m baseline -m gate_headwise -o comparison"

COSTS = "Time and memory"

CURVE_COLUMNS = [
    "model", "layer", "depth", "first_token_mass", "first_token_mass_ci_low", "first_token_mass_ci_high",
    "uniform_null", "n_prompts", "n_queries", "tokens", "first_row", "ci", "ci_seed", "ci_resamples",
]  # fmt: skip


def compare(
    ctx: typer.Context,
    model: options.Models = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Which of the models the others are set against. Default: the first.",
            rich_help_panel=options.MODELS,
            show_default=False,
        ),
    ] = None,
    checkpoints: options.Checkpoints = "demo",
    revision: options.Revision = None,
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
    first_row: Annotated[
        Literal["exclude", "include"],
        typer.Option(help="Whether the first query, which sees itself alone, counts in first_token_mass."),
    ] = "exclude",
    sink_threshold: Annotated[
        float, typer.Option(min=0, max=1, help="The eps of sink_rate: a prompt has a sink above it.")
    ] = 0.3,
    below: Annotated[float, typer.Option(min=0, max=1, help="A gate score is shut below it: gate_below.")] = 0.1,
    ci: Annotated[
        float, typer.Option(metavar="LEVEL", help="Of the intervals, a paired bootstrap over prompts.")
    ] = 0.95,
    seed: options.Seed = 0,
    resamples: options.Resamples = 1000,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Of timing: each runs every model once.", rich_help_panel=COSTS),
    ] = 5,
    time_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="T",
            help="Tokens of the prompt that is timed, and whose multiply-adds are counted: the longest, repeated "
            "or cut. Default: as it is.",
            rich_help_panel=COSTS,
            show_default=False,
        ),
    ] = None,
    no_time: Annotated[
        bool,
        typer.Option(
            "--no-time",
            help="Measure neither time nor memory: one model is in memory at a time.",
            rich_help_panel=COSTS,
        ),
    ] = False,
    layers: figure_output.Layers = None,
    x: figure_output.X = "layer",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            file_okay=False,
            metavar="DIR",
            help="Write tables and figures into a directory; - is CSV on stdout.",
            rich_help_panel=options.OUTPUT,
            show_default=False,
        ),
    ] = None,
    output_format: figure_output.Format = "png",
    recipe_paths: options.RecipePaths = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    some_layers = figure_output.chosen_layers(layers)

    os.environ["MPLBACKEND"] = "agg"
    from gattn_viz.metrics.bootstrap import Bootstrap
    from gattn_viz.metrics.compared import CompareOptions
    from gattn_viz.metrics.pooling import MapView
    from gattn_viz.models.names import VARIANTS
    from gattn_viz.pipeline import attention_maps
    from gattn_viz.pipeline import compare as compare_models
    from gattn_viz.pipeline.maps import check_layers
    from gattn_viz.prompts import default_prompts

    with options.wrong_use():
        Bootstrap(ci, seed, resamples)
    recorder = Recorder(ctx, recipe_paths, ["matplotlib"])
    run = options.run_of(ctx)
    models = model or VARIANTS
    chosen_prompts = options.chosen_prompts(prompt, prompts, whole_file) or default_prompts()
    to_files = output is not None and output != Path("-")
    if to_files and isinstance(some_layers, tuple):
        check_layers(models, some_layers, run)  # not after minutes of measuring
    with messages.progress(quiet) as progress:
        found = compare_models(
            models,
            chosen_prompts,
            baseline=baseline,
            ci=ci,
            seed=seed,
            resamples=resamples,
            options=CompareOptions(first_row=first_row, sink_threshold=sink_threshold, below=below),
            rounds=0 if no_time else rounds,
            time_tokens=time_tokens,
            x=x,
            run=run,
            progress=progress,
            on_model=recorder.on_model if to_files else None,
        )
    _show(found.table, ci, output)
    if to_files:
        from gattn_viz.cli.comparison_table import to_markdown

        assert output is not None
        with messages.progress(quiet) as progress:
            maps = attention_maps(
                models,
                chosen_prompts[:1],
                layers=some_layers,  # type: ignore[arg-type]
                view=MapView(max_cells=512),
                run=run,
                progress=progress,
            )
        directory = _Directory(output, output_format, recorder, found)
        print(directory.write_table("comparison.csv", "table", _csv(found.table)))
        print(directory.write_table("comparison.md", "table", to_markdown(found.table, ci)))
        curves = _csv(found.layers.filter(CURVE_COLUMNS))
        print(directory.write_table("first_token_by_layer.csv", "layers", curves))
        print(directory.write_curves(found.layers))
        print(directory.write_grid(maps))


def _show(table: pd.DataFrame, ci: float, output: Path | None) -> None:
    """A table in a terminal, whatever is written; CSV where nothing is written to files."""
    in_terminal = sys.stdout is not None and sys.stdout.isatty()
    if in_terminal and output != Path("-"):
        from gattn_viz.cli.comparison_table import print_comparison

        print_comparison(table, ci)
    elif output is None or output == Path("-"):
        print(_csv(table), end="")


def _csv(table: pd.DataFrame) -> str:
    return table.to_csv(index=False, float_format="%.12g", lineterminator="\n")  # parameters are exact


class _Directory:
    """Where the files go, each with its recipe."""

    def __init__(
        self, path: Path, figure_format: Literal["png", "pdf", "svg"], recorder: Recorder, found: Comparison
    ) -> None:
        used = found.table.attrs["attention_path"]
        self._path, self._format, self._recorder = path, figure_format, recorder
        self._attention = {label: " and ".join(paths) for label, paths in used.items()}

    def write_table(self, name: str, what: Literal["table", "layers"], text: str) -> Path:
        """Write a table, and its recipe beside it."""
        from gattn_viz.recipe.content import FileMade
        from gattn_viz.recipe.stored import write_with_sidecar

        path = self._path / name
        file = FileMade(what, path.suffix.removeprefix("."), tuple(self._attention))
        return write_with_sidecar(text.encode(), self._recorder.recipe(file, self._attention), path)

    def write_grid(self, maps: list[AttentionMaps]) -> Path:
        """Draw the models' maps of one prompt."""
        from gattn_viz.drawing.maps import Look, color_scale, draw_grid
        from gattn_viz.recipe.agreement import summarise_map

        colors = color_scale(maps, Look())
        return self._save(
            draw_grid(maps, scale=colors),
            "maps_grid",
            what="grid",
            models=tuple(one.model for one in maps),
            prompt=maps[0].prompt,
            view=" or ".join(dict.fromkeys(one.cells.in_words() for one in maps)),
            color_scale={"kind": colors.kind, "low": colors.low, "high": colors.vmax},
            numbers=tuple(
                summarise_map(one.model, layer, None, of_layer.mean(0))
                for one in maps
                for layer, of_layer in zip(one.layers, one.probabilities, strict=True)
            ),
        )

    def write_curves(self, layers: pd.DataFrame) -> Path:
        """Draw first-token mass by layer; a point of a curve is noted as a map of one cell."""
        import numpy as np

        from gattn_viz.drawing.maps import draw_first_token
        from gattn_viz.recipe.agreement import summarise_map

        points = zip(layers["model"], layers["layer"].tolist(), layers["first_token_mass"], strict=True)
        return self._save(
            draw_first_token(layers),
            "first_token_by_layer",
            what="curves",
            models=tuple(self._attention),
            numbers=tuple(summarise_map(name, layer, None, np.array([[mass]])) for name, layer, mass in points),
        )

    def _save(self, figure: Any, name: str, **made: Any) -> Path:
        from gattn_viz.figures.save import save_figure
        from gattn_viz.recipe.content import KEY, FileMade

        recipe = self._recorder.recipe(FileMade(format=self._format, **made), self._attention)
        return save_figure(figure, self._path / f"{name}.{self._format}", metadata={KEY: recipe.to_json()})

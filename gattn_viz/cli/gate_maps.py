"""`gattn-viz gate-maps`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gattn_viz.cli import figure_output, messages, options
from gattn_viz.cli.file_names import file_stems
from gattn_viz.cli.recording import Recorder
from gattn_viz.cli.table_output import write_csv

if TYPE_CHECKING:
    from gattn_viz.pipeline import GateMaps
    from gattn_viz.recipe.content import MapSummary, Recipe

HELP = (
    "Gate scores token by token: tokens down, heads across, a panel a layer, a figure for each gated model.\n\n"
    "With --text it is the text itself, each token shaded by a head's gate. A score is after the activation; of "
    "an elementwise gate it is the mean over the head's channels. All figures of one command share one colour "
    "range. The paths of the files written go to stdout."
)
EXAMPLE = "Example: gattn-viz gate-maps --model gate_headwise --layers 1,7,21,28"


def gate_maps(
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
    chunk: options.Chunk = None,
    layers: figure_output.Layers = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="mean, all, or heads from 1 such as 1,4-6. Default: all; with --text, mean.", show_default=False
        ),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="The text itself, shaded: once for each layer and head.")
    ] = False,
    scale: figure_output.Scale = "linear",
    vmax: figure_output.Vmax = None,
    font: figure_output.Font = None,
    output: figure_output.Directory = Path("figs"),
    output_format: figure_output.Format = "png",
    dpi: figure_output.Dpi = 200,
    with_csv: figure_output.WithCsv = False,
    recipe_paths: options.RecipePaths = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    heads = heads or ("mean" if text else "all")
    chosen_layers = figure_output.chosen_layers(layers)
    chosen_heads = heads if heads in ("mean", "all") else options.parse_numbers(heads, "mean, all, or heads")
    if vmax == 0:
        raise typer.BadParameter("--vmax 0 leaves no range; expected more than 0")

    os.environ["MPLBACKEND"] = "agg"  # figures go to files: no display is needed, whatever the environment says
    from gattn_viz import pipeline
    from gattn_viz.drawing.gates import draw_gate_maps, draw_gate_text, gate_color_scale
    from gattn_viz.drawing.maps import Look
    from gattn_viz.figures.fonts import user_family
    from gattn_viz.figures.save import save_figure
    from gattn_viz.models.names import VARIANTS
    from gattn_viz.recipe.content import KEY, FileMade

    recorder = Recorder(ctx, recipe_paths, ["matplotlib"])
    if font is not None:
        user_family(font)  # a font that is not there is said before a model is loaded
    with messages.progress(quiet) as progress:
        sets = pipeline.gate_maps(
            model or VARIANTS,
            options.chosen_prompts(prompt, prompts, whole_file),
            layers=chosen_layers,  # type: ignore[arg-type]
            heads=chosen_heads,  # type: ignore[arg-type]
            run=options.run_of(ctx),
            progress=progress,
            on_model=recorder.on_model,
        )

    look = Look(scale, vmax, font)
    colors = gate_color_scale(sets, look)
    color_range = {"kind": colors.kind, "low": colors.low, "high": colors.vmax}
    attention = {one.model: one.attention_path for one in sets}
    draw, kind, prefix = (draw_gate_text, "gate text", "gate_text") if text else (draw_gate_maps, "gates", "gates")

    def noted(one: GateMaps, what: Literal["gates", "gate text", "table"], file_format: str) -> Recipe:
        drawn = what != "table"
        file = FileMade(
            what,
            file_format,
            models=(one.model,),
            prompt=one.prompt,
            view=f"T = {len(one.tokens)}",
            color_scale=color_range if drawn else None,
            numbers=_summaries(one) if drawn else (),
        )
        return recorder.recipe(file, attention)

    several = len({one.prompt for one in sets}) > 1
    stems = file_stems((prefix, one.model, *([one.prompt] if several else [])) for one in sets)
    for one, name in zip(sets, stems, strict=True):
        metadata = {KEY: noted(one, kind, output_format).to_json()}  # type: ignore[arg-type]
        figure = draw(one, look=look, scale=colors)
        print(save_figure(figure, output / f"{name}.{output_format}", dpi=dpi, metadata=metadata))
        if with_csv:
            table = pipeline.gate_map_table([one])
            print(write_csv(table, output / f"{name}.csv", noted(one, "table", "csv")))


def _summaries(one: GateMaps) -> tuple[MapSummary, ...]:
    """Each layer's scores, (tokens, heads), in a few numbers."""
    from gattn_viz.recipe.agreement import summarise_map

    return tuple(
        summarise_map(one.model, layer, None, scores) for layer, scores in zip(one.layers, one.scores, strict=True)
    )

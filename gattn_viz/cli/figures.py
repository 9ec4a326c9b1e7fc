"""`gattn-viz figures`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gattn_viz.cli import figure_output, messages, options
from gattn_viz.cli.recording import Recorder

if TYPE_CHECKING:
    import pandas as pd

    from gattn_viz.pipeline.paper import PaperData
    from gattn_viz.recipe.content import Recipe

HELP = (
    "The paper's figures and its table, of these models: each as PNG and PDF, its numbers as CSV beside it.\n\n"
    "The summary is written as CSV, Markdown and LaTeX, what to say below each figure to captions.md. A figure of "
    "gates has the models with a gate only. The paths of the files written go to stdout."
)
EXAMPLE = "Example: gattn-viz figures --only first_token_by_layer,summary -o figs"

# those of the table of figures, which --help must not take the time to import
FIGURES = (
    "first_token_by_layer, attention_maps, gate_distribution, gate_distribution_by_layer, output_magnitude, "
    "output_sparsity, sinks_and_activations, gate_by_layer, summary"
)


def figures(
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
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help=f"Which, with commas between; what is not asked for costs nothing. Default: all. {FIGURES}.",
            show_default=False,
        ),
    ] = None,
    list_figures: Annotated[
        bool, typer.Option("--list", help="Say what each figure shows, and which of the paper's it is.")
    ] = False,
    layers: figure_output.Layers = None,
    x: figure_output.X = "layer",
    first_row: Annotated[
        Literal["exclude", "include"],
        typer.Option(help="Whether the first query, which sees itself alone, counts in first_token_mass."),
    ] = "exclude",
    style: Annotated[
        Literal["paper", "screen"], typer.Option(help="paper has the small type of a two-column paper.")
    ] = "paper",
    width: Annotated[
        float | None,
        typer.Option(
            min=2,
            max=40,
            metavar="INCHES",
            help="Of every figure. Default: one or two columns, 3.25 and 6.75 (screen: 5.5 and 9).",
            show_default=False,
        ),
    ] = None,
    font: Annotated[
        str | None, typer.Option(help="A font family or file to prefer for names and tokens.", show_default=False)
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            file_okay=False,
            metavar="DIR",
            help="Where they are written.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = Path("figs"),
    dpi: Annotated[
        int,
        typer.Option(
            min=20,
            max=2400,
            help="Pixels per inch of the PNGs, and of the maps in PDFs.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = 200,
    recipe_paths: options.RecipePaths = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    os.environ["MPLBACKEND"] = "agg"  # figures go to files: no display is needed, whatever the environment says
    if list_figures:
        _print_list()
        return
    some_layers = figure_output.chosen_layers(layers)

    from gattn_viz.figures.fonts import user_family
    from gattn_viz.models.names import VARIANTS
    from gattn_viz.pipeline.paper import choose_figures, paper_data

    with options.wrong_use():
        names = [name.strip() for name in ",".join(only).split(",")] if only else None
        chosen = choose_figures(names)
    if some_layers is not None and "attention_maps" not in chosen:
        raise typer.BadParameter("--layers is of attention_maps, which is not among --only; expected it there")
    if font is not None:
        user_family(font)  # a font that is not there is said before a model is loaded
    recorder = Recorder(ctx, recipe_paths, ["matplotlib"])
    with messages.progress(quiet) as progress:
        data = paper_data(
            model or VARIANTS,
            options.chosen_prompts(prompt, prompts, whole_file),
            figures=chosen,
            layers=some_layers,  # type: ignore[arg-type]
            first_row=first_row,
            x=x,
            run=options.run_of(ctx),
            progress=progress,
            on_model=recorder.on_model,
        )
    for path in _write(data, recorder, output, dpi, {"kind": style, "width": width, "font": font}):
        print(path)


def _print_list() -> None:
    from gattn_viz.drawing.paper import PAPER_FIGURES

    names, numbers = max(map(len, PAPER_FIGURES)), max(len(one.number) for one in PAPER_FIGURES.values())
    for name, figure in PAPER_FIGURES.items():
        print(f"{name:{names}}  {figure.number:{numbers}}  {figure.shows}")


def _write(data: PaperData, recorder: Recorder, output: Path, dpi: int, look: dict[str, Any]) -> list[Path]:
    """All files; each carries its recipe, the table beside a figure too."""
    from gattn_viz.drawing.paper import PAPER_FIGURES, draw_paper_figure
    from gattn_viz.figures.save import save_figure
    from gattn_viz.pipeline.captions import caption, captions
    from gattn_viz.pipeline.summary import to_latex, to_markdown
    from gattn_viz.recipe.content import KEY, FileMade
    from gattn_viz.recipe.stored import write_with_sidecar

    def recipe(name: str | None, file_format: str) -> Recipe:
        frame = None if name is None else data.frames[name]
        shown = [run.model for run in data.models if frame is None or (frame["model"] == run.model).any()]
        what: Any = "table" if file_format == "csv" else "figure" if file_format in ("png", "pdf") else "text"
        return recorder.recipe(FileMade(what, file_format, tuple(shown), figure=name), data.attention)

    def write(text: str, name: str, recipe: Recipe) -> Path:
        return write_with_sidecar(text.encode(), recipe, output / name)

    # all are drawn before the first file is written: one for which there is no room leaves nothing behind
    models = [run.model for run in data.models]
    figures = {
        name: draw_paper_figure(name, frame, models=models, **look)
        for name, frame in data.frames.items()
        if PAPER_FIGURES[name].draw is not None
    }
    written: list[Path] = []
    for name, frame in data.frames.items():
        written.append(write(_csv(frame), f"{name}.csv", recipe(name, "csv")))
        if name not in figures:
            written.append(write(to_markdown(frame), f"{name}.md", recipe(name, "md")))
            written.append(write(to_latex(frame), f"{name}.tex", recipe(name, "tex")))
            continue
        for kind in ("png", "pdf"):
            metadata = {"caption": caption(name, data), KEY: recipe(name, kind).to_json()}
            written.append(save_figure(figures[name], output / f"{name}.{kind}", dpi=dpi, metadata=metadata))
    numbers = {name: figure.number for name, figure in PAPER_FIGURES.items()}
    written.append(write(captions(data, numbers), "captions.md", recipe(None, "md")))
    return written


def _csv(frame: pd.DataFrame) -> str:
    return frame.to_csv(index=False, float_format="%.7g", lineterminator="\n")

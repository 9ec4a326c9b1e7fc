"""`gattn-viz sink-stats`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gattn_viz.cli import messages, options
from gattn_viz.cli.recording import Recorder
from gattn_viz.errors import GattnVizError

if TYPE_CHECKING:
    import pandas as pd

HELP = (
    "Attention-sink statistics: how much attention the first token takes, layer by layer, head by head.\n\n"
    "Writes CSV, a row for each model, layer and head. In a terminal it shows a table per model instead, unless a "
    "format is asked for. The columns are explained in the README."
)
EXAMPLE = "Example: gattn-viz sink-stats -o sinks.csv"

Format = Literal["csv", "json", "parquet"]

# those of the table of measures, which --help must not take the time to import
MEASURES = (
    "first_token_mass, uniform_null, sink_rate, top_sink_position, top_sink_mass, entropy, entropy_ratio, "
    "row_max, gate_mean, max_activation, max_activation_ratio, max_activation_position, max_activation_channel, "
    "value_norm_first, value_norm_rest, perplexity"
)


def sink_stats(
    ctx: typer.Context,
    model: options.Models = None,
    checkpoints: options.Checkpoints = "demo",
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    prompt: options.PromptTexts = None,
    prompts: options.PromptsFile = None,
    max_tokens: options.MaxTokens = None,
    whole_file: options.WholeFile = False,
    bos: options.Bos = "auto",
    batch_size: options.BatchSize = 1,
    chunk: options.Chunk = None,
    measures: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Which columns to compute; what is not asked for costs nothing. Default: all. Else, with commas "
            f"between: {MEASURES}.",
            show_default=False,
        ),
    ] = None,
    by: Annotated[
        Literal["head", "layer", "model"],
        typer.Option(
            help="What a row stands for: a head, the mean of a layer's heads, the mean of a model's layers."
        ),
    ] = "head",
    per_prompt: Annotated[bool, typer.Option("--per-prompt", help="A row for each prompt too.")] = False,
    first_row: Annotated[
        Literal["exclude", "include"],
        typer.Option(help="Whether the first query, which sees itself alone, counts in first_token_mass."),
    ] = "exclude",
    sink_threshold: Annotated[
        float, typer.Option(min=0, max=1, help="The eps of sink_rate: a prompt has a sink above it.")
    ] = 0.3,
    ci: Annotated[
        float | None,
        typer.Option(
            metavar="LEVEL",
            help="Confidence intervals of the means, such as .95: a percentile bootstrap over prompts.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    resamples: Annotated[int, typer.Option(min=1, help="Of the bootstrap.")] = 1000,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the table to a file (.csv, .json, .parquet) instead of stdout; - is stdout.",
            rich_help_panel=options.OUTPUT,
            show_default=False,
        ),
    ] = None,
    output_format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="Default: by the file's suffix; on stdout csv.",
            rich_help_panel=options.OUTPUT,
            show_default=False,
        ),
    ] = None,
    recipe_paths: options.RecipePaths = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    if output == Path("-"):
        output, output_format = None, output_format or "csv"
    chosen = _output_format(output, output_format)

    from gattn_viz import tables
    from gattn_viz.metrics.bootstrap import Bootstrap
    from gattn_viz.metrics.measures import SINK_MEASURES, Options, choose_measures
    from gattn_viz.models.names import VARIANTS
    from gattn_viz.pipeline.run import Run
    from gattn_viz.pipeline.stats import Wanted, measure_sinks

    recorder = None if output is None else Recorder(ctx, recipe_paths)

    with options.wrong_use():
        wanted = Wanted(
            choose_measures(",".join(measures or ["all"])),
            by,
            per_prompt,
            None if ci is None else Bootstrap(ci, seed, resamples),
            Options(first_row=first_row, sink_threshold=sink_threshold),
        )
    with messages.progress(quiet) as progress:
        table, sums = measure_sinks(
            model or VARIANTS,
            options.chosen_prompts(prompt, prompts, whole_file),
            wanted,
            Run(
                checkpoints=checkpoints,
                revision=revision,
                dtype=dtype,
                device=device,
                device_map=device_map,
                trust_remote_code=trust_remote_code,
                bos=bos,
                max_tokens=max_tokens,
                batch_size=batch_size,
                chunk=chunk,
            ),
            progress,
            None if recorder is None else recorder.on_model,
        )

    in_terminal = sys.stdout is not None and sys.stdout.isatty()
    if output is not None and recorder is not None:
        _write_file(table, output, chosen, recorder)
        messages.log.info("wrote %s: %d rows", output, len(table))
    elif not in_terminal or output_format is not None:
        _write_stdout(table, chosen)
        return
    if in_terminal and not quiet:
        from gattn_viz.report import print_sink_report

        columns = None if wanted.measures == SINK_MEASURES else [measure.name for measure in wanted.measures]
        print_sink_report(tables.summarise(sums, "layer"), tables.summarise(sums, "model"), columns)


def _output_format(output: Path | None, asked: Format | None) -> Format:
    """The format asked for, else that of the file's suffix.

    Raises:
        typer.BadParameter: the suffix is of no format.
        GattnVizError: the format's library is not installed.
    """
    by_suffix: dict[str, Format] = {"": "csv", ".csv": "csv", ".json": "json", ".parquet": "parquet"}
    suffix = output.suffix.lower() if output is not None else ""
    if asked is None and suffix not in by_suffix:
        raise typer.BadParameter(f"--output {output}: expected .csv, .json or .parquet, or --format beside it")
    chosen = asked or by_suffix[suffix]
    if chosen == "parquet" and find_spec("pyarrow") is None:
        raise GattnVizError(
            "parquet needs pyarrow, which is not installed; install it with: pip install 'gattn-viz[parquet]'"
        )
    return chosen


def _write_file(table: pd.DataFrame, path: Path, output_format: Format, recorder: Recorder) -> None:
    from gattn_viz.files import replacing
    from gattn_viz.recipe.content import FileMade
    from gattn_viz.recipe.stored import with_recipe, write_sidecar

    paths = {model: " and ".join(used) for model, used in table.attrs["attention_path"].items()}
    recipe = recorder.recipe(FileMade("table", output_format, tuple(paths)), paths)
    content = _encode(table, output_format)
    with replacing(path) as temporary:
        temporary.write_bytes(with_recipe(content, recipe) if output_format == "parquet" else content)
    if output_format != "parquet":
        write_sidecar(recipe, path)


def _write_stdout(table: pd.DataFrame, output_format: Format) -> None:
    if sys.stdout is None:
        raise GattnVizError("standard output is closed; expected somewhere to write to: use --output FILE")
    sys.stdout.flush()
    sys.stdout.buffer.write(_encode(table, output_format))
    sys.stdout.flush()


def _encode(table: pd.DataFrame, output_format: Format) -> bytes:
    if output_format == "csv":
        return table.to_csv(index=False, float_format="%.7g").encode()
    if output_format == "json":
        return (table.to_json(orient="records", indent=2, double_precision=9) + "\n").encode()
    return table.to_parquet(index=False)

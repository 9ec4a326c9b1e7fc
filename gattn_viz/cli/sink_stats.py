"""`gattn-viz sink-stats`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from gattn_viz.cli import messages, options
from gattn_viz.cli.recording import Recorder
from gattn_viz.cli.table_output import OutputFile, OutputFormat, TableOutput

HELP = (
    "Attention-sink statistics: how much attention the first token takes, layer by layer, head by head.\n\n"
    "Writes CSV, a row for each model, layer and head. In a terminal it shows a table per model with a row for "
    "each layer instead, or with --by model or --per-prompt those rows, unless a format is asked for. "
    "The columns are explained in "
    "the README."
)
EXAMPLE = "Example: gattn-viz sink-stats -o sinks.csv"

# those of the table of measures, which --help must not take the time to import
MEASURES = (
    "first_token_mass, uniform_null, first_token_visible, learned_sink_mass, sink_rate, top_sink_position, "
    "top_sink_mass, entropy, entropy_ratio, row_max, gate_mean, max_activation, max_activation_ratio, "
    "max_activation_position, max_activation_channel, value_norm_first, value_norm_rest, perplexity"
)


def sink_stats(
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
    max_tokens: options.MaxTokens = None,
    whole_file: options.WholeFile = False,
    bos: options.Bos = "auto",
    chat: options.Chat = False,
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
    by: options.By = "head",
    per_prompt: options.PerPrompt = False,
    first_row: Annotated[
        Literal["exclude", "include"],
        typer.Option(help="Whether the first query, which sees itself alone, counts in first_token_mass."),
    ] = "exclude",
    sink_threshold: Annotated[
        float, typer.Option(min=0, max=1, help="The eps of sink_rate: a prompt has a sink above it.")
    ] = 0.3,
    ci: options.Ci = None,
    seed: options.Seed = 0,
    resamples: options.Resamples = 1000,
    output: OutputFile = None,
    output_format: OutputFormat = None,
    recipe_paths: options.RecipePaths = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    options.check_bootstrap(ctx, ci)
    where = TableOutput(output, output_format)

    from gattn_viz import tables
    from gattn_viz.metrics.bootstrap import Bootstrap
    from gattn_viz.metrics.measures import SINK_MEASURES, Options, choose_measures
    from gattn_viz.models.names import VARIANTS
    from gattn_viz.pipeline.stats import Wanted, measure

    recorder = Recorder(ctx, recipe_paths)

    with options.wrong_use():
        wanted = Wanted(
            choose_measures(",".join(measures or ["all"])),
            by,
            per_prompt,
            None if ci is None else Bootstrap(ci, seed, resamples),
            Options(first_row=first_row, sink_threshold=sink_threshold),
        )
    with messages.progress(quiet) as progress:
        table, sums = measure(
            model or VARIANTS,
            options.chosen_prompts(prompt, prompts, whole_file),
            wanted,
            options.run_of(ctx),
            progress,
            recorder.on_model if where.is_file else None,
        )

    def report() -> None:
        from gattn_viz.report import print_rows, print_sink_report, shows_layers

        names = [measure.name for measure in wanted.measures]
        if shows_layers(names, by, per_prompt):
            columns = None if wanted.measures == SINK_MEASURES else names
            print_sink_report(tables.summarise(sums, "layer"), tables.summarise(sums, "model"), columns)
        else:
            print_rows(table if per_prompt else tables.summarise(sums, "model"))

    where.write(table, recorder, report)

"""`gattn-viz gate-stats`."""

from __future__ import annotations

from typing import Annotated

import typer

from gattn_viz.cli import messages, options
from gattn_viz.cli.recording import Recorder
from gattn_viz.cli.table_output import OutputFile, OutputFormat, TableOutput

HELP = (
    "Gate statistics: how open each head's gate is, and what the attention output is before and after it.\n\n"
    "Writes CSV, a row for each model, layer and head. In a terminal it shows a table per model with a row for "
    "each layer instead, or with --by model or --per-prompt those rows, unless a format is asked for. "
    "A model without a gate has empty columns; if no model has one, that is an error. With --tokens it lists the "
    "tokens that open and shut each head's gate instead. The columns are explained in the README."
)
EXAMPLE = "Example: gattn-viz gate-stats --model gate_headwise -o gates.csv"

# those of the table of measures, which --help must not take the time to import
MEASURES = (
    "gate_mean, gate_std, gate_q05, gate_q25, gate_q50, gate_q75, gate_q95, gate_below, gate_above, "
    "gate_first_token, gate_rest, gate_channels_shut, output_before, output_after, output_before_below_01, "
    "output_before_below_001, output_after_below_01, output_after_below_001, output_scaled_below_01, "
    "output_scaled_below_001, honor_before, honor_after"
)

TOKENS = "Tokens"


def gate_stats(
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
    below: Annotated[
        float, typer.Option(min=0, max=1, help="A score is shut below it: gate_below, gate_channels_shut.")
    ] = 0.1,
    above: Annotated[float, typer.Option(min=0, max=1, help="A score is open above it: gate_above.")] = 0.9,
    ci: options.Ci = None,
    seed: options.Seed = 0,
    resamples: options.Resamples = 1000,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="In place of the measures, the N tokens that open each head's gate most and the N that shut it "
            "most, with their context.",
            rich_help_panel=TOKENS,
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(help="Of --tokens: all, or layers from 1 such as 1,7,21-28.", rich_help_panel=TOKENS),
    ] = "all",
    heads: Annotated[
        str, typer.Option(help="Of --tokens: all, or heads from 1 such as 1,4-6.", rich_help_panel=TOKENS)
    ] = "all",
    output: OutputFile = None,
    output_format: OutputFormat = None,
    recipe_paths: options.RecipePaths = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    _check_tokens(tokens, layers, heads, measures, per_prompt, ci, by)
    options.check_bootstrap(ctx, ci)
    where = TableOutput(output, output_format)
    some_layers = None if layers == "all" else options.parse_numbers(layers, "all, or layers")
    some_heads = None if heads == "all" else options.parse_numbers(heads, "all, or heads")

    from gattn_viz import tables
    from gattn_viz.metrics.bootstrap import Bootstrap
    from gattn_viz.metrics.gate_measures import GATE_MEASURES, GateOptions
    from gattn_viz.metrics.measures import choose_measures
    from gattn_viz.models.names import VARIANTS
    from gattn_viz.pipeline.gates import gate_tokens, need_gate, require_gate
    from gattn_viz.pipeline.stats import Wanted, measure

    with options.wrong_use():
        chosen = choose_measures(",".join(measures or ["all"]), GATE_MEASURES)
        wanted = Wanted(
            chosen,
            by,
            per_prompt,
            None if ci is None else Bootstrap(ci, seed, resamples),
            GateOptions(below, above),
            gate_required=need_gate(chosen),
        )
    run = options.run_of(ctx)
    recorder = Recorder(ctx, recipe_paths)
    on_model = recorder.on_model if where.is_file else None
    models = model or VARIANTS
    chosen_prompts = options.chosen_prompts(prompt, prompts, whole_file)
    if tokens is not None:
        with messages.progress(quiet) as progress:
            found = gate_tokens(
                models,
                chosen_prompts,
                count=tokens,
                layers=some_layers,
                heads=some_heads,
                run=run,
                progress=progress,
                on_model=on_model,
            )
        where.write(found, recorder)
        return

    require_gate(models, run, chosen)
    with messages.progress(quiet) as progress:
        table, sums = measure(models, chosen_prompts, wanted, run, progress, on_model)

    def report() -> None:
        from gattn_viz.report import print_gate_report, print_rows, shows_layers

        names = [one.name for one in wanted.measures]
        if shows_layers(names, by, per_prompt):
            columns = None if wanted.measures == GATE_MEASURES else names
            print_gate_report(tables.summarise(sums, "layer"), tables.summarise(sums, "model"), columns)
        else:
            print_rows(table if per_prompt else tables.summarise(sums, "model"))

    where.write(table, recorder, report)


def _check_tokens(
    tokens: int | None,
    layers: str,
    heads: str,
    measures: list[str] | None,
    per_prompt: bool,
    ci: float | None,
    by: str,
) -> None:
    """Raise typer.BadParameter if options are given that say nothing about what is asked for."""
    if tokens is None:
        idle = {"--layers": layers != "all", "--heads": heads != "all"}
        what, instead = "without --tokens", "add --tokens N, or leave it out: the table has all layers and heads"
    else:
        idle = {
            "--measures": bool(measures),
            "--per-prompt": per_prompt,
            "--ci": ci is not None,
            "--by": by != "head",
        }
        what, instead = "with --tokens, which lists tokens and measures nothing", "leave one of the two out"
    for name, given in idle.items():
        if given:
            raise typer.BadParameter(f"{name} is given {what}; expected one that goes with it: {instead}")

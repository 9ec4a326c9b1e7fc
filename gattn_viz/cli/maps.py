"""`gattn-viz maps`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gattn_viz.cli import figure_output, messages, options
from gattn_viz.cli.file_names import file_stems
from gattn_viz.cli.recording import Recorder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gattn_viz.metrics.pooling import Span
    from gattn_viz.pipeline import AttentionMaps
    from gattn_viz.recipe.content import MapSummary, Recipe

HELP = (
    "Attention maps: a figure for each model, and with several models a grid of models x layers.\n\n"
    "A cell is the attention probability of a query (row) to a key (column), or with --weight what comes of it. "
    "All figures of one command share one colour range. Long prompts are pooled to --max-cells rows and columns; "
    "--queries and --keys show a part exactly. The paths of the files written go to stdout."
)
EXAMPLE = "Example: gattn-viz maps --model gate_headwise --layers 1,7,21,28"

VIEW = "Which part"
SPAN = "A-B, A-, -B or A"


def maps(
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
        str, typer.Option(help="mean (one map a layer), all, or heads from 1 such as 1,4-6 (a map for each).")
    ] = "mean",
    weight: Annotated[
        Literal["probability", "value", "gate", "output"],
        typer.Option(
            help="What a cell holds, head by head: the probability p of the key; p x the L2 norm of its value; "
            "p x the query's gate score (elementwise: p x the L2 norm of gate * value); or the L2 norm of what "
            "the key adds to the residual stream, through gate and output projection."
        ),
    ] = "probability",
    queries: Annotated[
        str | None,
        typer.Option(
            metavar=SPAN, help="Positions of the rows, from 1.", rich_help_panel=VIEW, show_default=False
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar=SPAN,
            help="Positions of the columns, from 1. Default: up to the last query.",
            rich_help_panel=VIEW,
            show_default=False,
        ),
    ] = None,
    drop_first: Annotated[
        bool,
        typer.Option(
            "--drop-first", help="Leave out the first key, to see what a sink hides.", rich_help_panel=VIEW
        ),
    ] = False,
    max_cells: Annotated[
        int,
        typer.Option(
            min=1, help="Rows and columns of a map at most; above, neighbours are pooled.", rich_help_panel=VIEW
        ),
    ] = 512,
    pool: Annotated[
        Literal["max", "mean"],
        typer.Option(
            help="What stands for pooled cells: the largest, which keeps a sink visible, or the mean over those "
            "whose key is not after the query.",
            rich_help_panel=VIEW,
        ),
    ] = "max",
    scale: figure_output.Scale = "linear",
    vmax: figure_output.Vmax = None,
    font: figure_output.Font = None,
    output: figure_output.Directory = Path("figs"),
    output_format: figure_output.Format = "png",
    dpi: figure_output.Dpi = 200,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Write the maps themselves too, float32, as safetensors: a tensor layer_N of (heads, queries, "
            "keys) each.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = False,
    recipe_paths: options.RecipePaths = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    chosen_layers = figure_output.chosen_layers(layers)
    chosen_heads = heads if heads in ("mean", "all") else options.parse_numbers(heads, "mean, all, or heads")
    query_span = parse_span(queries, "queries")
    key_span = seen_keys(query_span, parse_span(keys, "keys"), drop_first)
    if vmax == 0:
        raise typer.BadParameter("--vmax 0 leaves no range; expected more than 0")

    os.environ["MPLBACKEND"] = "agg"  # figures go to files: no display is needed, whatever the environment says
    from gattn_viz.drawing.maps import Look, color_scale, draw_grid, draw_maps
    from gattn_viz.figures.fonts import user_family
    from gattn_viz.figures.save import save_figure
    from gattn_viz.metrics.pooling import MapView
    from gattn_viz.models.names import VARIANTS
    from gattn_viz.pipeline import attention_maps
    from gattn_viz.recipe.content import FileMade

    recorder = Recorder(ctx, recipe_paths, ["matplotlib"])
    if font is not None:
        user_family(font)  # a font that is not there is said before a model is loaded
    with options.wrong_use():
        view = MapView(query_span, key_span, max_cells, pool)
    with messages.progress(quiet) as progress:
        sets = attention_maps(
            model or VARIANTS,
            options.chosen_prompts(prompt, prompts, whole_file),
            layers=chosen_layers,  # type: ignore[arg-type]
            heads=chosen_heads,  # type: ignore[arg-type]
            view=view,
            weight=weight,
            run=options.run_of(ctx),
            progress=progress,
            on_model=recorder.on_model,
        )

    look = Look(scale, vmax, font)
    colors = color_scale(sets, look)
    color_range = {"kind": colors.kind, "low": colors.low, "high": colors.vmax}
    attention = _attention_by_model(sets)

    def noted(what: Literal["maps", "grid", "raw"], of: list[AttentionMaps]) -> Recipe:
        """The recipe of a file with the maps of some models on one prompt."""
        drawn = what != "raw"
        file = FileMade(
            what,
            output_format if drawn else "safetensors",
            models=tuple(one.model for one in of),
            prompt=of[0].prompt,
            view=_view(of),
            color_scale=color_range if drawn else None,
            numbers=_summaries(of, mean=what == "grid") if drawn else (),
            quantity=_quantity(of),
        )
        return recorder.recipe(file, attention)

    by_prompt: dict[str, list[AttentionMaps]] = {}
    for one in sets:
        by_prompt.setdefault(one.prompt, []).append(one)
    stems = _file_stems(by_prompt)
    for prompt_id, of_prompt in by_prompt.items():
        for one in of_prompt:
            stem = output / stems[one.model, prompt_id]
            figure = draw_maps(one, look=look, scale=colors)
            metadata = _metadata([one], noted("maps", [one]))
            print(save_figure(figure, f"{stem}.{output_format}", dpi=dpi, metadata=metadata))
            if raw:
                print(_save_raw(one, Path(f"{stem}.safetensors"), noted("raw", [one])))
        if len(of_prompt) > 1:
            figure = draw_grid(of_prompt, look=look, scale=colors)
            metadata = _metadata(of_prompt, noted("grid", of_prompt))
            path = f"{output / stems[None, prompt_id]}.{output_format}"
            print(save_figure(figure, path, dpi=dpi, metadata=metadata))


def parse_span(text: str | None, name: str) -> Span | None:
    """`4-9` as (4, 9), `4-` as (4, None), `-9` as (1, 9), `4` as (4, 4).

    Raises:
        typer.BadParameter: it is not of that form.
    """
    if text is None:
        return None
    first, dash, last = (part.strip() for part in text.partition("-"))
    begin = end = None
    if re.fullmatch(r"[0-9]{0,12}", first) and re.fullmatch(r"[0-9]{0,12}", last) and (first or last):
        begin = int(first or 1)
        end = int(last) if last else None if dash else begin
    if begin is None or begin < 1 or (end is not None and end < begin):
        raise typer.BadParameter(
            f"--{name} is {text!r}; expected positions such as 100-200, 100-, -200 or 100, counted from 1"
        )
    return begin, end


def seen_keys(queries: Span | None, keys: Span | None, drop_first: bool) -> Span:
    """The keys to show: those asked for, without the first if it is to go, and none after the last query.

    Raises:
        typer.BadParameter: the first was the only one.
    """
    first, last = keys or (1, None)
    if drop_first:
        if last == 1:
            raise typer.BadParameter("--keys is 1, which --drop-first leaves out; expected more keys")
        first = max(first, 2)
    last_query = queries[1] if queries is not None else None
    if last is None and last_query is not None and first <= last_query:
        last = last_query  # what comes after is blank
    return first, last


def _metadata(sets: list[AttentionMaps], recipe: Recipe) -> dict[str, str]:
    """What a figure says of itself, see `read_metadata`."""
    from gattn_viz.recipe.content import KEY

    return {
        "quantity": _quantity(sets),
        "view": _view(sets),
        "attention path": " or ".join(dict.fromkeys(one.attention_path for one in sets)),
        KEY: recipe.to_json(),
    }


def _view(sets: list[AttentionMaps]) -> str:
    return " or ".join(dict.fromkeys(one.cells.in_words() for one in sets))


def _quantity(sets: list[AttentionMaps]) -> str:
    return " or ".join(dict.fromkeys(one.quantity.label for one in sets))


def _attention_by_model(sets: list[AttentionMaps]) -> dict[str, str]:
    """How attention was computed, for each model on all prompts."""
    found: dict[str, set[str]] = {}
    for one in sets:
        found.setdefault(one.model, set()).update(one.attention_path.split(" and "))
    return {model: " and ".join(sorted(paths)) for model, paths in found.items()}


def _summaries(sets: list[AttentionMaps], *, mean: bool) -> tuple[MapSummary, ...]:
    """The drawn maps in a few numbers each: heads apart, or with `mean` the mean over those asked for."""
    from gattn_viz.recipe.agreement import summarise_map

    found = []
    for one in sets:
        for layer, maps in zip(one.layers, one.probabilities, strict=True):
            if mean or one.heads is None:
                found.append(summarise_map(one.model, layer, None, maps.mean(0)))
            else:
                heads = zip(one.heads, maps, strict=True)
                found += [summarise_map(one.model, layer, head, cells) for head, cells in heads]
    return tuple(found)


def _file_stems(by_prompt: Mapping[str, Sequence[AttentionMaps]]) -> dict[tuple[str | None, str], str]:
    """What the file of each (model, prompt) is called, and that of each (None, prompt), the grid of its models."""
    figures: list[tuple[str | None, str]] = [(None, prompt) for prompt in by_prompt]  # a grid keeps its name
    figures += [(one.model, prompt) for prompt, sets in by_prompt.items() for one in sets]
    several = len(by_prompt) > 1
    stems = file_stems(("maps", model or "grid", *([prompt] if several else [])) for model, prompt in figures)
    return dict(zip(figures, stems, strict=True))


def _save_raw(one: AttentionMaps, path: Path, recipe: Recipe) -> Path:
    import json

    from safetensors.numpy import save

    from gattn_viz.files import replacing
    from gattn_viz.recipe.content import KEY

    tensors = {f"layer_{layer}": maps for layer, maps in zip(one.layers, one.probabilities, strict=True)}
    metadata = {
        "model": one.model,
        "prompt": one.prompt,
        "tokens": json.dumps(one.tokens),
        "layers": json.dumps(one.layers),
        "heads": "mean" if one.heads is None else json.dumps(one.heads),
        "axes": "heads, queries, keys",
        "weight": one.weight,
        "quantity": one.quantity.label,
        "view": one.cells.in_words(),
        "pool": one.cells.pool or "none",
        **({} if one.learned_sink is None else {"learned_sink_mass": json.dumps(_numbers(one.learned_sink))}),
        **{
            name: json.dumps({"first": axis.first, "last": axis.last, "size": axis.size})
            for name, axis in (("queries", one.cells.queries), ("keys", one.cells.keys))
        },
        KEY: recipe.to_json(),
    }
    with replacing(path) as temporary:
        temporary.write_bytes(_sorted_header(save(tensors, metadata)))
    return path


def _numbers(array: NDArray[np.float64]) -> list[list[float | None]]:
    """Rows of numbers for JSON, which knows no NaN."""
    return [[None if math.isnan(number) else number for number in row] for row in array.tolist()]


def _sorted_header(file: bytes) -> bytes:
    """A safetensors file with its header in order, which the library writes in another one each time."""
    import json

    size = int.from_bytes(file[:8], "little")
    header = json.dumps(json.loads(file[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of 8
    return len(header).to_bytes(8, "little") + header + file[8 + size :]

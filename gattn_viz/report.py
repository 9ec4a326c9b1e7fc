"""What is shown in a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pandas as pd
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gattn_viz.recipe.content import AdapterUsed, ModelUsed, Recipe

BAR_WIDTH = 20

# What is shown unless columns are named; each with its heading and format.
USUAL = {
    "first_token_mass": ("first-token mass", ".3f"),
    "first_token_visible": ("sees first", ".2f"),
    "learned_sink_mass": ("learned sink", ".3f"),
    "sink_rate": ("sink rate", ".2f"),
    "top_sink_position": ("top sink", ""),
    "entropy_ratio": ("entropy ratio", ".2f"),
    "gate_mean": ("gate mean", ".3f"),
    "max_activation": ("max activation", ".1f"),
}
USUAL_GATES = {
    "gate_mean": ("gate mean", ".3f"),
    "gate_q50": ("median", ".3f"),
    "gate_below": ("shut", ".2f"),
    "gate_above": ("open", ".2f"),
    "gate_first_token": ("first token", ".3f"),
    "gate_channels_shut": ("channels shut", ".2f"),
    "output_before": ("output before", ".3g"),
    "output_after": ("output after", ".3g"),
}
WITH_BAR = ("first_token_mass", "gate_below")
"""Shares that are drawn too."""
KEYS = ("model", "prompt", "layer", "head")
"""Columns that say what a row stands for."""
OF_THE_MODEL = ("uniform_null", "perplexity")


def print_sink_report(
    layers: pd.DataFrame,
    models: pd.DataFrame,
    columns: Sequence[str] | None = None,
    console: Console | None = None,
) -> None:
    """A table per model: a row a layer with a bar of its first-token mass, and the model's mean below.

    Args:
        layers: `sink_stats(by="layer")`.
        models: `sink_stats(by="model")`.
        columns: the measures to show; None is the usual ones.
    """
    _print_tables(layers, models, columns or _usual(layers), console)


def _usual(layers: pd.DataFrame) -> list[str]:
    """Without what says nothing where all queries see the first token."""
    says_nothing = (layers["first_token_visible"] == 1).all()
    return [name for name in USUAL if name != "first_token_visible" or not says_nothing]


def print_gate_report(
    layers: pd.DataFrame,
    models: pd.DataFrame,
    columns: Sequence[str] | None = None,
    console: Console | None = None,
) -> None:
    """The same of `gate_stats`, with a bar of the share of scores that are shut."""
    _print_tables(layers, models, columns or list(USUAL_GATES), console)


def shows_layers(measures: Sequence[str], by: str, per_prompt: bool) -> bool:
    """Whether the reports by layer show what was asked for; if not, `print_rows` does."""
    return not per_prompt and by != "model" and not set(measures) <= set(OF_THE_MODEL)


def print_rows(table: pd.DataFrame) -> None:
    """All rows and columns of a table, in blocks of columns as wide as the terminal."""
    keys = [name for name in KEYS if name in table]
    width = shutil.get_terminal_size().columns
    rows = table.set_index(keys)
    print(rows.to_string(float_format="{:.4g}".format, na_rep="", sparsify=False, line_width=width))


def _print_tables(
    layers: pd.DataFrame, models: pd.DataFrame, columns: Sequence[str], console: Console | None
) -> None:
    console = console or Console()
    for _, model in models.iterrows():
        console.print(layer_table(layers[layers["model"] == model["model"]], model, columns))
        console.print()


def layer_table(layers: pd.DataFrame, model: pd.Series, columns: Sequence[str]) -> Table:
    """One model's table."""
    table = Table(
        title=Text(str(model["model"]), style="bold"),
        caption=Text(_caption(model)),
        title_justify="left",
        caption_justify="left",
        show_footer=True,
    )
    of_layers = [name for name in columns if name not in OF_THE_MODEL]
    shown = [name for name in of_layers if layers[name].notna().any()] or of_layers
    rows = [row for _, row in layers.iterrows()]
    table.add_column("layer", justify="right", footer="all")
    cells: list[list[str | Bar]] = [[f"{row['layer']}" for row in rows]]
    for name in shown:
        heading, digits = (USUAL | USUAL_GATES).get(name, (name.replace("_", " "), ".4g"))
        table.add_column(heading, justify="right", footer=_value(model, name, digits))
        cells.append([_value(row, name, digits) for row in rows])
        if name in WITH_BAR and layers[name].notna().any():
            table.add_column("0 to 1", footer=Bar(1, 0, model[name], width=BAR_WIDTH))
            cells.append([Bar(1, 0, row[name], width=BAR_WIDTH) for row in rows])
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    return table


def _caption(model: pd.Series) -> str:
    """What the numbers stand for, and those that a layer has none of."""
    parts = ["mean over heads"]
    counted = f"{model['n_prompts']} prompts, {model['tokens']} tokens"
    if "first_row" in model:
        parts.append("first query left out" if model["first_row"] == "exclude" else "first query included")
        counted += f", {model['n_queries']} queries"
    parts += [counted, "last row: mean over layers"]
    if any(pd.notna(model.get(name)) for name in ("gate_below", "gate_above", "gate_channels_shut")):
        parts.append(f"shut: score < {model['below_threshold']:g}, open: > {model['above_threshold']:g}")
    if "ci" in model:
        parts.append(f"in brackets {100 * model['ci']:g}% intervals over prompts")
    if model.get("first_token_visible", 1) < 1:
        parts.append(f"first token visible to {model['first_token_visible']:.0%} of queries")
    if "uniform_null" in model:
        parts.append(f"uniform null {model['uniform_null']:.3f}")
    if "perplexity" in model:
        parts.append(f"perplexity {_value(model, 'perplexity', '.2f')}")
    return "; ".join(parts)


def _value(row: pd.Series, name: str, digits: str) -> str:
    """A value, and its interval if it has one."""
    if pd.isna(row[name]):
        return "-"
    text = f"{row[name]:{digits}}"
    if f"{name}_ci_low" in row:
        text += f" [{row[f'{name}_ci_low']:{digits}}, {row[f'{name}_ci_high']:{digits}}]"
    return text


def print_recipe(recipe: Recipe, console: Console | None = None) -> None:
    """A recipe, a line for each thing that it says."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _recipe_lines(recipe):
        table.add_row(name, Text(value))
    (console or Console(highlight=False)).print(table)


def _recipe_lines(recipe: Recipe) -> list[tuple[str, str]]:
    file, prompts = recipe.file, recipe.prompts
    ids = ", ".join(prompts.ids[:8]) + (", ..." if len(prompts.ids) > 8 else "")
    lines = [
        ("command", recipe.command_line),
        ("date", recipe.date),
        ("this file", f"{file.what} of {', '.join(file.models)}"),
    ]
    if file.prompt is not None:
        lines.append(("prompt", f"{file.prompt}, {file.view}"))
    elif file.view is not None:
        lines.append(("view", file.view))
    if file.quantity is not None:
        lines.append(("cells", file.quantity))
    if file.color_scale is not None:
        scale = file.color_scale
        lines.append(("colours", f"{scale['kind']} scale from {scale['low']:.3g} to {scale['high']:.3g}"))
    lines += [(f"model {model.label}", _model_in_words(model)) for model in recipe.models]
    lines.append(("prompts", f"{len(prompts.ids)} ({ids})\ntexts sha256 {prompts.sha256}"))
    if prompts.file is not None:
        lines.append(("prompts file", "standard input" if prompts.file == "-" else prompts.path or prompts.file))
    in_effect = {name: value for name, value in recipe.options.items() if value is not None and value is not False}
    lines += [
        ("options", ", ".join(f"{name} {_option(value)}" for name, value in in_effect.items())),
        ("versions", ", ".join(f"{name} {number}" for name, number in recipe.versions.items())),
    ]
    return lines


def _place(used: ModelUsed | AdapterUsed) -> str:
    if used.kind == "hub":
        subfolder = f", subfolder {used.subfolder}" if used.subfolder else ""
        return f"Hub {used.name}, revision {used.commit or used.revision or 'main'}{subfolder}"
    kind = "GGUF file" if used.kind == "file" else "directory"
    return f"bundled {used.name}" if used.kind == "bundled" else f"{kind} {used.path or used.name}"


def _model_in_words(model: ModelUsed) -> str:
    lengths = f"T = {model.shortest}" + (f" to {model.longest}" if model.longest > model.shortest else "")
    adapter = ""
    if model.adapter is not None:
        adapter = f"adapter {_place(model.adapter)}, sha256 {model.adapter.weights_sha256 or 'unknown'}\n"
    return (
        f"{_place(model)}, {model.dtype} on {model.device}, attention {model.attention}\n"
        f"weights sha256 {model.weights_sha256 or 'unknown'}\n{adapter}"
        f"{model.tokens} tokens, {lengths}"
    )


def _option(value: object) -> str:
    if isinstance(value, list):
        return " + ".join(map(str, value))
    return "yes" if value is True else str(value)

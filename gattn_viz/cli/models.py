"""`gattn-viz models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gattn_viz.cli import options
from gattn_viz.errors import GattnVizError

if TYPE_CHECKING:
    from gattn_viz.models.description import ModelDescription

HELP = (
    "The variants and the checkpoint each stands for; with names, what those models are.\n\n"
    "Only config and tokenizer are read, no weights."
)
EXAMPLE = "Example: gattn-viz models gate_headwise"


def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Models to describe: variants, directories or Hub ids. None: list the variants.",
            show_default=False,
        ),
    ] = None,
    checkpoints: options.Checkpoints = "demo",
    trust_remote_code: options.TrustRemoteCode = False,
    debug: options.Debug = False,
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gattn_viz.models.names import VARIANTS, resolve

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)  # a line stays a line for whoever reads it
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=names is None)
    if names is None:
        table.add_column("variant")
        table.add_column("checkpoint", overflow="fold")
        for variant in VARIANTS:
            try:
                table.add_row(variant, Text(resolve(variant, checkpoints).checkpoint))
            except GattnVizError as error:  # the others may be there
                table.add_row(variant, Text(f"none: {error}"))
    else:
        from gattn_viz.models.description import describe

        table.add_column(style="bold")
        for _ in names:
            table.add_column(overflow="fold")
        described = [describe(resolve(name, checkpoints), trust_remote_code) for name in names]
        for key, *values in zip(*(_lines(one) for one in described), strict=True):
            table.add_row(key[0], *[Text(value) for _, value in (key, *values)])
    console.print(table)


def _lines(model: ModelDescription) -> list[tuple[str, str]]:
    def known(value: Any) -> str:
        return "-" if value is None else "yes" if value is True else "no" if value is False else f"{value}"

    gate = model.gate
    if model.gate_place:
        gate += f", {model.gate_place}"
    layers = f"{model.layers}"
    if model.layer_types:
        layers += f" ({', '.join(f'{count} {kind}' for kind, count in model.layer_types.items())})"
    return [
        ("model", model.source.label),
        ("checkpoint", model.source.checkpoint),
        ("type", model.model_type),
        ("layers", layers),
        ("heads", f"{model.heads}, {model.kv_heads} KV, of {model.head_dim}"),
        ("hidden size", f"{model.hidden_size}"),
        ("gate", gate),
        ("parameters", f"{model.parameters:,}"),
        ("of the gate", f"{model.gate_parameters:,} ({model.gate_share:.2%})"),
        ("dtype", known(model.dtype)),
        ("attention bias", known(model.qkv_bias)),
        ("qk-norm", known(model.qk_norm)),
        ("tied embeddings", known(model.tied)),
        ("positions", known(model.max_positions)),
        ("sliding window", known(model.sliding_window)),
        ("tokenizer", f"{model.tokenizer}, {model.vocabulary:,} tokens"),
        ("BOS", known(model.bos_token)),
    ]

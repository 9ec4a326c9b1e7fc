"""The options that commands share, spelled as the ecosystem spells them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gattn_viz.cli import messages
from gattn_viz.errors import GattnVizError

if TYPE_CHECKING:
    from gattn_viz.pipeline.run import Run
    from gattn_viz.prompts import Prompt

MODELS = "Models"
PROMPTS = "Prompts"
OUTPUT = "Output"

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        help="A variant (baseline, gate_headwise, gate_elementwise), a directory, a .gguf file, or a Hub id "
        "org/name, with @revision and :subfolder if need be. Repeatable. Default: the three variants.",
        rich_help_panel=MODELS,
        show_default=False,
    ),
]
Checkpoints = Annotated[
    str,
    typer.Option(
        "--checkpoints",
        envvar="GATTN_VIZ_CHECKPOINTS",
        help="Where a variant is looked up: demo (bundled), official (the paper's, from the Hub), or a directory "
        "that holds 1B_<variant> or <variant>.",
        rich_help_panel=MODELS,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        help="Branch, tag or commit of every Hub id that names none itself.",
        rich_help_panel=MODELS,
        show_default=False,
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="A PEFT adapter, such as LoRA, that is merged into the one model: a directory or a Hub id.",
        rich_help_panel=MODELS,
        show_default=False,
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="auto: float32 on a CPU, the checkpoint's own on a GPU.", rich_help_panel=MODELS),
]
Device = Annotated[
    str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:1, mps.", rich_help_panel=MODELS)
]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="Spread a model over devices, such as auto.", rich_help_panel=MODELS, show_default=False),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZES",
        help="With --device-map, at most how much of each device: 0=10GiB,cpu=20GiB. The rest goes to disk.",
        rich_help_panel=MODELS,
        show_default=False,
    ),
]
OffloadFolder = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="With --device-map, where weights lie that are on disk, if not in the checkpoint's own safetensors.",
        rich_help_panel=MODELS,
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the code that comes with a checkpoint. Gated checkpoints never need it.",
        rich_help_panel=MODELS,
    ),
]
PromptTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        "-p",
        help="A prompt. Repeatable. Default: the bundled set (maps and gate-maps: its first).",
        rich_help_panel=PROMPTS,
        show_default=False,
    ),
]
PromptsFile = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Prompts from a file: .jsonl (id, text, source, licence), or text with a prompt a line; - is stdin.",
        rich_help_panel=PROMPTS,
        show_default=False,
    ),
]
WholeFile = Annotated[
    bool,
    typer.Option(
        "--whole-file",
        help="The text file of --prompts is one prompt, line breaks included, not a prompt a line.",
        rich_help_panel=PROMPTS,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Cut longer prompts after so many tokens.", rich_help_panel=PROMPTS, show_default=False
    ),
]
Bos = Annotated[
    Literal["auto", "always", "never"],
    typer.Option(help="The BOS token in front of a prompt; auto: as the tokenizer does.", rich_help_panel=PROMPTS),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Each prompt is a user turn in the tokenizer's chat template, which writes all that goes in front.",
        rich_help_panel=PROMPTS,
    ),
]
BatchSize = Annotated[
    int,
    typer.Option("--batch-size", "-b", min=1, help="Prompts run together.", rich_help_panel=PROMPTS),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Tokens of one forward pass: bounds the memory of the rest of the model on long prompts. The numbers "
        "stay the same, max_activation_ratio to .05 %. Default: a prompt in one pass.",
        rich_help_panel=PROMPTS,
        show_default=False,
    ),
]
By = Annotated[
    Literal["head", "layer", "model"],
    typer.Option(help="What a row stands for: a head, the mean of a layer's heads, the mean of a model's layers."),
]
PerPrompt = Annotated[
    bool,
    typer.Option(
        "--per-prompt",
        help="A row for each prompt and head (layer, model), in place of the mean over prompts.",
    ),
]
Ci = Annotated[
    float | None,
    typer.Option(
        metavar="LEVEL",
        help="Confidence intervals of the means, such as .95: a percentile bootstrap over prompts.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of the bootstrap of --ci.")]
Resamples = Annotated[int, typer.Option(min=1, max=1_000_000, help="Of the bootstrap of --ci.")]
RecipePaths = Annotated[
    bool,
    typer.Option(
        "--recipe-paths",
        help="Write the paths of models and prompts into the recipe of each file, not their names alone.",
        rich_help_panel=OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="No messages and no progress on stderr, errors only.",
        callback=lambda value: messages.set_quiet(value),
        rich_help_panel=OUTPUT,
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of an error.",
        callback=lambda value: messages.set_debug(value),
        rich_help_panel=OUTPUT,
    ),
]


def chosen_prompts(texts: list[str] | None, file: str | None, whole_file: bool = False) -> list[Prompt] | None:
    """The prompts asked for, from the command line and then from the file; None when there are none.

    Raises:
        typer.BadParameter: `whole_file` without a file.
    """
    from gattn_viz.prompts import prompts_from_text, read_prompts

    if whole_file and file is None:
        raise typer.BadParameter("--whole-file goes with --prompts FILE; expected a text file: name one")
    if texts is None and file is None:
        return None
    from_file = read_prompts(file, whole_file=whole_file) if file is not None else []
    return prompts_from_text(texts or []) + from_file


def run_of(ctx: typer.Context) -> Run:
    """How models are found and run: by the command's options that are `Run`'s, under the same names.

    Raises:
        typer.BadParameter: options of the place of weights do not go together.
    """
    from gattn_viz.models.placement import check_placement
    from gattn_viz.pipeline.run import Run

    run = Run(**{field.name: ctx.params[field.name] for field in fields(Run) if field.name in ctx.params})
    with wrong_use():
        check_placement(run.device, run.device_map, run.max_memory, run.offload_folder)
    return run


def check_bootstrap(ctx: typer.Context, ci: float | None) -> None:
    """Raise typer.BadParameter if something is said about a bootstrap that is not asked for."""
    for name in ("seed", "resamples"):
        source = ctx.get_parameter_source(name)
        if ci is None and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"--{name} is given without --ci, whose bootstrap it is of; expected both: add --ci .95, or leave "
                "it out"
            )


def named_paths(texts: list[str] | None) -> dict[str, str]:
    """`NAME=PATH` texts as a mapping.

    Raises:
        typer.BadParameter: one is not of that form, or a name comes twice.
    """
    found: dict[str, str] = {}
    for text in texts or []:
        name, _, path = text.partition("=")
        if not name or not path:
            raise typer.BadParameter(f"--model {text!r}: expected NAME=PATH, such as my-model=runs/my-model")
        if name in found:
            raise typer.BadParameter(f"--model {name}=... is given twice; expected one path for each model")
        found[name] = path
    return found


@contextmanager
def wrong_use() -> Iterator[None]:
    """What the library says about options is wrong use of the command."""
    try:
        yield
    except GattnVizError as error:
        raise typer.BadParameter(str(error)) from error


def parse_numbers(text: str, what: str) -> tuple[int, ...]:
    """`1,4-6` as (1, 4, 5, 6), in the order written, each once.

    Raises:
        typer.BadParameter: it is not of that form.
    """
    numbers: list[int] = []
    if len(text) > 10_000:
        raise typer.BadParameter(f"{text[:20]}...: expected {what} such as 1,7,21 or 1-4, counted from 1")
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise typer.BadParameter(f"{text!r}: expected {what} such as 1,7,21 or 1-4, counted from 1")
        if max(len(first), len(last)) > 6:  # no model is as deep, and a range is spelled out
            raise typer.BadParameter(f"{text!r}: expected {what} below a million")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(numbers))

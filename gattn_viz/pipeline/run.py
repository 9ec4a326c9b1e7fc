"""How models are found, loaded and given their prompts: what every command starts with."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gattn_viz.capture.anatomy import Anatomy, anatomy
from gattn_viz.capture.attention import WITH_TENSOR_MASK
from gattn_viz.chat import opening
from gattn_viz.errors import GattnVizError
from gattn_viz.models.libraries import quiet
from gattn_viz.models.loading import LoadedModel, load
from gattn_viz.models.names import ModelSource, resolve, resolve_adapter
from gattn_viz.models.placement import places
from gattn_viz.prompts import EncodedPrompt, Prompt, default_prompts, encode, prompts_from_text

log = logging.getLogger("gattn_viz")

# Above it the bundled demo is so far from what it was trained on that it must be said.
DEMO_TOKENS = 512

# From more prompts on, what is true of each is said once.
MOST_WARNINGS = 3

Progress = Callable[[str, int, int], None]
"""Called with what is being done, steps done, and steps in all."""

OnModel = Callable[[str, LoadedModel, Sequence[EncodedPrompt]], None]
"""Called with a model's label, the model and its prompts before it is run, such as to note them in a recipe."""


@dataclass(frozen=True)
class Run:
    """How models are found and run; the same for every command.

    Attributes:
        checkpoints: where a variant is looked up: `demo`, `official` or a directory.
        revision: branch, tag or commit of the Hub ids that name none themselves.
        adapter: a PEFT adapter, a directory or a Hub id, that is merged into the one model.
        dtype: `auto` (float32 on a CPU, the checkpoint's own on a GPU), `float32`, `bfloat16` or `float16`.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        device_map: as in transformers, to spread a model over devices, the CPU's memory and disk.
        max_memory: with a device map, at most how much of each device: `0=10GiB,cpu=20GiB`.
        offload_folder: with a device map, where weights on disk lie if not in the checkpoint's safetensors.
        trust_remote_code: run the code that comes with a checkpoint. Never needed for gated checkpoints.
        bos: `auto` (what the tokenizer does), `always` or `never`.
        chat: take each prompt as a user turn of the tokenizer's chat template, which writes its own BOS, if any.
        max_tokens: cut prompts after so many tokens, with `chat` those of the whole template.
        batch_size: prompts run together.
        chunk: tokens of one forward pass, which bounds its memory; None runs a prompt whole.
    """

    checkpoints: str = "demo"
    revision: str | None = None
    adapter: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    max_memory: str | None = None
    offload_folder: str | None = None
    trust_remote_code: bool = False
    bos: Literal["auto", "always", "never"] = "auto"
    chat: bool = False
    max_tokens: int | None = None
    batch_size: int = 1
    chunk: int | None = None

    def __post_init__(self) -> None:
        counts = {"batch_size": self.batch_size, "max_tokens": self.max_tokens, "chunk": self.chunk}
        for name, count in counts.items():
            if count is None and name != "batch_size":
                continue
            if not isinstance(count, Integral) or count < 1:
                raise GattnVizError(f"{name} is {count!r}; expected a whole number, 1 or more")
        for name in ("checkpoints", "dtype", "device"):
            if not isinstance(value := getattr(self, name), str):
                raise GattnVizError(f"{name} is {value!r}; expected a text, such as {getattr(Run, name)!r}")


def each_model(
    models: Sequence[str], prompts: Sequence[Prompt | str] | None, run: Run, on_model: OnModel | None = None
) -> Iterator[tuple[str, LoadedModel, list[EncodedPrompt]]]:
    """Load one model after the other, with a label of its own and the prompts in its own tokens."""
    sources = find_models(models, run)
    chosen = _as_prompts(prompts)
    for label, source in sources.items():
        loaded = load(
            source,
            dtype=run.dtype,
            device=run.device,
            device_map=run.device_map,
            max_memory=run.max_memory,
            offload_folder=run.offload_folder,
            trust_remote_code=run.trust_remote_code,
        )
        config = loaded.config.get_text_config()
        with quiet():
            parts = anatomy(loaded.model)
        log.info(
            "%s, %s on %s, %d layers of %s heads",
            source.sentence,
            str(loaded.dtype).removeprefix("torch."),
            places(loaded.model),
            len(parts.layers),
            " or ".join(map(str, parts.heads())),
        )
        _say_what_gate(label, parts)
        encoded = [
            encode(
                prompt,
                loaded.tokenizer,
                bos=run.bos,
                max_tokens=run.max_tokens,
                max_positions=getattr(config, "max_position_embeddings", None),
                chat=run.chat,
            )
            for prompt in chosen
        ]
        rows = loaded.model.get_input_embeddings().weight.shape[0]
        for prompt in encoded:
            if max(prompt.ids) >= rows:
                raise GattnVizError(
                    f"the tokenizer of {label} gives token {max(prompt.ids)}, but the model has {rows} "
                    "embeddings; expected the model's own tokenizer: put it beside config.json"
                )
        _say_how_they_begin(label, loaded.tokenizer, encoded)
        _say_what_is_cut(label, encoded)
        longest = max(len(prompt.ids) for prompt in encoded)
        if source.is_bundled and longest > DEMO_TOKENS:
            log.warning(
                "%s: %d tokens, but the demo was trained on 129 at most: what it does there is no finding",
                label,
                longest,
            )
        if on_model is not None:
            on_model(label, loaded, encoded)
        yield label, loaded, encoded
        del loaded  # as the caller does


def _say_what_gate(label: str, parts: Anatomy) -> None:
    """What is not plain about a model's gate."""
    if parts.refusal is not None:
        log.warning("%s: %s: it is treated as if it had no gate", label, parts.refusal)
    if parts.gate_in_words is not None:
        inferred = any(gate.inferred for gate in parts.gates)
        log.log(logging.WARNING if inferred else logging.INFO, "%s: gate: %s", label, parts.gate_in_words)
    if parts.implementation == "eager":
        log.info("%s computes attention by itself: its weights are taken, T x T of a layer at a time", label)
    elif parts.implementation == WITH_TENSOR_MASK:
        log.info(
            "%s chooses keys for each query: its mask is T x T, prompts are run one by one, and with chunks it "
            "may choose others of equal ones",
            label,
        )
    if parts.is_looped:
        log.info("%s goes through layers more than once: they are counted as they run", label)


def no_gate(labels: Iterable[str], refusals: Iterable[str | None] = (), otherwise: str = "") -> GattnVizError:
    """What to say where gates are asked for and no model has one."""
    found = "; ".join(filter(None, refusals))
    return GattnVizError(
        f"no gate in {', '.join(labels)}{f' ({found})' if found else ''}; expected a model with a gate on its "
        f"attention output, such as gate_headwise: add one{otherwise}"
    )


def _say_how_they_begin(label: str, tokenizer: Any, encoded: Sequence[EncodedPrompt]) -> None:
    """What the chat template puts in front; and that the token is not there which may be the model's sink."""
    if encoded[0].chat:
        before = opening(encoded[0].prompt.text, tokenizer)
        log.info("%s: each prompt is a user turn of its chat template, which puts %r in front", label, before)
    bos = tokenizer.bos_token_id
    if bos is not None and any(prompt.ids[0] != bos for prompt in encoded):
        log.info(
            "%s: prompts start without %s, its tokenizer's BOS token; some models have their sink there: compare "
            "--bos always",
            label,
            tokenizer.bos_token,
        )


def _say_what_is_cut(label: str, encoded: Sequence[EncodedPrompt]) -> None:
    cut = [prompt for prompt in encoded if prompt.is_cut]
    if len(cut) > MOST_WARNINGS:
        log.warning("%s: %d of %d prompts cut to %d tokens", label, len(cut), len(encoded), len(cut[0].ids))
        return
    for prompt in cut:
        log.warning("%s: prompt %r cut to %d tokens", label, prompt.prompt.id, len(prompt.ids))


def find_models(models: Sequence[str], run: Run) -> dict[str, ModelSource]:
    """The checkpoint of each model, by a label of its own."""
    models = [models] if isinstance(models, str) else list(models)
    if not models:
        raise GattnVizError("no model was given; expected at least one")
    for name in models:
        if not isinstance(name, str):
            raise GattnVizError(
                f"a model is {name!r}; expected its name, a directory, a file or a Hub id as a text"
            )
    if len(set(models)) < len(models):
        raise GattnVizError(f"a model is given twice in {', '.join(models)}; expected each once: leave one out")
    sources = [_with_revision(resolve(name, run.checkpoints), run.revision) for name in models]
    if run.adapter is not None:
        if len(sources) > 1:
            raise GattnVizError(
                f"the adapter {run.adapter!r} was given with {len(sources)} models, {', '.join(models)}; expected "
                "the one that it was trained on: name it alone with --model"
            )
        sources = [replace(sources[0], adapter=resolve_adapter(run.adapter))]
    labels = [source.label for source in sources]
    found = {}
    for number, (source, label) in enumerate(zip(sources, labels, strict=True), start=1):
        if labels.count(label) > 1:  # two checkpoints of one name: the whole of what was written tells them apart
            label = source.name
            if source.is_local and (Path(label).expanduser().is_absolute() or ".." in Path(label).parts):
                label = f"{source.label} (model {number})"  # no folder of this machine gets into a figure
        found[label] = source
    return found


def _with_revision(source: ModelSource, revision: str | None) -> ModelSource:
    if source.is_local or source.revision is not None:
        return source
    return replace(source, revision=revision)


def _as_prompts(prompts: Sequence[Prompt | str] | None) -> list[Prompt]:
    if prompts is None:
        return default_prompts()
    prompts = [prompts] if isinstance(prompts, (str, Prompt)) else list(prompts)
    for prompt in prompts:
        if not isinstance(prompt, (str, Prompt)):
            raise GattnVizError(f"a prompt is a {type(prompt).__name__}, {prompt!r}; expected a text or a Prompt")
    texts = iter(prompts_from_text([prompt for prompt in prompts if isinstance(prompt, str)]))
    chosen = [prompt if isinstance(prompt, Prompt) else next(texts) for prompt in prompts]
    if not chosen:
        raise GattnVizError("no prompt was given; expected at least one")
    for prompt_id, count in Counter(prompt.id for prompt in chosen).items():
        if count > 1:
            raise GattnVizError(
                f"{count} prompts have the id {prompt_id!r}; expected an id of its own for each: change one"
            )
    return chosen


def check_finite(value: Any, layer: int, label: str, prompt: str) -> None:
    if not np.isfinite(value):
        raise GattnVizError(
            f"layer {layer} of {label} gives NaN or infinity on prompt {prompt!r}; expected finite numbers: try "
            "--dtype float32, or check the weights"
        )

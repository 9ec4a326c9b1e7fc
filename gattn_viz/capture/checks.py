"""What may be passed to a capture: every value is looked at here, before the model is touched.

All errors are `GattnVizError`s of one line. Prompts, layers and heads count from 1 in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeGuard, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gattn_viz.capture.anatomy import Anatomy, anatomy
from gattn_viz.capture.collector import Request
from gattn_viz.capture.eager import GIVEN
from gattn_viz.errors import GattnVizError, first_line
from gattn_viz.metrics.layer import NEEDS
from gattn_viz.metrics.weights import Weight


def check_request(model: PreTrainedModel, request: Request, name: str = "this model") -> None:
    """Raise unless the model, called `name` in the message, has the layers and heads that are asked for.

    The first time it is run on a few tokens, to see what it is made of.
    """
    for field in ("maps", "gates", "outputs"):
        chosen = getattr(request, field)
        if not isinstance(chosen, (set, frozenset)) or not all(map(_is_whole, chosen)):
            raise GattnVizError(f"{field} is {chosen!r}; expected a set of layers, such as frozenset({{1, 3}})")
    _check_heads(request.heads)
    if not isinstance(request.needs, (set, frozenset)) or not request.needs <= NEEDS:
        unknown = request.needs - NEEDS if isinstance(request.needs, (set, frozenset)) else request.needs
        raise GattnVizError(f"needs has {_shortened(unknown)}; expected a set of {', '.join(sorted(NEEDS))}")
    if request.weight not in get_args(Weight):
        raise GattnVizError(f"weight is {request.weight!r}; expected one of {', '.join(get_args(Weight))}")
    parts = anatomy(model)  # costs a run, if it is the first
    layers = len(parts.layers)
    for layer in sorted(request.maps | request.gates | request.outputs):
        if not 1 <= layer <= layers:
            raise GattnVizError(f"no layer {layer}: {name} has {layers} layers; expected 1 to {layers}")
    _check_heads_of_layers(request, parts, name)
    if parts.implementation == "eager":
        _check_given(request, f"{type(model).__name__} ({name})")
    _check_gates_of_keys(request, parts, name)
    if request.weight == "gate" and not parts.gates:
        why = f" ({parts.refusal})" if parts.refusal else ""
        raise GattnVizError(
            f"no gate in {name}{why}; expected one for maps of the weight gate: choose another weight"
        )


def _check_gates_of_keys(request: Request, parts: Anatomy, name: str) -> None:
    """Raise if a gate multiplies something else than what the keys give, which a map divides among them."""
    between = [gate.adapter.multiplies for gate in parts.gates if gate.adapter.multiplies is not None]
    if request.weight == "gate" and between:
        raise GattnVizError(
            f"no maps of the weight gate of {name}: {between[0]} stands between attention and the gate; expected "
            "nothing there: choose the weight value or probability"
        )


def _check_given(request: Request, name: str) -> None:
    """Raise if all that is asked for is more than weights, of a model that gives nothing else."""
    more = ""
    if request.maps and request.weight != "probability":
        more = f"maps of the weight {request.weight}"
    elif request.outputs:
        more = "attention output"
    elif request.needs and not (request.needs & GIVEN or request.maps or request.loss):
        more = ", ".join(sorted(request.needs))
    if more:
        raise GattnVizError(
            f"no {more} of {name}, which computes attention by itself and gives its weights only; expected maps "
            "of the weight probability, or measures of attention weights or of the residual stream"
        )


def _check_heads(chosen: object) -> None:
    if chosen is None or chosen == "mean":
        return
    if not isinstance(chosen, tuple) or not chosen or not all(map(_is_whole, chosen)):
        raise GattnVizError(
            f"heads is {chosen!r}; expected a tuple of heads such as (1, 3), 'mean', or None for all"
        )


def _check_heads_of_layers(request: Request, parts: Anatomy, name: str) -> None:
    """Those of the layers that are asked for; of all if none are."""
    if not isinstance(request.heads, tuple):
        return
    layers = sorted(request.maps | request.gates | request.outputs) or parts.attending
    same = len(parts.heads()) == 1
    for layer in layers:
        for heads in parts.heads([layer]):
            wrong = [head for head in request.heads if not 1 <= head <= heads]
            if wrong:
                has = f"{name} has {heads} heads a layer" if same else f"layer {layer} of {name} has {heads} heads"
                raise GattnVizError(f"no head {wrong[0]}: {has}; expected 1 to {heads}")


def check_model(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise GattnVizError(
            f"model is a {type(model).__name__}; expected a causal LM of transformers, such as "
            "gattn_viz.models.loading.load(...).model"
        )


def check_sizes(batch_size: object = 1, chunk: object = None) -> None:
    if not _is_whole(batch_size) or batch_size < 1:
        raise GattnVizError(f"batch_size is {batch_size!r} prompts; expected a whole number, 1 or more")
    if chunk is not None and (not _is_whole(chunk) or chunk < 1):
        raise GattnVizError(f"chunk is {chunk!r} tokens; expected a whole number, 1 or more, or None for all")


def as_token_ids(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Each prompt's ids, (T,) and int64.

    Raises:
        GattnVizError: no prompt, one without ids, or what the model has no embedding for.
    """
    if len(prompts) == 0:
        raise GattnVizError("no prompt was given; expected at least one list of token ids")
    if all(map(_is_whole, prompts)):
        raise GattnVizError(
            f"prompts is one list of token ids, {_shortened(prompts)}; expected a list of such lists: put it in "
            "brackets"
        )
    return [_ids_of(model, prompt, f"prompt {number}") for number, prompt in enumerate(prompts, start=1)]


def real_tokens(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> list[slice]:
    """Where each sequence of a padded batch has its tokens.

    Args:
        input_ids, attention_mask: see `capture_batch`.

    Raises:
        GattnVizError: shapes that differ, ids that the model has no embedding for, a mask that is not one run of 1
            for each sequence.
    """
    if input_ids.dim() != 2 or input_ids.shape != attention_mask.shape or not len(input_ids):
        raise GattnVizError(
            f"input_ids are {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)}; expected "
            "both to be (sequences, tokens)"
        )
    _ids_of(model, input_ids.flatten(), "input_ids")
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise GattnVizError("attention_mask has other values than 1 for a token and 0 for padding; expected these")
    return [_run_of_ones(row, number) for number, row in enumerate(attention_mask, start=1)]


def _run_of_ones(mask: Tensor, number: int) -> slice:
    real = mask.nonzero().flatten()
    if not len(real):
        raise GattnVizError(f"attention_mask of sequence {number} is all 0: no tokens; expected at least one")
    first, last = int(real[0]), int(real[-1])
    if last - first + 1 != len(real):
        raise GattnVizError(
            f"attention_mask of sequence {number} has a gap; expected padding on the left or on the right only"
        )
    return slice(first, last + 1)


def _ids_of(model: PreTrainedModel, prompt: Any, what: str) -> Tensor:
    expected = "expected a list of token ids, which are whole numbers"
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GattnVizError(f"{what} is {_shortened(prompt)} ({first_line(error)}); {expected}") from error
    if not ids.numel():
        raise GattnVizError(f"{what} has no token ids; expected at least one")
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise GattnVizError(f"{what} is {_shortened(prompt)}; {expected}")
    ids = ids.long()
    rows = model.get_input_embeddings().weight.shape[0]
    least, largest = int(ids.min()), int(ids.max())
    if least < 0 or largest >= rows:
        wrong = least if least < 0 else largest
        raise GattnVizError(f"{what} has the token id {wrong}; expected 0 to {rows - 1}, the model's embeddings")
    return ids


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _shortened(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."

"""The next-token loss, without ever holding the logits of all tokens."""

from __future__ import annotations

from copy import copy
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from gattn_viz.capture.layers import backbone

# Logits that are computed together: 16 MB in float32.
LOGITS = 4 * 1024 * 1024


def next_token_loss(
    model: PreTrainedModel, outputs: Any, input_ids: Tensor, place: slice, chunk: range, sequence: int
) -> float:
    """The sum of -log p(next token), in nats, over the tokens of one sequence that are in a chunk.

    The model's own forward turns hidden states into logits, with whatever scale or softcap it has: only its
    backbone, which has run already, is passed over.

    Args:
        outputs: of the backbone for the chunk; `last_hidden_state` is (B, Q, hidden).
        input_ids: (T,), the whole sequence with its padding.
        place: where its real tokens are.
        chunk: which places the outputs are of.
        sequence: of the batch.
    """
    first, stop = max(place.start, chunk.start), min(place.stop - 1, chunk.stop)
    rows = max(64, LOGITS // model.get_input_embeddings().weight.shape[0])
    total = 0.0
    for start in range(first, stop, rows):
        end = min(start + rows, stop)
        some = copy(outputs)
        hidden = outputs.last_hidden_state[sequence : sequence + 1, start - chunk.start : end - chunk.start]
        some.last_hidden_state = hidden
        with patch.object(backbone(model), "forward", lambda *args, some=some, **kwargs: some):
            logits = model(input_ids=input_ids[None, start:end], use_cache=False).logits
        targets = input_ids[start + 1 : end + 1].to(logits.device)
        total += float(functional.cross_entropy(logits[0].float(), targets, reduction="sum"))
    return total

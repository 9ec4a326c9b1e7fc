"""Whether machine code of our own takes a part in attention: `row_kernel`, where numba is installed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from gattn_viz.capture.attention import Attention
from gattn_viz.errors import first_line

log = logging.getLogger("gattn_viz")

RowKernel = Callable[..., None]
"""`row_kernel.reduce_rows`."""

# Below this many scores of a layer, importing numba takes longer than it saves.
LEAST_SCORES = 4_000_000

# The kernel runs in one thread; torch splits what it replaces, and with two threads is as fast (`benchmarks/`).
MOST_THREADS = 1


def kernel_for(attention: Attention) -> RowKernel | None:
    """The kernel where it is of use: many scores in float32, on a CPU, and one thread; else None."""
    q = attention.q
    scores = len(q) * attention.heads * attention.k.shape[1]
    if q.device.type != "cpu" or q.dtype != torch.float32 or scores < LEAST_SCORES:
        return None
    return trusted_kernel() if torch.get_num_threads() <= MOST_THREADS else None


@lru_cache
def trusted_kernel() -> RowKernel | None:
    """The kernel, compiled; None without numba, or where it does not find what torch does.

    numba need not be there nor go with the numpy that is, and what it makes depends on the processor: without it
    attention takes longer.
    """
    try:
        import numba

        if numba.config.DISABLE_JIT:
            return None
        from gattn_viz.capture.row_kernel import reduce_rows

        off = _largest_difference(reduce_rows)
    except ModuleNotFoundError:
        return None
    except Exception as error:  # of a compiler there is no list of what may be raised
        log.warning("numba is not used, and attention takes longer: %s", first_line(error))
        return None
    if not off < 1e-5:
        log.warning("numba is not used, and attention takes longer: what it computes here is off by %.2g", off)
        return None
    return reduce_rows


def _largest_difference(reduce_rows: RowKernel) -> float:
    """Between the kernel and torch, of a small problem."""
    generator = torch.Generator().manual_seed(0)
    scores = 5 * torch.randn(3, 2, 37, generator=generator)
    sink_logit = torch.tensor([-1.0, 12.0])
    hidden = torch.ones(3, 37, dtype=torch.bool).triu(35)[:, None]
    p_and_sink = torch.cat([scores.masked_fill(hidden, -torch.inf), sink_logit.expand(3, 2)[..., None]], -1)
    p_and_sink = p_and_sink.double().softmax(-1)
    p, p_sink = p_and_sink[..., :-1], p_and_sink[..., -1]

    row: list[Tensor] = [torch.empty(3, 2) for _ in range(5)]
    total, over_total, shift, scores_mean, largest = row
    received = torch.zeros(2, 37)
    e = scores.clone()
    reduce_rows(
        e, diagonal=34, sink_logit=sink_logit, total=total, over_total=over_total, shift=shift,
        scores_mean=scores_mean, largest=largest, received=received,
    )  # fmt: skip
    differences = [
        e * over_total[..., None] - p,
        total * over_total - (1 - p_sink),
        (sink_logit - shift).exp() * over_total - p_sink,
        scores_mean * over_total - (p * (scores - shift[..., None]).masked_fill(hidden, 0)).sum(-1),
        largest * over_total - p.amax(-1),
        received - p.sum(0),
    ]
    return float(torch.cat([difference.flatten() for difference in differences]).abs().max())  # NaN is the largest

"""A block's scores, reduced a row at a time by machine code that numba makes; the second half of `blocks`.

torch goes through a whole block for each step: exponentials, their sums, the largest, what each key receives. Here
a row stays in the processor's nearest cache until all of that is done. Imported by `compiled` alone, since numba
need not be installed.

Axis letters as in `blocks`: R rows, G query heads of the KV head, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gattn_viz.capture.blocks import HIDDEN

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]

f32, i32 = np.float32, np.int32

_HIDDEN, _TINY, _LEAST_INTEGER = f32(HIDDEN), np.finfo(f32).tiny, np.iinfo(i32).min

# exp(x) = 2^n exp(r), n whole and |r| <= log(2) / 2. log(2) is in two parts, the first with so few digits that n
# times it is exact; exp(r) is the polynomial of Cephes' expf (S. L. Moshier, netlib.org/cephes), to 1e-7 of it.
_LOG2_E, _LOG_2_HIGH, _LOG_2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
_C0, _C1, _C2 = f32(1.9875691500e-4), f32(1.3981999507e-3), f32(8.3334519073e-3)
_C3, _C4, _C5 = f32(4.1665795894e-2), f32(1.6666665459e-1), f32(5.0000001201e-1)
_ZERO, _HALF, _ONE = f32(0), f32(0.5), f32(1)
_LEAST_EXPONENT = f32(-87)  # below this exp(x) is counted as 0, as float32 has no normal number for it

# Sums in any order, so that a processor adds many at a time; NaN and infinities keep their meaning. Not for exp,
# whose two parts of log(2) must not become one.
_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}

Function = Callable[..., Any]


def _kept_on_disk(function: Function) -> Function:
    """Compiled once for this machine, not once a process; where numba finds no place to write, once a process."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)


def reduce_rows(
    scores: Tensor,
    *,
    diagonal: int | None,
    sink_logit: Tensor | None,
    total: Tensor,
    over_total: Tensor,
    shift: Tensor,
    scores_mean: Tensor,
    largest: Tensor,
    received: Tensor,
) -> None:
    """Turn (R, G, C) scores into exponentials e, in place, and write what follows from them.

    A row's largest score, or the learned sink's if that is larger, is taken out of all before anything else.
    Everything is float32 on the CPU and contiguous.

    Args:
        scores: `HIDDEN` where a key is not seen; e is 0 there.
        diagonal: under the plain causal rule the column of the first row's own key, and row i sees no column after
            `diagonal` + i; None if `HIDDEN` says it all.
        sink_logit: (G,), counts in `over_total` alone.
        total: (R, G) for sum_k e.
        over_total: (R, G) for 1 / (sum_k e + the sink's).
        shift: (R, G) for what was taken out.
        scores_mean: (R, G) for sum_k e s, with s after `shift` was taken out.
        largest: (R, G) for the largest e.
        received: (G, C), to which e `over_total` is added, summed over rows.
    """
    columns = scores.shape[-1]
    sinks = scores.new_full((scores.shape[1],), -math.inf) if sink_logit is None else sink_logit.contiguous()
    _reduce(
        scores.numpy(),
        scores.view(torch.int32).numpy(),
        columns if diagonal is None else diagonal,
        sinks.numpy(),
        *(each.numpy() for each in (total, over_total, shift, scores_mean, largest, received)),
    )


@numba.njit(fastmath={"contract"})
def _exp(x: np.float32) -> np.float32:
    """Of x from -87 to 0."""
    n = np.floor(x * _LOG2_E + _HALF)
    r = (x - n * _LOG_2_HIGH) - n * _LOG_2_LOW
    polynomial = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    two_to_n = i32((i32(n) + i32(127)) << i32(23)).view(np.float32)  # its bits: sign, exponent + 127, nothing more
    return (polynomial * (r * r) + r + _ONE) * two_to_n


@numba.njit
def _ordered(bits: np.int32) -> np.int32:
    """The bits of a float as an integer that is larger where the float is; and back."""
    return bits ^ ((bits >> i32(31)) & i32(0x7FFFFFFF))


@numba.njit
def _largest(bits: Integers) -> np.float32:
    """Of a row of floats, given as their bits: integers are compared many at a time, floats (NaN) one by one."""
    found = i32(_LEAST_INTEGER)
    for column in range(bits.size):
        found = max(found, _ordered(bits[column]))
    return i32(_ordered(found)).view(np.float32)


@numba.njit(fastmath=_IN_ANY_ORDER)
def _exponentiate(row: Floats, shift: np.float32) -> tuple[np.float32, np.float32]:
    """Write e = exp(s - shift) over the scores of a row; return sum e and sum e (s - shift)."""
    total, weighted = _ZERO, _ZERO
    for column in range(row.size):
        score = row[column] - shift
        bounded = _LEAST_EXPONENT if score < _LEAST_EXPONENT else score
        e = _exp(bounded)
        e = _ZERO if score < _LEAST_EXPONENT else e
        row[column] = e
        total += e
        weighted += e * bounded
    return total, weighted


@numba.njit(fastmath={"contract"})
def _add_times(row: Floats, factor: np.float32, to: Floats) -> None:
    for column in range(row.size):
        to[column] += row[column] * factor


@_kept_on_disk
def _reduce(
    scores: Floats,
    bits: Integers,
    diagonal: int,
    sinks: Floats,
    total: Floats,
    over_total: Floats,
    shift: Floats,
    scores_mean: Floats,
    largest: Floats,
    received: Floats,
) -> None:
    """`reduce_rows`, with `scores` a second time as `bits` and -inf for no sink."""
    rows, heads, columns = scores.shape
    for i in range(rows):
        seen = min(diagonal + i + 1, columns)
        for g in range(heads):
            scores[i, g, seen:] = _ZERO
            row = scores[i, g, :seen]
            top = _largest(bits[i, g, :seen])
            taken = sinks[g] if sinks[g] > top else top
            if top == _HIDDEN:  # the row sees nothing
                row[:] = _ZERO
                top = f32(-np.inf)
                total[i, g], scores_mean[i, g] = _ZERO, _ZERO
            else:
                total[i, g], scores_mean[i, g] = _exponentiate(row, taken)
            with_sink = total[i, g] + f32(math.exp(sinks[g] - taken))
            over_total[i, g] = _ONE / (_TINY if with_sink < _TINY else with_sink)  # NaN is not less
            shift[i, g] = taken
            largest[i, g] = math.exp(top - taken)
            _add_times(row, over_total[i, g], received[g])

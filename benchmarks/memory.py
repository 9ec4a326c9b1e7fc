"""Memory: the peak during one call beyond what the process held before it, in MiB."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import CONTENDERS
from benchmarks.shapes import Shape

WARM_UP = 128
MIB = 2**20

M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def peak_memory(
    name: str, shape: Shape, tokens: int, device: str, dtype: torch.dtype, threads: int, limit: float
) -> float:
    """Run a contender once, after a tiny prompt that loads what every call needs.

    The model's weights count before the call; what the call returns counts as long as it runs.

    Args:
        limit: MiB that the process may grow by.

    Returns:
        MiB: resident memory of the process on a CPU, allocated memory of the device on CUDA.

    Raises:
        MemoryError, RuntimeError: it would grow by more, or there is no more.
    """
    if device == "cpu":
        # every tensor of 64 KiB or more goes back to the system when it is freed: the peak is of what is in use
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    torch.set_num_threads(threads)
    contender = CONTENDERS[name]
    contender.prepare(shape.model(device, dtype))
    ids = shape.prompt(tokens, device)
    with torch.no_grad():
        contender.run(ids[:, :WARM_UP])
        gc.collect()
        if device == "cpu":
            return _on_cpu(lambda: contender.run(ids), limit)
        return _on_cuda(lambda: contender.run(ids), limit)


def _on_cpu(call: Callable[[], Any], limit: float) -> float:
    """Linux only."""
    size = read_status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (int((size + limit) * MIB), resource.RLIM_INFINITY))
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, so that taking it again is seen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = read_status("VmRSS")
    result = call()
    peak = read_status("VmHWM")
    del result
    return peak - before


def _on_cuda(call: Callable[[], Any], limit: float) -> float:
    before = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (before + limit * MIB) / total))
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return (peak - before) / MIB


def read_status(field: str, path: str = "/proc/self/status") -> float:
    """A size of this process, such as VmRSS (resident) or VmHWM (its peak), in MiB."""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            number, unit = value.split()
            assert unit == "kB"
            return int(number) / 1024
    raise ValueError(f"no {field} in {path}")

"""Memory: the most that torch has allocated at once during a call, beyond what it had before it."""

from __future__ import annotations

import os

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import profile

from gattn_viz.pipeline.timing import Call

MIB = 2**20


def peak_memory(call: Call, device: torch.device) -> float | None:
    """MiB of tensors, on all CUDA devices or on the CPU; None on other devices, which do not say.

    Both are what torch's allocator has handed out, not what the system has given to the process: what is kept for
    later use does not count, nor do the scratch buffers inside of BLAS. The same call gives the same number.
    """
    if device.type == "cuda":
        return _on_cuda(call) / MIB
    return _on_cpu(call) / MIB if device.type == "cpu" else None


def _on_cuda(call: Call) -> int:
    devices = range(torch.cuda.device_count())
    before = [torch.cuda.memory_allocated(device) for device in devices]
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    call()
    return sum(torch.cuda.max_memory_allocated(device) - before[device] for device in devices)


def _on_cpu(call: Call) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr
    with profile(profile_memory=True) as profiler:
        call()
    assert profiler.kineto_results is not None
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    held = peak = 0
    for _, change in sorted(changes, key=lambda timed: timed[0]):
        held += change
        peak = max(peak, held)
    return peak

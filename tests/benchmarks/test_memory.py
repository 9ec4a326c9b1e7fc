"""The peak of known allocations, in processes of their own, and what such a process may answer."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import memory
from benchmarks.processes import call_in_process, status_of

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def allocate(mib: int) -> Any:
    return np.ones(mib * 2**17)  # of 8 bytes


def kept(mib: int) -> Any:
    return allocate(mib)


def freed_on_the_way(mib: int) -> Any:
    first = allocate(mib)
    del first
    return allocate(mib // 4)


def peak(call: Any, mib: int, limit: float) -> float:
    allocate(32)  # freed: must not hide what comes
    return memory._on_cpu(lambda: call(mib), limit)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@linux
@pytest.mark.parametrize("call", [kept, freed_on_the_way])
def test_peak_is_what_was_in_use_at_once(call: Any) -> None:
    status, mib = call_in_process(peak, call, 48, 1000.0)
    assert status == "ok"
    assert mib == pytest.approx(48, abs=2)


@linux
def test_more_than_the_limit_does_not_fit() -> None:
    assert call_in_process(peak, kept, 48, 40.0) == ("does not fit", None)


def test_a_process_that_dies_is_a_failure() -> None:
    assert call_in_process(die) == ("failed: its process ended with -9", None)


def test_an_error_is_one_line() -> None:
    assert call_in_process(int, "x")[0].startswith("failed: ValueError: invalid literal")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), "does not fit"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "does not fit"),
        (RuntimeError("shapes differ\nat line 2"), "failed: RuntimeError: shapes differ"),
    ],
)
def test_status(error: Exception, status: str) -> None:
    assert status_of(error) == status


def test_read_status(tmp_path: Path) -> None:
    file = tmp_path / "status"
    file.write_text("Name:\tpython\nVmHWM:\t  300 kB\nVmRSS:\t 2048 kB\n")
    assert memory.read_status("VmRSS", str(file)) == 2.0
    with pytest.raises(ValueError, match="no VmSize in"):
        memory.read_status("VmSize", str(file))

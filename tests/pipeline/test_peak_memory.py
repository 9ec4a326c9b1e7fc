from __future__ import annotations

import pytest
import torch

from gattn_viz.pipeline.peak_memory import MIB, peak_memory

CPU = torch.device("cpu")


def test_what_is_there_at_once_on_a_cpu() -> None:
    before = torch.zeros(1000)

    def call() -> torch.Tensor:
        first = before + 1  # 4,000 bytes
        second = torch.cat([first, first])  # 8,000 more: the peak
        del first
        return second[:1].clone() + 1

    assert peak_memory(call, CPU) == 12_000 / MIB
    assert peak_memory(call, CPU) == 12_000 / MIB


def test_what_was_there_before_does_not_count() -> None:
    held = [torch.zeros(1000)]

    def call() -> torch.Tensor:
        held.clear()
        return torch.zeros(10)

    assert peak_memory(call, CPU) == 40 / MIB


def test_it_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    peak_memory(lambda: torch.zeros(1), CPU)
    assert capfd.readouterr() == ("", "")


def test_a_device_that_does_not_say() -> None:
    assert peak_memory(lambda: None, torch.device("mps")) is None


@pytest.mark.gpu
def test_on_cuda() -> None:
    device = torch.device("cuda")
    held = torch.zeros(2**20, device=device)

    def call() -> torch.Tensor:
        return (held + 1) * 2  # two of 4 MiB

    call()
    assert peak_memory(call, device) == 8

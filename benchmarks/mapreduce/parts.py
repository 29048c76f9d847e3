"""What the parts compute."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


def empty(number: Tensor) -> None:
    """Does nothing."""


def sleep(number: Tensor, seconds: float, model: nn.Module | None) -> float:
    """Waits; returns how long it really took."""
    begin = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begin


def compute(number: Tensor, seconds: float, model: nn.Module | None) -> None:
    """Uses a core for so much of its time, however busy the machine is."""
    values = torch.ones(64, 64)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        values = torch.tanh(values @ values)


def sleep_for(seconds: Tensor) -> None:
    """Waits as long as the part says."""
    time.sleep(seconds.item())

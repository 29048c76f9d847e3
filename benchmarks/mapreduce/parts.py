"""The functions that the parts run."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


def empty(number: Tensor) -> None:
    """Does nothing."""


def sleep(number: Tensor, seconds: float, model: nn.Module | None) -> float:
    """Sleeps; returns the actual time in seconds."""
    begin = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begin


def compute(number: Tensor, seconds: float, model: nn.Module | None) -> None:
    """Uses ``seconds`` of CPU time, however busy the machine is."""
    values = torch.ones(64, 64)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        values = torch.tanh(values @ values)


def sleep_for(seconds: Tensor) -> None:
    """Sleeps for the time that the part gives."""
    time.sleep(seconds.item())

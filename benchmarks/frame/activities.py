"""Activities that keep a worker's main thread busy while other workers call it."""

from __future__ import annotations

import queue
from collections.abc import Callable

Activity = Callable[[], None]
"""Runs for some milliseconds at most, and is called repeatedly."""


def python_code() -> Activity:
    """Returns pure bytecode, which releases the interpreter lock only when forced to."""

    def work() -> None:
        total = 0
        for number in range(50_000):
            total += number * number % 7

    return work


def torch_kernels() -> Activity:
    """Returns matrix products, which run without the interpreter lock."""
    import torch

    left, right = torch.rand(256, 256), torch.rand(256, 256)

    def work() -> None:
        for _ in range(4):
            torch.mm(left, right)

    return work


ACTIVITIES: dict[str, Callable[[], Activity]] = {"python": python_code, "kernels": torch_kernels}


def run_until_ordered(name: str, orders: queue.SimpleQueue[str | None]) -> None:
    """Runs the activity called ``name`` in this thread until an order arrives."""
    work = ACTIVITIES[name]()
    while orders.empty():  # neither waits nor releases the interpreter lock
        work()

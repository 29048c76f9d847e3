"""What the main thread of a worker can be busy with while others call it."""

from __future__ import annotations

import queue
from collections.abc import Callable

Activity = Callable[[], None]
"""Does a little, some milliseconds at most, and is called again and again."""


def python_code() -> Activity:
    """Returns pure bytecode: it gives the interpreter lock away only when it is made to."""

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
    """Runs the activity called ``name`` in this thread until there is an order."""
    work = ACTIVITIES[name]()
    while orders.empty():  # neither waits nor gives the interpreter lock away
        work()

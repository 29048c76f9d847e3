from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchweft.engine.threads.timers import Timers
from torchweft.engine.worker.process import RepeatedInterrupts

LIMIT_S = 20.0


class Finalized:
    """Calls something in its finalizer."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


def be_interrupted() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise ValueError("not an interrupt")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Takes what the former hook is called with."""
    found: list[Any] = []

    def hook(unraisable: Any) -> None:
        found.append(unraisable.exc_type)

    monkeypatch.setattr(sys, "unraisablehook", hook)
    return found


@pytest.fixture
def interrupts(seen: list[Any]) -> Iterator[RepeatedInterrupts]:
    timers = Timers("clock")
    interrupts = RepeatedInterrupts(timers)
    timers.start()
    interrupts.begin()
    yield interrupts
    interrupts.end()
    timers.close()


def test_an_interrupt_of_a_finalizer_comes_again_once(
    interrupts: RepeatedInterrupts, seen: list[Any]
) -> None:

    def wait() -> None:
        Finalized(be_interrupted)
        threading.Event().wait(LIMIT_S)

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert math.isinf(interrupts._due_s)
    assert seen == []


def test_what_else_is_swallowed_is_the_former_hooks(
    interrupts: RepeatedInterrupts, seen: list[Any]
) -> None:
    Finalized(fail)
    thread = threading.Thread(target=lambda: Finalized(lambda: exec("raise KeyboardInterrupt")))
    thread.start()
    thread.join()
    assert seen == [ValueError, KeyboardInterrupt]

"""Tests that messages of a worker to itself find a thread."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from torchweft.engine.threads.reactor import OWN, FairQueue, Task
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.receiving import Receiver


def nothing(*_: object) -> None:
    """Is the handler of messages, and a task."""


class Contended(FairQueue):
    """A queue from which another thread takes a task whenever one is appended."""

    def append(self, task: Task, sender: int = OWN, size_bytes: int = 0) -> None:
        super().append(task, sender, size_bytes)
        self.popleft()


def test_a_message_to_oneself_wakes_a_thread_while_another_takes_an_earlier_task() -> None:
    tasks, wakes = Contended(8, 1 << 20), 0

    def wake() -> None:
        nonlocal wakes
        wakes += 1

    reactor: Any = SimpleNamespace(tasks=tasks, urgent=deque(), wake=wake)
    me: Any = SimpleNamespace(id=0, name="me")
    receiver = Receiver(reactor, nothing)
    receiver.on(Kind.RELEASE_CONTEXT, nothing, inline=False)
    FairQueue.append(tasks, (nothing, None, None))
    receiver.deliver(me, Frame(Kind.RELEASE_CONTEXT, 0, 0, b"", ()))
    assert len(tasks) == 1
    assert wakes == 1

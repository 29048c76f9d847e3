"""The order of events, whichever descriptor is seen to be readable first."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchweft.errors import LaunchError
from torchweft.launch.control import Message
from torchweft.launch.job import program_job
from torchweft.launch.nursery import Nursery
from torchweft.launch.worker import WorkerSpec


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with Nursery(preload=()) as nursery:
        yield nursery


def start(nursery: Nursery, body: str, notes: Path) -> None:
    job = program_job([sys.executable, "-c", body])
    nursery.start("a", WorkerSpec("a", 0, job, dict(os.environ), str(notes)))


def events_until(nursery: Nursery, is_last: Callable[[Message], bool]) -> list[Message]:
    events: list[Message] = []
    while not any(map(is_last, events)):
        events += nursery.receive()
    return events


def is_end(event: Message) -> bool:
    return bool(event["event"] == "ended")


def written(events: list[Message], stream: str) -> bytes:
    return b"".join(each["data"] for each in events if each.get("stream") == stream)


def see_messages_only(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the nursery see its messages, and never that a pipe is readable."""
    select = nursery._selector.select

    def messages() -> list[Any]:
        return [(key, mask) for key, mask in select() if key.data is None]

    monkeypatch.setattr(nursery._selector, "select", messages)


def test_output_comes_before_the_end_that_is_seen_first(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_messages_only(nursery, monkeypatch)
    start(nursery, "import sys; print('out'); print('err', file=sys.stderr)", tmp_path)
    events = events_until(nursery, is_end)
    told = [event["event"] for event in events if event["event"] != "output"]
    assert told == ["started", "ended"]
    assert is_end(events[-1])
    assert (written(events, "out"), written(events, "err")) == (b"out\n", b"err\n")


def test_what_a_worker_leaves_behind_writes_after_its_end(nursery: Nursery, tmp_path: Path) -> None:
    body = (
        "import os, signal, time\n"
        "reading, writing = os.pipe()\n"
        "def ending(*_): os.write(1, b'late'); os._exit(0)\n"
        "if os.fork() == 0:\n"
        "    signal.signal(signal.SIGTERM, ending)\n"
        "    os.write(writing, b'!')\n"
        "    while True: signal.pause()\n"
        "os.read(reading, 1)\n"
    )
    start(nursery, body, tmp_path)
    events = events_until(nursery, is_end)
    while written(events, "out") != b"late":  # The process is asked to end when the worker has.
        events += nursery.receive()


def test_output_of_workers_of_a_lost_nursery_is_read_before_the_error(
    nursery: Nursery, tmp_path: Path
) -> None:
    body = "import os, signal; os.write(1, b'last words'); signal.pause()"
    start(nursery, body, tmp_path)
    events = events_until(nursery, lambda event: event["event"] == "started")
    os.kill(nursery.pid, signal.SIGKILL)
    found: list[Message] = []
    with pytest.raises(LaunchError, match="process that starts the workers"):
        receive_all(nursery, found)
    assert written(events + found, "out") in (b"last words", b"")  # It may not have written yet.
    with pytest.raises(LaunchError):
        nursery.receive()


def receive_all(nursery: Nursery, events: list[Message]) -> None:
    while True:
        events += nursery.receive()

"""Tests the deadline and errors of a driver's calls, and work on a thread of its own."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from torchweft import knobs
from torchweft.checkpoint import owner
from torchweft.checkpoint.owner import Deadline, raise_first
from torchweft.engine.threads.device_streams import ServedStreams
from torchweft.engine.worker import current
from torchweft.engine.worker.agent import Slots
from torchweft.errors import ArgumentTypeError, CallTimeout, CheckpointError, WorkerLost
from torchweft.optim.distributed import Failure


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {rank: SimpleNamespace(name=name) for rank, name in enumerate(("a", "b"))}
    agent = SimpleNamespace(
        info=SimpleNamespace(name="ps"),
        peers=peers,
        slots=Slots(),
        served_streams=ServedStreams(),
    )
    monkeypatch.setattr(current, "here", agent)


def test_a_deadline_is_of_all_calls_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    deadline = Deadline(5.0)
    assert deadline.left_s() == 5.0
    now[0] += 4.0
    assert deadline.left_s() == 1.0
    now[0] += 1.0
    with pytest.raises(CallTimeout, match=r"within its 5\.0 s"):
        deadline.left_s()
    assert Deadline(0.0).left_s() == 0.0
    with knobs.CHECKPOINT_TIMEOUT_S.override(7.0):
        assert Deadline(-1.0).left_s() == 7.0


def test_nothing_is_raised_where_nothing_failed() -> None:
    raise_first("saving", [], "/d", 1)


def test_all_that_failed_is_named() -> None:
    disk = OSError(28, "No space left on device")
    failures = [Failure(0, disk), Failure(1, KeyError("x"))]
    with pytest.raises(CheckpointError, match=r"saving failed on worker 'a'.*No space.*'b'") as e:
        raise_first("saving", failures, "/d", 3)
    assert e.value.__cause__ is disk
    assert (e.value.worker, e.value.step, e.value.directory) == ("a", 3, "/d")


def test_a_lost_worker_comes_before_all_else() -> None:
    errors = [OSError("disk"), ArgumentTypeError("x"), CallTimeout("late"), WorkerLost("gone")]
    failures = [Failure(0, error) for error in errors]
    for last in (4, 3, 2):
        with pytest.raises(type(errors[last - 1])) as caught:
            raise_first("saving", failures[:last], "/d", 3)
        assert caught.value is errors[last - 1]


def test_it_runs_on_a_thread_with_a_name() -> None:
    def name() -> tuple[str, bool]:
        thread = threading.current_thread()
        return thread.name, thread.daemon

    assert owner.in_background(name, "save", is_awaited=True).wait() == ("weft-ps-save", False)
    assert owner.in_background(name, "part", is_awaited=False).wait() == ("weft-ps-part", True)


class Thing:
    pass


def test_an_error_keeps_nothing_that_its_frames_had() -> None:
    things: list[weakref.ref[Thing]] = []

    def fail() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    future: torch.futures.Future[None] = owner.in_background(fail, "x", is_awaited=True)
    with pytest.raises(ValueError, match="outer"):
        future.wait()
    gc.collect()
    assert things[0]() is None

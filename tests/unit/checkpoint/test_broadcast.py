from __future__ import annotations

import time

import pytest

from torchweft import knobs
from torchweft.checkpoint.broadcast import Deadline, Failure, raise_first
from torchweft.errors import ArgumentTypeError, CallTimeout, CheckpointError, WorkerLost


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
    failures = [Failure("a", disk), Failure("b", KeyError("x"))]
    with pytest.raises(CheckpointError, match=r"saving failed on worker 'a'.*No space.*'b'") as e:
        raise_first("saving", failures, "/d", 3)
    assert e.value.__cause__ is disk
    assert (e.value.worker, e.value.step, e.value.directory) == ("a", 3, "/d")


def test_a_lost_worker_comes_before_all_else() -> None:
    errors = [OSError("disk"), ArgumentTypeError("x"), CallTimeout("late"), WorkerLost("gone")]
    failures = [Failure("a", error) for error in errors]
    for last in (4, 3, 2):
        with pytest.raises(type(errors[last - 1])) as caught:
            raise_first("saving", failures[:last], "/d", 3)
        assert caught.value is errors[last - 1]

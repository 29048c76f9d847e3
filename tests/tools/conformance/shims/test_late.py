from __future__ import annotations

import threading

from tests.conformance.shims.late import Late
from torchweft.errors import NotInitialized


def test_an_action_for_a_worker_that_has_left_is_of_no_use() -> None:
    def fail() -> None:
        raise NotInitialized("gone")

    late, finished = Late("late"), threading.Event()
    late.add(0.0, fail)
    late.add(0.0, finished.set)
    assert finished.wait(5)
    late.close()


def test_nothing_runs_after_the_close() -> None:
    done: list[int] = []
    late = Late("late")
    late.add(0.05, lambda: done.append(1))
    late.close()
    late.add(0.0, lambda: done.append(2))
    assert not [thread for thread in threading.enumerate() if thread.name == "late"]
    assert not done
    Late("unused").close()

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from torchweft.engine.threads.interrupts import all_stacks


@pytest.fixture
def switching_often() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)
    gc.enable()


def test_frames_of_each_thread_innermost_last() -> None:
    inside, leave = threading.Event(), threading.Event()

    def outer() -> None:
        inner()

    def inner() -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=outer)
    thread.start()
    inside.wait()
    stacks = all_stacks()
    leave.set()
    thread.join()
    names = [frame.f_code.co_name for frame in stacks[thread.ident or 0]]
    place = names.index("outer")
    assert names[place + 1] == "inner"
    assert names[-1] in ("inner", "wait")
    own = [frame.f_code.co_name for frame in stacks[threading.get_ident()]]
    assert own.index("test_frames_of_each_thread_innermost_last") < own.index("all_stacks")


@pytest.mark.usefixtures("switching_often")
def test_a_collector_that_the_program_turns_off_stays_off() -> None:
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            all_stacks()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    seen = []
    for _ in range(50):
        gc.enable()
        time.sleep(1e-4)
        seen.append(gc.isenabled())
        gc.disable()
        time.sleep(1e-4)
        seen.append(gc.isenabled())
    is_over.set()
    for thread in threads:
        thread.join()
    assert seen == [True, False] * 50

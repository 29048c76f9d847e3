from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from torchweft.engine.threads import interrupts

PROGRAM = f"""
import gc, importlib.util, sys, threading, time

# Without torch, which takes long to import.
spec = importlib.util.spec_from_file_location("interrupts", {interrupts.__file__!r})
interrupts = sys.modules["interrupts"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interrupts)
gc.callbacks.append(lambda phase, info: time.sleep(1e-4))
ended = []

def look():
    kept = []  # Collections begin at any allocation.
    for _ in range(200):
        interrupts.current_frames()
        kept.append([])
    ended.append(gc.isenabled())

for threshold in (5, 20, 50):
    threads = [threading.Thread(target=look) for _ in range(4)]
    gc.set_threshold(threshold)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
assert ended == [True] * 12, ended
"""


def test_frames_are_found_while_the_collector_lets_other_threads_run() -> None:
    """In a process of its own: a failure stops all threads of it."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=30)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_object_is_kept_by_a_look_at_what_uses_it(is_enabled: bool) -> None:
    class Kept:
        pass

    def use() -> weakref.ref[Kept]:
        kept = Kept()
        if not is_enabled:
            gc.disable()
        interrupts.current_frames()
        return weakref.ref(kept)

    threshold = gc.get_threshold()
    gc.set_threshold(0)
    try:
        assert use()() is None
    finally:
        gc.set_threshold(*threshold)
        gc.enable()


class Alarm(Exception):
    """What a handler raises."""


def test_an_exception_of_a_handler_is_told_from_others() -> None:
    def handler(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Alarm) as caught:
            signal.raise_signal(signal.SIGALRM)
        assert interrupts.is_of_handler(caught.value)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not interrupts.is_of_handler(caught.value), "the handler is no longer installed"
    with pytest.raises(Alarm) as caught:
        raise Alarm
    assert not interrupts.is_of_handler(caught.value)


@pytest.fixture
def switching_often() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)
    gc.enable()


@pytest.mark.usefixtures("switching_often")
def test_a_collector_that_the_program_turns_off_stays_off() -> None:
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            interrupts.all_stacks()

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

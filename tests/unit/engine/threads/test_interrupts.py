from __future__ import annotations

import gc
import math
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

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


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        assert threading.get_ident() in interrupts.current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()


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


def test_ctrl_c_belongs_to_the_main_thread() -> None:
    assert interrupts.is_of_handler(KeyboardInterrupt())
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(interrupts.is_of_handler, KeyboardInterrupt()).result()


def test_a_flag_is_set_once_and_stays_set() -> None:
    flag = interrupts.Flag()
    assert not flag.wait(0)
    flag.set()
    flag.set()
    assert flag.wait(0)
    assert flag.wait(math.inf)


def test_who_waits_for_a_flag_is_woken() -> None:
    flag = interrupts.Flag()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(flag.wait, 20.0) for _ in range(2)]
        flag.set()
        assert [each.result() for each in waiting] == [True, True]

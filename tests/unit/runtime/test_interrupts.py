from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from torchweft.runtime import interrupts

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
        interrupts.frame_of_main()
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
        interrupts.frame_of_main()
        interrupts.current_frames()
        return weakref.ref(kept)

    threshold = gc.get_threshold()
    gc.set_threshold(0)
    try:
        assert use()() is None
    finally:
        gc.set_threshold(*threshold)
        gc.enable()

from __future__ import annotations

import gc
import subprocess
import sys
import threading

from torchweft.runtime import interrupts

PROGRAM = f"""
import gc, runpy, threading, time

frame_of_main = runpy.run_path({interrupts.__file__!r})["frame_of_main"]
gc.callbacks.append(lambda phase, info: time.sleep(1e-5))

def look():
    for _ in range(500):
        assert frame_of_main() is not None
        assert gc.isenabled()

threads = [threading.Thread(target=look) for _ in range(4)]
gc.set_threshold(5)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
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

"""How late a thread goes on that has something to do: the price of the interpreter lock."""

from __future__ import annotations

import threading
import time

_PERIOD_S = 0.005


class LatenessMeter:
    """Measures, from now until it is closed, how late a sleeping thread wakes.

    Its thread sleeps for a fixed time, over and over, and looks how much longer it took until it
    ran again: it had to be woken by the kernel, and to get the interpreter lock. That is what an
    arriving call goes through as well, while other threads compute in Python.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._total_s = 0.0
        self._count = 0
        self._has_measured = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def average_us(self) -> float:
        """Returns the average in microseconds; waits for the first measurement."""
        self._has_measured.wait()
        return self._total_s / self._count * 1e6

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed = True
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            start_s = time.perf_counter()
            time.sleep(_PERIOD_S)
            self._total_s += max(time.perf_counter() - start_s - _PERIOD_S, 0.0)
            self._count += 1
            self._has_measured.set()

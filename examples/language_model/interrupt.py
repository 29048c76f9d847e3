"""Turns Ctrl-C into an orderly stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

PATIENCE_S = 0.7
"""Time allowed after Ctrl-C for the current step to end and the state to be saved."""


class Interrupt:
    """Records the first Ctrl-C in a ``with`` block; a second one or a timeout interrupts the block.

    Attributes:
        is_requested: Whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.is_requested = False

    def __enter__(self) -> Interrupt:
        self._timer = threading.Timer(PATIENCE_S, _press_ctrl_c)
        self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        self._timer.start()


def _press_ctrl_c() -> None:
    # A signal sent to the main thread also interrupts a blocking wait there.
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)

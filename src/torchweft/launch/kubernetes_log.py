"""The log of one worker's container, followed on a thread of its own.

An API server ends a log that is followed, after hours or because it restarts. Then the log is
opened again a little earlier, and the lines that were shown are recognised by their timestamps.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from torchweft.errors import LaunchError
from torchweft.launch.console import LINE_LIMIT_BYTES, Console, Label, LineAssembler
from torchweft.launch.kubernetes_api import Gone

if TYPE_CHECKING:
    from torchweft.launch.kubernetes_api import Api

_AGAIN_S = 1.0
_OVERLAP_S = 5
_READ_BYTES = 1 << 16
_CLOSE_S = 2.0


class PodLog:
    """Shows the log of a pod, until its container has ended or this is closed.

    Args:
        api: Where the log is read.
        console: Where it is shown.
        label: The worker's.
        pod: The pod's name.
    """

    def __init__(self, api: Api, console: Console, label: Label, pod: str) -> None:
        self._api = api
        self._console = console
        self._label = label
        self._pod = pod
        self._lines = LineAssembler()
        self._latest = b""
        self._received_s: float | None = None
        self._has_ended = threading.Event()
        self._is_closed = threading.Event()
        self._response: Any = None
        self.failure: BaseException | None = None
        """The error because of which nothing more is shown, such as a closed pipe."""
        # A daemon, as nothing interrupts the wait for the head of a response.
        name = f"weft-log-{label.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Tells that the container has ended: the log is complete when its stream ends."""
        self._has_ended.set()

    def join(self, timeout_s: float) -> None:
        """Waits until the whole log was shown."""
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Shows nothing more; ends the thread, or has it end when it is answered."""
        self._is_closed.set()
        response = self._response
        if response is not None:
            with contextlib.suppress(ValueError, OSError):  # it has just ended
                response.shutdown()  # ends a read of the thread
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._is_closed.is_set():
                was_over = self._has_ended.is_set()
                is_whole = self._show_stream()
                if (was_over and is_whole) or self._is_closed.wait(_AGAIN_S):
                    break
            self._console.write_lines(self._label, self._lines.finish(), is_error=False)
        except OSError as error:
            self.failure = error

    def _show_stream(self) -> bool:
        """Shows the log from where it was left; returns whether it was read to its end."""
        import urllib3

        since_s = None
        if self._received_s is not None:
            since_s = math.ceil(time.monotonic() - self._received_s) + _OVERLAP_S
        try:
            response = self._api.log(self._pod, since_s)
        except Gone:
            return True
        except LaunchError:  # not yet
            return False
        self._response = response
        try:
            if self._is_closed.is_set():
                return False
            self._show(response)
        except (urllib3.exceptions.HTTPError, ValueError):
            return False  # a lost connection, or closed
        finally:
            self._response = None
            response.close()
        return True

    def _show(self, response: Any) -> None:
        rest = b""
        for data in response.stream(_READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > LINE_LIMIT_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._show_line(line)
        if rest:
            self._show_line(rest)

    def _show_line(self, line: bytes) -> None:
        moment, _, text = line.partition(b" ")
        if moment <= self._latest:  # they all have nine digits after the point
            return
        self._latest, self._received_s = moment, time.monotonic()
        self._console.write_lines(self._label, self._lines.feed(text + b"\n"), is_error=False)

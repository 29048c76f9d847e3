"""Where an observer runs: in this thread, in a thread of its own, or on a worker."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from torchweft import rpc
from torchweft.engine.threads.device_streams import ServedStreams
from torchweft.rl.observer import Observer

Done = Callable[[Any, BaseException | None], None]
"""Called with the result of a method, or with its error."""


class Place(Protocol):
    """Holds one observer, and calls its methods one after the other."""

    def start(self, method: str, args: tuple[Any, ...], done: Done) -> None:
        """Calls a method; ``done`` is called when it has ended, maybe at once."""

    def close(self) -> None:
        """Closes the observer, as far as it can be reached; does not wait for a method."""


class Here:
    """An observer in this thread, for debugging: a method runs while it is started."""

    def __init__(self, make: Callable[[], Observer]) -> None:
        self._make = make
        self._observer: Observer | None = None

    def start(self, method: str, args: tuple[Any, ...], done: Done) -> None:
        """Runs a method."""
        try:
            if self._observer is None:
                self._observer = self._make()
            result = getattr(self._observer, method)(*args)
        except Exception as error:
            done(None, error)
        else:
            done(result, None)

    def close(self) -> None:
        """Closes the observer."""
        if self._observer is not None:
            self._observer.close()


class InThread:
    """An observer in a thread of its own."""

    def __init__(self, make: Callable[[], Observer], name: str) -> None:
        self._here = Here(make)
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams = ServedStreams(most_lanes=1)
        # A daemon: an environment that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name=f"weft-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            work()
        self._here.close()

    def start(self, method: str, args: tuple[Any, ...], done: Done) -> None:
        """Has the thread run a method."""
        self._todo.put(self._streams.carried(lambda: self._here.start(method, args, done)))

    def close(self) -> None:
        """Ends the thread after the method that it runs."""
        self._todo.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout_s)


class OnWorker:
    """An observer on a worker."""

    def __init__(self, worker: str, *args: Any) -> None:
        self._observer = rpc.remote(worker, Observer, args)

    def start(self, method: str, args: tuple[Any, ...], done: Done) -> None:
        """Calls a method on the worker, without a limit of time."""

        def ended(future: rpc.Future[Any]) -> None:
            try:
                result = future.value()
            except Exception as error:
                done(None, error)
            else:
                done(result, None)

        try:
            future = getattr(self._observer.rpc_async(timeout=0), method)(*args)
        except Exception as error:
            done(None, error)  # The worker is known to be lost.
        else:
            future.add_done_callback(ended)

    def close(self) -> None:
        """Has the worker close the observer, unless it is lost."""
        self.start("close", (), lambda result, error: None)

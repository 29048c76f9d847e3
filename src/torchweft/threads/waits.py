"""Notes of what threads wait for, which reports read."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

Parts = Callable[[], Sequence[Any]]
"""Returns the open calls, and the ``Wait`` of anything else, that a thread waits for. Called by
other threads, for reports. Does not block. What has ended by now is left out."""


class Counting(Protocol):
    """Counts the threads that block, and keeps their notes: a ``Reactor``."""

    notes: dict[int, ref[Waiting]]

    def begin_wait(self) -> bool:
        """See ``Reactor.begin_wait``."""

    def end_wait(self) -> None:
        """See ``Reactor.end_wait``."""


class Waiting:
    """A remote wait of one thread, which notes what it waits for; made by ``Reactor.waiting``.

    The note ends with the block, also if a signal handler raises anywhere: only the block holds
    this object. A handler that waits meanwhile has a note of its own.
    """

    __slots__ = ("__weakref__", "_before", "_is_counted", "_reactor", "needs_any", "parts")

    def __init__(self, reactor: Counting, parts: Parts, needs_any: bool) -> None:
        self._reactor = reactor
        self.parts = parts
        self.needs_any = needs_any

    def __enter__(self) -> None:
        reactor, thread = self._reactor, get_ident()
        self._is_counted = reactor.begin_wait()
        self._before = reactor.notes.get(thread)
        reactor.notes[thread] = ref(self)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            self._reactor.notes.pop(get_ident(), None)
        else:
            self._reactor.notes[get_ident()] = self._before
        if self._is_counted:
            self._reactor.end_wait()

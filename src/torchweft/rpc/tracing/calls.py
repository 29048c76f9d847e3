"""Derives types of calls that are noted, at their caller and at their callee."""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable
from functools import partial
from typing import Any

from torchweft.agent.calls import PendingCall
from torchweft.ids import ReferenceId
from torchweft.protocol.observing.trace import CREATED, MADE, SERVED
from torchweft.rpc.completion import Call
from torchweft.rpc.counting import kept_of, key_of, name_of
from torchweft.rpc.tracing.rows import Rows
from torchweft.rpc.watching import Watcher
from torchweft.wire.messages import ERROR_REPLY

_MOST_NAMES = 10_000
_clock: Callable[[], float] = time.monotonic


class Names:
    """The names of called functions; looked up once for each. Thread-safe.

    Attributes:
        by_key: The names of known functions.
    """

    def __init__(self) -> None:
        self.by_key: dict[Any, str] = {}
        self._kept: list[object] = []

    def name_of(self, function: Any) -> str:
        """Returns the name of a function."""
        key = key_of(function)
        name = self.by_key.get(key)
        if name is None:
            name = name_of(function)
            if len(self._kept) < _MOST_NAMES and not isinstance(key, str):
                self._kept.append(kept_of(function))
                self.by_key[key] = name
        return name


def watcher_of(rows: Rows, names: Names) -> Watcher:
    """Returns what derives the types of calls that are noted."""

    def note_creation(function: Any, reference: ReferenceId) -> None:
        name, owner = names.name_of(function), reference.owner
        rows.note((rows.number(), CREATED, _clock(), get_ident(), owner, reference.number, name))

    pending = partial(_traced_pending, rows, names)
    served = partial(_traced_served, rows, names)
    return Watcher(pending, served, note_creation, is_brief=True)


def _traced_pending(rows: Rows, names: Names, base: type[PendingCall]) -> type[PendingCall]:
    note, number, clock = rows.note_fields, rows.number, _clock
    known, name_of = names.by_key, names.name_of
    finish, failed = base.finish, ERROR_REPLY

    class Traced(base):  # type: ignore[valid-type, misc]
        """A call that is noted at its caller, before those that wait for it go on."""

        __slots__ = ()

        def finish(self) -> None:
            function, frame, parent = self.function, self.frame, self.parent
            try:
                name = known[id(function.__code__)]
            except (AttributeError, KeyError):
                name = name_of(function)
            note(
                (
                    number(),
                    MADE,
                    self.started_s,
                    clock(),
                    self.thread,
                    self.worker,
                    self.number,
                    name,
                    -1 if parent is None else parent.peer.id,
                    0 if parent is None else parent.number,
                    self.on_done is not None,
                    frame is None or frame[1] & failed != 0,
                    0,
                )
            )
            finish(self)

    return Traced


def _traced_served(rows: Rows, names: Names, base: type[Call]) -> type[Call]:
    note, note_end = rows.note_fields, rows.note_end
    number, clock = rows.number, _clock
    known, name_of = names.by_key, names.name_of
    begins, answer = base.begins, base.__call__

    class Traced(base):  # type: ignore[valid-type, misc]
        """A served call that is noted before its caller goes on."""

        __slots__ = ("began_s", "creation", "thread")

        def begins(self, creation: int, remaining_s: float, now_s: float) -> bool:
            self.began_s, self.creation, self.thread = now_s, creation, get_ident()
            return begins(self, creation, remaining_s, now_s)

        def __call__(self, result: Any, error: BaseException | None) -> None:
            try:
                began_in, function = self.thread, self.function
            except AttributeError:  # It fails before its turn has come.
                answer(self, result, error)
                return
            if self.has_ended:
                answer(self, result, error)
                return
            try:
                name = known[function]
            except (TypeError, KeyError):
                name = name_of(function)
            row = number()
            note(
                (
                    row,
                    SERVED,
                    self.arrived_s,
                    self.began_s,
                    clock(),
                    began_in,
                    get_ident(),
                    self.peer.id,
                    self.number,
                    self.creation,
                    name,
                    self.context_id,
                    error is not None,
                )
            )
            answer(self, result, error)
            note_end((row, clock()))

    return Traced

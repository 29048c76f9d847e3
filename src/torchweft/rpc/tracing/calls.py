"""Notes calls, at their caller and at their callee, and the parts of backward passes."""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable
from typing import Any

from torchweft.agent.calls import PendingCall
from torchweft.autograd.local_pass import LocalPass, Outgoing
from torchweft.ids import ReferenceId
from torchweft.protocol.backward import Progress
from torchweft.protocol.calls import AnsweredCall
from torchweft.protocol.observing.trace import BACKWARD, CREATED, MADE, RAN, SERVED
from torchweft.rpc.counting import kept_of, key_of, name_of
from torchweft.rpc.tracing.passes import operations_due
from torchweft.rpc.tracing.rows import Rows
from torchweft.rpc.watching import Watcher
from torchweft.wire.messages import ERROR_REPLY, NO_CREATION

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


class TracingWatcher(Watcher):
    """Notes the calls and the parts of backward passes of one worker.

    Args:
        rows: Takes the notes.
        names: The names of the called functions.
    """

    def __init__(self, rows: Rows, names: Names) -> None:
        self._rows = rows
        self._names = names

    def call_begins(self, call: PendingCall) -> bytes:
        """Keeps which thread makes a call."""
        call.notes[self] = get_ident()
        return b""

    def creation_sent(self, call: PendingCall, reference: ReferenceId) -> None:
        """Notes a call that makes a value."""
        rows, name = self._rows, self._names.name_of(call.function)
        owner, number = reference.owner, reference.number
        rows.note((rows.number(), CREATED, _clock(), get_ident(), owner, number, name))

    def call_ends(self, call: PendingCall) -> None:
        """Notes a call at its caller."""
        function: Any = call.function
        frame, parent = call.frame, call.parent
        try:
            name = self._names.by_key[id(function.__code__)]
        except (AttributeError, KeyError):
            name = self._names.name_of(function)
        self._rows.note_fields(
            (
                self._rows.number(),
                MADE,
                call.started_s,
                _clock(),
                call.notes.get(self, 0),
                call.worker,
                call.number,
                name,
                -1 if parent is None else parent.peer.id,
                0 if parent is None else parent.number,
                call.on_done is not None,
                frame is None or frame.flags & ERROR_REPLY != 0,
                0,
            )
        )

    def serving_begins(self, call: AnsweredCall) -> None:
        """Keeps when and where the turn of a call has come."""
        call.notes[self] = _Serving(_clock(), get_ident())

    def serving_ends(self, call: AnsweredCall, error: BaseException | None) -> None:
        """Notes a served call before its caller goes on."""
        serving = self._serving(call)
        if serving is None or call.has_ended:
            return
        function: Any = call.function
        try:
            name = self._names.by_key[function]
        except (TypeError, KeyError):
            name = self._names.name_of(function)
        made = getattr(call, "reference", None)
        serving.row = self._rows.number()
        self._rows.note_fields(
            (
                serving.row,
                SERVED,
                call.arrived_s,
                serving.began_s,
                _clock(),
                serving.thread,
                get_ident(),
                call.peer.id,
                call.number,
                NO_CREATION if made is None else made.number,
                name,
                call.context_id,
                error is not None,
            )
        )

    def served(self, call: AnsweredCall, error: BaseException | None) -> None:
        """Notes when a call was answered."""
        serving = self._serving(call)
        if serving is not None and serving.row is not None:
            self._rows.note_end((serving.row, _clock()))

    def _serving(self, call: AnsweredCall) -> _Serving | None:
        notes: dict[Any, _Serving] = getattr(call, "notes", {})
        return notes.get(self)

    def part_runs(
        self, local: LocalPass, work: Callable[[], tuple[list[Outgoing], Progress]]
    ) -> tuple[list[Outgoing], Progress]:
        """Notes a step of a part of a pass, with the names of its operations."""
        names = operations_due(local)
        began_s = _clock()
        outgoing, progress = work()
        if progress.executed or outgoing:
            ended_s = _clock()
            details = (
                ("operations", names),
                ("messages", tuple(progress.executed)),
                ("answered", tuple(progress.answered)),
            )
            name, context_id = next(iter(names), "leaves"), local.context_id
            row = (self._rows.number(), RAN, began_s, ended_s, get_ident(), BACKWARD)
            self._rows.note((*row, name, context_id, details))
        return outgoing, progress


class _Serving:
    """What is kept of a served call until it is answered.

    Attributes:
        began_s: When its turn came.
        thread: The thread in which it began.
        row: Its row, once it has an outcome.
    """

    __slots__ = ("began_s", "row", "thread")

    def __init__(self, began_s: float, thread: int) -> None:
        self.began_s = began_s
        self.thread = thread
        self.row: int | None = None

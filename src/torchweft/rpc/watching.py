"""Puts subclasses in the place of the types of calls while somebody watches the calls of a worker.

A call is an object, and its type is looked up where it is made. So while nobody watches, nothing
of a watcher is in the way of a call. Watchers are counters, traces and spans; all may watch at
once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torchweft.agent.calls import PendingCall
from torchweft.autograd.graph import LocalPass
from torchweft.ids import ReferenceId
from torchweft.rpc.completion import Call, CallWithCode
from torchweft.rpc.serving import ServedTypes
from torchweft.rpc.worker import Around, Batches, Worker


class Watcher(NamedTuple):
    """Derives the types of watched calls.

    Attributes:
        pending: Returns a subclass of a type of calls that this worker makes.
        served: Returns a subclass of a type of calls that it serves.
        note_creation: Called for each call that makes a value, with its function and reference.
        is_brief: Whether it makes new types each time. They derive from those of the others.
        parts: Returns a subclass of a type of this worker's parts of backward passes; None to
            leave it.
        carrier: Has calls carry a context; None to leave them. One watcher at most has one.
    """

    pending: Callable[[type[PendingCall]], type[PendingCall]]
    served: Callable[[type[Any]], type[Any]]
    note_creation: Callable[[Any, ReferenceId], None]
    is_brief: bool = False
    parts: Callable[[type[LocalPass]], type[LocalPass]] | None = None
    carrier: Carrier | None = None


class Carrier(NamedTuple):
    """Has calls carry a context, and runs those that are served in it.

    Attributes:
        request: Takes the place of ``Encoder.request``; its first argument is that method.
        result_of: Takes the place of ``Worker.result_of`` in the same way.
        run: Takes the place of ``Engine.run``, which leads a backward pass.
        take_context: Called with a call that was read, and the context that it carries, before
            it is queued.
        around: Runs what serves a call, or a part of that, in the context of the call.
        batches: Runs the functions of batches of calls.
        encode: Takes the place of ``Envelopes.encode``, which makes the messages of a pass.
        take_span: Takes the numbers of a pass and its context, and the context of its span, which
            another worker has sent.
    """

    request: Callable[..., Any]
    result_of: Callable[..., Any]
    run: Callable[..., Any]
    take_context: Callable[[Any, bytes], None]
    around: Around
    batches: Batches
    encode: Callable[..., Any]
    take_span: Callable[[tuple[int, int], bytes], None]


class Watching:
    """The watchers of one worker's calls. Thread-safe.

    Args:
        worker: The worker.
        served: The types of its served calls.
    """

    def __init__(self, worker: Worker, served: ServedTypes) -> None:
        self._worker = worker
        self._served = served
        self._lock = threading.RLock()
        self._watchers: list[Watcher] = []

    def begin(self, watcher: Watcher) -> None:
        """Has all calls that are made or read from now on watched."""
        with self._lock:
            self._watchers.append(watcher)
            self._watchers.sort(key=lambda each: each.is_brief)
            self._use()

    def end(self, watcher: Watcher) -> None:
        """Has no further calls watched; nothing if the watcher does not watch."""
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)
                self._use()

    def _use(self) -> None:
        worker = self._worker
        pending: type[PendingCall] = PendingCall
        plain, with_code = Call, CallWithCode
        part: type[LocalPass] = LocalPass
        for watcher in self._watchers:
            pending = watcher.pending(pending)
            plain, with_code = watcher.served(plain), watcher.served(with_code)
            if watcher.parts is not None:
                part = watcher.parts(part)
        notes = [watcher.note_creation for watcher in self._watchers]
        carriers = [each.carrier for each in self._watchers if each.carrier is not None]
        carrier = carriers[0] if carriers else None
        worker.call_type = pending
        worker.note_creation = _all_of(notes) if len(notes) > 1 else next(iter(notes), None)
        worker.engine.pass_type = part
        worker.around = None if carrier is None else carrier.around
        worker.batches = None if carrier is None else carrier.batches
        worker.engine.take_span = None if carrier is None else carrier.take_span
        self._served.use(plain, with_code, worker.around)
        self._served.take_context = None if carrier is None else carrier.take_context
        self._carry(carrier)

    def _carry(self, carrier: Carrier | None) -> None:
        """Puts functions in front of methods of the worker's parts, or takes them away."""
        worker, engine = self._worker, self._worker.engine
        for part, name in (
            (worker.encoder, "request"),
            (worker, "result_of"),
            (engine, "run"),
            (engine.envelopes, "encode"),
        ):
            vars(part).pop(name, None)
            if carrier is not None:
                vars(part)[name] = partial(getattr(carrier, name), getattr(part, name))


def _all_of(
    notes: list[Callable[[Any, ReferenceId], None]],
) -> Callable[[Any, ReferenceId], None]:
    def note(function: Any, reference: ReferenceId) -> None:
        for each in notes:
            each(function, reference)

    return note

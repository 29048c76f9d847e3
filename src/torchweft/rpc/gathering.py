"""Gatherings: each of several workers brings a value, and continues when all have arrived.

The worker of the lowest id leads: the others send it their values, and when all have arrived it
sends the values to every worker. That takes two calls per worker, for any number of workers. This
file has a gathering and the leader's part; ``collective`` has the followers' part, and the
functions that a program calls.

* A gathering is named by its workers, its kind and a number that each worker counts for itself.
  So the same workers can gather repeatedly, also from several threads at once.
* A failure ends the gathering: a worker is lost, a value cannot be serialized, or the leader gives
  up. All workers that have arrived or still arrive are told the reason.
* The leader (``Led``) remembers a gathering until every worker has arrived or is lost. A follower
  remembers it while it waits. A follower that is told of an unknown gathering has given up, and
  ignores the message.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torchweft.agent.agent import Agent
from torchweft.agent.peers import Peer
from torchweft.errors import CallError, CallTimeout, NotInitialized, WorkerLost
from torchweft.protocol.observing.keys import GATHERING, Wait
from torchweft.rpc.api import rpc_async
from torchweft.rpc.current_call import check_types, detached, refuse
from torchweft.rpc.futures import Future, ignore_errors
from torchweft.runtime import device_streams
from torchweft.runtime.device_streams import Mark
from torchweft.runtime.reports import OpenWait
from torchweft.serialize.registry import rebuilds_plain


@rebuilds_plain
class Key(NamedTuple):
    """Names a gathering.

    Attributes:
        workers: The ids of the participants, lowest first.
        kind: The name of the operation; see ``Ways``.
        number: How many gatherings of that kind the workers had before.
    """

    workers: tuple[int, ...]
    kind: str
    number: int


class Ways(NamedTuple):
    """The name of a gathering, and the functions that it calls on other workers.

    Attributes:
        name: Its name in messages.
        bring: Called on the leader with the key, the name of the caller and its value.
        tell: Called on all other workers with the key and all values.
    """

    name: str
    bring: Callable[[Any, str, Any], None]
    tell: Callable[[Any, dict[str, Any]], None]


class Limits(NamedTuple):
    """Limits in seconds: for each call (0 for no limit), and for all workers to arrive."""

    call_s: float
    all_s: float


class Outcome(NamedTuple):
    """The result of a gathering.

    Attributes:
        values: The values by worker name.
        calls: On the leader, the calls that send the values to the others, by worker name. Until
            they have ended, the values must not be changed.
    """

    values: dict[str, Any]
    calls: dict[str, Future[None]]


class Gathering:
    """One gathering, as one of its workers knows it.

    Attributes:
        gathered_objects: The values by worker name; on the leader, those that have arrived.
        proceed_signal: Set when the gathering has ended.
        error: The reason if the gathering has failed, else None.
        missing: On the leader, ids of the workers that have not arrived and are not lost.
        began_s: When this worker first knew of it, by ``time.monotonic``.
    """

    def __init__(self, missing: Iterable[int] = ()) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()
        self.error: Exception | None = None
        self.missing = set(missing)
        self.began_s = time.monotonic()
        self._marks: list[Mark] = []
        self._lock = threading.RLock()

    @property
    def has_ended(self) -> bool:
        """Whether all workers have arrived, or the gathering has failed."""
        return self.proceed_signal.is_set()

    def end(self, values: dict[str, Any]) -> None:
        """Ends the gathering with all values; does nothing if it has ended."""
        with self._lock:
            if not self.has_ended:
                self.gathered_objects = values
                self.note_work()
                self.proceed_signal.set()

    def fail(self, error: Exception) -> None:
        """Fails the gathering and drops its values; does nothing if it has ended."""
        with self._lock:
            if not self.has_ended:
                self.error = error
                self.gathered_objects = {}
                self.proceed_signal.set()

    def wait(self, agent: Agent, key: Key, limit_s: float) -> bool:
        """Blocks until the gathering has ended, at most ``limit_s``; returns whether it has."""

        def parts() -> list[Wait]:
            names = tuple(agent.peers[each].name for each in key.workers)
            text = f"{key.kind} {key.number} of {' '.join(names)}"
            wait = Wait(GATHERING, text, time.monotonic() - self.began_s, key.kind, names)
            return [] if self.has_ended else [wait]

        with agent.reactor.waiting(parts):
            return self.proceed_signal.wait(None if math.isinf(limit_s) else limit_s)

    def values(self) -> dict[str, Any]:
        """Returns the values of an ended gathering, or raises its error."""
        if self.error is not None:
            raise copy.copy(self.error)  # Several threads may raise it: keep tracebacks apart.
        for mark in self._marks:
            device_streams.use(mark, self.gathered_objects)
        return self.gathered_objects

    def note_work(self) -> None:
        """Has the reader of the values wait for the GPU work of this thread, which made some."""
        mark = device_streams.mark() if device_streams.HAS_CUDA else None
        if mark is not None:
            self._marks.append(mark)


def check_key(key: Any, agent: Agent, caller: Peer, name: str | None = None) -> None:
    """Raises if a worker names a gathering in which it cannot take part.

    Args:
        key: The key that the worker sent.
        agent: This worker's agent.
        caller: The worker.
        name: The name that the caller claims in a message to the leader; None from the leader.

    Raises:
        ArgumentTypeError: ``key`` is malformed.
        NotAllowed: The caller, or this worker, has no such part in the gathering.
    """
    check_types(key=(key, Key))
    check_types(workers=(key.workers, tuple), kind=(key.kind, str), number=(key.number, int))
    workers: tuple[Any, ...] = key.workers
    is_known = all(type(each) is int and each in agent.peers for each in workers)
    leader = caller.id if name is None else agent.me.id
    is_sound = is_known and workers == tuple(sorted(set(workers))) and workers[:1] == (leader,)
    if not is_sound or not {caller.id, agent.me.id} <= set(workers):
        refuse("take part in a gathering of others", "its workers and its leader do not fit")
    if name is not None and name != caller.name:
        refuse(f"take {caller.name!r} for {name!r}", "every worker comes to a gathering by itself")


def failure(error: Exception, ways: Ways, worker: str) -> CallError:
    """Returns an error for the other workers; the original may not be serializable."""
    reason = f"{type(error).__name__}: {error}"
    return CallError(
        f"worker {worker!r} failed in {ways.name}: {reason}", worker=worker, call=ways.name
    )


class Led:
    """The gatherings that this worker leads. Thread-safe.

    Args:
        agent: The worker's agent.
        failed: Called on other workers, with the key and an error, when a gathering has failed.
    """

    def __init__(self, agent: Agent, failed: Callable[[Key, Exception], None]) -> None:
        self._agent = agent
        self._failed = failed
        self._lock = threading.RLock()
        self._open: dict[Key, Gathering] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._open)

    def gather(self, key: Key, value: Any, ways: Ways, limits: Limits) -> Outcome:
        """Brings this worker's value, waits for the others, then sends the values to them."""
        gathering = self.brought(key, self._agent.me.name, value)
        if not gathering.wait(self._agent, key, limits.all_s):
            late = (
                f"timed out in {ways.name} after {limits.all_s:.2f} seconds: these workers had not "
                f"come: {self._missing(gathering)}"
            )
            self._fail(key, gathering, CallTimeout(late, call=ways.name, elapsed_s=limits.all_s))
        values = gathering.values()
        others = [
            peer for peer in map(self._agent.peers.get, key.workers) if peer and not peer.is_self
        ]
        return Outcome(values, self._tell_all(key, others, values, ways, limits))

    def _missing(self, gathering: Gathering) -> str:
        with self._lock:
            names = sorted(self._agent.peers[worker].name for worker in gathering.missing)
        return ", ".join(map(repr, names))

    def _tell_all(
        self, key: Key, others: list[Peer], values: dict[str, Any], ways: Ways, limits: Limits
    ) -> dict[str, Future[None]]:
        calls = {}
        problem: Exception | None = None
        for peer in others:
            try:
                with detached():  # Sent even if the caller of the served call has given up.
                    call = rpc_async(peer.info, ways.tell, (key, values), None, limits.call_s)
            except Exception as error:
                problem = problem or error
                self._tell_failure(key, peer, failure(error, ways, self._agent.me.name))
            else:
                call.add_done_callback(self._noting(key, peer, ways))
                calls[peer.name] = call
        if problem is not None:
            raise problem
        return calls

    def _noting(self, key: Key, peer: Peer, ways: Ways) -> Callable[[Any], None]:
        """Returns a callback that tells a worker if it will not get the values."""

        def note(call: Any) -> None:
            try:
                call.value()
            except (CallTimeout, WorkerLost, NotInitialized):
                return  # The values may still arrive; or there is no worker to tell.
            except Exception as error:
                self._tell_failure(key, peer, failure(error, ways, peer.name))

        return note

    def open_waits(self) -> list[OpenWait]:
        """Returns the gatherings in which this worker has arrived, and others have not."""
        with self._lock:
            mine = [
                (key, gathering)
                for key, gathering in self._open.items()
                if key.workers[0] not in gathering.missing
            ]
        return [
            OpenWait(key, gathering.began_s, partial(self._awaited, key, gathering))
            for key, gathering in mine
        ]

    def _awaited(self, key: Key, gathering: Gathering) -> str:
        return f"in {key.kind} for {self._missing(gathering)}"

    # Messages from the others

    def brought(self, key: Key, name: str, value: Any) -> Gathering:
        """Records that a worker has arrived, and its value."""
        peer = self._agent.find(name)
        with self._lock:
            gathering, is_new = self._find(key)
            if not gathering.has_ended:
                gathering.gathered_objects[name] = value
                gathering.note_work()
            self._count(key, gathering, peer)
        if gathering.error is not None:
            self._tell_failure(key, peer, gathering.error)
        elif is_new and gathering.missing:
            self._agent.reactor.submit(self._watch, key.workers)
        return gathering

    def withdrawn(self, key: Key, name: str, error: Exception) -> None:
        """Records that a worker has arrived, but cannot bring its value."""
        with self._lock:
            gathering, _ = self._find(key)
        self._fail(key, gathering, error)
        with self._lock:
            self._count(key, gathering, self._agent.find(name))

    def lost(self, peer: Peer) -> None:
        """Fails the gatherings in which a lost worker has not arrived."""
        with self._lock:
            awaiting = [
                (key, gathering)
                for key, gathering in self._open.items()
                if peer.id in gathering.missing
            ]
        for key, gathering in awaiting:
            self._fail(key, gathering, peer.lost_error())
            with self._lock:
                self._count(key, gathering, peer)

    def _find(self, key: Key) -> tuple[Gathering, bool]:
        """Returns a gathering, and whether it is new."""
        if self._is_closed:
            raise NotInitialized(f"worker {self._agent.info.name!r} is shutting down")
        gathering = self._open.get(key)
        if gathering is not None:
            return gathering, False
        gathering = self._open[key] = Gathering(missing=key.workers)
        for worker in key.workers:
            peer = self._agent.peers[worker]
            if peer.lost is not None:
                gathering.fail(peer.lost_error())
                gathering.missing.discard(worker)
        return gathering, True

    def _count(self, key: Key, gathering: Gathering, peer: Peer) -> None:
        """Stops waiting for a worker."""
        gathering.missing.discard(peer.id)
        if not gathering.missing:
            self._open.pop(key, None)
            gathering.end(gathering.gathered_objects)

    # Failure

    def _fail(self, key: Key, gathering: Gathering, error: Exception) -> None:
        """Fails a gathering: tells the workers that have arrived now, the others on arrival."""
        with self._lock:
            if gathering.has_ended:
                return  # Race: all have just arrived, or the gathering has failed already.
            gathering.fail(error)
            come = [worker for worker in key.workers if worker not in gathering.missing]
        for worker in come:
            self._tell_failure(key, self._agent.peers[worker], error)

    def _tell_failure(self, key: Key, peer: Peer, error: Exception) -> None:
        if not peer.is_self and peer.lost is None:
            with contextlib.suppress(WorkerLost, NotInitialized, CallTimeout), detached():
                ignore_errors(rpc_async(peer.info, self._failed, args=(key, error)))

    def _watch(self, workers: tuple[int, ...], _: object) -> None:
        """Connects to the workers, so that the death of a missing one is noticed."""
        with self._agent.reactor.idling():
            self._agent.connect_all(self._agent.peers[worker] for worker in workers)

    def close(self, error: NotInitialized) -> None:
        """Fails all gatherings and refuses new ones, because this worker leaves."""
        with self._lock:
            self._is_closed = True
            for gathering in self._open.values():
                gathering.fail(error)
            self._open.clear()

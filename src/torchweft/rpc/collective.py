"""Collective operations: each of several workers brings a value, and goes on when all have arrived.

The worker of the lowest id leads: the others send it their values, and when all have arrived it
sends the values to every worker. That takes two calls per worker, for any number of workers. Either
call may carry an error in place of what it is for.

* A gathering is named by its workers, its kind and a number that each worker counts for itself.
  So the same workers can gather repeatedly, also from several threads at once.
* A failure ends the gathering: a worker is lost, a value cannot be serialized, or the leader gives
  up. All workers that have arrived or still arrive are told the reason.
* The leader remembers a gathering until every worker has arrived or is lost. A follower remembers
  it while it waits. A follower that is told of an unknown gathering has given up, and ignores the
  message.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torchweft.arguments import UNSET_RPC_TIMEOUT, limit_of
from torchweft.engine.codec.registry import rebuilds_plain, remotely_callable
from torchweft.engine.codec.tracebacks import without_own_frames
from torchweft.engine.protocol.observing import GATHERING, Wait
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.engine.threads.reports import LongWaits
from torchweft.engine.worker.agent import Agent, Slot
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.errors import CallError, CallTimeout, ConfigurationError, NotInitialized, WorkerLost
from torchweft.rpc.api import rpc_async, rpc_sync
from torchweft.rpc.calls import Destination, Future, ignore_errors
from torchweft.rpc.serving import (
    caller,
    check_types,
    detached,
    refuse,
    remaining_time,
    strict_caller,
)
from torchweft.rpc.waiting import as_completed

T = TypeVar("T")


@rebuilds_plain
class Key(NamedTuple):
    """Names a gathering.

    Attributes:
        workers: The ids of the participants, lowest first.
        kind: The name of the operation, also in messages.
        number: How many gatherings of that kind the workers had before.
    """

    workers: tuple[int, ...]
    kind: str
    number: int


class Limits(NamedTuple):
    """Limits in seconds: for each call (0 for no limit), and for all workers to arrive."""

    call_s: float
    all_s: float


class Outcome(NamedTuple):
    """The result of a gathering.

    Attributes:
        values: The values by worker name.
        calls: The leader's calls that send the values, by worker name. Until they have ended, the
            values must not be changed.
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

    def end(self, values: dict[str, Any], error: Exception | None = None) -> None:
        """Ends the gathering with all values, or with an error; does nothing if it has ended."""
        with self._lock:
            if not self.has_ended:
                self.gathered_objects, self.error = values, error
                self.note_work()
                self.proceed_signal.set()

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


class Gatherings:
    """The gatherings of one worker: those that it leads, and those in which it waits. Thread-safe.

    A gathering that the worker leads misses a worker for as long as it is open; one that it follows
    misses none.

    Args:
        agent: The worker's agent.
        waits: Reports waits that take long.
    """

    def __init__(self, agent: Agent, waits: LongWaits) -> None:
        self._agent = agent
        self._waits = waits
        self._lock = threading.RLock()
        self._numbers: dict[tuple[tuple[int, ...], str], int] = {}
        self._open: dict[Key, Gathering] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._open)

    def gather(
        self,
        value: Any,
        workers: Iterable[Peer],
        kind: str,
        limits: Limits,
        tell_all: Callable[[Any, dict[str, Any]], None] | None = None,
        tell_s: float | None = None,
    ) -> Outcome:
        """Brings ``value`` and waits until all ``workers``, including this one, have brought one.

        Args:
            value: The value of this worker.
            workers: All that take part.
            kind: The name of the operation.
            limits: The limits in seconds.
            tell_all: Called on the others by the leader, by default ``tell``.
            tell_s: The limit of each of these calls, 0 for none; by default that of each call.

        Raises as ``all_gather``.
        """
        peers = {peer.id: peer for peer in workers}
        me = self._agent.me
        if me.id not in peers:
            names = ", ".join(repr(peer.name) for peer in peers.values())
            raise ConfigurationError(
                f"worker {me.name!r} called {kind} for {names}, and is not one of them; only "
                "the workers that take part may call it"
            )
        ids = tuple(sorted(peers))
        leader = peers[ids[0]]
        with self._lock:
            number = self._numbers.get((ids, kind), 0)
            self._numbers[ids, kind] = number + 1
            key = Key(ids, kind, number)
            gathering = self._found(key, missing=ids if leader.is_self else ())
        if leader.is_self:
            tell_s = limits.call_s if tell_s is None else tell_s
            return self._lead(key, value, limits, tell_all or tell, tell_s)
        try:
            self._bring(key, value, leader, limits)
            # Race: the loss may have been reported before this gathering was registered.
            if leader.lost is not None:
                gathering.end({}, leader.lost_error())
            if not self._wait(key, gathering, limits):
                unsaid = f"worker {leader.name!r}, which leads it, has not said that all have come"
                raise _late(kind, limits.all_s, unsaid, leader.name)
        finally:
            with self._lock:
                self._open.pop(key, None)
        return Outcome(gathering.values(), {})

    def _found(self, key: Key, missing: Iterable[int]) -> Gathering:
        """Returns a gathering, which begins now if it is not open."""
        if self._is_closed:
            raise NotInitialized(f"worker {self._agent.info.name!r} has shut down")
        gathering = self._open.get(key)
        if gathering is None:
            gathering = self._open[key] = Gathering(missing)
            for worker in list(gathering.missing):
                peer = self._agent.peers[worker]
                if peer.lost is not None:
                    gathering.end({}, peer.lost_error())
                    gathering.missing.discard(worker)
            if gathering.missing:
                self._agent.reactor.submit(self._watch, key.workers)
        return gathering

    def _watch(self, workers: tuple[int, ...], _: object) -> None:
        """Connects to the workers, so that the death of a missing one is noticed."""
        with self._agent.reactor.idling():
            self._agent.connect_all(self._agent.peers[worker] for worker in workers)

    def _wait(self, key: Key, gathering: Gathering, limits: Limits) -> bool:
        """Blocks until a gathering has ended; returns whether it has within the limit."""
        limit_s = None if math.isinf(limits.all_s) else limits.all_s
        parts = partial(self._parts, key, gathering)
        awaited = partial(self._awaited, key, gathering)
        with self._waits.during(awaited), self._agent.reactor.waiting(parts):
            return gathering.proceed_signal.wait(limit_s)

    def _parts(self, key: Key, gathering: Gathering) -> list[Wait]:
        names = tuple(self._agent.peers[each].name for each in key.workers)
        text = f"{key.kind} {key.number} of {' '.join(names)}"
        wait = Wait(GATHERING, text, time.monotonic() - gathering.began_s, key.kind, names)
        return [] if gathering.has_ended else [wait]

    def _awaited(self, key: Key, gathering: Gathering) -> str:
        if gathering.missing:
            return f"in {key.kind} for {self._missing(gathering)}"
        leader = self._agent.peers[key.workers[0]].name
        return f"in {key.kind} for worker {leader!r}, which has not said that all have come"

    def _missing(self, gathering: Gathering) -> str:
        with self._lock:
            names = sorted(self._agent.peers[worker].name for worker in gathering.missing)
        return ", ".join(map(repr, names))

    def peer_lost(self, peer: Peer) -> None:
        """Fails the gatherings that lack a lost worker, or are led by it."""
        with self._lock:
            for ids, kind in [each for each in self._numbers if peer.id in each[0]]:
                del self._numbers[ids, kind]  # A life that is over takes part in no other.
            awaiting = [(key, each) for key, each in self._open.items() if peer.id in each.missing]
            headless = [each for key, each in self._open.items() if key.workers[0] == peer.id]
        for key, gathering in awaiting:
            self._fail(key, gathering, peer, peer.lost_error())
        for gathering in headless:
            gathering.end({}, peer.lost_error())

    def close(self) -> None:
        """Fails all gatherings and refuses new ones, because this worker leaves."""
        with self._lock:
            self._is_closed = True
            waiting = list(self._open.values())
            self._open.clear()
        for gathering in waiting:
            gathering.end({}, NotInitialized(f"worker {self._agent.info.name!r} has shut down"))

    # The leader

    def _lead(
        self, key: Key, value: Any, limits: Limits, tell_all: Callable[..., None], tell_s: float
    ) -> Outcome:
        """Brings this worker's value, waits for the others, then sends the values to them."""
        gathering = self.brought(key, self._agent.me, value)
        if not self._wait(key, gathering, limits):
            missing = f"these workers had not come: {self._missing(gathering)}"
            self._fail(key, gathering, None, _late(key.kind, limits.all_s, missing))
        values = gathering.values()
        calls = {}
        problem: Exception | None = None
        for peer in filter(None, map(self._agent.peers.get, key.workers[1:])):
            try:
                with detached():  # Sent even if the caller of the served call has given up.
                    call = rpc_async(peer.info, tell_all, (key, values), None, tell_s)
            except Exception as error:
                problem = problem or error
                self._tell_failure(key, peer, failure(error, key.kind, self._agent.me.name))
            else:
                call.add_done_callback(partial(self._tell_if_undelivered, key, peer))
                calls[peer.name] = call
        if problem is not None:
            raise problem
        return Outcome(values, calls)

    def _tell_if_undelivered(self, key: Key, peer: Peer, call: Any) -> None:
        """Tells a worker that it will not get the values, if so."""
        try:
            call.value()
        except (CallTimeout, WorkerLost, NotInitialized):
            pass  # The values may still arrive; or there is no worker to tell.
        except Exception as error:
            self._tell_failure(key, peer, failure(error, key.kind, peer.name))

    def brought(self, key: Key, peer: Peer, value: Any) -> Gathering:
        """Records that a worker has arrived, and its value."""
        with self._lock:
            gathering = self._found(key, missing=key.workers)
            if not gathering.has_ended:
                gathering.gathered_objects[peer.name] = value
                gathering.note_work()
            self._count(key, gathering, peer)
        if gathering.error is not None:
            self._tell_failure(key, peer, gathering.error)
        return gathering

    def withdrawn(self, key: Key, peer: Peer, error: Exception) -> None:
        """Records that a worker brings no value, unless it has brought one."""
        with self._lock:
            has_begun = key.number < self._numbers.get((key.workers, key.kind), 0)
            if has_begun and key not in self._open:
                return  # It has ended.
            gathering = self._found(key, missing=key.workers)
            if peer.id not in gathering.missing:
                return
        self._fail(key, gathering, peer, error)

    def _count(self, key: Key, gathering: Gathering, peer: Peer) -> None:
        """Stops waiting for a worker."""
        gathering.missing.discard(peer.id)
        if not gathering.missing:
            self._open.pop(key, None)
            gathering.end(gathering.gathered_objects)

    def _fail(self, key: Key, gathering: Gathering, gone: Peer | None, error: Exception) -> None:
        """Fails a gathering: tells the workers that have arrived now, the others on arrival.

        Args:
            key: Its name.
            gathering: Its state.
            gone: The worker that will not arrive, if one is known.
            error: The reason.
        """
        with self._lock:
            # Race: all have just arrived, or the gathering has failed already.
            come = [] if gathering.has_ended else [*set(key.workers) - gathering.missing]
            gathering.end({}, error)
            if gone is not None:
                self._count(key, gathering, gone)
        for worker in come:
            self._tell_failure(key, self._agent.peers[worker], error)

    def _tell_failure(self, key: Key, peer: Peer, error: Exception) -> None:
        if not peer.is_self and peer.lost is None:
            with contextlib.suppress(WorkerLost, NotInitialized, CallTimeout), detached():
                ignore_errors(rpc_async(peer.info, tell, (key, {}, error)))

    # A follower

    def _bring(self, key: Key, value: Any, leader: Peer, limits: Limits) -> None:
        try:
            rpc_sync(leader.info, bring, (key, value), None, limits.call_s)
        except (WorkerLost, NotInitialized):
            raise  # There is no leader to tell.
        except Exception as error:
            # The leader does not begin a call whose time is up, and it may wait without a limit.
            name = self._agent.me.name
            reason = failure(error, key.kind, name)
            if isinstance(error, CallTimeout):
                unable = f"worker {name!r} could not bring its value in that time"
                reason = _late(key.kind, limits.call_s, unable, name)
            with contextlib.suppress(WorkerLost, NotInitialized), detached():
                ignore_errors(rpc_async(leader.info, bring, (key, None, reason), None, 0))
            raise

    def told(self, key: Key, values: dict[str, Any], error: Exception | None = None) -> None:
        """Records that all workers have arrived, and their values; or why they cannot."""
        gathering = self._open.get(key)
        if gathering is not None and not gathering.missing:
            gathering.end(values, error)


def failure(error: Exception, kind: str, worker: str) -> CallError:
    """Returns an error for the other workers; the original may not be serializable."""
    reason = f"{type(error).__name__}: {error}"
    return CallError(f"worker {worker!r} failed in {kind}: {reason}", worker=worker, call=kind)


def _late(kind: str, limit_s: float, why: str, worker: str = "") -> CallTimeout:
    text = f"timed out in {kind} after {limit_s:.2f} seconds: {why}"
    return CallTimeout(text, worker=worker, call=kind, elapsed_s=limit_s)


_SHORTEST_S = 1e-3
"""In place of no time, which ``as_completed`` takes for no limit."""

GATHERINGS: Slot[Gatherings] = Slot()


def current_gatherings() -> Gatherings:
    """Returns the gatherings of this process's worker; raises NotInitialized if it is none."""
    return current().slots[GATHERINGS]


@without_own_frames
def barrier(
    workers: Iterable[Destination] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> None:
    """Blocks until all of ``workers`` have called ``barrier``.

    All name the same workers, in any order. The same workers may do so repeatedly, and other
    workers at the same time. Does not wait for calls that were started earlier.

    The worker of the lowest id also waits, at most its timeout, until the others know that all have
    called. So it may end at once, and the others do not take it for one that has not called.

    Args:
        workers: The participants, this worker included: names, ranks or ``WorkerInfo``; None for
            the whole group. If workers join and leave meanwhile, name the participants.
        timeout: Seconds to wait at most; 0 for no limit, by default the worker's ``rpc_timeout``.

    Raises:
        CallTimeout: Not all called in time. The error of the worker of the lowest id names the
            missing workers.
        WorkerLost: A worker was lost before it called.
        ConfigurationError: This worker is not among ``workers``.
    """
    limit_s = _limit_of(timeout)
    end_s = time.monotonic() + limit_s
    # All have come: who is slow to be told is told later, and does not fail this worker.
    outcome = _gather(None, workers, limit_s, "barrier", tell_s=0.0)
    left_s = max(end_s - time.monotonic(), _SHORTEST_S)
    with contextlib.suppress(CallTimeout):
        for _ in as_completed(outcome.calls.values(), left_s):
            pass


@without_own_frames
def all_gather(
    value: T,
    workers: Iterable[Destination] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, T]:
    """Gathers a value of each worker on all of them. Blocks until all have called.

    The values pass through the leader, the worker of the lowest id. That suits small values:
    settings, counts, references; exchange larger tensors by ``torch.distributed``.

    Args:
        value: This worker's value. The others get copies; references are sent as references.
        workers: The participants, as for ``barrier``.
        timeout: Seconds for the wait for the others, and for each call; as for ``barrier``.

    Returns:
        The values by worker name; this worker's own is ``value``, or a copy of it.

    Raises:
        CallTimeout: Not all called in time. The error of the worker of the lowest id names the
            missing workers.
        WorkerLost: A worker was lost before it called, or before it got the values.
        SerializationError: ``value`` cannot be serialized.
        CallError: Another worker's value cannot be serialized; names that worker.
        ConfigurationError: This worker is not among ``workers``.
    """
    outcome = _gather(value, workers, _limit_of(timeout), "all_gather")
    for call in outcome.calls.values():
        call.wait()
    return outcome.values


def members(agent: Agent, workers: Iterable[Destination] | None) -> list[Peer]:
    """Returns the named workers, or all if ``workers`` is None."""
    return agent.members.present() if workers is None else [agent.find(each) for each in workers]


def _limit_of(timeout: float) -> float:
    """Returns the limit of a gathering in seconds: that of the served call at most."""
    return min(limit_of(timeout, current().default_timeout_s), remaining_time())


def _gather(
    value: Any,
    workers: Iterable[Destination] | None,
    limit_s: float,
    kind: str,
    tell_s: float | None = None,
) -> Outcome:
    limits = Limits(0.0 if math.isinf(limit_s) else limit_s, limit_s)
    peers = members(current(), workers)
    return current_gatherings().gather(value, peers, kind, limits, tell_s=tell_s)


# Functions that the workers call on one another.


@remotely_callable
def bring(key: Key, value: Any, error: Exception | None = None) -> None:
    """Records, on the leader, that the caller has arrived, and its value; or why it brings none."""
    _check(key, current().me.id, error)
    if error is None:
        current_gatherings().brought(key, caller(), value)
    else:
        current_gatherings().withdrawn(key, caller(), error)


@remotely_callable
def tell(key: Key, values: dict[str, Any], error: Exception | None = None) -> None:
    """Records that all workers have arrived, and their values; or why they cannot."""
    _check(key, caller().id, error)
    check_types(values=(values, dict))
    current_gatherings().told(key, values, error)


def _check(key: Any, leader: int, error: Any) -> None:
    """Checks what another worker says of a gathering, if this worker is strict."""
    peer = strict_caller()
    if peer is None:
        return
    agent = current()
    check_types(key=(key, Key), error=(error, (Exception, type(None))))
    check_types(workers=(key.workers, tuple), kind=(key.kind, str), number=(key.number, int))
    workers: tuple[Any, ...] = key.workers
    is_known = all(type(each) is int and each in agent.peers for each in workers)
    is_sound = is_known and workers == tuple(sorted(set(workers))) and workers[:1] == (leader,)
    if not is_sound or not {peer.id, agent.me.id} <= set(workers):
        refuse("take part in a gathering of others", "its workers and its leader do not fit")

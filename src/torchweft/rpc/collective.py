"""Collective operations: each of several workers brings a value, and goes on when all have arrived.

The worker of the lowest id leads: the others send it their values, and when all have arrived it
sends the values to every worker. That takes two calls per worker, for any number of workers.

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
import math
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from torchweft.arguments import limit_of
from torchweft.errors import CallError, CallTimeout, ConfigurationError, NotInitialized, WorkerLost
from torchweft.rpc.api import rpc_async, rpc_sync
from torchweft.rpc.calls import Destination
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.current_call import check_types, detached, refuse, remaining_time, strict_caller
from torchweft.rpc.futures import Future, ignore_errors
from torchweft.rpc.gathering import Gathering, Key, Limits, Outcome, Ways
from torchweft.serialize.registry import remotely_callable
from torchweft.serialize.tracebacks import without_own_frames
from torchweft.threads.reports import OpenWait
from torchweft.worker.agent import Agent, Slot
from torchweft.worker.current import current
from torchweft.worker.peers import Peer


def check_key(key: Any, agent: Agent, caller: Peer, name: str | None = None) -> None:
    """Raises if a worker names a gathering in which it cannot take part.

    ``name`` is what the caller claims in a message to the leader; None in one of the leader.
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
    """The gatherings that this worker leads. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()
        self._open: dict[Key, Gathering] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, key: Key) -> bool:
        return key in self._open

    def open(self, key: Key) -> None:
        """Makes known a gathering in which this worker is about to arrive."""
        with self._lock:
            gathering, is_new = self._find(key)
        if is_new and gathering.missing:
            self._agent.reactor.submit(self._watch, key.workers)

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
            return [
                OpenWait(key, gathering.began_s, partial(self._awaited, key, gathering))
                for key, gathering in self._open.items()
                if key.workers[0] not in gathering.missing
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
        """Records that a worker brings no value; does nothing if it has brought one."""
        peer = self._agent.find(name)
        with self._lock:
            gathering, _ = self._find(key)
            if peer.id not in gathering.missing:
                return
        self._fail(key, gathering, error)
        with self._lock:
            self._count(key, gathering, peer)

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
                ignore_errors(rpc_async(peer.info, failed, args=(key, error)))

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


T = TypeVar("T")


class Gatherings:
    """All gatherings of one worker, as leader and as follower. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()
        self._numbers: dict[tuple[tuple[int, ...], str], int] = {}
        self._awaited: dict[Key, Gathering] = {}
        self._is_closed = False
        self.led = Led(agent)

    def __len__(self) -> int:
        return len(self._awaited) + len(self.led)

    def gather(self, value: Any, workers: Iterable[Peer], ways: Ways, limits: Limits) -> Outcome:
        """Brings ``value`` and waits until all ``workers``, including this one, have brought one.

        Raises as ``all_gather``.
        """
        peers = {peer.id: peer for peer in workers}
        me = self._agent.me
        if me.id not in peers:
            names = ", ".join(repr(peer.name) for peer in peers.values())
            raise ConfigurationError(
                f"worker {me.name!r} called {ways.name} for {names}, and is not one of them; only "
                "the workers that take part may call it"
            )
        ids = tuple(sorted(peers))
        with self._lock:
            number = self._numbers.get((ids, ways.name), 0)
            self._numbers[ids, ways.name] = number + 1
            key = Key(ids, ways.name, number)
            if ids[0] == me.id:
                self.led.open(key)
        if ids[0] == me.id:
            return self.led.gather(key, value, ways, limits)
        return Outcome(self._follow(key, value, peers[ids[0]], ways, limits), {})

    def _follow(
        self, key: Key, value: Any, leader: Peer, ways: Ways, limits: Limits
    ) -> dict[str, Any]:
        gathering = Gathering()
        with self._lock:
            if self._is_closed:
                raise _gone(self._agent)
            self._awaited[key] = gathering
        try:
            self._bring(key, value, leader, ways, limits)
            # Race: the loss may have been reported before this gathering was registered.
            if leader.lost is not None:
                gathering.fail(leader.lost_error())
            if not gathering.wait(self._agent, key, limits.all_s):
                raise CallTimeout(
                    f"timed out in {ways.name} after {limits.all_s:.2f} seconds: worker "
                    f"{leader.name!r}, which leads it, has not said that all have come",
                    worker=leader.name,
                    call=ways.name,
                    elapsed_s=limits.all_s,
                )
        finally:
            with self._lock:
                del self._awaited[key]
        return gathering.values()

    def _bring(self, key: Key, value: Any, leader: Peer, ways: Ways, limits: Limits) -> None:
        name = self._agent.me.name
        try:
            rpc_sync(leader.info, ways.bring, args=(key, name, value), timeout=limits.call_s)
        except (WorkerLost, NotInitialized):
            raise  # There is no leader to tell.
        except Exception as error:
            # The leader does not begin a call whose time is up, and it may wait without a limit.
            reason = failure(error, ways, name)
            if isinstance(error, CallTimeout):
                late = (
                    f"timed out in {ways.name} after {limits.call_s:.2f} seconds: worker {name!r} "
                    "could not bring its value in that time"
                )
                reason = CallTimeout(late, worker=name, call=ways.name, elapsed_s=limits.call_s)
            with contextlib.suppress(WorkerLost, NotInitialized), detached():
                ignore_errors(rpc_async(leader.info, withdrawn, (key, name, reason), None, 0))
            raise

    def open_waits(self) -> list[OpenWait]:
        """Returns the gatherings in which this worker waits for others."""
        return self.led.open_waits() + [
            OpenWait(key, gathering.began_s, partial(self._leader_awaited, key))
            for key, gathering in self._awaited.copy().items()
        ]

    def _leader_awaited(self, key: Key) -> str:
        leader = self._agent.peers[key.workers[0]].name
        return f"in {key.kind} for worker {leader!r}, which has not said that all have come"

    # Messages

    def withdrawn(self, key: Key, name: str, error: Exception) -> None:
        """Records that a worker brings no value, unless the gathering, led here, has ended."""
        with self._lock:
            has_begun = key.number < self._numbers.get((key.workers, key.kind), 0)
        if not has_begun or key in self.led:
            self.led.withdrawn(key, name, error)

    def told(self, key: Key, values: dict[str, Any]) -> None:
        """Records that all workers have arrived, and their values."""
        gathering = self._awaited.get(key)
        if gathering is not None:
            gathering.end(values)

    def failed(self, key: Key, error: Exception) -> None:
        """Records that not all workers can arrive."""
        gathering = self._awaited.get(key)
        if gathering is not None:
            gathering.fail(error)

    def peer_lost(self, peer: Peer) -> None:
        """Fails the gatherings that lack a lost worker."""
        self.led.lost(peer)
        with self._lock:
            for ids, kind in [each for each in self._numbers if peer.id in each[0]]:
                del self._numbers[ids, kind]  # A life that is over takes part in no other.
            headless = [each for key, each in self._awaited.items() if key.workers[0] == peer.id]
        for gathering in headless:
            gathering.fail(peer.lost_error())

    def close(self) -> None:
        """Fails all gatherings, because this worker leaves."""
        gone = _gone(self._agent)
        self.led.close(gone)
        with self._lock:
            self._is_closed = True
            waiting = list(self._awaited.values())
        for gathering in waiting:
            gathering.fail(gone)


def _gone(agent: Agent) -> NotInitialized:
    return NotInitialized(f"worker {agent.info.name!r} has shut down")


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
    _gather(None, workers, timeout, _BARRIER)


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
    outcome = _gather(value, workers, timeout, _ALL_GATHER)
    for call in outcome.calls.values():
        call.wait()
    return outcome.values


def members(agent: Agent, workers: Iterable[Destination] | None) -> list[Peer]:
    """Returns the named workers, or all if ``workers`` is None."""
    return agent.members.present() if workers is None else [agent.find(each) for each in workers]


def _gather(
    value: Any, workers: Iterable[Destination] | None, timeout: float, ways: Ways
) -> Outcome:
    agent = current()
    limit_s = limit_of(timeout, agent.default_timeout_s)
    limit_s = min(limit_s, remaining_time())  # No longer than the served call.
    limits = Limits(0.0 if math.isinf(limit_s) else limit_s, limit_s)
    return current_gatherings().gather(value, members(agent, workers), ways, limits)


# Functions that the workers call on one another.


@remotely_callable
def bring(key: Key, name: str, value: Any) -> None:
    """Records, on the leader, that another worker has arrived, and its value."""
    _check(key, name)
    current_gatherings().led.brought(key, name, value)


@remotely_callable
def tell(key: Key, values: dict[str, Any]) -> None:
    """Records that all workers have arrived, and their values."""
    _check(key, values=(values, dict))
    current_gatherings().told(key, values)


@remotely_callable
def failed(key: Key, error: Exception) -> None:
    """Records, on a follower, that a gathering has failed."""
    _check(key, error=(error, Exception))
    current_gatherings().failed(key, error)


@remotely_callable
def withdrawn(key: Key, name: str, error: Exception) -> None:
    """Records, on the leader, that a worker brings no value."""
    _check(key, name, error=(error, Exception))
    current_gatherings().withdrawn(key, name, error)


def _check(key: Any, name: str | None = None, **typed: Any) -> None:
    """Checks what another worker says of a gathering, if this worker is strict."""
    caller = strict_caller()
    if caller is not None:
        check_key(key, current(), caller, name)
        check_types(**typed)


_BARRIER = Ways("barrier", bring, tell)
_ALL_GATHER = Ways("all_gather", bring, tell)

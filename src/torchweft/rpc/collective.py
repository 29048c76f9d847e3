"""Collective operations: workers wait for one another, and exchange one value each.

A worker that does not lead a gathering sends its value to the leader, and waits for all values; see
``gathering``.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

from torchweft.agent.agent import Agent, Slot
from torchweft.agent.current import current
from torchweft.agent.peers import Peer
from torchweft.arguments import limit_of
from torchweft.errors import CallTimeout, ConfigurationError, NotInitialized, WorkerLost
from torchweft.rpc.api import rpc_async, rpc_sync
from torchweft.rpc.calls import Destination
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.current_call import check_types, detached, remaining_time, strict_caller
from torchweft.rpc.futures import ignore_errors
from torchweft.rpc.gathering import Gathering, Key, Led, Limits, Outcome, Ways, check_key, failure
from torchweft.runtime.reports import OpenWait
from torchweft.serialize.registry import remotely_callable
from torchweft.serialize.tracebacks import without_own_frames

T = TypeVar("T")


class Gatherings:
    """All gatherings of one worker, as leader and as follower. Thread-safe.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()
        self._numbers: dict[tuple[tuple[int, ...], str], int] = {}
        self._awaited: dict[Key, Gathering] = {}
        self._is_closed = False
        self.led = Led(agent, failed)

    def __len__(self) -> int:
        return len(self._awaited) + len(self.led)

    def gather(self, value: Any, workers: Iterable[Peer], ways: Ways, limits: Limits) -> Outcome:
        """Brings ``value`` and waits until all ``workers``, including this one, have brought one.

        Raises:
            CallTimeout: Not all arrived in time; the leader's error names the missing workers.
            WorkerLost: A worker was lost before it arrived.
            CallError: Another worker's value cannot be serialized; names that worker.
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
        except (CallTimeout, WorkerLost, NotInitialized):
            raise  # The value may have arrived; or there is no leader to tell.
        except Exception as error:
            with contextlib.suppress(WorkerLost, NotInitialized), detached():
                reason = failure(error, ways, name)
                ignore_errors(rpc_async(leader.info, withdrawn, args=(key, name, reason)))
            raise

    def open_waits(self) -> list[OpenWait]:
        """Returns the gatherings in which this worker waits for others."""
        with self._lock:
            awaited = list(self._awaited.items())
        return self.led.open_waits() + [
            OpenWait(key, gathering.began_s, partial(self._leader_awaited, key))
            for key, gathering in awaited
        ]

    def _leader_awaited(self, key: Key) -> str:
        leader = self._agent.peers[key.workers[0]].name
        return f"in {key.kind} for worker {leader!r}, which has not said that all have come"

    # Messages from the leader

    def told(self, key: Key, values: dict[str, Any]) -> None:
        """Records that all workers have arrived, and their values."""
        with self._lock:
            gathering = self._awaited.get(key)
        if gathering is not None:
            gathering.end(values)

    def failed(self, key: Key, error: Exception) -> None:
        """Records that not all workers can arrive."""
        with self._lock:
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
    """Returns the gatherings of this process's worker.

    Raises:
        NotInitialized: This process is not a worker.
    """
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
    """Returns the named workers, or all if ``workers`` is None.

    Raises:
        UnknownWorker: No worker has a given name or rank.
    """
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
    caller = strict_caller()
    if caller is not None:
        check_key(key, current(), caller, name)
    current_gatherings().led.brought(key, name, value)


@remotely_callable
def tell(key: Key, values: dict[str, Any]) -> None:
    """Records that all workers have arrived, and their values."""
    caller = strict_caller()
    if caller is not None:
        check_key(key, current(), caller)
        check_types(values=(values, dict))
    current_gatherings().told(key, values)


@remotely_callable
def failed(key: Key, error: Exception) -> None:
    """Records, on a follower, that a gathering has failed."""
    _check(key, None, error)
    current_gatherings().failed(key, error)


@remotely_callable
def withdrawn(key: Key, name: str, error: Exception) -> None:
    """Records, on the leader, that a worker cannot bring its value."""
    _check(key, name, error)
    current_gatherings().led.withdrawn(key, name, error)


def _check(key: Any, name: str | None, error: Any) -> None:
    caller = strict_caller()
    if caller is not None:
        check_key(key, current(), caller, name)
        check_types(error=(error, Exception))


_BARRIER = Ways("barrier", bring, tell)
_ALL_GATHER = Ways("all_gather", bring, tell)

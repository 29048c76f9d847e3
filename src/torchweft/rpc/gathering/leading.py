"""The leader's part of a gathering: it collects the values, and sends them to all workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torchweft.agent.agent import Agent
from torchweft.agent.peers import Peer
from torchweft.errors import CallTimeout, NotInitialized, WorkerLost
from torchweft.rpc.api import rpc_async
from torchweft.rpc.current_call import detached
from torchweft.rpc.futures import Future, ignore_errors
from torchweft.rpc.gathering.terms import Gathering, Key, Limits, Outcome, Ways, failure
from torchweft.runtime.long_waits import OpenWait


class Led:
    """The gatherings that this worker leads. Thread-safe.

    Args:
        agent: The worker's agent.
        failed: Called on other workers, with the key and an error, when a gathering has failed.
    """

    def __init__(self, agent: Agent, failed: Callable[[Key, Exception], None]) -> None:
        self._agent = agent
        self._failed = failed
        self._lock = threading.Lock()
        self._open: dict[Key, Gathering] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._open)

    def gather(self, key: Key, value: Any, ways: Ways, limits: Limits) -> Outcome:
        """Brings this worker's value, waits for the others, then sends the values to them."""
        gathering = self.brought(key, self._agent.me.name, value)
        if not gathering.wait(self._agent, limits.all_s):
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

"""Types that the leader and the followers of a gathering share."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torchweft.agent.agent import Agent
from torchweft.agent.peers import Peer
from torchweft.errors import CallError
from torchweft.rpc.futures import Future
from torchweft.rpc.strictness import check_types, refuse
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
        self._lock = threading.Lock()

    @property
    def has_ended(self) -> bool:
        """Whether all workers have arrived, or the gathering has failed."""
        return self.proceed_signal.is_set()

    def end(self, values: dict[str, Any]) -> None:
        """Ends the gathering with all values; does nothing if it has ended."""
        with self._lock:
            if not self.has_ended:
                self.gathered_objects = values
                self.proceed_signal.set()

    def fail(self, error: Exception) -> None:
        """Fails the gathering and drops its values; does nothing if it has ended."""
        with self._lock:
            if not self.has_ended:
                self.error = error
                self.gathered_objects = {}
                self.proceed_signal.set()

    def wait(self, agent: Agent, limit_s: float) -> bool:
        """Blocks until the gathering has ended, at most ``limit_s``; returns whether it has."""
        is_counted = agent.reactor.begin_wait()
        try:
            return self.proceed_signal.wait(None if math.isinf(limit_s) else limit_s)
        finally:
            if is_counted:
                agent.reactor.end_wait()

    def values(self) -> dict[str, Any]:
        """Returns the values of an ended gathering, or raises its error."""
        if self.error is not None:
            raise copy.copy(self.error)  # Several threads may raise it: keep tracebacks apart.
        return self.gathered_objects


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

"""What the leader of a gathering and the others have in common."""

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
    """What names a gathering.

    Attributes:
        workers: The ids of those who take part, lowest first.
        kind: How such gatherings are called.
        number: How many of that kind they had before.
    """

    workers: tuple[int, ...]
    kind: str
    number: int


class Ways(NamedTuple):
    """How a gathering is called, and the functions that are called on others in its course.

    Attributes:
        name: What messages call it.
        bring: Called on the leader with the key, the name of the caller and its value.
        tell: Called on everyone else with the key and all values.
    """

    name: str
    bring: Callable[[Any, str, Any], None]
    tell: Callable[[Any, dict[str, Any]], None]


class Limits(NamedTuple):
    """How long to wait, in seconds: for each call (0 for no limit), and for all to come."""

    call_s: float
    all_s: float


class Outcome(NamedTuple):
    """What a gathering has brought.

    Attributes:
        values: The values by name of worker.
        calls: On the leader, the calls by which the others are told, by name of worker. Until they
            have ended, the values must not be changed.
    """

    values: dict[str, Any]
    calls: dict[str, Future[None]]


class Gathering:
    """One gathering, as one of its workers knows it.

    Attributes:
        gathered_objects: The values by name of worker: on the leader those that have come.
        proceed_signal: Set when it has ended.
        error: Why it has failed, if it has.
        missing: On the leader, ids of the workers that have not come and are not lost.
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
        """Whether all have come, or it has failed."""
        return self.proceed_signal.is_set()

    def end(self, values: dict[str, Any]) -> None:
        """Ends it: all have come. Does nothing where it has ended."""
        with self._lock:
            if not self.has_ended:
                self.gathered_objects = values
                self.proceed_signal.set()

    def fail(self, error: Exception) -> None:
        """Ends it without a result, and drops its values. Does nothing where it has ended."""
        with self._lock:
            if not self.has_ended:
                self.error = error
                self.gathered_objects = {}
                self.proceed_signal.set()

    def wait(self, agent: Agent, limit_s: float) -> bool:
        """Blocks until it has ended, at most ``limit_s``; returns whether it has."""
        is_counted = agent.reactor.begin_wait()
        try:
            return self.proceed_signal.wait(None if math.isinf(limit_s) else limit_s)
        finally:
            if is_counted:
                agent.reactor.end_wait()

    def values(self) -> dict[str, Any]:
        """Returns the values of one that has ended, or raises why it failed."""
        if self.error is not None:
            raise copy.copy(self.error)  # Several may raise it; tracebacks must not mix.
        return self.gathered_objects


def check_key(key: Any, agent: Agent, caller: Peer, name: str | None = None) -> None:
    """Raises where a worker names a gathering that it cannot take part in.

    Args:
        key: What it calls the gathering.
        agent: This worker's agent.
        caller: The worker.
        name: Who it says it is, where it speaks to the leader; the leader itself says nothing.

    Raises:
        ArgumentTypeError: This is no name of a gathering.
        NotAllowed: It is one that the caller, or this worker, does not belong to in this way.
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
    """Returns an error for the others: it can travel, which the original perhaps cannot."""
    reason = f"{type(error).__name__}: {error}"
    return CallError(
        f"worker {worker!r} failed in {ways.name}: {reason}", worker=worker, call=ways.name
    )

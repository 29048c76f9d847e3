"""Two whole workers in one process: one calls, the other serves, over a real connection."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.unit.engine.worker.group import Member, group_of, wait_until
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import Handle
from torchweft.rpc import calls, serving
from torchweft.rpc.api import RRef
from torchweft.rpc.calls import Future
from torchweft.rpc.worker import WORKER, Worker

LIMIT_S = 20.0


class Pair:
    """A caller and a callee; in functions, ``torchweft.rpc`` acts for the callee."""

    def __init__(self, caller: Member, callee: Member) -> None:
        self.caller, self.callee = Worker(caller.agent, RRef), Worker(callee.agent, RRef)
        self.peer, self.peer_of_callee = caller.peer(callee), callee.peer(caller)
        for worker in (self.caller, self.callee):
            serving.install(worker)
            worker.agent.slots[WORKER] = worker
            worker.agent.when_lost = functools.partial(_peer_lost, worker)
            worker.agent.start()
        current_agent.install(callee.agent)

    def close(self) -> None:
        current_agent.install(None)
        for worker in (self.caller, self.callee):
            worker.close(LIMIT_S)

    def sync(self, function: Callable[..., Any], *args: Any) -> Any:
        return calls.call_and_wait(self.caller, self.peer, function, args, {}, LIMIT_S)

    def back(self, function: Callable[..., Any], *args: Any) -> Any:
        """Makes a call in the other direction."""
        return calls.call_and_wait(self.callee, self.peer_of_callee, function, args, {}, LIMIT_S)

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return calls.start(self.caller, self.peer, function, args, {}, LIMIT_S)

    def create(self, function: Callable[..., Any], *args: Any) -> Handle:
        return calls.create(self.caller, self.peer, function, args, {}, LIMIT_S)

    def fetch(self, reference: Handle) -> Any:
        return self.sync(serving.fetch, *reference.id, None)

    def call_method(self, reference: Handle, name: str, *args: Any) -> Any:
        return self.sync(serving.call_method, *reference.id, None, name, *args)

    def check_serves(self, threads: int) -> None:
        """Checks that no thread is lost: all threads must run a call at the same time."""
        together = threading.Barrier(threads)
        _barriers.append(together)
        try:
            for future in [self.start(_meet) for _ in range(threads)]:
                future.wait()
        finally:
            _barriers.remove(together)
        # An answer leaves slightly before its call ends.
        wait_until(lambda: not self.callee.agent.reactor.busy, "the end of all calls")
        wait_until(lambda: not self.callee.unfinished, "the end of all values in the making")


def _peer_lost(worker: Worker, peer: Peer) -> None:
    worker.tensor_messages.peer_lost(peer)
    worker.agent.calls.caller_lost(peer)
    worker.references.peer_lost(peer)
    worker.agent.calls.end_creations(worker.unfinished, peer)


_barriers: list[threading.Barrier] = []


def _meet() -> None:
    _barriers[-1].wait(LIMIT_S)


@contextlib.contextmanager
def pair_of(threads: int = 2, over: str = "unix") -> Iterator[Pair]:
    """Yields a pair of workers with ``threads`` threads each, and closes it."""
    with group_of(2, threads, over) as (caller, callee):
        pair = Pair(caller, callee)
        try:
            yield pair
        finally:
            pair.close()

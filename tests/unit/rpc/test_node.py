"""The order in which a worker's parts learn that another worker is lost; callers come first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.unit.engine.worker.group import LIMIT_S, Member, group_of, wait_until
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker.peers import Peer
from torchweft.errors import WorkerLost
from torchweft.rpc import calls
from torchweft.rpc.node import Node, how_ended
from torchweft.rpc.options import RpcBackendOptions

ORDER = [
    "tensor_messages",
    "gatherings",
    "engine",
    "served calls",
    "references",
    "creations",
    "leaving",
    "watchers",
]


class Pair:
    """A worker with all its parts, and a callee that the test can lose at once."""

    def __init__(self, first: Member, second: Member, monkeypatch: pytest.MonkeyPatch) -> None:
        self.second = second
        options = RpcBackendOptions(secret=None)
        self.node = Node(first.agent, options, HashStore())
        self.callee = Node(second.agent, options, HashStore())
        self.callee.start()
        self.node.start()
        self.peer = first.peer(second)
        self.told: list[str] = []
        self.during: Callable[[str], None] = lambda part: None
        worker = self.node.worker
        for name, part, method in (
            ("tensor_messages", worker.tensor_messages, "peer_lost"),
            ("gatherings", self.node.gatherings, "peer_lost"),
            ("engine", worker.engine, "peer_lost"),
            ("served calls", self.node.agent.calls, "caller_lost"),
            ("references", worker.references, "peer_lost"),
            ("creations", self.node, "_cancel_creations"),
            ("leaving", self.node.leaving, "peer_lost"),
            ("watchers", self.node.agent, "tell_watchers"),
        ):
            monkeypatch.setattr(part, method, self._told_before(name, getattr(part, method)))

    def _told_before(self, name: str, tell: Callable[[Peer], None]) -> Callable[[Peer], None]:
        def told(peer: Peer) -> None:
            if peer is self.peer:  # At its own end a worker gives up the calls of all.
                self.told.append(name)
                self.during(name)
            tell(peer)

        return told

    def start_call(self) -> Any:
        future = calls.start(self.node.worker, self.peer, _wait, (), {}, 0.0)
        assert _begun.acquire(timeout=LIMIT_S)
        return future

    def lose(self) -> None:
        """Ends the callee's connections, as if it had died."""
        self.second.agent.links.end(self.second.agent.links.all()[0])


_begun = threading.Semaphore(0)
_may_end = threading.Event()


def _wait() -> None:
    _begun.release()
    _may_end.wait(LIMIT_S)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    _may_end.clear()
    with group_of(2) as members, contextlib.ExitStack() as ending:
        made = Pair(*members, monkeypatch)
        ending.callback(current_agent.install, None)
        for node in (made.node, made.callee):
            ending.callback(node.end, 1.0)
        ending.callback(_may_end.set)
        yield made


def test_all_parts_are_told_in_order_and_callers_hear_it_first(pair: Pair) -> None:
    future = pair.start_call()
    was_done: list[bool] = []
    pair.during = lambda part: was_done.append(future.done())
    pair.lose()
    wait_until(lambda: pair.told[-1:] == ["watchers"], "the end of telling")
    assert pair.told == ORDER
    with pytest.raises(WorkerLost):
        future.wait()


def test_a_waiting_caller_has_its_error_while_the_first_part_is_told(pair: Pair) -> None:
    future = pair.start_call()
    may_go_on = threading.Event()
    pair.during = lambda part: (may_go_on.wait(LIMIT_S), None)[1]
    pair.lose()
    try:
        with pytest.raises(WorkerLost):
            future.wait()
        assert pair.told in ([], ORDER[:1])
    finally:
        may_go_on.set()
    wait_until(lambda: pair.told == ORDER, "the end of telling")


def test_an_error_in_one_part_does_not_keep_the_others_from_knowing(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(part: str) -> None:
        if part == "references":
            raise ValueError("of a finalizer")

    pair.during = fail
    future = pair.start_call()
    pair.lose()
    wait_until(lambda: pair.told == ORDER, "the end of telling")
    assert "a handler for the loss of worker 'worker1'" in caplog.text
    assert "of a finalizer" in caplog.text
    with pytest.raises(WorkerLost):
        future.wait()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("boom"), "its program raised ValueError: boom"),
        (ValueError("one\ntwo"), "its program raised ValueError: one"),
        (ValueError("x" * 300), f"its program raised ValueError: {'x' * 148}"),
        (StopIteration(), "its program raised StopIteration"),
        (SystemExit(3), "its program called sys.exit(3)"),
        (SystemExit("no data"), "its program called sys.exit('no data')"),
        (KeyboardInterrupt(), "its program was interrupted"),
    ],
)
def test_why_a_worker_leaves_is_said_in_a_line(error: BaseException, expected: str) -> None:
    assert how_ended(error) == expected

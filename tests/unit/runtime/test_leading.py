"""Where cores are lacking, one thread handles events: see ``torchweft.runtime.reactor``."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.agent.group import wait_until
from torchweft.runtime import reactor as module
from torchweft.runtime.fair_queue import FairQueue
from torchweft.runtime.reactor import Reactor

LIMIT_S = 20.0
CORES = 2


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads that run on a machine of two cores, for tests to change."""
    running = [CORES + 1]
    monkeypatch.setattr(os, "cpu_count", lambda: CORES)
    monkeypatch.setattr(module, "running_threads", lambda: running[0] + 1)
    monkeypatch.setattr(module, "_MOST_LOOKS", module._CROWDED_LOOKS)
    return running


@pytest.fixture
def reactor(busy: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Reactor]:
    monkeypatch.setattr(module, "monotonic", lambda: 100.0)  # No look at the load gets too old.
    made = Reactor("test", 4, FairQueue(limit=1000, limit_bytes=1 << 20))
    yield made
    if not made.is_closing:
        assert made.close(LIMIT_S) == []


def look_at_load(reactor: Reactor) -> None:
    """Does what the timer thread does; only a second look makes threads lead."""
    for _ in range(2):
        reactor.arm_if_left()


class Connection:
    """A connection; each byte on it brings a task."""

    def __init__(self, reactor: Reactor, task: Callable[[], None]) -> None:
        self._reactor = reactor
        self._task = task
        self._ours, self._theirs = socket.socketpair()
        self.runs: list[str] = []
        """The names of the threads that have run its tasks."""
        self.ran = threading.Semaphore(0)
        reactor.watch_reading(self._ours.fileno(), self._on_readable, self._after_tasks)

    def send(self) -> None:
        self._theirs.sendall(b"x")

    def close(self) -> None:
        self._reactor.forget(self._ours.fileno())
        self._ours.close()
        self._theirs.close()

    def _on_readable(self) -> None:
        self._ours.recv(1)
        self._reactor.tasks.append((self._run, None, None))
        self._reactor.leave_unarmed(self._ours.fileno())

    def _run(self, *_: object) -> None:
        self.runs.append(threading.current_thread().name)
        self._task()
        self.ran.release()

    def _after_tasks(self, may_look: bool) -> bool:
        if self._reactor.take_unarmed(self._ours.fileno()):
            self._reactor.resume_reading(self._ours.fileno())
        return False


def test_threads_lead_only_once_looks_agree(
    busy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(module, "_MOST_LOOKS", 4)
    reactor = Reactor("test", 4, FairQueue(limit=1000, limit_bytes=1 << 20))

    def look(running: int, after_s: float = 0.005) -> bool:
        now_s[0] += after_s
        busy[0] = running
        reactor.arm_if_left()
        return reactor._is_crowded

    assert [look(3), look(2), look(3), look(2)] == [False] * 4  # One look does not count.
    assert [look(3), look(3)] == [False, True]
    assert [look(2), look(3)] == [False, True]
    assert [look(3) for _ in range(5)] == [True] * 5
    assert [look(2) for _ in range(3)] == [True, True, False]
    look(3)
    assert not look(3, after_s=1.0)  # The look before it is too old.
    assert reactor.close(LIMIT_S) == []


class Two:
    """Two connections: the task of the first blocks until ``may_end`` is set."""

    def __init__(self, reactor: Reactor, begin: Callable[[], object]) -> None:
        self.reactor, self.begin = reactor, begin
        self.may_end, self.has_begun = threading.Event(), threading.Event()
        self.first, self.second = Connection(reactor, self._block), Connection(reactor, int)

    def _block(self) -> None:
        self.begin()
        self.has_begun.set()
        assert self.may_end.wait(LIMIT_S)

    def start(self) -> None:
        """Has the first task run, and sends what brings the second."""
        look_at_load(self.reactor)
        self.has_begun.clear()
        self.first.send()
        assert self.has_begun.wait(LIMIT_S)
        self.second.send()

    def end(self) -> None:
        self.may_end.set()
        assert self.first.ran.acquire(timeout=LIMIT_S)


@pytest.fixture
def two(reactor: Reactor) -> Iterator[Two]:
    made = Two(reactor, int)
    look_at_load(reactor)
    made.second.send()
    assert made.second.ran.acquire(timeout=LIMIT_S)
    wait_until(reactor._lead.locked, "a leader")
    made.second.runs.clear()
    yield made
    made.may_end.set()
    made.first.close()
    made.second.close()


def test_a_leader_runs_what_comes_meanwhile(two: Two) -> None:
    two.start()
    assert not two.second.ran.acquire(timeout=0.02)
    two.end()
    assert two.second.ran.acquire(timeout=LIMIT_S)
    assert two.first.runs == two.second.runs


def test_no_thread_leads_where_there_is_a_core_for_each(busy: list[int], two: Two) -> None:
    busy[0] = CORES
    two.start()
    assert two.second.ran.acquire(timeout=LIMIT_S)
    assert two.first.runs != two.second.runs


def test_no_thread_leads_where_the_system_does_not_tell_the_load(busy: list[int], two: Two) -> None:
    busy[0] = 0
    two.start()
    assert two.second.ran.acquire(timeout=LIMIT_S)


@pytest.mark.parametrize("way", ["is known to take long", "waits for a worker", "wakes another"])
def test_a_task_that_takes_long_lets_others_go_on(two: Two, way: str) -> None:
    reactor = two.reactor
    ways = {
        "is known to take long": reactor.arm_all,
        "waits for a worker": reactor.begin_wait,
        "wakes another": reactor.wake,
    }
    two.begin = ways[way]
    two.start()
    assert two.second.ran.acquire(timeout=LIMIT_S)
    if way == "waits for a worker":
        reactor.end_wait()


def test_a_task_that_blocks_unseen_is_found_by_the_timer_thread(two: Two) -> None:
    two.start()
    two.reactor.arm_if_left()
    assert not two.second.ran.acquire(timeout=0.02)  # It may have begun just now.
    two.reactor.arm_if_left()
    assert two.second.ran.acquire(timeout=LIMIT_S)
    two.end()
    # For a while, each thread runs what it reads.
    two.may_end.clear()
    two.start()
    assert two.second.ran.acquire(timeout=LIMIT_S)


def test_threads_lead_again_after_a_while(monkeypatch: pytest.MonkeyPatch, two: Two) -> None:
    monkeypatch.setattr(module, "_REST_S", 0.0)
    two.start()
    for _ in range(3):
        two.reactor.arm_if_left()
    assert two.second.ran.acquire(timeout=LIMIT_S)
    two.end()

    def leads() -> bool:
        two.may_end.clear()
        two.start()
        has_run = two.second.ran.acquire(timeout=0.02)
        two.end()
        assert has_run or two.second.ran.acquire(timeout=LIMIT_S)
        return not has_run

    # A thread that waits for events without the lead wants it after its next event only.
    wait_until(leads, "a leader")


def test_a_queue_that_makes_no_progress_ends_the_lead(two: Two) -> None:
    two.start()
    two.reactor.tasks.append((lambda *_: None, None, None))
    for _ in range(2):
        two.reactor.help_if_stalled(0)
    assert two.second.ran.acquire(timeout=LIMIT_S)


def test_a_thread_that_leads_no_more_waits_for_events_again(busy: list[int], two: Two) -> None:
    two.start()
    busy[0] = 1
    two.reactor.arm_if_left()
    two.end()
    assert two.second.ran.acquire(timeout=LIMIT_S)
    two.may_end.clear()
    two.start()
    assert two.second.ran.acquire(timeout=LIMIT_S)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_closing_ends_followers(reactor: Reactor, two: Two, is_stuck: bool) -> None:
    two.start()
    if not is_stuck:
        two.end()
        assert two.second.ran.acquire(timeout=LIMIT_S)
    stuck = reactor.close(0.5 if is_stuck else LIMIT_S)
    assert stuck == (two.first.runs if is_stuck else [])
    if is_stuck:
        two.end()
        assert reactor.close(LIMIT_S) == []


def test_nothing_is_lost_when_leads_begin_and_end_at_random(
    busy: list[int], reactor: Reactor
) -> None:
    count, each = 8, 200
    ends = [reactor.arm_all, reactor.wake, int, int, reactor._end_lead]
    connections = [Connection(reactor, ends[number % len(ends)]) for number in range(count)]

    def send(connection: Connection, number: int) -> None:
        for turn in range(each):
            busy[0] = CORES + (turn + number) % 2
            if number == 0:
                reactor.arm_if_left()
            connection.send()
            assert connection.ran.acquire(timeout=LIMIT_S)

    senders = [
        threading.Thread(target=send, args=pair)
        for pair in zip(connections, range(count), strict=True)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(LIMIT_S)
    assert [len(connection.runs) for connection in connections] == [each] * count
    for connection in connections:
        connection.close()


class Interleaved(dict[int, list[Callable[[], None]]]):
    """The leads of a reactor; lets another thread lead while one ends its entry."""

    def __init__(self) -> None:
        super().__init__()
        self.before_pop: Callable[[], None] = lambda: None

    def pop(self, *key: Any) -> Any:
        before, self.before_pop = self.before_pop, lambda: None
        before()
        return super().pop(*key)


def test_a_thread_that_has_handled_an_event_does_not_end_the_lead_of_the_next(
    busy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at the lead and its end, which nothing joins, another thread may lead."""
    made = Reactor("test", 4, FairQueue(limit=1000, limit_bytes=1 << 20))
    leads = Interleaved()
    try:
        released: list[str] = []
        mine = [lambda: released.append("mine")]
        next_one = [lambda: released.append("the next one's")]
        monkeypatch.setattr(made, "_handling", leads)
        leads[id(mine)] = mine
        leads.before_pop = lambda: leads.__setitem__(id(next_one), next_one)
        made._give_up_lead()  # Meanwhile, the next thread begins to lead.
        assert released == ["mine"]
        assert leads == {id(next_one): next_one}
        made.begin_wait()  # Its task waits for another worker, so others must wait for events.
        assert released == ["mine", "the next one's"]
        assert not leads
    finally:
        made.close(LIMIT_S)

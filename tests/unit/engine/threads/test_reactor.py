from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.descriptors import nothing_is_written
from tests.thread_limits import no_new_threads
from tests.unit.engine.worker.group import wait_until
from torchweft.engine.threads.reactor import FairQueue, Reactor

LIMIT_S = 20.0


def empty_queue() -> FairQueue:
    return FairQueue(limit=1000, limit_bytes=1 << 20)


@pytest.fixture
def make_reactor() -> Iterator[Callable[[int], Reactor]]:
    made: list[Reactor] = []

    def make(limit: int) -> Reactor:
        made.append(Reactor("test", limit, empty_queue()))
        return made[-1]

    yield make
    for reactor in made:
        assert reactor.close(LIMIT_S) == []


Make = Callable[[int], Reactor]


class Tasks:
    """Tasks that block until they may end, and are counted."""

    def __init__(self, reactor: Reactor) -> None:
        self.reactor = reactor
        self.lock = threading.Lock()
        self.may_end = threading.Event()
        self.running = self.most = self.ended = 0
        self.has_begun = threading.Semaphore(0)
        self.has_ended = threading.Semaphore(0)

    def hold(self, *_: object) -> None:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.has_begun.release()
        assert self.may_end.wait(LIMIT_S)
        with self.lock:
            self.running -= 1
            self.ended += 1
        self.has_ended.release()

    def await_begun(self, count: int, open_calls: int = 0) -> None:
        """Waits until ``count`` tasks have begun; helps the reactor as the timer thread does."""
        for _ in range(count):
            while not self.has_begun.acquire(timeout=1e-4):
                self.reactor.help_if_stalled(open_calls)

    def await_ended(self, count: int) -> None:
        for _ in range(count):
            assert self.has_ended.acquire(timeout=LIMIT_S)


def test_a_task_that_waits_for_another_worker_makes_room(make_reactor: Make) -> None:
    reactor = make_reactor(1)
    tasks = Tasks(reactor)

    def waits(depth: int, _: object) -> None:
        if depth:
            reactor.submit_task(waits, depth - 1)
        assert reactor.begin_wait()
        tasks.hold()
        reactor.end_wait()

    reactor.submit_task(waits, 9)
    tasks.await_begun(10)
    assert tasks.running == 10
    tasks.may_end.set()
    tasks.await_ended(10)


def test_a_thread_may_wait_alone_only_while_another_waits_for_events(make_reactor: Make) -> None:
    reactor = make_reactor(2)
    assert not reactor.begin_read()
    tasks = Tasks(reactor)
    reactor.submit_task(tasks.hold)
    # The last waiting thread has started another one. A helper would start one more.
    assert tasks.has_begun.acquire(timeout=LIMIT_S)
    tasks.may_end.set()
    wait_until(reactor.begin_read, "two waiting threads")
    assert not reactor.begin_read()
    reactor.end_read()
    assert reactor.begin_read()
    reactor.end_read()


def test_a_stalled_queue_gets_another_thread(make_reactor: Make) -> None:
    """One read brings several tasks, of which the first does not end."""
    reactor = make_reactor(4)
    tasks = Tasks(reactor)
    for _ in range(4):
        reactor.tasks.append((tasks.hold, None, None))
    reactor.wake()
    tasks.await_begun(4)
    assert not len(reactor.tasks)
    tasks.may_end.set()
    tasks.await_ended(4)
    assert not reactor.help_if_stalled(0)


def test_threads_that_could_not_be_started_are_started_later(
    make_reactor: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container may limit the number of threads, and another process may use most of them."""
    reactor = make_reactor(4)
    tasks = Tasks(reactor)
    with no_new_threads(monkeypatch):
        for _ in range(4):
            reactor.submit_task(tasks.hold)
        tasks.await_begun(1)
        for _ in range(100):
            assert reactor.help_if_stalled(0)
        assert tasks.running == 1
        reactor.tasks.append((tasks.hold, None, None))
    assert caplog.text.count("can't start new thread: no further call is served") == 1
    tasks.await_begun(3)
    tasks.may_end.set()
    tasks.await_ended(5)
    assert not reactor.help_if_stalled(0)
    tasks.may_end.clear()
    for _ in range(4):
        reactor.submit_task(tasks.hold)
    tasks.await_begun(4)
    tasks.may_end.set()
    tasks.await_ended(4)


def test_no_thread_is_woken_for_a_task_that_may_not_run_yet(
    make_reactor: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep waking, and take the interpreter from the tasks that run."""
    reactor = make_reactor(1)
    tasks = Tasks(reactor)
    for _ in range(2):
        reactor.submit_task(tasks.hold)
    tasks.await_begun(1)
    wakes: list[None] = []
    wake = reactor.wake

    def count_and_wake() -> None:
        wakes.append(None)
        wake()

    with monkeypatch.context() as patch:
        patch.setattr(reactor, "wake", count_and_wake)
        for _ in range(50):
            assert reactor.help_if_stalled(0)
        assert not wakes
        tasks.await_begun(1, open_calls=1)
        assert wakes
    tasks.may_end.set()
    tasks.await_ended(2)


def test_tasks_blocked_unseen_get_help_for_as_many_answers_as_are_open(make_reactor: Make) -> None:
    reactor = make_reactor(1)
    tasks = Tasks(reactor)
    for _ in range(4):
        reactor.submit_task(tasks.hold)
    tasks.await_begun(3, open_calls=2)
    for _ in range(500):
        reactor.help_if_stalled(2)
    assert tasks.running == 3
    tasks.may_end.set()
    tasks.await_ended(4)


def test_nothing_is_lost_when_many_threads_submit(make_reactor: Make) -> None:
    reactor = make_reactor(4)
    each, done = 3000, threading.Event()
    seen: list[int] = []

    def task(number: int, _: object) -> None:
        seen.append(number)
        if len(seen) == 5 * each:
            done.set()

    def submit(start: int) -> None:
        for number in range(start, start + each):
            if number % 2:
                reactor.submit_task(task, number)
            else:
                reactor.submit(task, number)

    threads = [threading.Thread(target=submit, args=(at * each,)) for at in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.wait(LIMIT_S)
    assert sorted(seen) == list(range(5 * each))


def test_a_readable_descriptor_wakes_one_thread_once_until_it_is_armed_again(
    make_reactor: Make,
) -> None:
    reactor, events = make_reactor(4), threading.Semaphore(0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reactor.watch_reading(ours.fileno(), events.release)
        theirs.sendall(b"x")
        assert events.acquire(timeout=LIMIT_S)
        assert not events.acquire(timeout=0.01)
        reactor.resume_reading(ours.fileno())
        assert events.acquire(timeout=LIMIT_S)
        reactor.forget(ours.fileno())


def test_a_descriptor_that_its_handler_leaves_unarmed_is_handled_again_after_the_tasks(
    make_reactor: Make,
) -> None:
    reactor, order = make_reactor(1), []
    ours, theirs = socket.socketpair()
    done = threading.Event()

    def handle() -> None:
        was_left = bool(reactor.unarmed.pop(ours.fileno(), 0))
        order.append(f"handler {was_left}")
        if was_left:
            done.set()
        else:
            reactor.urgent.append((lambda *_: order.append("task"), None, None))
            reactor.leave_unarmed(ours.fileno())

    with ours, theirs:
        reactor.watch_reading(ours.fileno(), handle)
        theirs.sendall(b"x")
        assert done.wait(LIMIT_S)
        reactor.forget(ours.fileno())
    assert order == ["handler False", "task", "handler True"]


def test_tasks_that_block_keep_no_descriptor_from_being_heard(make_reactor: Make) -> None:
    """The thread that waits for events must not look again and again at one that it left unarmed.

    Here it leaves one while a task waits that may not run yet.
    """
    reactor = make_reactor(1)
    tasks = Tasks(reactor)
    left, heard = threading.Event(), threading.Event()
    reactor.submit_task(tasks.hold)
    tasks.await_begun(1)
    reactor.submit_task(tasks.hold)
    first, other_first = socket.socketpair()
    second, other_second = socket.socketpair()

    def leave() -> None:
        left.set()
        reactor.leave_unarmed(first.fileno())

    with first, other_first, second, other_second:
        reactor.watch_reading(first.fileno(), leave)
        reactor.watch_reading(second.fileno(), heard.set)
        other_first.sendall(b"x")
        assert left.wait(LIMIT_S)
        other_second.sendall(b"x")
        assert heard.wait(LIMIT_S)
        reactor.forget(first.fileno())
        reactor.forget(second.fileno())
    tasks.may_end.set()
    tasks.await_ended(2)


def test_a_descriptor_that_is_forgotten_in_its_handler_holds_no_thread() -> None:
    """Its connection may end while a thread reads it, which then leaves it unarmed."""
    reactor, done = Reactor("test", 1, empty_queue()), threading.Event()
    ours, theirs = socket.socketpair()

    def handle() -> None:
        reactor.forget(ours.fileno())
        reactor.urgent.append((lambda *_: done.set(), None, None))
        reactor.leave_unarmed(ours.fileno())

    with ours, theirs:
        reactor.watch_reading(ours.fileno(), handle)
        theirs.sendall(b"x")
        assert done.wait(LIMIT_S)
        assert reactor.close(LIMIT_S) == []


def test_closing_waits_for_what_runs_and_for_what_waits_to() -> None:
    reactor = Reactor("test", 2, empty_queue())
    tasks = Tasks(reactor)
    for _ in range(4):
        reactor.submit_task(tasks.hold)
    tasks.await_begun(2)
    closing = threading.Thread(target=reactor.close, args=(LIMIT_S,))
    closing.start()
    tasks.may_end.set()
    closing.join(LIMIT_S)
    assert tasks.ended >= 2
    assert tasks.running == 0


def test_threads_that_do_not_end_are_named() -> None:
    reactor = Reactor("stubborn", 1, empty_queue())
    tasks, holders = Tasks(reactor), []

    def hold(*_: object) -> None:
        holders.append(threading.current_thread().name)
        tasks.hold()

    reactor.submit_task(hold)
    tasks.await_begun(1)
    stuck = reactor.close(0.01)  # On a busy machine others may take longer, too.
    assert set(holders) <= set(stuck)
    assert all(name.startswith("stubborn-") for name in stuck)
    tasks.may_end.set()
    assert reactor.close(LIMIT_S) == []


def test_nothing_is_written_to_a_descriptor_that_another_file_has_got_since() -> None:
    reactor = Reactor("test", 1, empty_queue())
    reactor.close(LIMIT_S)
    with nothing_is_written():
        reactor.submit(lambda *_: None)
        reactor.begin_wait()


def test_a_descriptor_that_is_left_unarmed_during_a_look_is_seen_by_another_look() -> None:
    class Unarmed(dict[int, float]):
        """Lets a descriptor be left unarmed as soon as the look has taken its copy."""

        def copy(self) -> dict[int, float]:
            found = super().copy()
            if not self:
                reactor.leave_unarmed(1)
            return found

    looks: list[str] = []
    reactor = Reactor("test", 1, empty_queue())
    reactor.on_unarmed = lambda: looks.append("asked")
    reactor.unarmed = Unarmed()
    try:
        assert reactor.arm_if_left(time.monotonic())
        assert looks == ["asked"]
        reactor.leave_unarmed(1)
        assert looks == ["asked"]  # The look that is due sees it, too.
        assert not reactor.arm_if_left(time.monotonic())
        assert 1 not in reactor.unarmed
    finally:
        assert reactor.close(LIMIT_S) == []

"""The queue of tasks: turns, bounds, and many threads at once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from tests.thorough import examples
from torchweft.engine.threads.reactor import OWN, SWEEP_LIMIT, FairQueue


def nothing(*_: Any) -> None:
    """The function of every task; the argument identifies the task."""


def make(limit: int = 10, limit_bytes: int = 1000) -> FairQueue:
    return FairQueue(limit, limit_bytes)


def drain(tasks: FairQueue) -> list[Any]:
    taken = []
    while tasks.ready:
        taken.append(tasks.popleft()[1])
    return taken


def test_a_full_sender_refuses_what_is_offered_and_the_others_do_not() -> None:
    tasks = make(limit=2)
    assert [tasks.offer((nothing, number, None), 1, 0) for number in range(3)] == [
        True,
        True,
        False,
    ]
    assert tasks.offer((nothing, "other", None), 2, 0)
    tasks.append((nothing, "must", None), 1)
    assert drain(tasks) == [0, "other", 1, "must"]
    assert tasks.offer((nothing, 4, None), 1, 0)


def test_a_sender_that_finalizers_use_is_never_dropped() -> None:
    tasks = FairQueue(10, 1000, kept=frozenset({OWN, 0}))
    for sender in (OWN, 0):
        tasks.append((nothing, sender, None), sender)
    drain(tasks)
    kept = [tasks._queues[sender] for sender in (OWN, 0)]
    for life in range(1, 4 * SWEEP_LIMIT):
        tasks.append((nothing, life, None), life)
        tasks.popleft()
    assert [tasks._queues[sender] for sender in (OWN, 0)] == kept


def test_a_sender_in_which_tasks_wait_is_kept_with_its_bounds() -> None:
    tasks = make(limit=2, limit_bytes=100)
    waiting = range(2 * SWEEP_LIMIT)
    for worker in waiting:
        assert tasks.offer((nothing, worker, None), worker, 60)
    for life in range(10_000, 10_000 + 4 * SWEEP_LIMIT):
        tasks.append((nothing, life, None), life)
    assert not tasks.offer((nothing, "too large", None), 0, 60)
    assert tasks.offer((nothing, "second", None), 0, 40)
    assert not tasks.offer((nothing, "third", None), 0, 0)
    taken = drain(tasks)
    assert taken[: len(waiting)] == list(waiting)
    assert taken[-1] == "second"
    assert len(taken) == len(waiting) + 4 * SWEEP_LIMIT + 1


def test_many_threads_lose_and_double_nothing() -> None:
    tasks, each = make(limit=100_000), examples(3000)
    taken: list[list[Any]] = [[] for _ in range(3)]
    are_putting = threading.Event()

    def put(sender: int) -> None:
        for number in range(each):
            tasks.append((nothing, (sender, number), None), sender)

    def take(into: list[Any]) -> None:
        while not are_putting.is_set() or tasks.ready:
            try:
                into.append(tasks.popleft()[1])
            except IndexError:
                time.sleep(0)  # lets others run

    takers = [threading.Thread(target=take, args=(into,)) for into in taken]
    putters = [threading.Thread(target=put, args=(sender,)) for sender in (OWN, 1, 2)]
    for thread in takers + putters:
        thread.start()
    for thread in putters:
        thread.join()
    are_putting.set()
    for thread in takers:
        thread.join()
    everything = Counter(item for into in taken for item in into)
    assert everything == Counter(
        (sender, number) for sender in (OWN, 1, 2) for number in range(each)
    )
    for into in taken:
        for sender in (OWN, 1, 2):
            numbers = [number for of, number in into if of == sender]
            assert numbers == sorted(numbers)

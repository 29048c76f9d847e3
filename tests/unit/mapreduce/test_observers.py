"""Tests that observers get all events of maps, and cannot harm a map."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchweft.mapreduce.observers import Observers

LOG = "torchweft"


class Recorder:
    """Records the events that it gets."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def __getattr__(self, event: str) -> Callable[..., None]:
        return lambda *arguments: self.told.append((event, *arguments))


class Broken:
    """Raises on the first event, and lacks most of the methods."""

    def begun(self, *_: object) -> None:
        raise ValueError("no room left")

    def __repr__(self) -> str:
        return "<the broken one>"


def tell_all(observers: Observers) -> list[tuple[object, ...]]:
    error = ValueError("x")
    observers.tell("begun", 4, "double", 2, ["worker0", "worker1"])
    observers.tell("started", 4, 0, "worker0")
    observers.tell("moved", 4, 1, "worker1", "worker0")
    observers.tell("ended", 4, 0, "worker0", 0.5)
    observers.tell("lost", 4, "worker1", [1])
    observers.tell("done", 4, error)
    return [
        ("begun", 4, "double", 2, ["worker0", "worker1"]),
        ("started", 4, 0, "worker0"),
        ("moved", 4, 1, "worker1", "worker0"),
        ("ended", 4, 0, "worker0", 0.5),
        ("lost", 4, "worker1", [1]),
        ("done", 4, error),
    ]


def test_all_are_told_in_order() -> None:
    observers, one, two = Observers(), Recorder(), Recorder()
    observers.add(one)
    observers.add(two)
    expected = tell_all(observers)
    assert one.told == expected
    assert two.told == expected


def test_who_is_removed_is_told_no_more() -> None:
    observers, one, two = Observers(), Recorder(), Recorder()
    observers.add(one)
    observers.add(two)
    assert observers.remove(one)
    assert not observers.remove(one)
    expected = tell_all(observers)
    assert one.told == []
    assert two.told == expected


def test_one_that_raises_is_removed_with_one_message(caplog: pytest.LogCaptureFixture) -> None:
    observers, after = Observers(), Recorder()
    observers.add(Broken())  # type: ignore[arg-type]
    observers.add(after)
    with caplog.at_level(logging.ERROR, logger=LOG):
        expected = tell_all(observers)
    assert after.told == expected
    assert [record.message for record in caplog.records] == [
        "<the broken one> raised and is told no more about maps"
    ]
    assert "no room left" in caplog.text


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_one_that_exits_does_so_in_the_main_thread_only(is_interrupted: bool) -> None:
    """In the main thread it may be Ctrl-C; the other threads are the worker's."""

    class Exits:
        def done(self, *_: object) -> None:
            raise KeyboardInterrupt

    observers = Observers()
    observers.add(Exits())  # type: ignore[arg-type]
    if is_interrupted:
        with pytest.raises(KeyboardInterrupt):
            observers.tell("done", 1, None)
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(observers.tell, "done", 1, None).result()
    assert not observers.is_watched


def test_one_that_lacks_a_method_is_removed_too(caplog: pytest.LogCaptureFixture) -> None:
    observers = Observers()
    observers.add(object())  # type: ignore[arg-type]
    observers.tell("started", 1, 0, "worker0")
    assert "has no attribute 'started'" in caplog.text


def test_two_threads_that_meet_a_broken_one_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    observers = Observers()
    both_are_in = threading.Barrier(2, timeout=10)

    class BrokenForBoth:
        def done(self, *_: object) -> None:
            both_are_in.wait()
            raise ValueError("twice")

    observers.add(BrokenForBoth())  # type: ignore[arg-type]
    threads = [
        threading.Thread(target=observers.tell, args=("done", number, None)) for number in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(caplog.records) == 1


def test_an_observer_may_leave_while_it_is_told() -> None:
    observers, after = Observers(), Recorder()

    class Leaving:
        def started(self, *_: object) -> None:
            observers.remove(self)  # type: ignore[arg-type]

    observers.add(Leaving())  # type: ignore[arg-type]
    observers.add(after)
    observers.tell("started", 1, 0, "worker0")
    observers.tell("started", 1, 1, "worker0")
    assert len(after.told) == 2

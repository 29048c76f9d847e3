"""A worker's objects, found by typed keys."""

from __future__ import annotations

import threading
import time

import pytest

from torchweft.engine.worker.agent import Slot, Slots

COUNT: Slot[int] = Slot()
NAMES: Slot[list[str]] = Slot(list)


def test_an_object_is_found_by_its_key_and_not_by_another() -> None:
    slots = Slots()
    slots[COUNT] = 3
    assert slots[COUNT] + 1 == 4
    other: Slot[int] = Slot()
    with pytest.raises(KeyError):
        slots[other]


def test_each_worker_has_objects_of_its_own() -> None:
    first, second = Slots(), Slots()
    first[NAMES].append("a")
    assert (first[NAMES], second[NAMES]) == (["a"], [])


def test_an_object_is_made_once_whoever_asks_for_it() -> None:
    made: list[object] = []

    def make() -> object:
        time.sleep(0.01)  # All threads ask before the object exists.
        made.append(object())
        return made[-1]

    slots, slot, found = Slots(), Slot(make), []
    threads = [threading.Thread(target=lambda: found.append(slots[slot])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == made * 8


def test_an_object_may_need_another_one() -> None:
    slots = Slots()
    outer = Slot(lambda: [*slots[NAMES], "made"])
    assert slots[outer] == ["made"]

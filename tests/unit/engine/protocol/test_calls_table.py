from __future__ import annotations

import gc
import math
import threading
from dataclasses import dataclass

from torchweft.engine.protocol.calls import CallClient


@dataclass(eq=False)
class Entry:
    worker: int = 0
    deadline_s: float = math.inf


def test_everybody_takes_at_once_and_nothing_is_taken_twice_or_left() -> None:
    table: CallClient[Entry] = CallClient()
    taken: list[Entry] = []
    entries = [Entry(worker=number % 2, deadline_s=number % 5) for number in range(3000)]
    numbers: list[int] = []
    start = threading.Barrier(5)

    def add(part: list[Entry]) -> None:
        start.wait()
        numbers.extend(table.add(entry) for entry in part)

    def take_all() -> None:
        start.wait()
        for _ in range(60):
            taken.extend(table.take_where(lambda entry: entry.worker == 1))
            taken.extend(table.take_expired(2.0)[0])

    def answer() -> None:
        start.wait()
        for number in range(1, 3001):
            entry = table.pop(number, None)
            if entry is not None:
                taken.append(entry)

    threads = [threading.Thread(target=add, args=(entries[at::2],)) for at in range(2)]
    threads += [threading.Thread(target=target) for target in (take_all, take_all, answer)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken.extend(table.take_where(lambda _: True))
    assert len(set(numbers)) == 3000
    assert sorted(map(id, taken)) == sorted(map(id, entries))


class AddsWhenCollected:
    """An object in a cycle, whose finalizer makes a call."""

    def __init__(self, table: CallClient[Entry]) -> None:
        self.table = table
        self.cycle = self

    def __del__(self) -> None:
        self.table.add(Entry())


def test_a_collection_in_the_middle_of_a_look_does_no_harm() -> None:
    table: CallClient[Entry] = CallClient()
    for _ in range(200):
        table.add(Entry())
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(100):
            AddsWhenCollected(table)
            assert table.take_expired(0.0) == ([], math.inf)
            assert table.take_where(lambda entry: entry.worker == 7) == []
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(table) == 300

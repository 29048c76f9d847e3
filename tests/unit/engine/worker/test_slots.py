"""A worker's objects, each made once."""

from __future__ import annotations

import threading
import time

from torchweft.engine.worker.agent import Slot, Slots


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

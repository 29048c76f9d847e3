from __future__ import annotations

import itertools
import threading
from collections import deque

import pytest

from torchweft import free_threading
from torchweft.free_threading import copy_of, shared_count

THREADS = 4
EACH = 2000


@pytest.fixture(params=[True, False])
def _build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has counts made as for a Python without the interpreter lock, and as for this one."""
    if request.param:
        monkeypatch.setattr(free_threading, "IS_FREE_THREADED", True)
        monkeypatch.setattr(free_threading.sys, "version_info", (3, 13))


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize(("start", "step"), [(0, 1), (1, 1), (7, 3)])
def test_each_number_of_a_count_is_given_once(start: int, step: int) -> None:
    numbers, barrier = shared_count(start, step), threading.Barrier(THREADS)
    given: list[list[int]] = []

    def take() -> None:
        barrier.wait()
        given.append(list(itertools.islice(numbers, EACH)))

    threads = [threading.Thread(target=take) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = sorted(itertools.chain(*given))
    assert taken == list(range(start, start + THREADS * EACH * step, step))


@pytest.mark.usefixtures("_build")
def test_a_deque_that_changes_is_copied() -> None:
    changing, is_over = deque(range(100)), threading.Event()

    def change() -> None:
        while not is_over.is_set():
            changing.append(changing.popleft())

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(50):
            assert {*copy_of(changing)} <= {*range(100)}
    finally:
        is_over.set()
        thread.join()
    assert list(copy_of(changing)) == list(changing)


class Shrinking(deque[int]):
    """A deque from which another thread takes all but two items while it is copied."""

    def __len__(self) -> int:
        return 5


def test_items_that_are_removed_during_a_copy_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_threading, "IS_FREE_THREADED", True)
    assert copy_of(Shrinking([1, 2])) == [1, 2]

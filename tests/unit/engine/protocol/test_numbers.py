"""Sets of numbers remember what they are to, and no more."""

from __future__ import annotations

from torchweft.engine.protocol.numbers import Tombstones, WorkerIds
from torchweft.ids import ID_LIMIT


def test_those_added_longest_ago_are_forgotten() -> None:
    ended = Tombstones(2)
    for number in (1, 2, 1, 3):
        ended.add(number)
    assert [number in ended for number in (1, 2, 3)] == [True, False, True]
    assert len(ended) == 2


def test_ids_of_workers_take_the_same_memory_however_many_there_are() -> None:
    ids, expected = WorkerIds(), set(range(0, ID_LIMIT, 7)) | {ID_LIMIT - 1}
    size_bytes = len(ids._bits)
    for worker in (*expected, 8, 9):
        ids.add(worker)
    for worker in (8, 9, 10):
        ids.discard(worker)
    assert {worker for worker in range(-9, ID_LIMIT + 9) if worker in ids} == expected
    assert 1 << 60 not in ids
    assert len(ids._bits) == size_bytes

"""Sets of numbers remember what they are to, and no more."""

from __future__ import annotations

from torchweft.engine.protocol.numbers import Tombstones


def test_those_added_longest_ago_are_forgotten() -> None:
    ended = Tombstones(2)
    for number in (1, 2, 1, 3):
        ended.add(number)
    assert [number in ended for number in (1, 2, 3)] == [True, False, True]
    assert len(ended) == 2

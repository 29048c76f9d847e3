from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchweft.engine.channels.shm import Extents


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_no_byte_is_taken_twice_or_lost(steps: list[tuple[bool, int]]) -> None:
    extents = Extents(5, 69)
    taken: dict[int, int] = {}
    for is_taking, number in steps:
        if is_taking:
            start = extents.take(number)
            if start is not None:
                taken[start] = number
        elif taken:
            start = sorted(taken)[number % len(taken)]
            extents.give_back(start, taken.pop(start))
        used = [byte for start, size in taken.items() for byte in range(start, start + size)]
        assert len(used) == len(set(used))
        assert all(5 <= byte < 69 for byte in used)
        assert extents.free_bytes() == 64 - len(used)
    for start, size in taken.items():
        extents.give_back(start, size)
    assert extents.take(64) == 5

from __future__ import annotations

import gc
import weakref
from collections import deque
from typing import Any

import pytest

from torchweft.errors import CallTimeout
from torchweft.rpc import Merged, Stream, merged
from torchweft.rpc.calls import OrderedFuture, fail

LIMIT_S = 20.0


class Scripted(Stream[int]):
    """A stream whose values come when the test says so."""

    def __init__(self, name: str, ahead: int = 1) -> None:
        self._name = name
        self.limit_s = LIMIT_S
        self._pulled = deque()
        self._asked: deque[Any] = deque()
        self._has_ended = False
        for _ in range(ahead):
            self._pull()

    def _pull(self) -> None:
        future: OrderedFuture[Any] = OrderedFuture()
        self._pulled.append(future)
        self._asked.append(future)

    def come(self, *values: int) -> Scripted:
        for value in values:
            self._asked.popleft().set_result((value,))
        return self

    def end(self, error: Exception | None = None) -> Scripted:
        asked = self._asked.popleft()
        if error is None:
            asked.set_result(())
        else:
            fail(asked, error)
        return self

    @property
    def worker_name(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"Scripted({self._name})"

    def close(self) -> None:
        self._has_ended = True
        self._pulled.clear()

    def __del__(self) -> None:
        pass


def named(found: Merged[int], count: int) -> list[tuple[str, int]]:
    return [(stream.worker_name, value) for stream, value in (next(found) for _ in range(count))]


def test_no_value_in_time() -> None:
    one = Scripted("one")
    found = merged([one], timeout=0.01)
    with pytest.raises(CallTimeout, match=r"none of these streams .* 0.0 s: Scripted\(one\)"):
        next(found)
    one.come(3)
    assert named(found, 1) == [("one", 3)]


def test_it_closes_its_streams_and_does_not_keep_them() -> None:
    one, other = Scripted("one"), Scripted("other")
    with merged([one, other]) as found:
        other.close()
        assert "Scripted(one)" in repr(found)
    assert one._has_ended
    assert list(found) == []
    dropped = Scripted("dropped")
    gone, found = weakref.ref(dropped), merged([dropped])
    gc.disable()
    try:
        del dropped, found
        assert gone() is None
    finally:
        gc.enable()

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from torchweft.engine.protocol.registration import Registration
from torchweft.engine.worker import rendezvous
from torchweft.engine.worker.rendezvous import BoundedStore, SignedStore, join
from torchweft.errors import RendezvousTimeout

LIMIT_S = 20.0


class Silent(PrefixStore):
    """A store that stops answering after ``answers`` operations, until it may go on."""

    def __init__(self, answers: int) -> None:
        super().__init__("x", HashStore())
        self._left = answers
        self.asked = 0
        self.go_on = threading.Event()

    def _count(self) -> None:
        self.asked += 1
        self._left -= 1
        if self._left < 0:
            assert self.go_on.wait(LIMIT_S)

    def set(self, key: str, value: str) -> None:
        self._count()
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        self._count()
        return super().check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._count()
        super().wait(keys, timeout)


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shortens the grace period for answers; waits for abandoned operations after the test."""
    monkeypatch.setattr(rendezvous, "_LATE_S", 0.1)
    yield
    for thread in threading.enumerate():
        if thread.name == "weft-store":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_a_store_that_was_silent_once_is_not_asked_again() -> None:
    silent = Silent(0)
    store = BoundedStore(silent, 0.0)
    with pytest.raises(RendezvousTimeout, match="at a HashStore does not answer"):
        store.set("a", "1")
    began_s = time.monotonic()
    for _ in range(10):
        with pytest.raises(RendezvousTimeout, match="does not answer"):
            store.check(["a"])
    assert time.monotonic() - began_s < 1.0
    assert silent.asked == 1
    silent.go_on.set()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("answers", [0, 1, 2, 3])
def test_joining_ends_in_time_whenever_the_store_becomes_silent(rank: int, answers: int) -> None:
    silent = Silent(answers)
    me = Registration("me", rank, ("unix:@x",))
    began_s = time.monotonic()
    with pytest.raises(RendezvousTimeout, match="does not answer for"):
        join(SignedStore(BoundedStore(silent, 0.2), None), me, 3, 0.2, deque(maxlen=1))
    assert time.monotonic() - began_s < 3.0
    silent.go_on.set()

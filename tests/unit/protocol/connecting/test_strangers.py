from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchweft.protocol.connecting.strangers import Admission, Admissions, Strangers

BEGIN, TURN_OUT, CLOSE = Admission.BEGIN, Admission.TURN_OUT, Admission.CLOSE


def test_a_connection_is_served_at_once_up_to_the_limit() -> None:
    strangers: Strangers[int] = Strangers(2)
    assert strangers.came(1) == [(BEGIN, 1)]
    assert strangers.came(2) == [(BEGIN, 2)]
    assert strangers.ended(1) == []
    assert strangers.came(3) == [(BEGIN, 3)]


def test_beyond_the_limit_the_oldest_goes_and_its_thread_serves_the_latest() -> None:
    strangers: Strangers[int] = Strangers(2)
    strangers.came(1)
    strangers.came(2)
    assert strangers.came(3) == [(TURN_OUT, 1)]
    assert strangers.ended(1) == [(BEGIN, 3)]


def test_a_connection_that_ends_by_itself_makes_room_before_the_one_that_was_told_to() -> None:
    strangers: Strangers[int] = Strangers(2)
    strangers.came(1)
    strangers.came(2)
    strangers.came(3)
    assert strangers.ended(2) == [(BEGIN, 3)]
    assert strangers.came(4) == []
    assert strangers.ended(1) == [(BEGIN, 4)]


def test_a_connection_that_waits_goes_when_it_is_the_oldest() -> None:
    strangers: Strangers[int] = Strangers(1)
    strangers.came(1)
    assert strangers.came(2) == [(TURN_OUT, 1)]
    assert strangers.came(3) == [(CLOSE, 2)]
    assert strangers.ended(1) == [(BEGIN, 3)]


def test_in_a_fast_flood_a_served_connection_has_time() -> None:
    """Four connections come while one thread becomes free."""
    limit = 8
    shell = Shell(limit)
    lives: dict[int, int] = {}
    for _ in range(50):
        for _ in range(4):
            shell.come()
        before = set(shell.served)
        shell.end_leaving()
        lives |= {connection: shell.count - connection for connection in set(shell.served) - before}
    assert len(lives) > 20
    assert max(lives.values()) < limit / 2


def test_when_closed_all_go_and_none_comes() -> None:
    strangers: Strangers[int] = Strangers(1)
    strangers.came(1)
    strangers.came(2)
    assert strangers.close() == [(CLOSE, 2)]
    assert strangers.came(3) == [(CLOSE, 3)]
    assert strangers.ended(1) == []
    served: Strangers[int] = Strangers(1)
    served.came(1)
    assert served.close() == [(TURN_OUT, 1)]
    assert served.ended(1) == []


class Shell:
    """Carries out the actions for numbered connections, and checks them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.strangers: Strangers[int] = Strangers(limit)
        self.count = 0
        self.waiting: list[int] = []
        self.served: list[int] = []
        self.leaving: list[int] = []

    def come(self) -> None:
        self.count += 1
        self.waiting.append(self.count)
        self._act(self.strangers.came(self.count))

    def end(self, choice: int) -> None:
        threads = sorted(self.served + self.leaving)
        if threads:
            ended = threads[choice % len(threads)]
            (self.served if ended in self.served else self.leaving).remove(ended)
            self._act(self.strangers.ended(ended))

    def end_leaving(self) -> None:
        if self.leaving:
            self._act(self.strangers.ended(self.leaving.pop(0)))

    def close(self) -> None:
        self._act(self.strangers.close())
        assert not self.served
        assert not self.waiting

    def _act(self, actions: Admissions[int]) -> None:
        for action, connection in actions:
            if action is BEGIN:
                assert connection == self.waiting.pop()
                self.served.append(connection)
            elif action is TURN_OUT:
                assert connection == min(self.served + self.waiting)
                self.served.remove(connection)
                self.leaving.append(connection)
            else:
                assert connection == min(self.served + self.waiting)
                self.waiting.remove(connection)
            assert len(self.served) + len(self.leaving) <= self.limit
        assert len(self.served) + len(self.waiting) <= self.limit
        is_full = len(self.served) + len(self.leaving) == self.limit
        assert is_full or not self.waiting


@given(st.integers(1, 4), st.lists(st.one_of(st.none(), st.integers(0, 7)), max_size=60))
def test_threads_and_connections_are_bounded_and_the_oldest_goes(
    limit: int, events: list[int | None]
) -> None:
    shell = Shell(limit)
    for event in events:
        if event is None:
            shell.come()
        else:
            shell.end(event)
    shell.close()

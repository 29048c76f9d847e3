from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchweft.engine.protocol import strangers as module
from torchweft.engine.protocol.strangers import Admission, Admissions, Strangers

BEGIN, TURN_OUT, CLOSE = Admission.BEGIN, Admission.TURN_OUT, Admission.CLOSE


class Prompt(Strangers[int]):
    """The machine, in a worker whose threads begin at once."""

    def _serve(self) -> Admissions[int]:
        begun = super()._serve()
        return begun + self.began(begun[0][1]) if begun else []


class Vouchers(dict[int, bytes]):
    """The vouchers that have arrived, by connection."""

    def of(self, limit: int) -> Prompt:
        return Prompt(limit, self.get)


def came(strangers: Strangers[int], *connections: int) -> Admissions[int]:
    """Has connections come together."""
    done: Admissions[int] = []
    for connection in connections:
        done += strangers.came(connection)
    return done + strangers.all_came()


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


# Members


def test_the_latest_vouchers_are_remembered() -> None:
    vouchers = Vouchers()
    strangers = vouchers.of(1)
    for connection in range(module.REMEMBERED + 1):
        vouchers[connection] = str(connection).encode()
        assert strangers.came(connection) == [(BEGIN, connection)]
        strangers.ended(connection)
    assert len(strangers._numbers) == module.REMEMBERED
    vouchers[-1], vouchers[-2] = b"1", b"0"
    assert strangers.came(-1) == []
    assert strangers.came(-2) == [(BEGIN, -2)]


def test_members_beyond_their_limit_are_served_as_strangers() -> None:
    strangers = Vouchers({1: b"a", 2: b"b", 3: b"c"}).of(1)
    assert came(strangers, 1, 2) == [(BEGIN, 1), (BEGIN, 2)]
    assert came(strangers, 3) == [(TURN_OUT, 2)]
    # A voucher that did not count before is not used up.
    assert strangers.ended(1) == []
    assert came(strangers, 4) == [(BEGIN, 3)]


class Shell:
    """Carries out the actions for numbered connections, and checks them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.vouchers = Vouchers()
        self.strangers = self.vouchers.of(limit)
        self.count = 0
        self.waiting: list[int] = []
        self.served: list[int] = []
        self.leaving: list[int] = []
        self.members: list[int] = []

    def come(self, *, brings_voucher: bool = False) -> None:
        self.count += 1
        self.waiting.append(self.count)
        if brings_voucher:
            self.vouchers[self.count] = str(self.count).encode()
        self._act(came(self.strangers, self.count))

    def end(self, choice: int) -> None:
        threads = sorted(self.served + self.leaving + self.members)
        if threads:
            ended = threads[choice % len(threads)]
            for each in (self.served, self.leaving, self.members):
                if ended in each:
                    each.remove(ended)
            self._act(self.strangers.ended(ended))

    def end_leaving(self) -> None:
        if self.leaving:
            self._act(self.strangers.ended(self.leaving.pop(0)))

    def close(self) -> None:
        before = sorted(self.served + self.waiting + self.members)
        told = sorted(connection for _, connection in self.strangers.close())
        assert told == before

    def _act(self, actions: Admissions[int]) -> None:
        for action, connection in actions:
            if action is BEGIN and connection in self.vouchers:
                if len(self.members) < self.limit:
                    self.waiting.remove(connection)
                    self.members.append(connection)
                    continue
                del self.vouchers[connection]
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
        assert len(self.members) <= self.limit
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


@given(st.integers(2, 4), st.lists(st.one_of(st.booleans(), st.integers(2, 9)), max_size=60))
def test_members_are_never_told_to_go(limit: int, events: list[int]) -> None:
    shell = Shell(limit)
    for event in events:
        if isinstance(event, bool):
            if not event or len(shell.members) < limit:
                shell.come(brings_voucher=event)
        else:
            shell.end(event)
    shell.close()

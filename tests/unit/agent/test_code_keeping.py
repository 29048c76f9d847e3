from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.agent.group import Member, group_of, wait_until
from torchweft import knobs
from torchweft.agent.code_keeping import CodeKeeper
from torchweft.errors import NotInitialized, WorkerLost
from torchweft.serialize.by_value import Code


class Keeper:
    """A member that sends code to the other one."""

    def __init__(self, member: Member, other: Member) -> None:
        self.member, self.peer = member, member.peer(other)
        self.keeper = CodeKeeper(member.agent, is_strict=False)

    def lend(self, *contents: bytes) -> Any:
        return self.keeper.lend(self.peer, [Code(content, content[:16]) for content in contents])

    def kept(self) -> list[bytes]:
        return [code.content for code in self.peer.kept_codes._table.values()]


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Keeper, Keeper]]:
    with knobs.CODE_LIMIT.override(8), group_of(2, over=request.param) as (first, second):
        keepers = Keeper(first, second), Keeper(second, first)
        for keeper in keepers:
            keeper.member.start()
        yield keepers


def test_code_arrives_once(pair: tuple[Keeper, Keeper]) -> None:
    first, second = pair
    entries = first.lend(b"a", b"b")
    again = first.lend(b"b", b"a")
    assert again == [entries[1], entries[0]]
    wait_until(lambda: second.kept() == [b"a", b"b"])
    numbers = [entry.number for entry in entries]
    found = second.peer.kept_codes.find(numbers)
    assert [code.content for code in found] == [b"a", b"b"]


def test_both_directions_are_apart(pair: tuple[Keeper, Keeper]) -> None:
    first, second = pair
    entry, other = first.lend(b"a")[0], second.lend(b"b")[0]
    assert entry.number == other.number
    wait_until(lambda: (first.kept(), second.kept()) == ([b"b"], [b"a"]))


def test_old_code_makes_room(pair: tuple[Keeper, Keeper]) -> None:
    first, second = pair
    for number in range(40):
        assert first.lend(b"%d" % number)
    wait_until(lambda: second.kept() == [b"%d" % number for number in range(32, 40)])


def test_too_many_codes_at_once_are_not_lent(pair: tuple[Keeper, Keeper]) -> None:
    first, second = pair
    assert first.lend(b"a", b"b", b"c") is None
    assert first.lend(b"a", b"b")
    assert first.lend(b"x" * knobs.CODE_LIMIT_BYTES.default) is None
    wait_until(lambda: len(second.kept()) == 2)


def test_a_thread_does_not_wait_for_another_one(pair: tuple[Keeper, Keeper]) -> None:
    first, _ = pair
    first.lend(b"a")
    with first.peer.code_lock:
        assert first.lend(b"a")
        assert first.lend(b"b") is None
    assert first.lend(b"b")


def test_many_threads_get_the_same_entry(pair: tuple[Keeper, Keeper]) -> None:
    first, second = pair
    lent: list[Any] = []

    def work() -> None:
        for _ in range(50):
            lent.append(first.lend(b"same"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({entry[0].number for entry in lent if entry is not None}) == 1
    wait_until(lambda: second.kept() == [b"same"])


def test_a_lost_worker_is_forgotten(pair: tuple[Keeper, Keeper]) -> None:
    first, second = pair
    first.lend(b"a")
    wait_until(lambda: second.kept() == [b"a"])
    for keeper in pair:
        keeper.member.agent.lose(keeper.peer, "for the test")
        keeper.keeper.peer_lost(keeper.peer)
    assert second.kept() == []
    assert first.lend(b"b") is None
    assert first.peer.sent_codes.get(b"a") is None


def test_nothing_is_lent_that_cannot_be_sent(pair: tuple[Keeper, Keeper]) -> None:
    first, _ = pair
    first.member.agent.lose(first.peer, "for the test")
    with pytest.raises(WorkerLost):
        first.lend(b"a")
    assert first.peer.code_lock.acquire(False)
    first.peer.code_lock.release()
    other = pair[1]
    other.member.agent.close()
    with pytest.raises((WorkerLost, NotInitialized)):
        other.lend(b"a")

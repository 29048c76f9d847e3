"""Messages about references reach a worker while one of its threads has the lock of the references.

That thread may be in a signal handler, or a finalizer, which makes a call and waits for its answer
on the same connection. So the reader of the connection must never wait for the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.unit.engine.worker.group import LIMIT_S, Member, group_of, wait_until
from torchweft.engine.protocol.references import Handed, Hold, Message, encode
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.references import ReferenceKeeper
from torchweft.ids import ReferenceId


class Pair:
    """Two workers; the first one notes the messages about references that it has taken."""

    def __init__(self, first: Member, second: Member) -> None:
        self.first, self.second = first, second
        self.keeper: ReferenceKeeper = first.references
        self.peer = first.peer(second)
        self.taken: list[Message] = []
        take = self.keeper._machine.message

        def note(sender: int, message: Message) -> None:
            take(sender, message)
            self.taken.append(message)

        self.keeper._machine.message = note  # type: ignore[method-assign]

    def read(self, *messages: Message) -> threading.Thread:
        """Has another thread handle a message of the second worker, as a reader does."""
        frame = Frame(Kind.REFERENCES, 0, 0, encode(messages), ())
        reader = threading.Thread(
            target=self.first.agent.receiver.dispatch, args=(self.peer, frame)
        )
        reader.start()
        return reader


@pytest.fixture
def pair() -> Iterator[Pair]:
    with group_of(2) as (first, second):
        first.start()
        second.start()
        yield Pair(first, second)


def test_the_reader_goes_on_while_a_thread_has_the_lock(pair: Pair) -> None:
    with pair.keeper._lock:
        reader = pair.read(Handed(1))
        reader.join(LIMIT_S)
        assert not reader.is_alive()
        assert pair.taken == []
    wait_until(lambda: pair.taken == [Handed(1)], "the postponed message")


def test_a_later_message_may_overtake_a_postponed_one(pair: Pair) -> None:
    """The protocol needs no order: every message is safe to repeat and to come late."""
    reactor = pair.first.agent.reactor
    submit, postponed = reactor.submit, []
    reactor.submit = lambda *task: postponed.append(task)  # type: ignore[method-assign]
    with pair.keeper._lock:
        pair.read(Handed(1)).join(LIMIT_S)
    reactor.submit = submit  # type: ignore[method-assign]
    pair.read(Handed(2)).join(LIMIT_S)
    wait_until(lambda: pair.taken == [Handed(2)], "the later message")
    (task,) = postponed
    reactor.submit(*task)
    wait_until(lambda: pair.taken == [Handed(2), Handed(1)], "the postponed message")


def test_a_sender_without_a_say_is_turned_away_also_later(pair: Pair) -> None:
    stranger = ReferenceId(creator=1, owner=1, number=0)  # The receiver does not own it.
    with pair.keeper._lock:
        pair.read(Hold(stranger, 1, 0)).join(LIMIT_S)
        assert pair.peer.lost is None
    wait_until(lambda: pair.peer.lost, "the loss")
    assert "no say" in pair.peer.lost_error().cause

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from tests.unit.agent.group import LIMIT_S, Member, group_of, wait_until
from torchweft.agent.fetching import ask_for_supply, read_request
from torchweft.channel.table import CMA, STRIPED, ChannelKind
from torchweft.errors import ProtocolError, WorkerLost
from torchweft.wire.messages import Kind, encode_ints

REASON = OSError("the way was closed")


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    with group_of(2, over=request.param) as members:
        for member in members:
            member.start()
        yield members


def hold(sender: Member, to: Member, *buffers: bytes) -> int:
    return sender.peer(to).held.hold([memoryview(buffer) for buffer in buffers])


@pytest.mark.parametrize("size", [5, 3_000_000])
def test_what_was_held_comes_behind_a_message(pair: list[Member], size: int) -> None:
    sender, receiver = pair
    token = hold(sender, receiver, b"x" * size, b"yz")
    supplied = ask_for_supply(receiver.agent, receiver.peer(sender), token, CMA, [size, 2], REASON)
    assert [bytes(buffer) for buffer in supplied] == [b"x" * size, b"yz"]
    assert sender.peer(receiver).held.statistics().message_count == 0


@pytest.mark.parametrize("kind", [CMA, STRIPED])
def test_what_is_not_held_any_more_is_an_error(pair: list[Member], kind: ChannelKind) -> None:
    sender, receiver = pair
    with pytest.raises(ProtocolError, match=r"worker0.*the way was closed"):
        ask_for_supply(receiver.agent, receiver.peer(sender), 99, kind, [3], REASON)
    assert receiver.peer(sender).lost is None


def test_what_is_of_another_size_is_an_error(pair: list[Member]) -> None:
    sender, receiver = pair
    token = hold(sender, receiver, b"xyz")
    with pytest.raises(ProtocolError, match="could not resend"):
        ask_for_supply(receiver.agent, receiver.peer(sender), token, CMA, [4], REASON)


def test_the_loss_of_the_sender_ends_the_wait(pair: list[Member]) -> None:
    sender, receiver = pair
    errors: list[BaseException] = []

    def ask() -> None:
        with pytest.raises(WorkerLost) as caught:
            ask_for_supply(receiver.agent, receiver.peer(sender), 1, CMA, [3], REASON)
        errors.append(caught.value)

    sender.agent.receiver.on(Kind.SUPPLY, lambda peer, frame: None, inline=True)
    with contextlib.ExitStack() as stack:
        asking = threading.Thread(target=ask)
        asking.start()
        stack.callback(asking.join, LIMIT_S)
        wait_until(lambda: len(receiver.agent.calls))
        receiver.agent.lose(receiver.peer(sender), "a test")
    assert len(errors) == 1


def test_a_request_says_which_message_and_which_way() -> None:
    assert read_request(encode_ints(7, CMA)) == (7, CMA)
    for control in (b"", encode_ints(1), encode_ints(1, 2, 3)):
        with pytest.raises(ProtocolError):
            read_request(control)

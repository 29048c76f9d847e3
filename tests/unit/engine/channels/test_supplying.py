from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from tests.memory_counts import held_counts
from tests.unit.engine.worker.group import LIMIT_S, Member, group_of, wait_until
from torchweft.engine.channels.channel import Channel, Handle
from torchweft.engine.channels.pull import Pull
from torchweft.engine.channels.stripes import Stripes
from torchweft.engine.wire.messages import Kind, encode_ints
from torchweft.errors import WorkerLost

REASON = OSError("the way was closed")


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    with group_of(2, over=request.param) as members:
        for member in members:
            member.start()
        yield members


def hold(sender: Member, to: Member, channel: type[Channel], *buffers: bytes) -> int:
    held, of = sender.peer(to).held, sender.agent.channels.of(channel)
    token = next(held.tokens)
    handles = [Handle(b"", len(buffer), memoryview(buffer)) for buffer in buffers]
    held.hold(token, [(of, handle) for handle in handles])
    return token


def ask(receiver: Member, sender: Member, *numbers: int) -> list[bytes]:
    request = encode_ints(*numbers)
    supplied = receiver.agent.ask_again(receiver.peer(sender), request, REASON)
    return [bytes(buffer) for buffer in supplied]


@pytest.mark.parametrize("size", [5, 3_000_000])
@pytest.mark.parametrize("channel", [Pull, Stripes])
def test_what_is_held_comes_behind_a_message_once(
    pair: list[Member], size: int, channel: type[Channel]
) -> None:
    sender, receiver = pair
    token = hold(sender, receiver, channel, b"x" * size, b"yz")
    assert ask(receiver, sender, token, channel.number, 0) == [b"x" * size, b"yz"]
    assert ask(receiver, sender, token, channel.number, 0) == []
    assert held_counts(sender.peer(receiver).held).size_bytes == 0


def test_buffers_of_other_channels_stay(pair: list[Member]) -> None:
    sender, receiver = pair
    token = hold(sender, receiver, Pull, b"abc")
    assert ask(receiver, sender, token, Stripes.number, 0) == []
    assert ask(receiver, sender, 99, Pull.number, 0) == []
    assert ask(receiver, sender, token, Pull.number, 0) == [b"abc"]


@pytest.mark.parametrize("is_lasting", [0, 1])
def test_the_receiver_says_whether_the_channel_is_given_up(
    pair: list[Member], is_lasting: int
) -> None:
    sender, receiver = pair
    sender.agent.connect(sender.peer(receiver))
    ask(receiver, sender, 1, Stripes.number, is_lasting)
    assert ("cannot get" in sender.peer(receiver).ways.obstacles()["striped"]) == bool(is_lasting)


@pytest.mark.parametrize("numbers", [(), (1,), (1, 2), (1, 2, 0, 4), (1, 77, 0)])
def test_malformed_requests_lose_their_sender(pair: list[Member], numbers: tuple[int, ...]) -> None:
    sender, receiver = pair
    with pytest.raises(WorkerLost):
        ask(receiver, sender, *numbers)
    wait_until(lambda: sender.peer(receiver).lost)


def test_the_loss_of_the_sender_ends_the_wait(pair: list[Member]) -> None:
    sender, receiver = pair
    errors: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(WorkerLost) as caught:
            ask(receiver, sender, 1, Pull.number, 1)
        errors.append(caught.value)

    sender.agent.receiver.on(Kind.SUPPLY, lambda peer, frame: None, inline=True)
    with contextlib.ExitStack() as stack:
        asking = threading.Thread(target=wait)
        asking.start()
        stack.callback(asking.join, LIMIT_S)
        wait_until(lambda: len(receiver.agent.calls))
        receiver.agent.lose(receiver.peer(sender), "a test")
    assert len(errors) == 1

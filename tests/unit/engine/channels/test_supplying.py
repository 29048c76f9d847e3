from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.engine.worker.group import Member, group_of, wait_until
from torchweft.engine.channels.channel import Channel, Handle
from torchweft.engine.channels.pull import Pull
from torchweft.engine.channels.stripes import Stripes
from torchweft.engine.wire.messages import encode_ints
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


def test_buffers_of_other_channels_stay(pair: list[Member]) -> None:
    sender, receiver = pair
    token = hold(sender, receiver, Pull, b"abc")
    assert ask(receiver, sender, token, Stripes.number, 0) == []
    assert ask(receiver, sender, 99, Pull.number, 0) == []
    assert ask(receiver, sender, token, Pull.number, 0) == [b"abc"]


@pytest.mark.parametrize("numbers", [(), (1,), (1, 2), (1, 2, 0, 4), (1, 77, 0)])
def test_malformed_requests_lose_their_sender(pair: list[Member], numbers: tuple[int, ...]) -> None:
    sender, receiver = pair
    with pytest.raises(WorkerLost):
        ask(receiver, sender, *numbers)
    wait_until(lambda: sender.peer(receiver).lost)

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.memory_counts import first_for, held_counts
from tests.unit.engine.channels.home import Posts, SomePeer, make_home
from torchweft import knobs
from torchweft.engine.channels.channel import (
    CannotGet,
    Channel,
    Entry,
    Handle,
    Held,
    Ways,
)
from torchweft.engine.channels.channels import Channels
from torchweft.engine.wire.messages import Kind, decode_ints
from torchweft.engine.worker.tensor_messages import (
    FOLLOWS,
    TensorMessages,
    encode_table,
)
from torchweft.errors import ProtocolError

MIB = 1 << 20


class Fake(Channel):
    """A channel whose handles are texts, and whose buffers are made of them."""

    def __init__(self, name: str, number: int, from_bytes: int, *, is_held: bool = True) -> None:
        self.name = name  # type: ignore[misc]
        super().__init__(make_home())
        self.name, self.number, self.from_bytes = name, number, from_bytes  # type: ignore[misc]
        self.is_held = is_held  # type: ignore[misc]
        self.room = 100
        self.events: list[str] = []
        self.error: Exception | None = None

    def put(
        self, peer: Any, token: int, buffers: Sequence[torch.Tensor]
    ) -> Sequence[Handle | None]:
        handles: list[Handle | None] = []
        for buffer in buffers:
            if self.error is not None:
                raise self.error
            takes = buffer.nbytes >= self.from_bytes and self.room > 0
            self.room -= takes
            handles.append(Watched(self, buffer) if takes else None)
        return handles

    def begin(self, peer: Any, token: int, handles: Sequence[Any], **options: Any) -> None:
        self.events.append(f"begin {len(handles)}")

    def get(self, peer: Any, token: int, entries: Sequence[Entry]) -> Sequence[bytes]:
        self.events.append(f"get {len(entries)}")
        if self.error is not None:
            raise self.error
        return [entry.content * entry.size_bytes for entry in entries]

    def drop(self, peer: Any, token: int, entries: Sequence[Entry]) -> None:
        self.events.append(f"drop {len(entries)}")


class Watched(Handle):
    """A handle that notes what becomes of it."""

    def __init__(self, channel: Fake, buffer: torch.Tensor | memoryview) -> None:
        super().__init__(b"x", buffer.nbytes, buffer)
        self._events = channel.events

    def take_back(self) -> None:
        self._events.append("taken back")


@pytest.fixture
def fakes() -> list[Fake]:
    return [Fake("best", 11, 100), Fake("next", 12, 200), Fake("free", 13, 400, is_held=False)]


@pytest.fixture
def posts() -> Posts:
    return Posts()


@pytest.fixture
def asked() -> list[tuple[int, ...]]:
    return []


@pytest.fixture
def channels(fakes: list[Fake], posts: Posts, asked: list[tuple[int, ...]]) -> TensorMessages:
    def ask(peer: Any, request: bytes, reason: Exception) -> list[bytes]:
        asked.append(decode_ints(request))
        return [b"y" * 100]

    with knobs.SHM_LIMIT_BYTES.override(0):
        made = Channels(make_home(posts))
    made.close(0.0)
    made.by_number = {each.number: each for each in fakes}
    agent: Any = SimpleNamespace(
        channels=made,
        info=SimpleNamespace(name="here"),
        page_locks=made.home.page_locks,
        pool=made.home.pool,
        timers=SimpleNamespace(add=lambda job: None),
        receiver=SimpleNamespace(on=lambda kind, handler, inline: None),
        ask_again=ask,
    )
    return TensorMessages(agent)


@pytest.fixture
def peer(fakes: list[Fake]) -> SomePeer:
    made = SomePeer()
    with knobs.INLINE_LIMIT_BYTES.override(10):
        made.ways = Ways(made.name, fakes)
    made.ways.confirm(dict.fromkeys(["best", "next", "free"], ""))
    return made


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


# What is held


def held_one(held: Held, fake: Fake, memory: memoryview) -> int:
    token = next(held.tokens)
    held.hold(token, [(fake, Watched(fake, memory))])
    return token


def test_close_lets_go_of_everything_for_good(fakes: list[Fake]) -> None:
    held = Held()
    arrays = [np.zeros(100, dtype=np.uint8) for _ in range(2)]
    alive = [weakref.ref(array) for array in arrays]
    held_one(held, fakes[0], arrays[0].data)
    held.close()
    token = held_one(held, fakes[0], arrays[1].data)
    arrays.clear()
    assert [each() for each in alive] == [None, None]
    assert held_counts(held) == (0, 0)
    held.release(token)
    assert not fakes[0].events


def test_a_finalizer_may_use_what_is_letting_go_of_it(fakes: list[Fake]) -> None:
    held, array = Held(), np.zeros(100, dtype=np.uint8)
    seen: list[tuple[int, int]] = []
    weakref.finalize(array, lambda: seen.append(held_counts(held)))
    held_one(held, fakes[0], array.data)
    del array
    held.close()
    assert seen == [(0, 0)]


# Sending


def test_a_channel_that_raises_leaves_nothing(
    channels: TensorMessages, fakes: list[Fake], peer: Any
) -> None:
    fakes[1].error = KeyboardInterrupt()  # type: ignore[assignment]
    fakes[0].room = 1
    with pytest.raises(KeyboardInterrupt):
        channels.put(peer, tensors(300, 300))
    assert fakes[0].events == ["taken back"]
    assert held_counts(peer.held) == (0, 0)


# Receiving


def message(*entries: Entry) -> tuple[bytes, list[bytes]]:
    """Returns the table of a message, and the buffers that follow it."""
    return encode_table(5, entries), [b"f" * e.size_bytes for e in entries if e.channel == FOLLOWS]


def no_devices() -> dict[int, torch.device | None]:
    raise AssertionError("no channel is for devices")


def test_what_comes_in_another_size_is_an_error_and_the_rest_is_dropped(
    channels: TensorMessages, fakes: list[Fake], peer: Any, posts: Posts
) -> None:
    fakes[0].error = CannotGet("broken")
    with pytest.raises(ProtocolError, match=r"'worker1' could not resend .* broken"):
        channels.get(peer, *message(Entry(11, 99, b"a"), Entry(12, 1, b"b")), no_devices)
    assert fakes[1].events == ["drop 1"]
    assert [kind for kind, _ in posts.sent] == [Kind.PULLED]


def test_a_channel_of_another_version_is_refused(channels: TensorMessages, peer: Any) -> None:
    with pytest.raises(ProtocolError, match="channel 99"):
        channels.get(peer, *message(Entry(99, 1, b"a")), no_devices)


# Ways


@pytest.mark.parametrize("verdict", [None, {"best": 0}, "best"])
def test_what_is_no_verdict_is_refused(fakes: list[Fake], verdict: object) -> None:
    with pytest.raises(ProtocolError):
        Ways("ps", fakes).confirm(verdict)


def test_giving_up_warns_once_and_lasts(
    fakes: list[Fake], caplog: pytest.LogCaptureFixture
) -> None:
    ways = Ways("trainer3", fakes)
    ways.confirm({"best": "", "next": ""})
    with caplog.at_level(logging.WARNING):
        ways.give_up("best", "Operation not permitted")
        ways.give_up("best", "once more")
    ways.confirm({"best": ""})
    assert first_for(ways, MIB) == "next"
    assert ways.obstacles()["best"] == "Operation not permitted"
    [record] = caplog.records
    assert record.getMessage() == (
        "tensors to worker 'trainer3' no longer travel by best, but by next: "
        "Operation not permitted"
    )

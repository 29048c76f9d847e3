"""What channels need of a worker, for tests without one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torchweft.engine.channels.channel import Held, Home, Ways
from torchweft.engine.channels.device_copies import PageLocks
from torchweft.engine.channels.memory import BufferPool, Copier
from torchweft.engine.wire.messages import Kind
from torchweft.errors import WorkerLost

MIB = 1 << 20


class SomePeer:
    """A worker that a test plays."""

    def __init__(self, number: int = 1) -> None:
        self.id = number
        self.name = f"worker{number}"
        self.is_self = self.is_over = False
        self.kept: dict[str, Any] = {}
        self.ways = Ways(self.name)
        self.held = Held()
        self.moved: Counter[str] = Counter()

    def lost_error(self) -> WorkerLost:
        return WorkerLost("it is lost", worker=self.name, since=0.0)


class Posts:
    """The control messages that a worker sends: kind and content."""

    def __init__(self) -> None:
        self.sent: list[tuple[Kind, bytes]] = []

    def post(self, peer: Any, kind: Kind, control: bytes) -> None:
        self.sent.append((kind, control))


def make_home(posts: Posts | None = None, peers: tuple[SomePeer, ...] = ()) -> Home:
    """Returns a home without threads."""

    def refuse(*arguments: object) -> list[Any]:
        raise ConnectionRefusedError("there is nothing to dial")

    def nothing(*arguments: object) -> None:
        pass

    no_reactor: Any = None
    return Home(
        name="here",
        reactor=no_reactor,
        pool=BufferPool(MIB),
        page_locks=PageLocks(0),
        copier=Copier("copy"),
        idle_s=10.0,
        detection_s=10.0,
        peers={peer.id: peer for peer in peers},
        post=(posts or Posts()).post,
        on=nothing,
        dial=refuse,
        lose=nothing,
        check_open=nothing,
    )

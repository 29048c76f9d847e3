"""Two members with a session, and checks of the messages that it carries."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

from tests.unit.engine.worker.group import Member, group_of, wait_until
from torchweft.engine.io.session import ResumableLink
from torchweft.engine.protocol.connecting import Patience, Terms
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.peers import Peer

HEAD = struct.Struct("<III")


class Inbox:
    """Checks that each writer's frames reach a member once and in order."""

    def __init__(self, member: Member) -> None:
        self.count = 0
        self.wrong: list[object] = []
        self._next: dict[int, int] = {}
        member.agent.receiver.on(Kind.CALL, self._take, inline=True)

    def _take(self, peer: Peer, frame: Frame) -> None:
        writer, number, size = HEAD.unpack_from(frame.control)
        if self._next.get(writer, 0) != number:
            self.wrong.append((writer, number, self._next.get(writer)))
        self._next[writer] = number + 1
        if [bytes(buffer) for buffer in frame.buffers] != [content(number, size)]:
            self.wrong.append((writer, number, "content"))
        self.count += 1


def content(number: int, size: int) -> bytes:
    return bytes([number % 251]) * size


def send(member: Member, other: Member, number: int, size: int = 10, writer: int = 0) -> None:
    parts = encode_frame(
        Kind.CALL, 0, 0, HEAD.pack(writer, number, size), [memoryview(content(number, size))]
    )
    member.agent.sender.send(member.peer(other), parts, may_block=bool(number % 2))


class Pair:
    """Two members with a session that the first one has dialled, and the inbox of each."""

    def __init__(self, members: list[Member]) -> None:
        self.dialler, self.acceptor = members
        self.inboxes = [Inbox(member) for member in members]
        for member in members:
            member.start()
        self.dialler.agent.connect(self.dialler.peer(self.acceptor))
        wait_until(lambda: self.acceptor.peer(self.dialler).link)

    @property
    def links(self) -> tuple[ResumableLink, ResumableLink]:
        return self.dialler.session(self.acceptor), self.acceptor.session(self.dialler)

    @property
    def terms(self) -> tuple[Terms, Terms]:
        """The session's terms, as each side has them."""
        return self.dialler.terms(self.acceptor), self.acceptor.terms(self.dialler)

    @property
    def is_sound(self) -> bool:
        """Whether both sides are connected, by the same connection."""
        one, other = self.links
        is_one = self.terms[0].attempt == self.terms[1].attempt
        return is_one and not one.is_broken and not other.is_broken

    @property
    def is_settled(self) -> bool:
        """Whether, in addition, no further connection is being made or about to be."""
        agents = self.dialler.agent, self.acceptor.agent
        making = [each._connector._making for each in agents]
        return self.is_sound and not any(making) and not any(each.reactor.busy for each in agents)

    def lost(self) -> list[str]:
        peers = self.dialler.peer(self.acceptor), self.acceptor.peer(self.dialler)
        return [peer.lost.cause for peer in peers if peer.lost is not None]

    def check(self, first_number: int = 0) -> None:
        """Sends messages both ways, and waits until all of them have arrived."""
        counts = [inbox.count for inbox in self.inboxes]
        for number in range(first_number, first_number + 3):
            send(self.dialler, self.acceptor, number)
            send(self.acceptor, self.dialler, number)
        wait_until(lambda: [inbox.count for inbox in self.inboxes] == [n + 3 for n in counts])
        assert [inbox.wrong for inbox in self.inboxes] == [[], []]


@contextlib.contextmanager
def pair_of(patience: Patience | None = None) -> Iterator[Pair]:
    with group_of(2, over="tcp", patience=patience) as members:
        yield Pair(members)

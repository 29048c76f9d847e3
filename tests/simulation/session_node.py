"""Workers whose sessions outlive connections, on a simulated network.

The machines are the real ones: ``torchweft.wire.session`` counts and keeps,
``torchweft.wire.frames`` cuts frames, ``torchweft.protocol.contact`` says when to dial and when to
give up. What is here does the part of the shell, with simulated connections: whoever dialled a
session first resumes it, the other side asks it to (``session_dial``).

Ids name lives: who comes back after a crash has another id, and refuses what is meant for the old
one. A pair of lives has one session, ever.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.simulation.session_dial import ANSWER, ASK, HELLO, REFUSED, WELCOME, Dial
from tests.simulation.streams import End, Streams
from tests.simulation.timeline import Clock, Timeline
from torchweft.protocol.contact import Contact, Step
from torchweft.wire.frames import Buffer, Frame, FrameParser, encode_frame
from torchweft.wire.session import Incoming, Outgoing

ACKNOWLEDGED = 255
"""Kind of the frames that only the sessions themselves see."""
ACKNOWLEDGE_AFTER_S = 0.5
_POSITION = struct.Struct("<q")
_MOMENT_S = 1e-6


@dataclass(frozen=True)
class Limits:
    """When a worker gives another one up, and how long it waits for one to greet."""

    detection_s: float = 10.0
    reconnect_s: float = 10.0

    @property
    def patience_s(self) -> float:
        return min(self.detection_s, self.reconnect_s) / 8

    @property
    def probe_s(self) -> float:
        return self.detection_s / 8


class Half:
    """One worker's half of a session: what outlives connections."""

    def __init__(self, node: Node, peer: int, peer_place: int, is_dialler: bool) -> None:
        self.node = node
        self.peer = peer
        self.peer_place = peer_place
        self.is_dialler = is_dialler
        self.outgoing = Outgoing()
        self.incoming = Incoming()
        self.parser = FrameParser(
            lambda size: memoryview(bytearray(size)),
            receive_bytes=256,
            control_limit_bytes=1 << 20,
            frame_limit_bytes=1 << 20,
        )
        self.contact = Contact(node.clock.now_s, node.limits.detection_s, node.limits.reconnect_s)
        self.contact.broke(node.clock.now_s, "never connected", is_answer=True)
        self.end: End | None = None
        self.unsent: deque[Buffer] = deque()
        self.attempt = 0
        self.message_position = 0
        """Where the last frame ends that is no acknowledgement."""
        self.is_lost = False
        self.resumptions = 0
        self.has_gone_on_inside_a_frame = False
        self.acknowledgements = 0
        self._is_acknowledgement_due = False
        self._reminder_s = float("inf")

    # Sending and receiving

    def send(self, parts: Sequence[Buffer]) -> None:
        self.outgoing.keep(parts)
        self.unsent.extend(parts)
        self._write()

    def _write(self) -> None:
        end, unsent = self.end, self.unsent
        while unsent and end is not None:
            part = memoryview(unsent[0])
            size = end.write(part)
            if size < part.nbytes:
                unsent[0] = part[size:]
                return
            unsent.popleft()

    def _on_bytes(self, data: bytes) -> None:
        is_due, has_news = False, False
        while data and not self.is_lost:
            space = self.parser.space()[0]
            size = min(len(data), len(space))
            space[:size] = data[:size]
            data = data[size:]
            is_due |= self.incoming.received(size)
            for frame in self.parser.received(size):
                if frame.kind == ACKNOWLEDGED:
                    self.outgoing.acknowledge(*_POSITION.unpack(bytes(frame.control)))
                else:
                    has_news = True
                    self.node.on_frame(self.peer, frame)
        if is_due:
            self._acknowledge()
        elif has_news and not self._is_acknowledgement_due:
            self._is_acknowledgement_due = True
            self.node.clock.later(ACKNOWLEDGE_AFTER_S, self._acknowledge)

    def _acknowledge(self) -> None:
        self._is_acknowledgement_due = False
        position = None if self.is_lost else self.incoming.acknowledgement()
        if position is not None:
            self.acknowledgements += 1
            self.send(encode_frame(ACKNOWLEDGED, 0, 0, _POSITION.pack(position)))

    # Breaks

    def connected(self, end: End, position: int, rest: bytes) -> None:
        """Goes on over a new connection, after the greeting."""
        self.outgoing.acknowledge(position)
        self.unsent = deque(self.outgoing.since(position))
        if self.unsent and isinstance(self.unsent[0], memoryview):
            self.has_gone_on_inside_a_frame |= (
                self.unsent[0].nbytes < memoryview(self.unsent[0].obj).nbytes
            )
        self.end = end
        end.on_bytes = self._on_bytes
        end.on_room = self._write
        end.on_broken = self._on_broken
        self.resumptions += 1
        self.contact.resumed(self.node.clock.now_s)
        if rest:
            self._on_bytes(rest)
        self._write()
        self._probe(end)
        self.attend()

    def break_off(self, cause: str) -> None:
        """Ends the connection, if there is one, but not the session."""
        if self.end is not None:
            self.end.close()
            self.end = None
        self.contact.broke(self.node.clock.now_s, cause, is_answer=True)

    def _on_broken(self) -> None:
        self.end = None
        self.contact.broke(self.node.clock.now_s, "the connection broke", is_answer=True)
        self.attend()

    def _probe(self, end: End) -> None:
        """Does what the system does, whatever the worker is doing: asks for signs of life."""
        if end is self.end and end.is_open:
            end.probe()
            self.node.timeline.later(self.node.limits.probe_s, self._probe, end)

    # Contact

    def attend(self) -> None:
        """Does what the machine says, and sees to it that it is asked again in time."""
        now_s = self.node.clock.now_s
        if self.end is not None:
            self.contact.heard(self.node.own_time(self.end.heard_s))
        step = self.contact.step(now_s)
        if step is Step.GIVE_UP:
            self.node.lose(self.peer, self.contact.cause)
        elif step is Step.DIAL:
            Dial(self)
        due_s = max(self.contact.due_s(), now_s + _MOMENT_S)
        if due_s < self._reminder_s and not self.is_lost:
            self._reminder_s = due_s
            self.node.clock.later(due_s - now_s, self._on_reminder, due_s)

    def _on_reminder(self, due_s: float) -> None:
        if due_s == self._reminder_s:
            self._reminder_s = float("inf")
            if not self.is_lost:
                self.attend()

    def lose(self) -> None:
        self.is_lost = True
        if self.end is not None:
            self.end.close()
            self.end = None
        self.unsent.clear()
        self.outgoing.clear()


class Node:
    """One life of a worker.

    Attributes:
        on_frame: Called with the peer's id and each frame.
        on_lost: Called once for each peer that is given up, with its id and why.
    """

    def __init__(
        self, streams: Streams, node_id: int, place: int, clock: Clock, limits: Limits
    ) -> None:
        self.streams = streams
        self.timeline: Timeline = streams.timeline
        self.chance: random.Random = streams.chance
        self.id = node_id
        self.place = place
        self.clock = clock
        self.limits = limits
        self.is_alive = True
        self.halves: dict[int, Half] = {}
        self.on_frame: Callable[[int, Frame], None] = lambda peer, frame: None
        self.on_lost: Callable[[int, str], None] = lambda peer, cause: None
        streams.listen(place, self._accept)

    @property
    def lost(self) -> set[int]:
        """The peers that were given up."""
        return {peer for peer, half in self.halves.items() if half.is_lost}

    def own_time(self, true_s: float) -> float:
        """Returns what the clock showed at ``true_s``."""
        return self.clock.now_s - (self.timeline.now_s - true_s) * self.clock.rate

    def know(self, peer: int, peer_place: int) -> None:
        """Learns of another worker; the one with the larger id dials."""
        self.halves[peer] = half = Half(self, peer, peer_place, is_dialler=self.id > peer)
        half.attend()

    def send(self, peer: int, parts: Sequence[Buffer]) -> bool:
        """Sends a frame; returns False where that peer is lost."""
        half = self.halves[peer]
        if half.is_lost:
            return False
        half.send(parts)
        half.message_position = half.outgoing.position
        return True

    def lose(self, peer: int, cause: str) -> None:
        half = self.halves[peer]
        if not half.is_lost:
            half.lose()
            self.on_lost(peer, cause)

    def kill(self, is_silent: bool) -> None:
        """Ends this life; with its host, where ``is_silent``."""
        self.is_alive = False
        self.clock.stop()
        self.streams.kill(self.place, is_silent)
        for half in self.halves.values():
            half.end = None

    def freeze(self, span_s: float) -> None:
        """Has this worker do nothing for a while, as under a signal or a lock."""
        self.clock.freeze(span_s)
        self.streams.freeze(self.place, span_s)

    def _accept(self, end: End) -> None:
        received = bytearray()

        def on_bytes(data: bytes) -> None:
            received.extend(data)
            if len(received) >= HELLO.size:
                end.on_bytes = lambda data: None
                self._answer(end, *HELLO.unpack_from(received))

        end.on_bytes = on_bytes

    def _answer(
        self, end: End, intent: int, sender: int, meant: int, attempt: int, position: int
    ) -> None:
        half = self.halves.get(sender)
        if meant != self.id or (half is not None and half.is_lost):
            end.write(ANSWER.pack(REFUSED, 0))
            end.close()
            return
        if half is None:
            half = self.halves[sender] = Half(self, sender, end.peer_place, is_dialler=False)
        if intent == ASK:
            end.write(ANSWER.pack(WELCOME, 0))
            end.close()
            half.break_off("the other side asks for another connection")
            half.attend()
        elif attempt <= half.attempt:
            end.close()  # A newer one has overtaken it.
        else:
            half.attempt = attempt
            half.break_off("there is a new one")
            end.write(ANSWER.pack(WELCOME, half.incoming.position))
            half.connected(end, position, b"")

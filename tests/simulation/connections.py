"""Workers that are connected over a simulated network: the I/O of the shell, no decisions.

The machines are the real ones: ``engine.protocol.connecting`` decides about connections,
``engine.wire.session`` counts and keeps bytes, ``engine.wire.frames`` parses frames. The rest
of the shell is here and in ``greetings``, with simulated connections.

Ids name lives: a worker that comes back after a crash has another id, and refuses greetings for
the former one.
"""

from __future__ import annotations

import math
import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.simulation.greetings import Accepted, Dialled, Talk
from tests.simulation.streams import End, Streams
from tests.simulation.timeline import Clock, Timeline
from torchweft.engine.protocol.connecting import (
    Action,
    Busy,
    Connecting,
    Dial,
    Failure,
    Lose,
    Patience,
    Probe,
    Purpose,
    Redial,
    Resume,
    Step,
    Terms,
    Wait,
)
from torchweft.engine.protocol.sessions import Rounds
from torchweft.engine.wire import session
from torchweft.engine.wire.frames import Buffer, Frame, FrameParser, encode_frame
from torchweft.engine.wire.session import Incoming, Outgoing

ACKNOWLEDGED, GOODBYE = 255, 254
"""Kinds of the frames that only the sessions themselves see."""
_POSITION = struct.Struct("<q")
_MOMENT_S = 1e-6
_PAUSES_S = (0.0, 0.0, 0.001, 0.05)
"""How long a thread of the shell may be kept waiting between two steps."""
_DEADLINES_S = (math.inf, math.inf, 0.3, 3.0)
"""How long callers wait for a first connection."""


@dataclass(frozen=True)
class Limits:
    """When a worker gives another one up, and how long it waits for an answer.

    Attributes:
        detection_s: How long a peer may be silent.
        reconnect_s: How long a session may be without a connection.
        connect_s: How long a peer may be unreachable before the first connection.
    """

    detection_s: float = 10.0
    reconnect_s: float = 10.0
    connect_s: float = 10.0

    @property
    def patience_s(self) -> float:
        return min(self.detection_s, self.reconnect_s) / 4

    @property
    def probe_s(self) -> float:
        return self.detection_s / 8


class Half:
    """One worker's half of a connection: its machine, and the state that outlives connections."""

    def __init__(self, node: Node, peer: int, peer_place: int) -> None:
        self.node = node
        self.peer = peer
        self.peer_place = peer_place
        self.machine: Connecting = node.machine_type(peer, str(peer))
        self.outgoing = Outgoing()
        self.incoming = Incoming(session.ALONE_BYTES)
        self.parser = FrameParser(
            lambda size: memoryview(bytearray(size)),
            receive_bytes=256,
            control_limit_bytes=1 << 20,
            frame_limit_bytes=1 << 20,
        )
        self.end: End | None = None
        self.unsent: deque[Buffer] = deque()
        self.message_position = 0
        """The end of the last frame that is not an acknowledgement."""
        self.is_lost = False
        self.resumptions = 0
        self.dials = 0
        self.has_gone_on_inside_a_frame = False
        self.acknowledgements = 0
        self._greeting_rest = b""
        self._names = 0
        self._is_wanted = False
        self._attempt: Dialled | None = None
        self._reminder_s = math.inf

    # The first connection

    def want(self, deadline_s: float) -> None:
        """Makes a caller wait for the connection, if none does yet."""
        if self._is_wanted or self.is_lost or self.end is not None:
            return
        self._is_wanted = True
        self._names += 1
        name = f"{self.node.id}-{self.peer}-{self._names}"
        self._follow(
            self.machine.want(self.node.clock.now_s, deadline_s, self.node.limits.connect_s, name)
        )

    def go_on(self) -> None:
        if self._is_wanted:
            self._follow(self.machine.go_on(self.node.clock.now_s))

    def repeat_offer(self) -> None:
        """Ends an attempt that waits in vain for an answer, or begins another one."""
        if self._is_wanted and self._attempt is not None:
            self._attempt.fail("the other side says that it broke")
        else:
            self.want(math.inf)

    def dial_failed(self, failure: Failure, cause: str) -> None:
        self.node.note("does not get through to", self.peer, failure.name, cause)
        if self._is_wanted:
            self._follow(self.machine.dial_failed(self.node.clock.now_s, failure, cause))

    def _follow(self, step: Step) -> None:
        now_s = self.node.clock.now_s
        if isinstance(step, Dial):
            self.dials += 1
            self._attempt = Dialled(self, Purpose.LINK, step.terms, step.limit_s)
            return
        if isinstance(step, Wait):
            self.node.clock.later(max(step.until_s - now_s, _MOMENT_S), self.go_on)
            return
        self._is_wanted = False
        self.machine.want_no_more()
        if isinstance(step, Lose):
            self.node.lose(self.peer, step.cause)
        elif isinstance(step, Busy):
            # The caller has given up; another caller may come.
            self.node.clock.later(3.0 * self.node.chance.random(), self._want_again)

    def _want_again(self) -> None:
        if self.unsent or self.node.is_eager:
            self.want(math.inf)

    def adopt(self, terms: Terms | None) -> str:
        limits = self.node.limits
        patience = Patience(limits.detection_s, limits.reconnect_s)
        return self.machine.adopt(self.node.clock.now_s, terms, patience)

    # Sending and receiving

    def send(self, parts: Sequence[Buffer]) -> None:
        self.outgoing.keep(parts)
        self.unsent.extend(parts)
        self._write()

    def _write(self) -> None:
        end, unsent = self.end, self.unsent
        while end is not None and self._greeting_rest:
            size = end.write(self._greeting_rest)
            self._greeting_rest = self._greeting_rest[size:]
            if not size:
                return
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
            self.incoming.position += size
            is_due |= self.incoming.is_much
            for frame in self.parser.received(size):
                if frame.kind == ACKNOWLEDGED:
                    self.outgoing.acknowledge(*_POSITION.unpack(bytes(frame.control)))
                elif frame.kind == GOODBYE:
                    self.machine.goodbye(bytes(frame.control))
                    is_due = True  # The leaver waits for the acknowledgement.
                else:
                    has_news = True
                    self.node.on_frame(self.peer, frame)
        if is_due:
            self.acknowledge()
        elif has_news:
            self.node.acknowledge_later()

    def acknowledge(self) -> None:
        position = None if self.is_lost else self.incoming.acknowledgement()
        if position is not None:
            self.acknowledgements += 1
            self.send(encode_frame(ACKNOWLEDGED, 0, 0, _POSITION.pack(position)))

    # Connections come and end

    def connected(self, talk: Talk, position: int) -> None:
        """Continues over a new connection, after the greeting."""
        if self.is_lost:
            talk.end.close()
            return
        self.outgoing.acknowledge(position)
        self.unsent = deque(self.outgoing.since(position))
        if self.unsent and isinstance(self.unsent[0], memoryview):
            self.has_gone_on_inside_a_frame |= (
                self.unsent[0].nbytes < memoryview(self.unsent[0].obj).nbytes
            )
        self.resumptions += 1
        self.node.note("is connected to", self.peer, self.machine.session)
        end = self.end = talk.end
        if not end.is_open:
            self._on_broken()
            return
        end.on_bytes, end.on_room, end.on_broken = self._on_bytes, self._write, self._on_broken
        self._greeting_rest = talk.unsent
        rest = bytes(talk.rest)
        if rest:
            self._on_bytes(rest)
        self._write()
        self._probe(end)
        self.attend()

    def resume(self, talk: Talk, position: int) -> None:
        """Resumes the session over a new connection."""
        if not self.is_lost:
            self.machine.resumed(self.node.clock.now_s)
        self.connected(talk, position)

    def stop(self) -> int:
        """Ends the connection in favour of another; returns this side's receive position."""
        if self.end is not None:
            self.end.close()
            self.end = None
        return self.incoming.position

    def break_off(self, cause: str) -> None:
        """Ends the connection, if there is one, but not the session."""
        if self.end is not None:
            self.stop()
            self._act(self.machine.broke(self.node.clock.now_s, cause, is_answer=True))
            self.attend()

    def _on_broken(self) -> None:
        self.end = None
        now_s = self.node.clock.now_s
        self._act(self.machine.broke(now_s, "the connection broke", is_answer=True))
        self.attend()

    def _probe(self, end: End) -> None:
        """Sends keepalives, as the system does whatever the worker is doing."""
        if end is self.end and end.is_open:
            end.probe()
            self.node.timeline.later(self.node.limits.probe_s, self._probe, end)

    # Contact

    def attend(self) -> None:
        """Carries out the machine's actions, and schedules its next step."""
        if self.is_lost:
            return
        now_s = self.node.clock.now_s
        if self.end is not None:
            self.machine.heard(self.node.own_time(self.end.heard_s))
        self._act(self.machine.step(now_s))
        due_s = max(self.machine.due_s(), now_s + _MOMENT_S)
        if due_s < self._reminder_s and not self.is_lost:
            self._reminder_s = due_s
            self.node.clock.later(due_s - now_s, self._on_reminder, due_s)

    def _on_reminder(self, due_s: float) -> None:
        if due_s == self._reminder_s:
            self._reminder_s = math.inf
            self.attend()

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Redial):
                self.node.pause(self._redial)
            else:
                self.node.lose(self.peer, action.cause)

    def _redial(self) -> None:
        asked = self.machine.redial(self.node.clock.now_s, self.node.limits.patience_s)
        if isinstance(asked, Resume):
            self.dials += 1
            Dialled(self, Purpose.RESUME, None, asked.limit_s)
        elif isinstance(asked, Probe):
            self.dials += 1
            Dialled(self, Purpose.PROBE, asked.terms, asked.limit_s)

    def redial_failed(self, failure: Failure, cause: str) -> None:
        if self.is_lost:
            return
        now_s = self.node.clock.now_s
        if self.end is None and not self.machine.is_broken:
            self._act(self.machine.broke(now_s, cause, is_answer=True))
        self._act(self.machine.redial_failed(now_s, failure, cause))
        self.attend()

    def lose(self) -> None:
        self.is_lost = True
        self.stop()
        self.unsent.clear()
        self.outgoing.clear()


class Node:
    """One life of a worker.

    Attributes:
        machine_type: The class of the machines; mutation tests replace it with a faulty one.
        is_eager: Whether callers that gave up waiting for a first connection come back.
        on_frame: Called with the peer's id and each frame.
        on_lost: Called once for each lost peer, with its id and the cause.
        on_note: Called with each event, for the trace.
    """

    machine_type: type[Connecting] = Connecting

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
        self.rounds = Rounds(limits.detection_s, limits.probe_s)
        self._is_round_due = False
        self.is_alive = True
        self.is_eager = True
        self.halves: dict[int, Half] = {}
        self.on_frame: Callable[[int, Frame], None] = lambda peer, frame: None
        self.on_lost: Callable[[int, str], None] = lambda peer, cause: None
        self.on_note: Callable[..., None] = lambda *what: None
        streams.listen(place, self._accept)

    def note(self, *what: object) -> None:
        self.on_note(self.id, *what)

    def pause(self, what: Callable[..., None], *arguments: object) -> None:
        """Schedules a step of a thread of the shell."""
        self.clock.later(self.chance.choice(_PAUSES_S), what, *arguments)

    @property
    def lost(self) -> set[int]:
        """The lost peers."""
        return {peer for peer, half in self.halves.items() if half.is_lost}

    def own_time(self, true_s: float) -> float:
        """Returns what the clock showed at ``true_s``."""
        return self.clock.now_s - (self.timeline.now_s - true_s) * self.clock.rate

    def half_of(self, peer: int, place: int) -> Half:
        """Returns this worker's half for a peer, which may be new to it."""
        if peer not in self.halves:
            self.halves[peer] = Half(self, peer, place)
        return self.halves[peer]

    def know(self, peer: int, peer_place: int) -> None:
        """Learns of another worker, and needs a connection to it, now or soon."""
        half = self.half_of(peer, peer_place)
        delay_s = self.chance.choice((0.0, 0.0, 0.1, 1.0)) * self.chance.random()
        self.clock.later(delay_s, self._want, half)

    def _want(self, half: Half) -> None:
        half.want(self.clock.now_s + self.chance.choice(_DEADLINES_S))

    def send(self, peer: int, parts: Sequence[Buffer]) -> bool:
        """Sends a frame; returns False if that peer is lost."""
        half = self.halves[peer]
        if half.is_lost:
            return False
        if half.incoming.is_due:
            half.acknowledge()
        half.send(parts)
        half.message_position = half.outgoing.position
        if not half.resumptions:
            half.want(math.inf)
        return not half.is_lost

    def acknowledge_later(self) -> None:
        """Has the data that has come acknowledged in the next round."""
        if not self._is_round_due:
            self._is_round_due = True
            self._go_round()

    def _go_round(self) -> None:
        now_s = self.clock.now_s
        if not self.rounds.must_acknowledge(now_s):
            self.clock.later(max(self.rounds.acknowledge_at_s - now_s, _MOMENT_S), self._go_round)
            return
        self._is_round_due = False
        for half in list(self.halves.values()):
            half.acknowledge()

    def lose(self, peer: int, cause: str) -> None:
        half = self.halves[peer]
        known = half.machine.lose(cause)
        if known is not None:
            half.lose()
            self.on_lost(peer, known)

    def kill(self, is_silent: bool) -> None:
        """Ends this life, with its host if ``is_silent``."""
        self.is_alive = False
        self.clock.stop()
        self.streams.kill(self.place, is_silent)
        for half in self.halves.values():
            half.end = None

    def say_goodbye(self, reason: str) -> None:
        """Tells all peers that this life ends; ``is_heard`` tells when it may."""
        for half in self.halves.values():
            if not half.is_lost:
                half.send(encode_frame(GOODBYE, 0, 0, reason.encode()))
                half.message_position = half.outgoing.position

    def is_heard(self) -> bool:
        """Returns whether all peers have everything that this worker has sent, or are lost."""
        return all(
            half.is_lost or half.outgoing.acknowledged >= half.message_position
            for half in self.halves.values()
        )

    def freeze(self, span_s: float) -> None:
        """Freezes this worker for a while, as a signal or a lock does."""
        self.clock.freeze(span_s)
        self.streams.freeze(self.place, span_s)

    def _accept(self, end: End) -> None:
        Accepted(self, end)

"""Workers that count for each other over sessions, and an observer that knows every frame.

A call adds one to a counter of the callee, and is answered. The observer records all sent frames
and checks that each arrives once, in order and unaltered. It also checks that every counter ends at
the number of calls, and that sessions keep a bounded number of bytes for retransmission.
"""

from __future__ import annotations

import random
import struct
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from tests.simulation.connections import Half, Limits, Node
from tests.simulation.streams import Streams, Weather
from tests.simulation.timeline import Clock, Timeline
from torchweft.engine.protocol.calls import CallClient
from torchweft.engine.wire import session
from torchweft.engine.wire.frames import HEADER_BYTES, Frame, encode_frame

CALL, REPLY = 1, 2
_NUMBER = struct.Struct("<qq")
_LARGEST_BYTES = (0, 20, 200, 3000)
_ACKNOWLEDGEMENT_BYTES = HEADER_BYTES + 8


@dataclass(eq=False)
class Call:
    """An open call."""

    worker: int
    deadline_s: float = float("inf")


class CounterWorker:
    """One life of a worker with counters that other workers may raise."""

    def __init__(self, world: CounterWorld, node: Node) -> None:
        self.world = world
        self.node = node
        self.calls: CallClient[Call] = CallClient()
        self.failed = 0
        node.on_frame = self._on_frame
        node.on_note = world.note
        node.on_lost = self._on_lost

    @property
    def id(self) -> int:
        return self.node.id

    def call(self, peer: int, size: int) -> None:
        """Asks ``peer`` to raise the counter that it has for this worker."""
        number = self.calls.add(Call(peer))
        self.world.asked[self.id, peer] += 1
        if not self._send(peer, CALL, number, size) and self.calls.pop(number, None):
            self.failed += 1

    def _send(self, peer: int, kind: int, number: int, size: int) -> bool:
        world = self.world
        # The frames from this life to that one, in order: the receiver compares.
        sent = world.sent[self.id, peer]
        control = _NUMBER.pack(len(sent), number) + world.chance.randbytes(size % 97)
        count = world.chance.choice((0, 0, 1, 2))
        buffers = [memoryview(world.chance.randbytes(size)) for _ in range(count)]
        parts = encode_frame(kind, count, number, control, buffers)
        sent.append(b"".join(bytes(part) for part in parts))
        return self.node.send(peer, parts)

    def _on_frame(self, peer: int, frame: Frame) -> None:
        world = self.world
        control = bytes(frame.control)
        place, number = _NUMBER.unpack_from(control)
        received = world.received[peer, self.id]
        assert place == received, f"frame {place} of {peer} comes to {self.id} as {received}"
        world.received[peer, self.id] += 1
        world.note(self.id, "has from", peer, "frame", place)
        again = encode_frame(frame.kind, frame.flags, frame.id, control, _views(frame.buffers))
        is_same = b"".join(bytes(part) for part in again) == world.sent[peer, self.id][place]
        assert is_same, f"frame {place} from {peer} to {self.id} was altered"
        if frame.kind == CALL:
            world.counted[peer, self.id] += 1
            self._send(peer, REPLY, number, world.draw_size())
        else:
            call = self.calls.pop(number, None)
            assert call is not None, f"call {number} of {self.id} is answered again"
            world.answered[self.id, peer] += 1

    def _on_lost(self, peer: int, cause: str) -> None:
        self.world.note(self.id, "loses", peer, "because", cause)
        assert (self.id, peer) not in self.world.lost_at_s, f"{self.id} loses {peer} again"
        self.world.causes[self.id, peer] = cause
        self.world.lost_at_s[self.id, peer] = self.world.timeline.now_s
        self.failed += len(self.calls.take_where(lambda call: call.worker == peer))


def _views(buffers: Any) -> list[memoryview]:
    return [memoryview(buffer) for buffer in buffers]


class CounterWorld:
    """Workers, their network and the observer.

    Attributes:
        workers: The living workers, by id.
        sent: Frames sent, by sender and receiver.
        received: How many of these frames arrived.
        asked: How many calls were made, by caller and callee; so ``counted`` and ``answered``.
        lost_at_s: When a worker lost another one; ``causes`` says why.
    """

    def __init__(
        self, seed: int, size: int, limits: Limits, weather: Weather | None = None
    ) -> None:
        self.chance = chance = random.Random(seed)
        self.timeline = Timeline()
        self.weather = weather or Weather.draw(chance)
        self.streams = Streams(chance, self.timeline, self.weather)
        self.limits = limits
        self.sent: defaultdict[tuple[int, int], list[bytes]] = defaultdict(list)
        self.received: Counter[tuple[int, int]] = Counter()
        self.asked: Counter[tuple[int, int]] = Counter()
        self.counted: Counter[tuple[int, int]] = Counter()
        self.answered: Counter[tuple[int, int]] = Counter()
        self.lost_at_s: dict[tuple[int, int], float] = {}
        self.causes: dict[tuple[int, int], str] = {}
        self.trace: list[tuple[Any, ...]] = []
        self.workers: dict[int, CounterWorker] = {}
        self._next_id = 0
        self._largest_bytes = chance.choice(_LARGEST_BYTES)
        for place in range(size):
            self.join(place)

    def join(self, place: int) -> CounterWorker:
        """Begins a life at ``place``; all workers learn of it."""
        clock = Clock.draw(self.chance, self.timeline)
        node = Node(self.streams, self._next_id, place, clock, self.limits)
        self._next_id += 1
        worker = CounterWorker(self, node)
        for other in self.workers.values():
            node.know(other.id, other.node.place)
            other.node.know(node.id, place)
        self.workers[node.id] = worker
        self.note(node.id, "begins at", place)
        return worker

    def kill(self, worker: int, is_silent: bool) -> None:
        self.note(worker, "dies", "with its host" if is_silent else "alone")
        self.workers.pop(worker).node.kill(is_silent)

    def note(self, *what: Any) -> None:
        self.trace.append((round(self.timeline.now_s, 4), *what))

    def draw_size(self) -> int:
        return self.chance.randint(0, self._largest_bytes)

    def call_any(self) -> None:
        """Makes a random worker call another one."""
        caller = self.chance.choice(list(self.workers.values()))
        peers = list(caller.node.halves)
        if peers:
            caller.call(self.chance.choice(peers), self.draw_size())

    def open_calls(self) -> int:
        return sum(len(worker.calls) for worker in self.workers.values())

    def check_bounds(self) -> None:
        """Checks that a session keeps only what its peer lacks or has not acknowledged yet."""
        for worker in self.workers.values():
            for peer, half in worker.node.halves.items():
                other = self.workers.get(peer)
                if other is not None and not half.is_lost:
                    self._check_kept(half, other.node.halves[worker.id])

    def _check_kept(self, half: Half, other: Half) -> None:
        outgoing = half.outgoing
        lacking = outgoing.position - other.incoming.position
        unacknowledged = other.incoming.position - outgoing.acknowledged
        assert lacking >= 0, f"{half.peer} received more than was sent"
        assert unacknowledged >= 0, f"{half.peer} lacks what it has acknowledged"
        kept = outgoing.since(outgoing.acknowledged)
        assert sum(map(len, kept)) == outgoing.kept_bytes, "what is kept is not all there"
        parts = [part for _, part in outgoing._kept]
        assert sum(map(len, parts[1:])) <= outgoing.kept_bytes, "what is acknowledged is kept"
        untold = other.incoming.position - other.incoming._told
        assert untold < session.ALONE_BYTES, f"{half.peer} has not acknowledged {untold} bytes"
        if half.end is not None and half.incoming.position == other.outgoing.position:
            # No acknowledgement is in flight.
            assert unacknowledged < session.ALONE_BYTES, "an acknowledgement got lost"

    def check_rest(self) -> None:
        """Checks, at rest, that sessions keep almost nothing but acknowledgements."""
        for worker in self.workers.values():
            for peer, half in worker.node.halves.items():
                if half.is_lost:
                    assert not half.outgoing._kept, (
                        f"{worker.id} keeps bytes for {peer}, a lost one"
                    )
                elif peer in self.workers:
                    bytes_ = half.acknowledgements * _ACKNOWLEDGEMENT_BYTES
                    bound = min(session.ALONE_BYTES, bytes_) + session.LEAST_BYTES
                    assert half.outgoing.kept_bytes <= bound, f"{worker.id} keeps too much"

    def check_exact(self, caller: int, callee: int) -> None:
        """Checks a pair that never lost each other."""
        pair = caller, callee
        assert self.asked[pair] == self.counted[pair] == self.answered[pair], (
            f"{caller} called {callee} {self.asked[pair]} times, which counted "
            f"{self.counted[pair]}; {self.answered[pair]} answers came"
        )

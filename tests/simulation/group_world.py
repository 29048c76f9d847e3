"""Whole groups: sessions, calls, references and departure together, on a simulated network.

The machines that decide are the real ones: sessions, contact, call table, references, shutdown.
The observer of references (``reference_world``) watches every handle. The observer here watches
the calls: none runs twice, all end, and a group that is called quiet is quiet.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.connections import Limits, Node
from tests.simulation.group_member import Member, Request
from tests.simulation.reference_world import World
from tests.simulation.streams import Streams, Weather
from tests.simulation.timeline import Clock, Timeline
from torchweft.engine.wire.frames import encode_frame

_MESSAGE = 7


class GroupWorld:
    """The workers of a group, their network, and the observer's knowledge.

    Attributes:
        run: The test, to which the workers report.
        members: The living workers, by id.
        references: The reference machines, and their observer.
        ran: How often each call ran, by caller and number.
        given_up: The calls that their callers do not wait for any more.
    """

    def __init__(self, seed: int, member_type: type[Member], run: Any) -> None:
        self.chance = chance = random.Random(seed)
        self.timeline = Timeline()
        weather = replace(Weather.draw(chance), largest_piece_bytes=chance.choice((20, 300, 5000)))
        self.streams = Streams(chance, self.timeline, weather)
        self.limits = Limits(detection_s=10.0, reconnect_s=60.0, connect_s=60.0)
        self.references = World(0, self)
        self.members: dict[int, Any] = {}
        self.ran: Counter[tuple[int, int]] = Counter()
        self.given_up: set[Request] = set()
        self.asked = self.answered = 0
        self.next_id = 0
        self.run = run
        self._member_type = member_type
        self._messages: list[Any] = []
        self._taken: set[int] = set()
        self._captured: list[Any] | None = None

    @property
    def trace(self) -> list[tuple[Any, ...]]:
        return self.references.trace

    def note(self, *what: Any) -> None:
        self.trace.append((round(self.timeline.now_s, 3), *what))

    def join(self, place: int) -> Any:
        """Begins a life at ``place``."""
        node_id, self.next_id = self.next_id, self.next_id + 1
        clock = Clock.draw(self.chance, self.timeline)
        node = Node(self.streams, node_id, place, clock, self.limits)
        self.references.join(node_id)
        member = self._member_type(self, node)
        for other in self.members.values():
            if not other.is_gone:
                node.know(other.id, other.node.place)
                other.node.know(node_id, place)
        self.members[node_id] = member
        self.note(node_id, "begins at", place)
        member.start()
        return member

    def kill(self, worker: int, is_silent: bool = False) -> None:
        """Ends a life."""
        self.note(worker, "dies", "with its host" if is_silent else "alone")
        self.members.pop(worker).node.kill(is_silent)
        self.references.kill(worker, is_announced=False)

    # How messages travel

    def send(self, source: int, target: int, payload: Any, *, is_reliable: bool = False) -> None:
        """Sends a message of the reference machines or of their users."""
        if self._captured is not None and is_reliable:
            self._captured.append(payload)
        else:
            self.post(source, target, payload)

    def captured(self, pack: Callable[[], None]) -> tuple[Any, ...]:
        """Returns the user messages that ``pack`` sends, which are to travel in a call."""
        items: list[Any] = []
        self._captured = items
        pack()
        self._captured = None
        return tuple(items)

    def post(self, source: int, target: int, message: Any) -> None:
        """Sends a message over the session of two workers, or to oneself."""
        member = self.members[source]
        if source == target:
            member.node.clock.later(1e-3, member.take, source, message)
            return
        self._messages.append(message)
        number = len(self._messages) - 1
        # Large enough that the session acknowledges it: leavers wait for the acknowledgement.
        padding = self.chance.randbytes(self.chance.choice((10, 20, 400)))
        member.node.send(target, encode_frame(_MESSAGE, 0, number, padding))

    def taken(self, number: int) -> Any:
        """Returns a message that arrives; it must not arrive twice."""
        assert number not in self._taken, f"message {number} arrives twice"
        self._taken.add(number)
        return self._messages[number]

    # Answers of the observer

    def is_undisturbed(self, workers: frozenset[int]) -> bool:
        """Returns whether all of ``workers`` live and none of them has lost another."""
        pairs = self.references._lost_pairs
        return workers <= self.members.keys() and not any(pair <= workers for pair in pairs)

    def is_awaited(self, request: Request) -> bool:
        """Returns whether callers wait for a call and for all calls in which it is nested."""
        ancestor: Request | None = request
        while ancestor is not None:
            if ancestor in self.given_up:
                return False
            ancestor = ancestor.parent
        return True

    def is_calm(self) -> bool:
        """Returns whether all workers have come to rest and know which workers are lost."""
        return all(
            member.is_idle
            and self.references.machines[member.id].is_settled()
            and self._knows_who_is_lost(member.node)
            for member in self.members.values()
        )

    def _knows_who_is_lost(self, node: Node) -> bool:
        return all(
            half.is_lost or (peer in self.members and node.id not in self.members[peer].node.lost)
            for peer, half in node.halves.items()
        )

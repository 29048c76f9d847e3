"""Reference counting: the messages of a hostile peer harm no other worker.

A worker owns two values. An honest user holds one; the other is on its way to that user. A hostile
peer sends any messages, and hands on any references. When it is gone, everything is as it would
have been without it.
"""

from __future__ import annotations

import struct

from tests.fuzz.target import Target
from torchweft.engine.protocol.references import (
    Drop,
    DropAck,
    Gone,
    Handed,
    Hold,
    HoldAck,
    Message,
    NotCreated,
    NotHanded,
    References,
    ReleaseValue,
    Send,
)
from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId

_ME, _HOSTILE, _HONEST = range(3)
_STEP = struct.Struct("<BBBqBB")
_ARRIVAL_S = 5.0
_EVENTS = 12


class _World:
    """The machine of the owner, and the actions that it has asked of its shell."""

    def __init__(self) -> None:
        self.machine = References(_ME, _ARRIVAL_S)
        self.held, self.handed = self.machine.owned(), self.machine.owned()
        self.machine.message(_HONEST, Hold(self.held, 1, 0))
        self.token = self.machine.hand_on(self.handed, _HONEST)
        self.theirs = self.machine.creating(_HONEST)
        for reference in (self.held, self.handed):
            self.machine.handle_dropped(reference)
        self.released: list[ReferenceId] = []
        self.check()

    def check(self) -> None:
        """Takes the actions; checks that no value that the honest user needs is released."""
        for action in self.machine.take_actions():
            if isinstance(action, ReleaseValue):
                self.released.append(action.reference)
            elif isinstance(action, Send):
                assert action.to != _ME, f"{action} goes to the worker itself"
        honest = {self.held, self.handed, self.theirs}
        assert not honest & set(self.released), "a value that somebody uses was released"

    def step(self, event: int, reference: ReferenceId, version: int, token: int) -> None:
        """Carries out one action of the hostile peer."""
        machine = self.machine
        messages: tuple[Message, ...] = (
            Hold(reference, version, token),
            HoldAck(reference, version),
            Gone(reference, version),
            Drop(reference, version),
            DropAck(reference, version),
            NotCreated(reference),
            Handed(token),
            NotHanded(token),
        )
        if event < len(messages):
            machine.message(_HOSTILE, messages[event])
        elif event == 8:
            machine.created(ReferenceId(_HOSTILE, _ME, reference.number))
        elif event == 9:
            if machine.received(reference, token, _HOSTILE):
                machine.handle_dropped(reference)
        elif event == 10:
            machine.refused(reference, token, _HOSTILE)
        elif machine.came_home(reference):
            machine.handle_dropped(reference)

    def end(self) -> None:
        """Loses the hostile peer, and lets the honest one drop its references."""
        machine = self.machine
        machine.peer_lost(_HOSTILE)
        self.check()
        machine.message(_HONEST, Drop(self.held, 2))
        machine.message(_HONEST, Handed(self.token))
        machine.take_actions()
        census = machine.census()
        assert (census.shared, census.users, census.handovers) == (0, 0, 0), census
        held = {leak.reference for leak in machine.leaks()}
        assert not held & {self.held, self.handed}, "a value outlives all who used it"
        assert self.theirs in held, "a reference in use was forgotten"


def run(data: bytes) -> Exception | None:
    """Plays one step after the other; counts as refused if the last one was."""
    world = _World()
    refusal: Exception | None = None
    for step in _STEP.iter_unpack(data[: len(data) // _STEP.size * _STEP.size]):
        event, creator, owner, number, version, token = step
        reference = ReferenceId(creator % 4, owner % 4, number)
        refusal = None
        try:
            world.step(event % _EVENTS, reference, version, token)
        except ProtocolError as error:
            refusal = error
        world.check()
    world.end()
    return refusal


def seeds() -> list[bytes]:
    """Returns legitimate steps of a peer, and all steps on references that are not its own."""
    right = [
        _STEP.pack(0, _ME, _ME, 0, 1, 0),
        _STEP.pack(8, 0, 0, 0, 0, 0),
        _STEP.pack(3, _HOSTILE, _ME, 0, 1, 0),
        _STEP.pack(9, _HONEST, _HONEST, 3, 0, 1),
        _STEP.pack(11, _ME, _ME, 1, 0, 0),
        _STEP.pack(5, _HOSTILE, _ME, 1, 0, 0),
    ]
    wrong = [
        _STEP.pack(event, creator, owner, number, 2, 1)
        for event in range(_EVENTS)
        for creator, owner, number in ((_ME, _ME, 0), (_ME, _ME, 1), (_ME, _HONEST, 0))
    ]
    return [*right, *wrong, b"".join(right), b"".join(wrong), b"".join(reversed(wrong))]


TARGET = Target("reference_counts", run, seeds)

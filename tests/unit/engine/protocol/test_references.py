"""Single machines, and short exchanges between two or three machines without a network."""

from __future__ import annotations

import pytest

from torchweft.engine.protocol.references import (
    NO_TOKEN,
    Action,
    Confirmed,
    Drop,
    DropAck,
    Gone,
    Handed,
    Hold,
    HoldAck,
    Leak,
    NotCreated,
    NotHanded,
    OwnerLost,
    References,
    ReleaseValue,
    Send,
    ValueGone,
)
from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId

ARRIVAL_S = 5.0
OWNER, USER, OTHER = 0, 1, 2
X = ReferenceId(creator=USER, owner=OWNER, number=0)


class Wire:
    """Three machines; their messages wait until the test calls ``flow``."""

    def __init__(self) -> None:
        self.owner, self.user, self.other = (References(worker, ARRIVAL_S) for worker in range(3))
        self._machines = [self.owner, self.user, self.other]

    def flow(self) -> list[tuple[int, Action]]:
        """Delivers everything; returns the other actions with the worker of each."""
        done: list[tuple[int, Action]] = []
        is_flowing = True
        while is_flowing:
            is_flowing = False
            for worker, machine in enumerate(self._machines):
                for action in machine.take_actions():
                    is_flowing = True
                    if isinstance(action, Send):
                        self._machines[action.to].message(worker, action.message)
                    else:
                        done.append((worker, action))
        return done

    def create(self) -> ReferenceId:
        """Has USER hold a new value of OWNER."""
        reference = self.user.creating(OWNER)
        assert self.owner.created(reference)
        self.flow()
        return reference

    def is_clean(self) -> bool:
        return all(m.is_settled() and m.leaks() == [] for m in self._machines)


@pytest.fixture
def wire() -> Wire:
    return Wire()


def make_user() -> References:
    """Returns USER after it has learned that OWNER counts it for X."""
    user = References(USER, ARRIVAL_S)
    assert user.creating(OWNER) == X
    user.message(OWNER, HoldAck(X, 0))
    assert user.take_actions() == [Confirmed(X)]
    return user


def make_owner() -> References:
    """Returns OWNER after the call that makes X."""
    owner = References(OWNER, ARRIVAL_S)
    assert owner.created(X)
    assert owner.take_actions() == [Send(USER, HoldAck(X, 0))]
    return owner


class TestCreation:
    def test_only_what_may_still_come_is_awaited(self) -> None:
        owner = make_owner()
        assert not owner.is_awaited(X)
        assert owner.is_awaited(ReferenceId(USER, OWNER, 1))
        assert not owner.is_awaited(ReferenceId(OWNER, OWNER, 0))


class TestLosingWorkers:
    def test_references_to_lost_owners_are_of_no_use(self) -> None:
        user = References(USER, ARRIVAL_S)
        user.peer_lost(OWNER)
        assert user.received(X, 1, OTHER)
        assert user.take_actions() == [Send(OTHER, Handed(1)), OwnerLost(X)]
        created = user.creating(OWNER)
        assert user.take_actions() == [OwnerLost(created)]

    def test_who_waits_for_the_creation_of_a_lost_worker_learns_of_it(self) -> None:
        owner = References(OWNER, ARRIVAL_S)
        owner.message(OTHER, Hold(X, 1, NO_TOKEN))
        owner.peer_lost(USER)
        assert owner.take_actions() == [ValueGone(X), Send(OTHER, Gone(X, 1))]
        assert not owner.is_awaited(X)
        assert not owner.created(X)
        owner.message(OTHER, Hold(X, 1, NO_TOKEN))
        assert owner.take_actions() == [Send(OTHER, Gone(X, 1))]
        assert owner.leaks() == []


class TestShutdown:
    def test_g4_what_is_under_way_is_not_dropped(self, wire: Wire) -> None:
        reference = wire.create()
        token = wire.user.hand_on(reference, OTHER)
        wire.user.drop_all()
        assert wire.flow() == []
        assert not wire.user.is_settled()
        assert wire.other.received(reference, token, USER)
        wire.flow()
        assert wire.user.is_settled()
        assert wire.owner.leaks() == [Leak(reference, 0, 0, (OTHER,))]

    def test_what_a_late_function_makes_is_let_go_at_once(self, wire: Wire) -> None:
        wire.user.drop_all()
        reference = wire.user.creating(OWNER)
        assert wire.owner.created(reference)
        assert (OWNER, ReleaseValue(reference)) in wire.flow()
        own = wire.user.owned()
        assert wire.flow() == [(USER, ReleaseValue(own))]
        assert wire.is_clean()

    def test_what_an_interrupted_thread_has_never_sent_is_taken_back(self) -> None:
        user = make_user()
        token = user.hand_on(X, OTHER)
        never_made = user.creating(OWNER)
        user.drop_all()
        user.tick(0.0)
        user.tick(ARRIVAL_S - 0.1)
        assert user.take_actions() == []
        user.tick(ARRIVAL_S)
        assert user.take_actions() == [
            Send(OWNER, NotCreated(never_made)),
            Send(OTHER, NotHanded(token)),
        ]
        user.tick(2 * ARRIVAL_S)
        assert user.take_actions() == []
        assert not user.is_settled()

    def test_a_question_on_its_way_is_not_taken_for_answered(self, wire: Wire) -> None:
        """The network may take longer than a worker waits before it asks again."""
        wire.create()
        wire.flow()
        wire.user.drop_all()
        wire.user.tick(0.0)
        wire.user.tick(ARRIVAL_S)
        assert not wire.user.is_settled()
        wire.flow()
        assert wire.user.is_settled()
        assert wire.is_clean()


@pytest.mark.parametrize(
    "message",
    [
        Hold(ReferenceId(USER, OTHER, 0), 1, NO_TOKEN),
        Drop(ReferenceId(USER, OTHER, 0), 1),
        NotCreated(ReferenceId(OTHER, OWNER, 0)),
        NotCreated(ReferenceId(USER, OTHER, 0)),
        HoldAck(ReferenceId(USER, OTHER, 0), 1),
        Gone(ReferenceId(USER, OTHER, 0), 1),
        DropAck(ReferenceId(USER, OTHER, 0), 1),
    ],
    ids=str,
)
def test_a_worker_has_a_say_only_in_what_is_its_own(
    message: Hold | Drop | NotCreated | HoldAck | Gone | DropAck,
) -> None:
    owner = References(OWNER, ARRIVAL_S)
    with pytest.raises(ProtocolError, match="worker 1 has no say"):
        owner.message(USER, message)
    assert owner.leaks() == []
    assert owner.take_actions() == []


@pytest.mark.parametrize(
    "message", [Handed(7), NotHanded(7), HoldAck(X, 9), Gone(X, 9), DropAck(X, 9)]
)
def test_answers_to_no_question_change_nothing(message: Handed) -> None:
    user = make_user()
    user.message(OWNER, message)
    assert user.leaks() == [Leak(X, 1, 0, ())]


class TestGoingHome:
    def test_a_reference_that_lives_elsewhere_is_an_error(self) -> None:
        with pytest.raises(ProtocolError, match="does not belong to worker 2"):
            References(OTHER, ARRIVAL_S).came_home(X)

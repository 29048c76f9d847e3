"""Single machines, and short exchanges between two or three machines without a network."""

from __future__ import annotations

import pytest

from torchweft.engine.protocol.numbers import SeenNumbers
from torchweft.engine.protocol.references import (
    NO_TOKEN,
    Action,
    Census,
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

    def test_a_call_to_oneself_needs_no_messages(self) -> None:
        machine = References(OWNER, ARRIVAL_S)
        reference = machine.creating(OWNER)
        assert machine.created(reference)
        assert machine.is_settled()
        machine.handle_dropped(reference)
        assert machine.take_actions() == [ReleaseValue(reference)]

    def test_those_who_wait_for_a_call_learn_that_it_will_not_come(self, wire: Wire) -> None:
        reference = wire.user.creating(OWNER)
        for receiver, to in ((wire.other, OTHER), (wire.owner, OWNER)):
            assert receiver.received(reference, wire.user.hand_on(reference, to), USER)
        assert wire.flow() == []
        wire.user.not_created(reference)
        gone = wire.flow()
        assert sorted(worker for worker, _ in gone) == [OWNER, USER, OTHER]
        assert {str(action) for _, action in gone} == {str(ValueGone(reference))}


class TestDropping:
    def test_a_handle_dropped_too_often_is_an_error_in_the_shell(self) -> None:
        owner = References(OWNER, ARRIVAL_S)
        reference = owner.owned()
        owner.handle_dropped(reference)
        with pytest.raises(KeyError):
            owner.handle_dropped(reference)


class TestHandingOn:
    def test_a_message_to_oneself_keeps_the_value_without_messages(self) -> None:
        owner = References(OWNER, ARRIVAL_S)
        reference = owner.owned()
        token = owner.hand_on(reference, OWNER)
        owner.handle_dropped(reference)
        assert owner.received(reference, token, OWNER)
        assert owner.take_actions() == []
        owner.handle_dropped(reference)
        assert owner.take_actions() == [ReleaseValue(reference)]

    def test_a_message_to_oneself_may_be_refused_or_never_sent(self) -> None:
        owner = References(OWNER, ARRIVAL_S)
        reference = owner.owned()
        owner.refused(reference, owner.hand_on(reference, OWNER), OWNER)
        owner.undeliverable(reference, owner.hand_on(reference, OWNER), OWNER)
        assert owner.leaks() == [Leak(reference, 1, 0, ())]

    def test_a_late_reference_to_nothing_is_said_to_be_gone(self) -> None:
        user = References(USER, ARRIVAL_S)
        user.received(X, 1, OTHER)
        user.take_actions()
        user.message(OWNER, Gone(X, 1))
        assert user.take_actions() == [ValueGone(X), Send(OTHER, Handed(1))]
        user.received(X, 2, OTHER)
        assert user.take_actions() == [Send(OTHER, Handed(2)), ValueGone(X)]
        user.received(X, user.hand_on(X, USER), USER)
        assert user.take_actions() == [ValueGone(X)]
        for _ in range(3):
            user.handle_dropped(X)
        assert user.take_actions() == []
        assert user.leaks() == []


class TestLosingWorkers:
    def test_g3_users_learn_that_the_owner_is_lost(self) -> None:
        user = make_user()
        user.peer_lost(OWNER)
        assert user.take_actions() == [OwnerLost(X)]
        user.handle_dropped(X)
        assert user.take_actions() == []
        assert user.leaks() == []

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

    def test_nothing_is_heard_of_a_lost_worker(self) -> None:
        owner = make_owner()
        owner.peer_lost(OTHER)
        owner.message(OTHER, Hold(X, 1, NO_TOKEN))
        owner.message(USER, Drop(X, 1))
        assert ReleaseValue(X) in owner.take_actions()


class TestShutdown:
    def test_g4_everything_is_dropped_by_force(self, wire: Wire) -> None:
        reference = wire.create()
        wire.user.handle_added(reference)
        own = wire.owner.owned()
        assert wire.user.leaks() == [Leak(reference, 2, 0, ())]
        wire.user.drop_all()
        wire.owner.drop_all()
        assert sorted(wire.flow(), key=str) == [
            (OWNER, ReleaseValue(own)),
            (OWNER, ReleaseValue(reference)),
        ]
        assert wire.is_clean()

    def test_late_finalizers_and_late_messages_do_no_harm(self) -> None:
        user = make_user()
        user.drop_all()
        user.handle_dropped(X)
        user.take_actions()
        assert not user.received(X, 1, OTHER)
        assert user.take_actions() == [Send(OTHER, Handed(1))]
        assert not user.received(X, NO_TOKEN, USER)

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

    def test_a_question_that_was_never_asked_keeps_no_worker_from_leaving(self) -> None:
        """A signal handler raised between the machine and the messages that go out."""
        user = References(USER, ARRIVAL_S)
        user.received(X, 1, OTHER)
        (never_sent,) = user.take_actions()
        user.drop_all()
        user.tick(0.0)
        assert user.take_actions() == []
        assert not user.is_settled()
        user.tick(ARRIVAL_S)
        assert user.take_actions() == [never_sent]
        user.message(OWNER, HoldAck(X, 1))
        user.message(OWNER, DropAck(X, 2))
        assert user.is_settled()
        assert user.leaks() == []

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

    def test_a_late_function_hands_nothing_on(self, wire: Wire) -> None:
        reference = wire.create()
        wire.user.drop_all()
        wire.flow()
        wire.user.handle_added(reference)
        token = wire.user.hand_on(reference, OTHER)
        assert token == NO_TOKEN
        assert not wire.other.received(reference, token, USER)
        assert wire.flow() == []
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


def test_numbers_seen_take_no_memory_once_the_gaps_are_filled() -> None:
    seen = SeenNumbers(first=1)
    assert 0 in seen
    assert [seen.add(number) for number in (3, 2, 3, 5)] == [True, True, False, True]
    assert 1 not in seen
    assert len(seen._above) == 3
    assert seen.add(1)
    assert len(seen._above) == 1
    assert [seen.add(number) for number in (1, 2, 3, 5)] == [False] * 4


class TestGoingHome:
    def test_it_counts_a_handle_and_no_message_is_sent(self) -> None:
        owner = make_owner()
        assert owner.came_home(X)
        assert owner.take_actions() == []
        assert owner.leaks() == [Leak(X, 1, 0, (USER,))]
        owner.handle_dropped(X)
        assert owner.leaks() == [Leak(X, 0, 0, (USER,))]

    def test_the_handle_keeps_the_value_when_the_user_has_dropped_it(self, wire: Wire) -> None:
        reference = wire.create()
        assert wire.owner.came_home(reference)
        wire.user.handle_dropped(reference)
        assert wire.flow() == []
        wire.owner.handle_dropped(reference)
        assert wire.flow() == [(OWNER, ReleaseValue(reference))]
        assert wire.is_clean()

    def test_it_may_come_before_the_call_that_makes_the_value(self) -> None:
        owner = References(OWNER, ARRIVAL_S)
        assert owner.came_home(X)
        assert owner.is_awaited(X)
        assert owner.created(X)
        assert owner.leaks() == [Leak(X, 1, 0, (USER,))]

    def test_it_is_told_that_the_value_is_gone(self, wire: Wire) -> None:
        reference = wire.create()
        wire.user.handle_dropped(reference)
        assert wire.flow() == [(OWNER, ReleaseValue(reference))]
        assert wire.owner.came_home(reference)
        assert wire.flow() == [(OWNER, ValueGone(reference))]
        wire.owner.handle_dropped(reference)
        assert wire.flow() == []
        assert wire.is_clean()

    def test_no_handle_is_counted_at_the_end_of_the_program(self) -> None:
        owner = make_owner()
        owner.drop_all()
        assert not owner.came_home(X)

    def test_a_reference_that_lives_elsewhere_is_an_error(self) -> None:
        with pytest.raises(ProtocolError, match="does not belong to worker 2"):
            References(OTHER, ARRIVAL_S).came_home(X)


def test_the_census_counts_what_is_shared() -> None:
    wire = Wire()
    nothing = Census(0, 0, 0, 0, 0)
    mine = wire.owner.owned()
    assert wire.owner.census() == nothing
    token = wire.owner.hand_on(mine, USER)
    assert wire.owner.census() == Census(1, 0, 0, 1, 0)
    assert wire.user.received(mine, token, OWNER)
    assert wire.user.census() == Census(0, 0, 1, 0, 1)
    wire.flow()
    assert wire.owner.census() == Census(1, 1, 0, 0, 0)
    assert wire.user.census() == nothing
    wire.user.handle_dropped(mine)
    assert wire.user.census() == Census(0, 0, 0, 0, 1)
    wire.flow()
    assert wire.owner.census() == wire.user.census() == nothing

"""Ctrl-C at every step of a call that makes, hands on or returns references.

Such a reference is taken back at once. Where the interrupt came within the tables of references,
it stays until the worker leaves, which waits for it no longer than ``REFERENCE_ARRIVAL_S``.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator

import pytest

from tests.interrupting import interrupt, interrupt_at
from tests.thorough import every
from tests.unit.engine.worker.group import wait_until
from tests.unit.rpc.pair import Pair, pair_of
from tests.unit.rpc.test_interrupted import check_is_sound
from torchweft.engine.protocol import references as protocol
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker import references as keeping
from torchweft.engine.worker.references import Handle
from torchweft.errors import ReferenceGone
from torchweft.knobs import INTERNAL_VARIABLE
from torchweft.rpc.api import RRef
from torchweft.rpc.worker import Worker

TABLES = (protocol.__file__, keeping.__file__)

held: list[RRef[int]] = []


@pytest.fixture(autouse=True)
def holds_nothing() -> Iterator[None]:
    yield
    held.clear()


def take(_: object) -> None:
    pass


def give() -> RRef[int]:
    return RRef(1)


def make_a_value(pair: Pair) -> object:
    return pair.create(list)


def own_a_value(_: Pair) -> object:
    return RRef(3)


def hand_on(pair: Pair) -> object:
    return pair.sync(take, held[:])


def hand_on_soon(pair: Pair) -> object:
    return pair.start(take, held[:]).wait()


def take_over(pair: Pair) -> object:
    return pair.sync(give)


def act_for_the_caller(pair: Pair) -> None:
    current_agent.install(None)
    current_agent.install(pair.caller.agent)


def open_ends(worker: Worker) -> int:
    census = worker.references.census()
    return census.handovers + census.unanswered


def is_within_tables() -> bool:
    """Whether the code that is interrupted is called by the tables of references."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    return any(frame.f_code.co_filename in TABLES for frame in frames)


@pytest.mark.keeps("threads", "descriptors")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in finalizers
@pytest.mark.parametrize("way", [make_a_value, hand_on, hand_on_soon, take_over])
def test_an_interrupted_call_with_references_does_not_keep_a_worker_from_leaving(
    way: Callable[[Pair], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERNAL_VARIABLE, "REFERENCE_ARRIVAL_S=0.1")
    with pair_of(2) as pair:
        workers = pair.caller, pair.callee
        if way is not take_over:
            act_for_the_caller(pair)
            held.append(RRef(2))
        pair.sync(take, 0)
        step, within = 1, 0

        def interrupt_and_count() -> None:
            nonlocal within
            within += is_within_tables()
            interrupt()

        while interrupt_at(step, lambda: way(pair), interrupt_and_count):
            check_is_sound(pair)
            step += every(1)
        held.clear()
        # Such an interrupt may leave an end at each side until the worker leaves.
        wait_until(
            lambda: all(open_ends(each) <= within for each in workers),
            "the references to be undone",
        )
        for each in workers:
            each.references.begin_settling()
        wait_until(lambda: all(each.references.is_settled() for each in workers))


@pytest.mark.parametrize("way", [make_a_value, own_a_value, hand_on])
def test_a_signal_handler_may_use_references_at_any_step(way: Callable[[Pair], object]) -> None:
    """No two values get the same number, and no two handovers the same token."""
    with pair_of(2) as pair:
        act_for_the_caller(pair)
        held.extend(RRef(number) for number in range(2))
        made: list[object] = []

        def run() -> None:
            made.append(way(pair))

        def handle() -> None:
            sys.setprofile(None)
            run()

        step = 1
        while interrupt_at(step, run, handle):
            assert len(made) == 2
            first, second = made
            if isinstance(first, Handle) and isinstance(second, Handle):
                assert first.id != second.id
            made.clear()
            step += 1
        held.clear()
        workers = pair.caller, pair.callee
        wait_until(lambda: sum(map(open_ends, workers)) == 0, "the end of all handovers")


def test_a_refused_reference_leaves_others_of_the_call_as_they_are() -> None:
    with pair_of(2) as earlier:
        act_for_the_caller(earlier)
        held.append(RRef(1))
    with pair_of(2) as pair:
        act_for_the_caller(pair)
        held.append(RRef(2))
        with pytest.raises(ReferenceGone, match="a group that has been shut down"):
            pair.sync(take, held[::-1])
        wait_until(lambda: not open_ends(pair.caller), "the handover to be taken back")

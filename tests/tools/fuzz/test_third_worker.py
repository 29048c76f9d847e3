"""A strict worker between an honest worker and hostile ones: a short run, and holes to be found."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.fuzz import third_worker
from tests.fuzz.strict.others import Others
from tests.fuzz.strict.trio import FIRST, HONEST, STANDING, Trio
from tests.thorough import examples
from torchweft.autograd import contexts, engine
from torchweft.engine.protocol import calls, leaving, references
from torchweft.ids import scoped_id

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.keeps("descriptors")]
FRAMES = 40_000
"""With the seed below, the rarest hole takes a third of them."""


def test_an_honest_worker_is_by_itself_as_it_is_compared_with() -> None:
    trio = Trio(tuple)
    try:
        for number in range(5):
            trio.round(number)
        assert trio.standing() == STANDING
    finally:
        trio.close()


def test_an_honest_worker_does_not_notice_hostile_members() -> None:
    sent, refused = third_worker.attack("a test", examples(24_000))
    assert sent > refused > 0


def test_a_refused_call_ends_no_message_of_another() -> None:
    """Not under its number either. With this seed, calls with such numbers are refused unread."""
    third_worker.attack("50 0", 16_000)


def test_a_made_up_pass_of_an_honest_worker_keeps_no_graph_of_it() -> None:
    context_id, pass_id = scoped_id(HONEST, 1234567), scoped_id(HONEST, 99)
    to_send = ["a call", "gradients"]

    def attack() -> list[bytes]:
        receivers = {
            each.to_worker: each.message_id for each in victim.engine.outside._sends.values()
        }
        if to_send == ["a call", "gradients"]:
            del to_send[0]
            return [others.call_with_tensor()]
        if to_send and {HONEST, FIRST} <= receivers.keys():
            del to_send[0]
            return [others.gradients_of(receivers[FIRST], context_id, pass_id)]
        return []

    trio = Trio(attack)
    victim, others = trio.victim.worker, Others(random.Random(1), trio)
    try:
        trio.round(0)
        assert not to_send
        assert (pass_id, context_id) in victim.engine.passes.parts
    finally:
        trio.close()


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _taken_from_anybody(calls: Any, worker: int, frame: Any) -> Any:
    call = calls.pop(frame.id, None)
    if call is not None:
        call.frame = frame
    return call


HOLES: dict[str, tuple[Any, str, Any]] = {
    "anybody answers a call": (calls.CallClient, "answered", _taken_from_anybody),
    "anybody leads the end of the group": (leaving, "LED_STEPS", frozenset()),
    "anybody speaks for users and owners": (references, "check_reference_message", _nothing),
    "anybody sends gradients": (engine, "check_gradients", _nothing),
    "contexts can be guessed": (contexts.secrets, "randbits", lambda bits: 3),
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_hole_is_found(hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home, name, instead = HOLES[hole]
    monkeypatch.setattr(home, name, instead)
    with pytest.raises(AssertionError, match=r"seed 'a hole', round \d+"):
        third_worker.attack("a hole", FRAMES)

"""Strangers flood a worker while members dial it: members get in, in time, at a bounded cost.

Each seed is a flood of some speed, hosts of some load, and members whose handshakes take longer
than the flood needs to fill all places. Some strangers are silent, some repeat vouchers that they
have read on the network. ``WEFT_TEST_SEED=<seed>`` runs one seed alone; ``WEFT_TEST_SEEDS`` sets
how many are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tests.simulation.flood_world import CONNECT_S, Flood
from tests.simulation.seeds import batches, name_of, try_seeds

SEED_COUNT = 180
RATES = (300.0, 1500.0, 10000.0)
TURNS_S = (0.0, 0.003, 0.03, 0.1)
SPAN_S = 0.2
"""How long the flood lasts before each member dials."""


def flood(seed: int) -> Flood:
    made = Flood(seed, RATES[seed % len(RATES)], TURNS_S[seed % len(TURNS_S)])
    made.timeline.run_for(SPAN_S)
    return made


def keep_the_place(seed: int) -> None:
    """A voucher comes with its connection: the first attempt is the last, however slow it is."""
    world = flood(seed)
    dialled = []
    for _ in range(3):
        handshake_s = world.chance.choice((0.001, 0.05, 0.5))
        due_s = world.timeline.now_s + handshake_s + 5 * TURNS_S[-1]
        dialled.append((world.dial(handshake_s), due_s))
        world.timeline.run_for(SPAN_S * world.chance.random())
    world.timeline.run_for(max(due_s for _, due_s in dialled) - world.timeline.now_s)
    for member, due_s in dialled:
        assert member.tries == 1, f"{member.tries} attempts"
        assert member.got_in_s is not None, "it has not got in yet"
        assert member.got_in_s < due_s, f"it got in {member.got_in_s - due_s:.2f} s late"


def come_late(seed: int) -> None:
    """A voucher may come after its connection: the member may be displaced, and dials again."""
    world = flood(seed)
    late_s = world.chance.choice((0.0001, 0.001, 0.01, 0.1))
    member = world.dial(
        world.chance.choice((0.001, 0.05)), lambda: world.chance.choice((0.0, late_s))
    )
    world.timeline.run_until(
        lambda: member.got_in_s is not None or member.has_given_up, 2 * CONNECT_S, "it dials on"
    )
    assert not member.has_given_up, f"after {member.tries} attempts"


def come_in_time(seed: int) -> None:
    """A voucher comes after its connection, but before strangers fill the places."""
    rate = RATES[seed % len(RATES)]
    world = Flood(seed, rate, 0.0)
    world.timeline.run_for(SPAN_S)
    handshake_s, late_s = 0.3, world.limit / rate / 8
    member = world.dial(handshake_s, lambda: late_s)
    world.timeline.run_for(2 * handshake_s)
    assert member.tries == 1, f"{member.tries} attempts"
    assert member.got_in_s is not None, "it has not got in yet"


def observe(seed: int) -> None:
    """An observer, which has no voucher, gets in while strangers come as fast as it dials."""
    world = Flood(seed, 1500.0, 0.0)
    world.timeline.run_for(SPAN_S)
    observers = [world.dial(0.001, lambda: math.inf) for _ in range(5)]
    world.timeline.run_until(
        lambda: all(each.got_in_s is not None for each in observers), CONNECT_S, "not all got in"
    )


PROGRAMS: list[Callable[[int], None]] = [keep_the_place, come_late, come_in_time, observe]


@pytest.mark.parametrize("batch", batches(SEED_COUNT), ids=name_of)
@pytest.mark.parametrize("program", PROGRAMS)
def test_members_get_in(program: Callable[[int], None], batch: range) -> None:
    try_seeds(batch, int, program)

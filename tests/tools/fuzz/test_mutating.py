from __future__ import annotations

import random

from tests.fuzz.mutating import Mutator, Varier
from tests.fuzz.target import Target

VALID = bytes(range(40))


def mutator(seed: int, **options: object) -> Mutator:
    target = Target("toy", lambda data: None, lambda: [VALID], **options)  # type: ignore[arg-type]
    return Mutator(random.Random(seed), target)


def test_the_same_seed_makes_the_same_inputs() -> None:
    first, second = mutator(3), mutator(3)
    made = [first.mutate(VALID, b"other") for _ in range(50)]
    assert made == [second.mutate(VALID, b"other") for _ in range(50)]
    assert len(set(made)) > 40


def varier(seed: int, **options: object) -> Varier:
    target = Target("toy", lambda data: None, lambda: [VALID], **options)  # type: ignore[arg-type]
    return Varier(random.Random(seed), target)


def test_a_lot_of_inputs_is_near_the_known_one() -> None:
    lot = list(varier(3).vary(VALID, b"other", 1000))
    assert lot == list(varier(3).vary(VALID, b"other", 1000))
    assert len(lot) == 1000
    assert len(set(lot)) > 600
    assert sum(each[:8] == VALID[:8] for each in lot) > 300
    changed = {
        place
        for each in lot
        for place in range(40)
        if each[place : place + 1] != VALID[place : place + 1]
    }
    assert changed == set(range(40))

from __future__ import annotations

import json
import random

from tests.fuzz.json_mutating import change_json
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


def test_a_lot_of_inputs_has_lengths_words_and_pieces_of_others() -> None:
    lot = list(varier(4, words=(b"SECRET",), length_limit=50).vary(VALID, b"abcdefgh", 2000))
    assert any(b"SECRET" in each for each in lot)
    assert any(b"abc" in each for each in lot)
    assert any(each.endswith(b"\x04\0\0\0" + VALID[-4:]) for each in lot)
    assert max(map(len, lot)) == 50
    assert min(map(len, lot)) < 10


def test_json_stays_json_with_other_values() -> None:
    text = json.dumps({"worker": 1, "facts": {"list": [1, "x", None]}, "refusal": ""}).encode()
    chance = random.Random(4)
    made = [change_json(chance, text) for _ in range(200)]
    assert all(each is not None and json.loads(each) != text for each in made)
    assert len(set(made)) > 50
    assert change_json(chance, b"no JSON") is None
    assert change_json(chance, b"[" * 100_000) is None

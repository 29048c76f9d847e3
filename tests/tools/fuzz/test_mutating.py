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


def test_inputs_stay_within_the_limit() -> None:
    limited = mutator(1, length_limit=30)
    sizes = {len(limited.mutate(VALID, VALID)) for _ in range(300)}
    assert max(sizes) == 30
    assert min(sizes) < 10


def test_the_empty_input_is_changed_too() -> None:
    assert {mutator(seed).mutate(b"", b"") for seed in range(50)} > {b""}


def test_words_and_pieces_of_others_are_put_in() -> None:
    spliced = mutator(2, words=(b"SECRET",))
    made = [spliced.mutate(VALID, b"abcdefgh") for _ in range(300)]
    assert any(b"SECRET" in each for each in made)
    assert any(b"abc" in each for each in made)


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


def test_the_empty_input_has_a_lot_of_others_near_it() -> None:
    assert len(set(varier(5).vary(b"", b"", 500))) > 20


def test_json_stays_json_with_other_values() -> None:
    text = json.dumps({"worker": 1, "facts": {"list": [1, "x", None]}, "refusal": ""}).encode()
    chance = random.Random(4)
    made = [change_json(chance, text) for _ in range(200)]
    assert all(each is not None and json.loads(each) != text for each in made)
    assert len(set(made)) > 50
    assert change_json(chance, b"no JSON") is None
    assert change_json(chance, b"[" * 100_000) is None


def test_json_behind_a_prefix_is_changed_as_such() -> None:
    prefixed = mutator(5, json_from=1)
    made = [prefixed.mutate(b'\7{"a": 1, "b": 2}', b"") for _ in range(200)]
    read = 0
    for each in made:
        try:
            json.loads(each[1:])
            read += each[:1] == b"\7"
        except ValueError:
            pass
    assert read > 100

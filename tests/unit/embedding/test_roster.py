"""Ids of bounded number, compared with a list that is sorted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.embedding import roster as module
from torchweft.embedding.idmap import Ints
from torchweft.embedding.plan import Evict
from torchweft.embedding.roster import Roster

Marks = dict[int, tuple[int, int]]


def marks_of(roster: Roster, steps: int = 0) -> Marks:
    """Returns count and age mark of each id."""
    places = roster.held(steps)
    assert (np.diff(roster.ids[places]) > 0).all()
    assert roster.find(roster.ids[places]).tolist() == places.tolist()
    columns = (roster.counts[places].tolist(), roster.ages[places].tolist())
    return dict(zip(roster.ids[places].tolist(), zip(*columns, strict=True), strict=True))


def added_to(roster: Roster, ids: Ints, step: int) -> Ints:
    """Adds ids that occur for the first time."""
    return roster.add(ids, np.ones(len(ids), np.int64), np.full(len(ids), step), step)


def in_order(marks: Marks, evict: Evict) -> list[int]:
    """Returns ids, those first that give way first."""
    turn = -1 if evict == "age" else 1
    return sorted(marks, key=lambda number: (*marks[number][::turn], number))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(["age", "frequency"]),
    st.sampled_from([8, 130]),
    st.lists(st.sets(st.integers(-9, 9) | st.integers(-100, 100), max_size=8), max_size=40),
)
def test_the_last_ones_give_way(evict: Evict, capacity: int, steps: list[set[int]]) -> None:
    roster, model, evicted, added = Roster(capacity, evict), Marks(), 0, 0
    for step, wanted in enumerate(steps, start=1):
        ids = np.array(sorted(wanted), np.int64)
        places = roster.find(ids)
        roster.touch(places[places >= 0], step)
        new = ids[places < 0]
        assert len(set(added_to(roster, new, step).tolist())) == len(new)
        model |= {number: (model[number][0] + 1, step) for number in wanted & model.keys()}
        old = {number: each for number, each in model.items() if each[1] != step}
        lacking = len(model) + len(new) - capacity
        gone = in_order(old, evict)[: max(lacking, capacity // 64)] if lacking > 0 else []
        model = {number: each for number, each in model.items() if number not in gone}
        model |= dict.fromkeys(new.tolist(), (1, step))
        evicted, added = evicted + len(gone), added + len(new)
        assert marks_of(roster) == model
        assert (len(roster), roster.evicted, roster.added) == (len(model), evicted, added)
        assert len(roster) <= capacity


def test_the_smaller_id_gives_way_among_equals() -> None:
    roster = Roster(3, "age")
    added_to(roster, np.array([5, -9, 2]), 1)
    added_to(roster, np.array([7]), 2)
    assert marks_of(roster) == {2: (1, 1), 5: (1, 1), 7: (1, 2)}


def test_no_id_of_the_step_gives_way_however_rare() -> None:
    roster = Roster(2, "frequency")
    places = roster.add(np.array([1, 2]), np.array([9, 1]), np.ones(2, np.int64), 1)
    roster.touch(places[1:], 2)
    added_to(roster, np.array([3]), 2)
    assert marks_of(roster) == {2: (2, 2), 3: (1, 2)}


@pytest.mark.parametrize("evict", ["age", "frequency"])
def test_it_takes_over_as_many_as_there_is_room_for(evict: Evict) -> None:
    ids, counts, ages = (np.array(each) for each in ([4, 1, 9, -3], [2, 2, 1, 5], [8, 7, 9, 1]))
    roster = Roster(2, evict)
    chosen, places = roster.fill(ids, counts, ages, ages)
    marks = {4: (2, 8), 1: (2, 7), 9: (1, 9), -3: (5, 1)}
    kept = in_order(marks, evict)[2:]
    assert sorted(ids[chosen].tolist()) == sorted(kept)
    assert roster.ids[places].tolist() == ids[chosen].tolist()
    assert marks_of(roster) == {number: marks[number] for number in kept}
    assert Roster(0, evict).fill(ids, counts, ages, ages)[0].tolist() == []


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(["age", "frequency"]),
    st.sampled_from([8, 30]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([1, 3, 1024]),
    st.lists(st.sets(st.integers(0, 20), max_size=6), max_size=30),
)
def test_ids_expire_after_the_same_step_however_many_places_are_swept(
    evict: Evict,
    capacity: int,
    ttl: int | None,
    frequency: float,
    swept: int,
    steps: list[set[int]],
) -> None:
    roster = Roster(capacity, evict, ttl, frequency)
    model: dict[int, tuple[int, int, int]] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "_SWEPT", swept)
        for step, wanted in enumerate(steps, start=1):
            ids = np.array(sorted(wanted), np.int64)
            roster.sweep(step - 1, ids)
            places = roster.find(ids)
            roster.touch(places[places >= 0], step)
            new = ids[places < 0]
            added_to(roster, new, step)
            known = wanted & model.keys()
            assert known == wanted - set(new.tolist())
            model |= {each: (model[each][0] + 1, step, model[each][2]) for each in known}
            lacking = len(model) + len(new) - capacity
            if lacking > 0:
                old = {each: marks[:2] for each, marks in model.items() if marks[1] != step}
                for each in in_order(old, evict)[: max(lacking, capacity // 64)]:
                    del model[each]
            model |= dict.fromkeys(new.tolist(), (1, step, step))
            model = {
                each: (count, age, first)
                for each, (count, age, first) in model.items()
                if (ttl is None or step - age < ttl) and count >= frequency * (step - first + 1)
            }
            assert marks_of(roster, step) == {each: found[:2] for each, found in model.items()}
            all_ids = np.arange(21)
            is_live = roster.live(all_ids, step) >= 0
            assert set(all_ids[is_live].tolist()) == model.keys()


def test_a_step_looks_at_few_places_and_all_are_looked_at_in_time() -> None:
    roster = Roster(10_000, "age", ttl=1)
    added_to(roster, np.arange(10_000), 1)
    none = np.zeros(0, np.int64)
    for step in range(2, 11):
        roster.sweep(step, none)
        assert len(roster) == 10_000 - 1024 * (step - 1)
    roster.sweep(11, none)
    assert (len(roster), roster.evicted) == (0, 10_000)

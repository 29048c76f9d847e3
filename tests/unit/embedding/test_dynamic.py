"""Dynamic tables: the map of ids, ids of bounded number, and the rows of a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dynamic_ids_alone import server_by_definition
from tests.thorough import examples
from torchweft.embedding import (
    SGD,
    ColumnWise,
    Copies,
    Dynamic,
    PlanError,
    RowWise,
    TableConfig,
    TableWise,
    initial,
    plan_tables,
)
from torchweft.embedding.configs import Evict
from torchweft.embedding.dynamic import DynamicShard, IdMap, Ints, Roster, server_of
from torchweft.embedding.initial import mixed
from torchweft.embedding.shard import Gradients

EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), -(2**63) + 1, 2**33, 2**57, 2**62]
INT64 = st.integers(-(2**63), 2**63 - 1)


def array(numbers: list[int]) -> Ints:
    return np.array(numbers, np.int64)


def colliding(count: int, positions: int) -> list[int]:
    """Returns ids that begin at the last of the positions of a map, for every size up to it."""
    ids = torch.arange(-positions * count * 4, positions * count * 4)
    found = ids[mixed(ids).bitwise_and(positions - 1) == positions - 1][:count].tolist()
    assert len(found) == count
    return found


POOLS = [EXTREMES + list(range(-20, 20)), colliding(40, 1024)]


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_it_does_what_a_dict_does(data: st.DataObject) -> None:
    pool = data.draw(st.sampled_from(POOLS) | st.lists(INT64, min_size=1, unique=True))
    some = st.lists(st.sampled_from(pool), unique=True)
    found, model, last = IdMap(), dict[int, int](), 0
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(some)
        if data.draw(st.booleans()):
            new = [number for number in chosen if number not in model]
            found.insert(array(new), np.arange(last, last + len(new)))
            model |= {number: last + place for place, number in enumerate(new)}
            last += len(new)
        else:
            old = [number for number in chosen if number in model]
            found.remove(array(old))
            model = {number: place for number, place in model.items() if number not in old}
        assert len(found) == len(model)
        assert found.find(array(pool)).tolist() == [model.get(number, -1) for number in pool]


def test_it_stays_small_when_ids_come_and_go() -> None:
    found = IdMap()
    for begin in range(0, 100_000, 100):
        found.insert(np.arange(begin, begin + 100), np.arange(100))
        found.remove(np.arange(begin, begin + 100))
    assert len(found) == 0
    assert len(found._ids) <= 1024


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


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(["age", "frequency"]),
    st.sampled_from([8, 30]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.lists(st.sets(st.integers(0, 20), max_size=6), max_size=30),
)
def test_ids_expire_after_the_same_step_whether_there_is_room_or_not(
    evict: Evict,
    capacity: int,
    ttl: int | None,
    frequency: float,
    steps: list[set[int]],
) -> None:
    roster = Roster(capacity, evict, ttl, frequency)
    model: dict[int, tuple[int, int, int]] = {}
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


SERVERS = ("a", "b", "c")
INT64 = st.integers(-(2**63), 2**63 - 1)


def table(pooling: Any = "sum", rows: int = 30, **options: Any) -> TableConfig:
    return TableConfig("users", rows, 4, pooling, torch.float64, dynamic=Dynamic(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admit_after": 0}, "admit_after=0; it must be a positive integer"),
        ({"admit_after": True}, "admit_after=True"),
        ({"evict": "lru"}, "evict='lru'; use one of age, frequency"),
        ({"ttl": 0}, "ttl=0; it must be a positive number of steps, or None"),
        ({"min_frequency": 2}, "min_frequency=2; it is a share of steps"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Dynamic(**options)


def test_tables_that_cannot_work_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'users' has dynamic=True; use Dynamic\(\)"):
        TableConfig("users", 30, 4, dynamic=True)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="padding_idx=9223372036854775808, which is no int64"):
        table(padding_idx=2**63)
    assert table(padding_idx=-1).padding_idx == -1
    for place in (Copies(), ColumnWise(*SERVERS)):
        with pytest.raises(PlanError, match="cannot have copies or be cut by column"):
            plan_tables([table()], SERVERS, places={"users": place})
    many = RowWise(*(str(number) for number in range(31)))
    with pytest.raises(PlanError, match="30 rows, too few for 31 servers"):
        plan_tables([table()], SERVERS, places={"users": many})


@given(INT64, st.integers(1, 9))
def test_the_server_of_an_id_is_that_of_the_protocol(number: int, servers: int) -> None:
    found = server_of(torch.tensor([number]), servers).tolist()
    assert found == [server_by_definition(number, servers)]


def test_ids_that_differ_in_high_bits_have_different_initial_values() -> None:
    ids = (torch.arange(8) << 60) + 5
    values = initial.values_of_ids(table(), ids, range(4), 0)
    assert len(values.unique()) == 32
    alone = torch.cat([initial.values_of_ids(table(), each, range(4), 0) for each in ids.split(1)])
    assert torch.equal(values, alone)


def test_a_reused_row_has_nothing_of_its_former_id() -> None:
    config = TableConfig("users", 2, 4, "sum", torch.float64, dynamic=Dynamic())
    (stack,) = plan_tables([config], SERVERS, places={"users": TableWise("a")}).layout.stacks
    shard = DynamicShard(stack, 0, seed=0, limit=2)
    shard.set_rule(SGD(momentum=0.9))
    ones = torch.ones(1, 4, dtype=torch.float64)
    for version, number in enumerate((10, 11, 12, 10), start=1):
        part = torch.tensor([number]), ones
        shard.apply([Gradients(1, [part])], lr=0.5, divisor=1, version=version)
    # 11 has lost its row, so it reads as its initial value again.
    assert shard.changed_since(torch.tensor([10, 11, 12]), 3).tolist() == [True, True, False]
    start = initial.values_of_ids(config, torch.tensor([10]), range(4), 0)
    assert torch.equal(shard.pull(torch.tensor([10])), start - 0.5)
    ids, rows = shard.rows()
    assert ids.tolist() == [10, 12]
    assert rows.shape == (2, 4)
    occupancy = shard.occupancy()
    assert (occupancy.admitted, occupancy.evicted) == (4, 2)

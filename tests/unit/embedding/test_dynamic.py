"""Dynamic tables: the map of ids, ids of bounded number, and the rows of a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

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
    Wire,
    initial,
    plan_tables,
    touched_shares,
)
from torchweft.embedding.configs import Evict
from torchweft.embedding.dynamic import DynamicShard, IdMap, Ints, Roster, server_of
from torchweft.embedding.initial import mixed
from torchweft.embedding.inputs import Checker
from torchweft.embedding.requests import RowRequest, TableIds, make_router, prepare
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


def test_an_empty_map_finds_nothing() -> None:
    assert IdMap().find(array(EXTREMES)).tolist() == [-1] * len(EXTREMES)
    assert IdMap().find(array([])).tolist() == []


def test_ids_that_collide_keep_their_places_when_others_go() -> None:
    ids = array(colliding(60, 1024))
    found = IdMap()
    found.insert(ids, np.arange(60))
    found.remove(ids[::2])
    assert found.find(ids).tolist() == [-1 if k % 2 == 0 else k for k in range(60)]
    found.insert(ids[::2], np.arange(100, 130))
    assert found.find(ids[::2]).tolist() == list(range(100, 130))


def test_it_stays_small_when_ids_come_and_go() -> None:
    found = IdMap()
    for begin in range(0, 100_000, 100):
        found.insert(np.arange(begin, begin + 100), np.arange(100))
        found.remove(np.arange(begin, begin + 100))
    assert len(found) == 0
    assert len(found._ids) <= 1024


@pytest.mark.parametrize("step", [1, 2**20, 2**57])
def test_ids_in_regular_distances_do_not_collide(step: int) -> None:
    count = 64 if step == 2**57 else 4096
    homes = mixed(torch.arange(count) * step).bitwise_and(4 * count - 1)
    assert len(homes.unique()) > 0.7 * count


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


def test_a_dynamic_table_is_always_on_servers_in_a_stack_of_its_own() -> None:
    tables = [table(), TableConfig("days", 7, 4, "sum", torch.float64)]
    plan = plan_tables(tables, SERVERS, touched={"users": 1.0, "days": 1.0}, trainers=2)
    assert plan.placed["users"].reason == "dynamic ids"
    assert plan.placed["users"].server_bytes == 2 * 2 * 30 * (8 + 4 * 8)
    assert plan.placed["days"].is_copied
    plan = plan_tables(tables, ["a"])
    assert sorted(stack.is_dynamic for stack in plan.layout.stacks) == [False, True]


def test_the_share_of_a_batch_is_at_most_all_rows() -> None:
    batches = [{"users": torch.arange(-50, 50)}]
    assert touched_shares([table()], batches) == {"users": 1.0}


@given(INT64, st.integers(1, 9))
def test_the_server_of_an_id_is_that_of_the_protocol(number: int, servers: int) -> None:
    found = server_of(torch.tensor([number]), servers).tolist()
    assert found == [server_by_definition(number, servers)]


def test_servers_share_ids_of_any_pattern() -> None:
    for ids in (torch.arange(6000), torch.arange(6000) * 6, torch.arange(6000) << 40):
        counts = torch.bincount(server_of(ids, 3))
        assert counts.min() > 1850


def test_ids_that_differ_in_high_bits_have_different_initial_values() -> None:
    ids = (torch.arange(8) << 60) + 5
    values = initial.values_of_ids(table(), ids, range(4), 0)
    assert len(values.unique()) == 32
    alone = torch.cat([initial.values_of_ids(table(), each, range(4), 0) for each in ids.split(1)])
    assert torch.equal(values, alone)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.integers(-4, 4) | INT64, max_size=24),
    st.sampled_from([RowWise(*SERVERS), RowWise("a", "c"), TableWise("b")]),
    st.sampled_from(["sum", "mean", "max", "none"]),
)
@example([2, -2, -4, 6, 7, 8, -8, 9, -11, -12, 14, 16, -16, -17, -25, 26], RowWise("a", "c"), "sum")
def test_lookups_and_pushes_are_those_of_a_table_with_these_rows(
    numbers: list[int], place: Any, pooling: Any
) -> None:
    config = table(pooling, rows=90)  # All ids may be on one of three servers.
    (stack,) = plan_tables([config], SERVERS, places={"users": place}).layout.stacks
    shards = {
        name: DynamicShard(stack, k, seed=0, limit=24) for k, name in enumerate(stack.servers)
    }
    for shard in shards.values():
        shard.set_rule(SGD())
    ids = torch.tensor(numbers, dtype=torch.int64)
    given = ids if pooling == "none" else ids[: len(ids) // 2 * 2].view(-1, 2)
    flat = Checker(config).flat(given)
    (pulled,) = prepare(0, make_router(stack, Wire()), [TableIds(0, stack.members[0], flat)])
    assert isinstance(pulled, RowRequest)
    asked = pulled.requests()
    for name, (_, rows) in asked.items():
        expected = sorted(
            number
            for number in set(given.flatten().tolist())
            if stack.servers[server_by_definition(number, len(stack.servers))] == name
        )
        assert rows.tolist() == expected
    leaf = pulled.gather({name: shards[name].pull(rows) for name, (_, rows) in asked.items()})
    leaf.requires_grad_()
    ((_, output),) = pulled.outputs(leaf)
    unique, places = given.unique(return_inverse=True)
    rows = initial.values_of_ids(config, unique, range(4), 0).requires_grad_()
    if not len(unique):
        wanted = torch.empty(0, 4, dtype=torch.float64)
    elif pooling == "none":
        wanted = functional.embedding(places, rows)
    else:
        wanted = functional.embedding_bag(places, rows, mode=pooling)
    assert torch.allclose(output, wanted, rtol=0, atol=1e-14)
    if not len(unique):
        return
    factors = torch.linspace(-1, 1, 4, dtype=torch.float64)
    (output * factors).sum().backward()
    (wanted * factors).sum().backward()
    assert leaf.grad is not None
    pushes = pulled.pushes(leaf.grad)
    for name, part in pushes.items():
        gradients = Gradients(1, [part])
        shards[name].check(gradients)
        shards[name].apply([gradients], lr=0.5, divisor=1, version=1)
    found = [shards[name].pull(rows) for name, (_, rows) in asked.items()]
    order = torch.cat([rows for _, rows in asked.values()]).argsort()
    assert rows.grad is not None
    assert torch.allclose(torch.cat(found)[order], rows.detach() - 0.5 * rows.grad, atol=1e-14)
    assert sum(shard.occupancy().rows for shard in shards.values()) == len(unique)
    assert sum(len(part[0]) for part in pushes.values()) == len(unique)


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


def test_padding_reads_as_zeros_and_never_gets_a_row() -> None:
    config = table("none", padding_idx=-9)
    (stack,) = plan_tables([config], SERVERS, places={"users": RowWise(*SERVERS)}).layout.stacks
    flat = Checker(config).flat(torch.tensor([-9, 4, -9]))
    (pulled,) = prepare(0, make_router(stack, Wire()), [TableIds(0, stack.members[0], flat)])
    pushes = pulled.pushes(torch.ones(2, 4, dtype=torch.float64))
    assert [part[0].tolist() for part in pushes.values()] == [[4]]
    shard = DynamicShard(stack, 0, seed=0, limit=3)
    assert shard.pull(torch.tensor([-9])).tolist() == [[0.0] * 4]

"""Dynamic ids without servers: what they may be, where they go, and how a lookup is routed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
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
    Adagrad,
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
    saved,
    touched_shares,
)
from torchweft.embedding.dynamic import DynamicShard
from torchweft.embedding.inputs import Checker
from torchweft.embedding.lookup import PulledRows, prepare
from torchweft.embedding.pulled import Looked
from torchweft.embedding.routing import make_router, server_of
from torchweft.embedding.shard import Gradients

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
    assert [stack.is_dynamic for stack in plan.layout.stacks] == [False, True]


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
    (pulled,) = prepare(0, make_router(stack, Wire()), [Looked(0, stack.members[0], flat)])
    assert isinstance(pulled, PulledRows)
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
    (pulled,) = prepare(0, make_router(stack, Wire()), [Looked(0, stack.members[0], flat)])
    pushes = pulled.pushes(torch.ones(2, 4, dtype=torch.float64))
    assert [part[0].tolist() for part in pushes.values()] == [[4]]
    shard = DynamicShard(stack, 0, seed=0, limit=3)
    assert shard.pull(torch.tensor([-9])).tolist() == [[0.0] * 4]


class Received(saved.Entry):
    """An entry of a snapshot on this worker, as references give it."""

    def is_owner(self) -> bool:
        return True

    def local_value(self) -> saved.Entry:
        return self


@pytest.mark.parametrize("chunk_bytes", [1, 200, 1 << 26])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_servers_take_their_ids_of_a_snapshot_in_any_chunks(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, count: int
) -> None:
    monkeypatch.setattr(saved, "_CHUNK_BYTES", chunk_bytes)
    config = TableConfig("users", 90, 4, "sum", torch.float64, dynamic=Dynamic(2))
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 40)
    layouts = [
        plan_tables([config], SERVERS, places={"users": RowWise(*SERVERS[:number])}).layout
        for number in (2, count)
    ]
    entries, before = [], []
    for k in range(2):
        shard = DynamicShard(layouts[0].stacks[0], k, seed=0, limit=90)
        shard.set_rule(Adagrad())
        for end in (40, 25):
            own = torch.from_numpy(np.sort(ids[:end]))
            own = own[server_of(own, 2) == k]
            part = own, torch.ones(len(own), 4, dtype=torch.float64)
            shard.apply([Gradients(1, [part])], lr=0.5, divisor=1, version=1)
        entries.append(Received())
        entries[-1].content = {"tensors": shard.copied(0), "steps": float(shard.steps[0])}
        before.append(shard.copied(0))
    after = []
    for k in range(count):
        shard = DynamicShard(layouts[1].stacks[0], k, seed=0, limit=90)
        shard.set_rule(Adagrad())
        host: Any = SimpleNamespace(name=SERVERS[k], settled=nullcontext)
        found: Any = entries
        saved._adopt_ids(host, shard, [found], 1.0)
        assert shard.steps.tolist() == [2.0]
        after.append(shard.copied(0))
        for prefix in ("rows.", "waiting."):
            assert set(server_of(after[-1][f"{prefix}ids"], count).tolist()) <= {k}
    for prefix, number in (("rows.", 25), ("waiting.", 15)):
        orders = [
            torch.cat([each[f"{prefix}ids"] for each in parts]).argsort()
            for parts in (before, after)
        ]
        names = [name for name in before[0] if name.startswith(prefix)]
        assert len(names) == (6 if prefix == "rows." else 4)
        for name in names:
            one, other = (
                torch.cat([each[name] for each in parts])[order]
                for parts, order in zip((before, after), orders, strict=True)
            )
            assert len(one) == number
            assert torch.equal(one, other), name
